"""An autocast block around a generator and the loss of its critic becomes two: more than one loss needs its samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.calls import only_calls
from oomfix.rewrite.dataflow.changes import overlap
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.facts.trace import Forward
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import walk


def part_autocast(reading: Reading, manager: str) -> list[Edit]:
    """The edits that end blocks of the manager's autocast behind what they run for later losses, and begin them again.

    Ahead of that a block may run no other network. Nor may one of these networks run in the rest of the block: autocast
    rounds a weight, and the sum of its gradients, once for a block.
    """
    return [edit for block in _blocks(reading, manager) for edit in _parted(block, reading, manager)]


def _blocks(reading: Reading, manager: str) -> list[list[ast.stmt]]:
    """The blocks with more than one backward."""
    calls = reading.calls_to(f"{manager}.backward")
    blocks = [reading.blocks.block_of(reading.blocks.statement_of(call)) for call in calls]
    return list({id(block): block for block in blocks if sum(block is other for other in blocks) > 1}.values())


def _parted(block: list[ast.stmt], reading: Reading, manager: str) -> Iterator[Edit]:
    backwards = [index for index, one in enumerate(block) if only_calls(one, f"{manager}.backward")]
    for index, statement in enumerate(block):
        later = [block[other] for other in backwards if other > index][1:]
        if not later or not _is_autocast(statement, manager):
            continue
        assert isinstance(statement, ast.With)
        place = _end_of_shared(statement, later, reading)
        first = None if place is None else reading.chunk(statement.body[place])
        if first is not None and reading.layout.own_lines(statement) is not None:
            context = reading.source.segment(statement.items[0].context_expr)
            header = f"{reading.layout.margin(statement)}with {context}:"
            yield reading.layout.inserted(reading.layout.span(first)[0], [header])


def _is_autocast(statement: ast.stmt, manager: str) -> bool:
    if not isinstance(statement, ast.With) or len(statement.items) != 1 or statement.items[0].optional_vars is not None:
        return False
    context = statement.items[0].context_expr
    return isinstance(context, ast.Call) and path_of(context.func) == f"{manager}.autocast"


def _end_of_shared(block: ast.With, later: list[ast.stmt], reading: Reading) -> int | None:
    """The index in a block behind all that runs networks for the backwards `later`; None where others run ahead."""
    called = set(walk(*later))
    through = {origin for event in reading.script.backwards if event.node in called for origin in event.origins}
    forwards = list(reading.script.trace.forwards.values())
    run = [set(reading.calls_run.by(statement)) for statement in block.body]
    of_statement = [[forward for forward in forwards if forward.node in calls] for calls in run]
    needed = [any(forward.origin in through for forward in found) for found in of_statement]
    if True not in needed:
        return None
    end = len(needed) - needed[::-1].index(True)
    ahead, rest = of_statement[:end], of_statement[end:]
    others_ahead = any(found and not wanted for found, wanted in zip(ahead, needed, strict=False))
    return None if end == len(needed) or others_ahead or _in_common(ahead, rest) else end


def _in_common(ahead: list[list[Forward]], rest: list[list[Forward]]) -> bool:
    """Whether a network may be in both; one that is no name may be any."""
    paths = [{forward.path for found in part for forward in found} for part in (ahead, rest)]
    known = [{path for path in part if path is not None} for part in paths]
    return known != paths or overlap(*known)
