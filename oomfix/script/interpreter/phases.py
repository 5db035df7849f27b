"""Loops over a few phases (`for phase in ["train", "val"]`): what each round binds, and so which branches it takes."""

from __future__ import annotations

import ast
from typing import NamedTuple

from oomfix.script.facts.definitions import Function
from oomfix.script.facts.hints import Hints
from oomfix.script.facts.values import MISSING, Value, constant
from oomfix.script.syntax.names import unpacked

_MOST = 4
"""A loop over more than these is one over many things alike."""


class Phase(NamedTuple):
    """What one round binds."""

    target: ast.expr
    value: Value


def phases_written(loop: ast.For | ast.AsyncFor, source: Value) -> list[Phase]:
    """The rounds of a loop over constants, or over tuples that a text or a flag tells apart; empty for any other.

    Args:
        loop: the loop.
        source: what it goes over.
    """
    # a call gives one item for all that there are
    items = () if isinstance(loop.iter, ast.Call) else source.items or ()
    if not 0 < len(items) <= _MOST:
        return []
    if not all(item.constant is not MISSING or _is_told_apart(loop, item) for item in items):
        return []
    return [Phase(loop.target, item) for item in items]


def _is_told_apart(loop: ast.For | ast.AsyncFor, item: Value) -> bool:
    """`("train", train_loader)`, taken apart by the loop."""
    parts = item.items or ()
    names = len(loop.target.elts) if isinstance(loop.target, ast.Tuple | ast.List) else 0
    return names == len(parts) and any(isinstance(part.constant, str | bool) for part in parts)


def phases_told_apart(loop: ast.For | ast.AsyncFor, function: Function | None, hints: Hints) -> list[Phase]:
    """`for split in splits:` with `if split == "train":` in it: one round trains, and there are others.

    Args:
        loop: the loop.
        function: the function that it stands in.
        hints: what the names of the file are compared with.
    """
    scope = function.node if function is not None and not isinstance(function.node, ast.Lambda) else None
    for target in unpacked(loop.target):
        told = hints.told_apart.get((scope, target.id), set()) if isinstance(target, ast.Name) else set()
        training = sorted(text for text in told if "train" in text.lower())
        if training:
            others = sorted(told.difference(training)) or ["other"]
            return [Phase(target, constant(text)) for text in (*training, *others)][:_MOST]
    return []
