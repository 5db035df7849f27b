"""Losses that take rows of the batch by their number, or ask how many there are: a part of it has others.

The rows of a check do not show it where they are fewer than the number that is meant.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from oomfix.rewrite.dataflow.liveness import names_bound, names_bound_by_target, names_read, nodes_of_scope_body
from oomfix.rewrite.facts.lift import Lift
from oomfix.rewrite.slicing.batch_names import asks_first_size, is_zero
from oomfix.rewrite.slicing.plain_numbers import size_of
from oomfix.script.syntax.nodes import walk

_OF_TENSORS = frozenset("to cuda float long shape size view".split())


def why_by_number(lift: Lift, runs_forward: Callable[[ast.AST], bool]) -> str | None:
    """Why not all rows of a slice's inputs are the same to it, or None.

    Args:
        lift: the slice with its inputs and the sizes that are asked inside.
        runs_forward: whether a statement runs a network.
    """
    sizes, ranges, found = _Sizes(lift), _Ranges(lift, runs_forward), []
    for node in walk(*lift.lifted, lift.site.root):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and sizes.decide(node.test):
            found.append((node.test.lineno, node.test.col_offset, "asks how many rows the batch has"))
        if isinstance(node, ast.Subscript) and (name := ranges.cut_from(node)) is not None:
            found.append((node.lineno, node.col_offset, f"takes rows of `{name}` by their number"))
    if not found:
        return None
    line, _, told = min(found)
    return f"line {line} {told}"


class _Ranges:
    """Tells the ranges of rows that mean certain samples of the batch: other ones in a part of it.

    Args:
        lift: the slice with its inputs and the sizes that are asked inside.
        runs_forward: whether a statement runs a network.
    """

    def __init__(self, lift: Lift, runs_forward: Callable[[ast.AST], bool]) -> None:
        parts = (*lift.copied, *lift.lifted, lift.site.root)
        self._inputs = set(lift.inputs)
        self._rows = {name for one in lift.lifted if runs_forward(one) for name in names_bound(one)} | self._inputs
        self._made = {name for part in parts for name in _bound_within(part)} | self._inputs
        self._tensors = {name for node in nodes_of_scope_body(lift.site.scope) for name in _shown_a_tensor(node)}

    def cut_from(self, node: ast.Subscript) -> str | None:
        """The name of what `x[:labelled]` and `x[:4]` cut, None for what is cut by sizes that the slice asks for."""
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        if not (isinstance(node.value, ast.Name) and isinstance(first, ast.Slice)):
            return None
        if not (first.lower or first.upper or first.step):
            return None
        name, bounds = node.value.id, names_read(first)
        # of anything but a tensor, `x[:2]` may be the first two views
        means_samples = bounds.isdisjoint(self._made) if bounds else name in self._tensors & self._inputs
        return name if name in self._rows and means_samples else None


class _Sizes:
    """Tells the expressions that ask how many rows there are.

    Args:
        lift: the slice with its inputs.
    """

    def __init__(self, lift: Lift) -> None:
        self._names: set[str] = set()
        # of a batch that is opened, `len` counts what it brings
        opened = {name for node in nodes_of_scope_body(lift.site.scope) for name in _opened_by(node)}
        self._batches = set(lift.inputs) - opened
        for one in (*lift.copied, *lift.lifted):
            if isinstance(one, ast.Assign) and self._ask_rows(one.value):
                self._names |= names_bound(one)

    def decide(self, test: ast.expr) -> bool:
        """Whether a test compares the rows with a number: not with 0, which no part has, or what parts have as well."""
        for node in walk(test):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                if any(map(self._ask_rows, sides)) and any(map(_is_number_of_its_own, sides)):
                    return True
        return False

    def _ask_rows(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            return value.id in self._names
        return asks_first_size(value) and size_of(value) in self._batches


def _is_number_of_its_own(value: ast.expr) -> bool:
    plain = isinstance(value, ast.Constant | ast.Name | ast.Attribute | ast.Subscript)
    return plain and not is_zero(value) and size_of(value) is None


def _opened_by(node: ast.AST) -> set[str]:
    """`batch` in `x, y = batch`, `batch[0]`, `batch["x"]` and `model(*batch)`."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple | ast.List):
        return {node.value.id} if isinstance(node.value, ast.Name) else set()
    held = node.value if isinstance(node, ast.Starred) else None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held = node.value
    return {held.id} if isinstance(held, ast.Name) else set()


def _shown_a_tensor(node: ast.AST) -> set[str]:
    """`x` in `x.to(device)`, `x.shape`, `x[:4].clone()` and `x[:4, 0]`; a list of views has none of them."""
    held: ast.expr | None = None
    if isinstance(node, ast.Subscript):
        held = node.value if isinstance(node.slice, ast.Tuple) else None
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Subscript):
        held = node.value.value if isinstance(node.value.slice, ast.Slice) and not hasattr(list, node.attr) else None
    elif isinstance(node, ast.Attribute):
        held = node.value if node.attr in _OF_TENSORS else None
    return {held.id} if isinstance(held, ast.Name) else set()


def _bound_within(part: ast.AST) -> set[str]:
    """The names that a statement binds, those of comprehensions included."""
    generators = (node for node in walk(part) if isinstance(node, ast.comprehension))
    return names_bound(part).union(*(names_bound_by_target(one.target) for one in generators))
