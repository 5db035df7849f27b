"""Batches that are objects, `batch.text` and `batch.label`: the runtime cuts some kinds of them and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from oomfix.rewrite.facts.lift import Lift
from oomfix.script.facts.torch_facts import PLAIN_ATTRIBUTES
from oomfix.script.syntax.nodes import walk

_OF_TENSORS = PLAIN_ATTRIBUTES | {"T", "mT", "real", "imag"}


def why_perhaps_whole(lifts: Iterable[Lift]) -> str | None:
    """What the summary says of slices whose inputs are all read by their attributes; None where one is not."""
    found: dict[str, None] = {}
    for lift in lifts:
        for name in lift.inputs:
            if not _is_read_by_attributes(name, lift):
                return None
            found[name] = None
    if not found:
        return None
    names = ", ".join(f"`{name}`" for name in found)
    return f"{names} may be an object, which is cut where it is a mapping, a named tuple or a dataclass, and else whole"


def _is_read_by_attributes(name: str, lift: Lift) -> bool:
    parts = [*lift.lifted, lift.site.root]
    nodes = list(walk(*parts))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    owners = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Attribute) and id(node) not in called and node.attr not in _OF_TENSORS
    }
    return all(id(node) in owners for node in nodes if isinstance(node, ast.Name) and node.id == name)
