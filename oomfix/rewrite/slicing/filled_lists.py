"""An empty list that a network is given to leave something in, `noise = [0]`, for those who read it behind the loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import Liveness, names_bound, names_read
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.script.syntax.nodes import arguments_of


def check_nothing_is_filled(lift: Lift, liveness: Liveness) -> None:
    """Whether a slice leaves nothing in lists and dicts that hold no data yet: each part has its own, and drops it.

    Raises:
        CannotLift: something that the slice calls may fill one, and it is read later.
    """
    later = liveness.before(lift.after, liveness.after(lift.site.end))
    filled = set(_made_empty(lift)) & later - names_bound(*lift.lifted)
    for call in calls_in(*lift.lifted, lift.site.root):
        given = {one.id for one in arguments_of(call) if isinstance(one, ast.Name)}
        if found := sorted(given & filled):
            raise CannotLift(f"line {call.lineno} may fill {found[0]}, which is read later")


def _made_empty(lift: Lift) -> Iterator[str]:
    """The names of lists and dicts that are made ahead of a slice in its block, and that nothing else is done to."""
    block = lift.site.block
    ahead = block[: block.index(lift.lifted[0] if lift.lifted else lift.site.end)]
    for place, statement in enumerate(ahead):
        match statement:
            case ast.Assign(targets=[ast.Name(name)], value=value) if _is_empty(value):
                if not any(name in names_read(one) | names_bound(one) for one in ahead[place + 1 :]):
                    yield name


def _is_empty(value: ast.expr) -> bool:
    """`[]`, `{}`, `[0]`, `[None, None]`, `[0] if track else None`."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            return _is_empty(body) or _is_empty(orelse)
        case ast.List(elts=elements):
            return all(isinstance(one, ast.Constant) for one in elements)
        case ast.Dict(values=values):
            return not values
    return False
