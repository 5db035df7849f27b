"""What a log between lines of a loss reads, and a later one changes, gets a name that nothing changes.

`losses.update(loss.item(), len(x))` ahead of `loss += other.mean()`, `print(y.size())` ahead of `y = y.view(-1)`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomfix.rewrite.dataflow.liveness import COMPREHENSIONS, names_bound, names_bound_by_target, names_read
from oomfix.rewrite.dataflow.shared_tensors import are_changed_in_place
from oomfix.rewrite.facts.needed import needed_for
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.substitution import substituted
from oomfix.rewrite.slicing.asked_graphs import asks_for_graph
from oomfix.rewrite.slicing.read_between import only_reads
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.nodes import walk

_LATER = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *COMPREHENSIONS)

_KEEPING = frozenset("detach clone cpu float mean sum".split())
"""What may stand between a tensor and the `.item()` that makes a number of it."""


def name_what_is_read(reading: Reading, manager: str) -> list[Edit]:
    """The edits that give a name to what logs ahead of a backward read of names that change before it.

    A name that is bound anew keeps its object under another one: `y_before = y`. Of a tensor that is changed in place
    the number is read ahead of that: `loss_before = loss.item()`.
    """
    logs = _Logs(reading)
    edits: list[Edit] = []
    backwards = [reading.blocks.statement_of(call) for call in reading.calls_to(f"{manager}.backward")]
    for block in {id(block): block for block in map(reading.blocks.block_of, backwards)}.values():
        ends = [index for index, one in enumerate(block) if one in backwards]
        needed = {index for end in ends for index in (end, *needed_for(block, end, manager))}
        for index in range(logs.first_behind_network(block), ends[-1]):
            if index not in needed:
                edits += logs.edits(block, index, next(end for end in ends if end > index))
    return edits


class _Logs:
    """Gives names to what logs read.

    Args:
        reading: the file.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._functions = reading.functions
        self._names = FreeNames(reading.script)
        self._given: dict[tuple[int, str], str] = {}

    def first_behind_network(self, block: list[ast.stmt]) -> int:
        """The index in a block from which on logs stand among lines of a loss: those ahead of networks stay there."""
        lines = [call.lineno for call in self._reading.events.running]
        runs = (any(one.lineno <= line <= (one.end_lineno or 0) for line in lines) for one in block)
        return next((index for index, run in enumerate(runs) if run), 0)

    def edits(self, block: list[ast.stmt], index: int, end: int) -> list[Edit]:
        """Those for one statement of a block, ahead of the backward at its index `end`."""
        statement = block[index]
        behind = block[index + 1 : end]
        # under another name, nothing would tell that what is asked for its graph comes from a call that leaves none
        if only_reads(statement) or _may_read_later(statement) or asks_for_graph(statement):
            return []
        places: dict[ast.expr, int] = {}
        for name in sorted(names_read(statement) - names_bound(statement)):
            in_place = any(self._is_changed(name, block, other) for other in range(index + 1, end))
            if not in_place and name not in names_bound(*behind):
                continue
            for node in _read(statement, name):
                value = _number(node, statement) if in_place else node
                if value is None:
                    return []
                places[value] = self._place_of(name, block, index)
        return self._named(statement, {value: block[place] for value, place in places.items()})

    def _is_changed(self, name: str, block: list[ast.stmt], index: int) -> bool:
        """Whether the statement at an index may change in place what a name stands for."""
        return are_changed_in_place({name}, [block[index]], self._functions, block[:index])

    def _named(self, statement: ast.stmt, ahead_of: dict[ast.expr, ast.stmt]) -> list[Edit]:
        """The edits that bind what a statement reads ahead of others, and read it there."""
        layout = self._reading.layout
        bound: list[Edit] = []
        given = dict(self._given)
        texts: dict[ast.expr, str] = {}
        for value, place in ahead_of.items():
            key = (id(place), ast.unparse(value))
            if key not in given:
                given[key] = self._name(f"{key[1].split('.')[0]}_before", set(given.values()))
                own = layout.own_lines(place)
                if own is None:
                    return []
                line = f"{layout.margin(place)}{given[key]} = {key[1]}"
                bound.append(layout.inserted(layout.whole(own)[0], [line]))
            texts[value] = given[key]
        found = substituted(self._reading, statement, texts) if texts else []
        if found:
            self._given = given
        return [*bound, *found] if found else []

    def _name(self, wanted: str, taken: set[str]) -> str:
        name, number = self._names.one_of(wanted), 2
        while name in taken:
            name, number = self._names.one_of(f"{wanted}_{number}"), number + 1
        return name

    def _place_of(self, name: str, block: list[ast.stmt], index: int) -> int:
        """Where in the block a name has the value that it has at an index: ahead of the statement at the result."""
        for other in reversed(range(index)):
            if name in names_bound(block[other]) or self._is_changed(name, block, other):
                return other + 1
        loop = next(self._reading.blocks.ancestors(block[0]), None)
        is_given = isinstance(loop, ast.For) and block is loop.body and name in names_bound_by_target(loop.target)
        return 0 if is_given else index


def _may_read_later(statement: ast.stmt) -> bool:
    """Whether what a statement reads may be read when it has run, or means something else within it."""
    return any(isinstance(node, _LATER) for node in walk(statement))


def _read(statement: ast.stmt, name: str) -> Sequence[ast.expr]:
    nodes = (node for node in walk(statement) if isinstance(node, ast.Name) and node.id == name)
    return [node for node in nodes if isinstance(node.ctx, ast.Load)]


def _number(name: ast.expr, statement: ast.stmt) -> ast.expr | None:
    """The number that is read off a name: `loss.detach().item()`; None where more than that is."""
    calls = {id(call.func): call for call in walk(statement) if isinstance(call, ast.Call) and not call.args}
    methods = {id(node.value): node for node in walk(statement) if isinstance(node, ast.Attribute)}
    node = name
    while (method := methods.get(id(node))) is not None and id(method) in calls and not calls[id(method)].keywords:
        node = calls[id(method)]
        if method.attr == "item":
            return node
        if method.attr not in _KEEPING:
            return None
    return None
