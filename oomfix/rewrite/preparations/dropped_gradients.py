"""Losses whose gradients into another network are dropped unread: they may go through copies without its graph.

`loss_d.backward(retain_graph=True)` of a discriminator also fills the gradients of the generator whose samples it saw,
and `generator.zero_grad()` ahead of the generator's own backward drops them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from typing import NamedTuple

from oomfix.rewrite.dataflow.liveness import names_bound, names_read, nodes_of_scope_body
from oomfix.rewrite.dataflow.on_gradients import CLIPPING, frees_gradients_of, keeps_gradients
from oomfix.rewrite.dataflow.read_without_graph import is_read_without_graph
from oomfix.rewrite.dataflow.shared_parameters import SharedParameters
from oomfix.rewrite.facts.amp import differentiated
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.script import Forward, TrainingLoop
from oomfix.script.facts.trace import Backward
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import last_name, path_of, unpacked
from oomfix.script.syntax.nodes import arguments_of, walk

_JOINING = frozenset({"cat", "concat", "concatenate"})
_KEEPING = frozenset("append appendleft extend insert update add put push store".split())


class Dropped(NamedTuple):
    """Gradients that a backward leaves in a network and nothing reads.

    Attributes:
        edits: give its loss copies without the graph of that network.
        note: what is said of it.
    """

    edits: list[Edit]
    note: str


def dropped_gradients(reading: Reading) -> list[Dropped]:
    """What may be given to losses without its graph, though they keep the graph for a backward to come.

    A network is run for samples; a loss of another network goes through those, and keeps the graph; behind that the
    gradients of the first network are reset, in one block with the backward of its own loss and the only steps that
    take them. What is dropped so is read by nothing in between, and all other gradients are the same to the bit.
    """
    shared = SharedParameters(reading.script)
    retained: dict[ast.Call, tuple[TrainingLoop, list[Backward]]] = {}
    for loop in reading.loops:
        for event in loop.backwards:
            if event.retains and reading.script.is_needed_later(event):
                retained.setdefault(event.node, (loop, []))[1].append(event)
    found = (_of_backward(events, loop, reading, shared) for loop, events in retained.values())
    return [one for one in found if one is not None]


def _of_backward(
    events: list[Backward], loop: TrainingLoop, reading: Reading, shared: SharedParameters
) -> Dropped | None:
    """What is dropped of the gradients of one backward, on all ways that lead to it; None where some are not."""
    first, node = min(event.order for event in events), events[0].node
    statement = reading.blocks.statement_of(node)
    block = reading.blocks.block_of(statement)
    # a penalty may differentiate on the way to the loss
    ahead = {call for one in block[: block.index(statement)] for call in reading.calls_run.by(one)}
    later = [other for other in reading.script.backwards if other.order > first and other.node not in {node, *ahead}]
    origins = {origin for event in events for origin in event.origins}
    kept = origins & {origin for other in later for origin in other.origins}
    forwards = reading.script.trace.forwards
    # of what the loss itself becomes part of, some origin tells
    if not kept or not kept <= forwards.keys() or kept == origins:
        return None
    edits: list[Edit] = []
    resets: set[int] = set()
    cut = {id(forwards[origin].node) for origin in kept}
    for forward in map(forwards.__getitem__, sorted(kept)):
        samples = _Samples.of(forward, statement, reading)
        reset = None if samples is None else _reset_behind(statement, samples.network, loop, reading, shared)
        copies = None if samples is None else samples.without_graph(differentiated(node), cut, reading)
        if reset is None or copies is None:
            return None
        through = [reading.blocks.statement_of(other.node) for other in later if forward.origin in other.origins]
        if any(other.lineno < reset for other in through):
            return None
        edits += copies
        resets.add(reset)
    lines = ", ".join(f"line {line}" for line in sorted(resets))
    said = f"the loss of line {statement.lineno} sees samples without their graph: {lines} drops gradients of that"
    return Dropped(list(dict.fromkeys(edits)), said) if edits else None


class _Samples(NamedTuple):
    """What a network is run for ahead of a loss of another one.

    Attributes:
        names: what holds them, alone or joined with others.
        network: the path of the network.
        between: the statements from there up to the backward.
    """

    names: frozenset[str]
    network: str
    between: Sequence[ast.stmt]

    @classmethod
    def of(cls, forward: Forward, backward: ast.stmt, reading: Reading) -> _Samples | None:
        """The samples that `samples = network(noise)` makes, in the block of a backward."""
        made, block = reading.blocks.statement_of(forward.node), reading.blocks.block_of(backward)
        if made not in block or forward.path is None or not isinstance(made, ast.Assign):
            return None
        parts = [part for target in made.targets for part in unpacked(target)]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        if len(made.targets) != 1 or len(names) != len(parts) or made.value is not forward.node:
            return None
        between = block[block.index(made) + 1 : block.index(backward)]
        if any(reads_gradients(one) or keeps_gradients(one) for one in between):
            return None
        for one in between:
            if (name := _other_name(one, names)) is not None:
                names.append(name)
        bound = [name for name in names_bound(*between) if name in names]
        if len(bound) + len(parts) != len(names):
            return None
        return cls(frozenset(names), forward.path, between)

    def without_graph(self, loss: ast.expr, cut: set[int], reading: Reading) -> list[Edit] | None:
        """The edits that take the graph off the samples wherever they are read up to the backward; None if some stay.

        A network needs a copy without graph, a function of the script perhaps one to differentiate by: a penalty. A
        network whose own samples lose their graph keeps what it is given: a later loss goes through it.

        Args:
            loss: what the backward differentiates.
            cut: the calls of networks whose samples lose their graph, by identity.
            reading: the script.
        """
        given = {id(argument) for one in reading.script.trace.forwards.values() for argument in one.given}
        others = [one for one in self.between if _other_name(one, self.names) is None]
        nodes = walk(*others)
        edits: list[Edit] = []
        for read in (node for node in nodes if isinstance(node, ast.Name) and node.id in self.names):
            if any(id(one) in cut for one in reading.blocks.ancestors(read)):
                continue
            if id(read) in given or _is_joined(read, given, reading):
                copied = ".detach()"
            elif self._is_for(loss, read, reading):
                copied = ".detach().requires_grad_()"
            else:
                return None
            place = reading.source.offset(read.lineno, read.col_offset) + len(read.id)
            edits.append(Edit(place, place, copied))
        return edits

    def _is_for(self, loss: ast.expr, read: ast.Name, reading: Reading) -> bool:
        """Whether samples are handed to a function, and its result is used for a loss and no further down.

        A function that is handed what was computed from them may differentiate that by these very samples.
        """
        call = next(reading.blocks.ancestors(read))
        if isinstance(call, ast.keyword):
            call = next(reading.blocks.ancestors(call))
        if not isinstance(call, ast.Call) or read is call.func or last_name(call).endswith("_"):
            return False
        if isinstance(next(reading.blocks.ancestors(call)), ast.Expr) or _may_keep(call, reading):
            return False
        made = set(self.names)
        for statement in self.between:
            if names_read(statement) & made:
                made |= names_bound(statement)
        if names_read(call) & made != {read.id}:
            return False
        scope = reading.blocks.scope_of(read)
        nodes = () if scope is None else nodes_of_scope_body(scope)
        later = (one for one in nodes if isinstance(one, ast.Name) and one.id in made - {*self.names, path_of(loss)})
        used = (one for one in later if isinstance(one.ctx, ast.Load) and one.lineno > loss.lineno)
        return all(is_read_without_graph(one, reading.blocks) for one in used)


def _may_keep(call: ast.Call, reading: Reading) -> bool:
    """Whether a function in sight that a call runs may keep what it is given beyond the call."""
    nodes = walk(*reading.calls_run.functions([call]))
    return any(
        (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr != "requires_grad")
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last_name(node.value) in _KEEPING)
        for node in nodes
    )


def _other_name(statement: ast.stmt, names: Collection[str]) -> str | None:
    """`pairs` of `pairs = torch.cat([images, samples], 1)`, which does nothing else than to hold samples as well."""
    match statement:
        case ast.Assign([ast.Name(name)], ast.Name(held)) if held in names:
            return name
        case ast.Assign([ast.Name(name)], ast.Call(_, [ast.List(parts) | ast.Tuple(parts), *_]) as call):
            held_too = any(isinstance(part, ast.Name) and part.id in names for part in parts)
            return name if held_too and last_name(call) in _JOINING else None
    return None


def _is_joined(node: ast.Name, given: set[int], reading: Reading) -> bool:
    """Whether a tensor is one of several that a network is given together: `critic(torch.cat([real, samples]))`."""
    several, call, *_ = reading.blocks.ancestors(node)
    return (
        isinstance(several, ast.List | ast.Tuple)
        and isinstance(call, ast.Call)
        and last_name(call) in _JOINING
        and id(call) in given
    )


def _reset_behind(
    backward: ast.stmt, network: str, loop: TrainingLoop, reading: Reading, shared: SharedParameters
) -> int | None:
    """The line that drops the gradients of a network behind a backward, ahead of every step that takes them."""
    steps = [*loop.steps, *loop.later_steps]
    own = [step for step in steps if shared.is_made_for(step.optimizer, network)]
    others = [step for step in steps if step not in own]
    if not own or any(shared.may_be_shared(one.optimizer, other.optimizer) for one in own for other in others):
        return None
    found: list[int] = []
    for step in own:
        statement = reading.blocks.statement_of(step.node)
        block = reading.blocks.block_of(statement)
        ahead = block[: block.index(statement)]
        paths = (step.optimizer, network)
        resets = [one.lineno for one in ahead if any(frees_gradients_of(one, path) for path in paths)]
        same_scope = reading.blocks.scope_of(statement) is reading.blocks.scope_of(backward)
        if not same_scope or not resets or max(resets) < backward.lineno:
            return None
        found.append(max(resets))
    between = range((backward.end_lineno or backward.lineno) + 1, min(found))
    scope = reading.blocks.scope_of(backward)
    nodes = () if scope is None else nodes_of_scope_body(scope)
    passed = [node for node in nodes if isinstance(node, ast.Expr | ast.expr) and node.lineno in between]
    if any(_may_read(node, network, own[0].optimizer, shared) for node in passed):
        return None
    return min(found)


def _may_read(node: ast.AST, network: str, optimizer: str, shared: SharedParameters) -> bool:
    """Whether a node reads the gradients of a network, or hands it or its optimizer to what might."""
    if isinstance(node, ast.Call):
        if CLIPPING.search(last_name(node)):
            return shared.may_be_given(optimizer, node)
        if any(path_of(argument) in (network, optimizer) for argument in arguments_of(node)):
            return True
    return isinstance(node, ast.Attribute) and reads_gradients(node)
