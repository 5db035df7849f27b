"""A number that a loop on the way to a loss logs off what its rounds fill, `sums[i] += losses[-1].item()`, gets a name.

Behind the loop, `losses[-1]` is another one; what each round binds is kept for a loop that logs (`logs_of_rounds.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.changes import overlap, paths_read
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import COMPREHENSIONS, names_bound
from oomfix.rewrite.facts.log_effects import LogEffects
from oomfix.rewrite.facts.needed import needed_for, ways_to
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.substitution import substituted
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.nodes import children

_KEEPING = frozenset("detach clone cpu mean sum item".split())
_NOT_ALWAYS = (ast.Lambda, ast.IfExp, ast.BoolOp, *COMPREHENSIONS)


def name_numbers(reading: Reading, manager: str) -> list[Edit]:
    """The edits that bind such numbers right ahead of what logs them, and log the names."""
    log_effects, names = LogEffects(reading), FreeNames(reading.script)
    layout = reading.layout
    edits: list[Edit] = []
    taken: set[str] = set()
    for loop in dict.fromkeys(_loops(reading, manager)):
        for log in (one for one in loop.body if log_effects.are_all(one) and not isinstance(one, ast.If)):
            others = [one for one in loop.body if one is not log]
            filled = {path for one in others for path in (*log_effects.changed(one), *names_bound(one))}
            own, texts, bound = layout.own_lines(log), dict[ast.expr, str](), dict[str, str]()
            for number in _numbers(log, filled - log_effects.changed(log)):
                text = ast.unparse(number)
                if text not in bound:
                    bound[text] = _name(names, taken)
                    taken.add(bound[text])
                texts[number] = bound[text]
            found = substituted(reading, log, texts) if texts and own is not None else []
            if found and own is not None:
                lines = [f"{layout.margin(log)}{name} = {text}" for text, name in bound.items()]
                edits += [layout.inserted(layout.whole(own)[0], lines), *found]
    return edits


def _loops(reading: Reading, manager: str) -> Iterator[ast.For]:
    """The loops in the blocks of backwards that these may depend on."""
    for call in reading.calls_to(f"{manager}.backward"):
        for block, end in ways_to(call, reading):
            for index in needed_for(block, end, manager):
                inner = block[index]
                while isinstance(inner, ast.With) and isinstance(inner.body[-1], ast.With | ast.For):
                    inner = inner.body[-1]
                if isinstance(inner, ast.For) and not any(map(leaves, inner.body)):
                    yield inner


def _numbers(node: ast.AST, filled: set[str]) -> Iterator[ast.expr]:
    """The numbers that are read in any case off an item of what is filled."""
    if isinstance(node, ast.expr) and _is_number(node):
        if overlap(filled, paths_read(node)):
            yield node
    elif not isinstance(node, _NOT_ALWAYS):
        for child in children(node):
            yield from _numbers(child, filled)


def _is_number(node: ast.expr) -> bool:
    """`losses[-1].detach().item()`, `float(losses[name])`."""
    is_number = False
    while isinstance(node, ast.Call) and not node.keywords:
        if isinstance(node.func, ast.Attribute) and called_name(node) in _KEEPING and not node.args:
            is_number = is_number or called_name(node) == "item"
            node = node.func.value
        elif called_name(node) == "float" and len(node.args) == 1:
            is_number, node = True, node.args[0]
        else:
            return False
    return is_number and isinstance(node, ast.Subscript)


def _name(names: FreeNames, taken: set[str]) -> str:
    found, number = names.one_of("value", "number"), 2
    while found in taken:
        found, number = names.one_of(f"value_{number}", f"number_{number}"), number + 1
    return found
