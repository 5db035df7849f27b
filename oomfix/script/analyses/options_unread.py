"""Options of the command line that a script offers and never asks for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import Nodes
from oomfix.script.syntax.patterns import Pattern

_PARSING = frozenset({"parse_args", "parse_known_args"})


def unread_options(nodes: Nodes, pattern: Pattern, in_sight: bool) -> list[ast.expr | ast.stmt]:
    """The calls that add options of some names which nothing reads, and the statements that read them in vain.

    `parser.add_argument("--gpu")` and `GPU = args.gpu`, where `GPU` is all there is of it.

    Args:
        nodes: those of the file.
        pattern: what the names have.
        in_sight: do not ask whether other files, which are handed all options, may read them.
    """
    offered = {call: name for call in nodes.of(ast.Call) if (name := _option(call)) and pattern.search(name)}
    if not offered or (_are_handed_over(nodes) and not in_sight):
        return []
    loaded = {node.id for node in nodes.of(ast.Name) if isinstance(node.ctx, ast.Load)}
    in_vain = {
        node.value: node
        for node in nodes.of(ast.Assign)
        if all(isinstance(target, ast.Name) and target.id not in loaded for target in node.targets)
    }
    found: list[ast.expr | ast.stmt] = []
    for call, name in offered.items():
        reads: list[ast.expr] = [
            node for node in nodes.of(ast.Attribute) if node.attr == name and path_of(node) != f"torch.{name}"
        ]
        if all(read in in_vain for read in reads):
            found += [call, *(in_vain[read] for read in reads)]
    return found


def _option(call: ast.Call) -> str:
    """`gpu` of `parser.add_argument("-g", "--gpu")`; empty for any other call."""
    if last_name(call) != "add_argument":
        return ""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "dest"]
    texts = [one.value for one in named or call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    long = [text for text in texts if named or text.startswith("--")]
    return long[0].lstrip("-").replace("-", "_") if long else ""


def _are_handed_over(nodes: Nodes) -> bool:
    """Whether what was parsed goes anywhere as a whole, where each option may be read."""
    parsed = set(_parsed(nodes))
    holders = {node.value for node in nodes.of(ast.Attribute)}
    whole = (node.id for node in nodes.of(ast.Name) if isinstance(node.ctx, ast.Load) and node not in holders)
    return None in parsed or not parsed or not parsed.isdisjoint(whole)


def _parsed(nodes: Nodes) -> Iterator[str | None]:
    """The names that hold what was parsed; None for what is no name."""
    assigned = {node.value: node.targets[0] for node in nodes.of(ast.Assign) if len(node.targets) == 1}
    for call in nodes.of(ast.Call):
        if last_name(call) in _PARSING:
            target = assigned.get(call)
            yield target.id if isinstance(target, ast.Name) else None
