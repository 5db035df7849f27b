"""What a statement does with a network: looks at it, or runs it so that its graph is still there behind it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple

from oomfix.rewrite.dataflow.calls_run import CallsRun
from oomfix.rewrite.dataflow.changes import overlap, paths_read
from oomfix.rewrite.facts.events import Differentiated, Run
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.facts.named_like import looks_like_metric
from oomfix.script.syntax.names import last_name

PREPARATION = frozenset(
    "to cuda cpu float long half double int bool type type_as view reshape size dim permute transpose unsqueeze "
    "squeeze contiguous flatten Variable autograd tensor from_numpy as_tensor FloatTensor LongTensor len range list "
    "tuple dict zip enumerate get pop items keys values next iter max min requires_grad_ is_available device clone "
    "detach numpy repeat expand stack cat ones zeros ones_like zeros_like full randn rand "
    "randn_like arange normal_ t eq ne item tolist".split()
)
"""What makes, moves and shapes data; no network is called like that."""


class NetworkUse(NamedTuple):
    """What a node does with networks.

    Attributes:
        runs: whether it runs one.
        trains: whether it runs one itself with gradients on, as that of a teacher is not.
        leads_to_loss: whether it runs one that a backward goes through, as that of a printed sample is not.
        takes: whether it hands one to a function, which may run it.
        reads: whether it looks at one, as to log the norm of its weights.
        runs_for_no_loss: whether it calls some, and no backward goes through what these give.
        may_draw: whether it may draw random numbers.
        sees_mode: of a statement that switches one, whether nodes may look at its mode.
    """

    runs: Callable[[ast.AST], bool]
    trains: Callable[[ast.AST], bool]
    leads_to_loss: Callable[[ast.AST], bool]
    takes: Callable[[ast.AST], bool]
    reads: Callable[[ast.AST], bool]
    runs_for_no_loss: Callable[[ast.AST], bool]
    may_draw: Callable[[ast.AST], bool]
    sees_mode: Callable[[ast.stmt, Sequence[ast.AST]], bool]


def forwards_of(reading: Reading) -> list[Run]:
    """The forwards of a script that may run a network."""
    return [one for one in reading.events.runs.values() if _may_run_network(one, reading)]


def _may_run_network(forward: Run, reading: Reading) -> bool:
    """Not `model.init_hidden()` or `metric.add_batch(out, y)`, whose results nobody takes, nor `x.view(-1)`."""
    call = forward.node
    if last_name(call) in PREPARATION:
        return False
    if not isinstance(next(reading.blocks.ancestors(call)), ast.Expr):
        return True
    is_given = bool(call.args or call.keywords)
    return is_given and not any(map(looks_like_metric, (forward.path or "").split(".")))


class ReadsNetwork:
    """Whether a node looks at a network: at its weights, or at anything else of it.

    Args:
        calls_run: the calls that run in a node.
        forwards: those of the script.
    """

    def __init__(self, calls_run: CallsRun, forwards: list[Run]) -> None:
        self._calls_run = calls_run
        parts = [forward.path.split(".") for forward in forwards if forward.path is not None]
        self._networks = {".".join(names[: 2 if names[0] == "self" else 1]) for names in parts}
        if "self" in self._networks:
            # the object that trains is the network: what else it holds may be looked at
            self._networks = self._networks - {"self"} | {"self.parameters", "self.named_parameters", "self.state_dict"}

    def __call__(self, node: ast.AST) -> bool:
        return any(overlap(self._networks, paths_read(one)) for one in (node, *self._calls_run.by(node)))


class RunsForNoLoss:
    """Whether a node calls networks, `model(x)`, and no backward of the script goes through what they give.

    A method of a network may count what it is asked, and a backward that runs it again.

    Args:
        calls_run: the calls that run in a node.
        forwards: those of the script.
        backwards: those of the script.
    """

    def __init__(self, calls_run: CallsRun, forwards: list[Run], backwards: Sequence[Differentiated]) -> None:
        self._calls_run = calls_run
        through = {origin for event in backwards for origin in event.origins}
        self._forwards: set[ast.AST] = {forward.node for forward in forwards}
        self._others = {one.node for one in forwards if not one.direct or one.origin in through}

    def __call__(self, node: ast.AST) -> bool:
        run = self._forwards.intersection(self._calls_run.by(node))
        return bool(run) and run.isdisjoint(self._others)


class TrainsNetwork:
    """Whether a node runs a network whose graph is still there behind it, as that of an attack on its inputs is not.

    Args:
        calls_run: the calls that run in a node.
        forwards: those that record a graph.
        backwards: those of the script; one in the same node that keeps no graph leaves nothing to go through.
    """

    def __init__(self, calls_run: CallsRun, forwards: list[Run], backwards: Sequence[Differentiated]) -> None:
        self._calls_run = calls_run
        ends: dict[int, set[ast.expr]] = {}
        for event in backwards:
            if not _keeps_graph(event):
                for origin in event.origins:
                    ends.setdefault(origin, set()).add(event.node)
        self._ends: dict[ast.expr, list[set[ast.expr]]] = {}
        for forward in forwards:
            self._ends.setdefault(forward.node, []).append(ends.get(forward.origin, set()))

    def __call__(self, node: ast.AST) -> bool:
        run: set[ast.expr] = set(self._calls_run.by(node))
        return any(not ends & run for call in run & self._ends.keys() for ends in self._ends[call])


def _keeps_graph(event: Differentiated) -> bool:
    given = (keyword for keyword in event.node.keywords if keyword.arg in ("retain_graph", "create_graph", None))
    return any(not (isinstance(one.value, ast.Constant) and not one.value.value) for one in given)
