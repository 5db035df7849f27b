"""What a script keeps for each batch, such as what a teacher gave once, and takes out again by the batch's number."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from oomfix.rewrite.dataflow.blocks import Loop
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, names_read
from oomfix.rewrite.facts.lift import Site
from oomfix.rewrite.slicing.batch_names import bound_anywhere
from oomfix.rewrite.slicing.between import stays_the_same_ahead_of
from oomfix.script.syntax.names import last_name, root_of
from oomfix.script.syntax.nodes import walk

_MOVING = frozenset(
    "from_numpy tensor as_tensor FloatTensor LongTensor Variable to cuda float long double half type detach clone view "
    "reshape squeeze unsqueeze is_available".split()
)
"""What makes a tensor of kept numbers and moves it; it draws nothing and changes nothing."""


def taken_by_number(
    site: Site, chosen: Sequence[int], runs_forward: Callable[[ast.AST], bool], filled: Callable[[], set[str]]
) -> list[int]:
    """The indices of a slice that take out what is kept for this batch: `soft = torch.from_numpy(kept[i])`.

    Inside of the slice they would bring all of it to every part of the batch. They mean the same ahead of it, and what
    they bring is then a part of the batch.

    Args:
        site: where the backward stands.
        chosen: the indices of the slice's statements in the block, ascending.
        runs_forward: whether a statement runs a network.
        filled: tells what functions fill from inside, as hooks of the network do while it runs.
    """
    number = _number_of(site.iteration)
    if number is None:
        return []
    found: list[int] = []
    brought: set[str] = set()
    for place, index in enumerate(chosen):
        statement = site.block[index]
        passed = [site.block[other] for other in chosen[:place] if other not in found]
        if not _only_moves(statement) or runs_forward(statement) or not stays_the_same_ahead_of(statement, passed):
            continue
        if names_read(statement) & brought or _takes_out(statement, number, filled):
            found.append(index)
            brought |= names_bound(statement)
    left = [site.block[index] for index in chosen if index not in found]
    changed = {root_of(path) for one in left for path in changed_paths(one) | names_bound(one)}
    return [] if brought & changed else found


def _number_of(loop: Loop | None) -> str | None:
    """`i` of `for i, (x, y) in enumerate(loader)`."""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
        return None
    first = loop.target.elts[0]
    counted = any(last_name(call) == "enumerate" for call in calls_in(loop.iter))
    return first.id if counted and isinstance(first, ast.Name) else None


def _only_moves(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        calls = calls_in(statement.test)
        inside = not statement.orelse and all(isinstance(one, ast.Assign) for one in statement.body)
        return inside and all(last_name(call) in _MOVING for call in calls) and all(map(_only_moves, statement.body))
    if not isinstance(statement, ast.Assign) or not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    return all(last_name(call) in _MOVING for call in calls_in(statement))


def _takes_out(statement: ast.stmt, number: str, filled: Callable[[], set[str]]) -> bool:
    items = (node for node in walk(statement) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name))
    taken = (item for item in items if isinstance(item.slice, ast.Name) and item.slice.id == number)
    return any(isinstance(item.value, ast.Name) and item.value.id not in filled() for item in taken)


def filled_from_inside(tree: ast.Module) -> set[str]:
    """The names whose objects functions change without having bound them: `def hook(m, x, out): seen.append(out)`."""
    found: set[str] = set()
    for function in walk(tree):
        if isinstance(function, ast.Lambda):
            found |= set(map(root_of, changed_paths(ast.Expr(function.body))))
        elif isinstance(function, FunctionNode):
            changed = {root_of(path) for statement in function.body for path in changed_paths(statement)}
            found |= changed - bound_anywhere(function)
    return found
