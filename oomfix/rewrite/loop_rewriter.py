"""The training loops of one file, rewritten together: one manager serves them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from oomfix.rewrite.amp import Amp
from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.edits import apply_edits, line_before
from oomfix.rewrite.inplace import InPlace
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.lifter import lift_backwards
from oomfix.rewrite.liveness import FunctionNode
from oomfix.rewrite.loops import Judge, Scaling, Verdict, scaling_of
from oomfix.rewrite.module import Names, Overrides, header_edits, manager_in, prepare_edits, unused_amp_imports
from oomfix.rewrite.same_branches import merge_branches
from oomfix.rules.base import Edit
from oomfix.script import Script
from oomfix.source import Source, parse

_PRECISION: dict[Scaling, Overrides] = {
    "ours": {},
    "none": {"precision": "no-fp16"},
    "script's": {"precision": "fp32"},
}
"""What the preset is told about precision: fp32 for a script that brings its own autocast and scaler."""

_SAID: dict[Scaling, str] = {
    "ours": "",
    "none": "losses are not scaled, so no fp16",
    "script's": "its own precision and loss scaler stay",
}


class LoopRewriter:
    """Rewrites the loops of a script.

    Args:
        script: the script.
        preset: the preset's name.
        overrides: fields of the preset that the script is to change.

    Attributes:
        verdicts: what becomes of each loop; final after `rewrite`.
    """

    def __init__(self, script: Script, preset: str, overrides: Overrides) -> None:
        source = script.source
        self._script, self._source, self._preset, self._overrides = script, source, preset, overrides
        self._blocks, self._layout, self._names = Blocks(source.tree), Layout(source), Names(source.tree)
        self._amp = Amp(script, self._blocks)
        self._judge = Judge(script, self._blocks, self._amp)
        self._known = manager_in(script)
        self.verdicts = self._judge.verdicts()

    def rewrite(self) -> Source:
        """The file with its loops rewritten."""
        if self._known is not None:
            self._leave(lambda verdict: verdict.sees_scale)
        while any(verdict.form != "none" for verdict in self.verdicts):
            scaling = scaling_of(self.verdicts)
            rewritten = self._rewritten(scaling)
            if scaling != "script's" or all(verdict.form != "in-place" for verdict in self.verdicts):
                self._note(scaling)
                removals = unused_amp_imports(self._source.tree, rewritten.tree, Layout(rewritten))
                return _changed(rewritten, apply_edits(rewritten.text, removals))
            self._leave(_why_nothing_is_gained)
        return self._source

    def _rewritten(self, scaling: Scaling) -> Source:
        manager = self._known or self._names.free("memory", "gpu_memory", "oomfix_memory")
        edits = InPlace(self._script, self._blocks, self._layout, self._amp, manager, scaling).edits(self.verdicts)
        models = _models(self.verdicts)
        edits += prepare_edits(self._script, self._layout, self._blocks, manager, models)
        if self._known is None:
            used = _first_use(self._source, self._blocks, edits)
            overrides = {**_PRECISION[scaling], **self._overrides}
            edits += header_edits(self._layout, self._names, manager, self._preset, overrides, used)
        stages = _Stages(self._source)
        stages.edit(edits)
        order = self._order()
        while (merged := merge_branches(stages.source, manager)).edits:
            stages.edit(merged.edits)
            order = [place for number, place in enumerate(order) if number not in merged.gone]
        lifted = lift_backwards(Script.read(stages.source, self._script.target_torch), order, manager)
        for verdict in self.verdicts:
            if verdict.form == "in-place" and verdict.reason is not None and verdict.liftable:
                verdict.reason = stages.with_lines_before(verdict.reason)
        stages.edit(lifted)
        return stages.source

    def _order(self) -> list[tuple[Verdict, bool]]:
        """For each `memory.backward` that is written, in the order of the text: its loop, and whether to lift it."""
        places: dict[tuple[int, int], tuple[Verdict, bool]] = {}
        for verdict in self.verdicts:
            if verdict.form != "none":
                lifted = {id(call) for call in verdict.liftable}
                for event in verdict.backwards:
                    node = event.node
                    places[(node.lineno, node.col_offset)] = (verdict, id(node) in lifted)
        return [places[place] for place in sorted(places)]

    def _leave(self, why: Callable[[Verdict], str | None]) -> None:
        for verdict in self.verdicts:
            if verdict.form != "none":
                reason = why(verdict)
                verdict.form = "in-place"
                if reason is not None:
                    verdict.leave(reason)
        self._judge.leave_shared(self.verdicts)

    def _note(self, scaling: Scaling) -> None:
        for verdict in self.verdicts:
            if verdict.form != "none" and verdict.sees_scale is not None:
                verdict.notes.append(f"{_SAID[scaling]}: {verdict.sees_scale}")


class _Stages:
    """A source on its way through several rounds of edits.

    Attributes:
        source: as it is now.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._rounds: list[tuple[str, list[Edit]]] = []

    def edit(self, edits: list[Edit]) -> None:
        """Make one round of edits."""
        self._rounds.append((self.source.text, edits))
        self.source = _changed(self.source, apply_edits(self.source.text, edits))

    def with_lines_before(self, reason: str) -> str:
        """A reason with the lines of the script as it was, not as it is now."""
        return re.sub(r"\bline (\d+)", lambda found: f"line {self._line_before(int(found[1]))}", reason)

    def _line_before(self, line: int) -> int:
        for text, edits in reversed(self._rounds):
            line = line_before(text, edits, line)
        return line


def _why_nothing_is_gained(verdict: Verdict) -> str | None:
    """Why a loop that keeps its own precision is left alone: its batch cannot be split either."""
    if verdict.form == "micro-batched":
        return None
    own = "its loss scaler is also that of another loop" if verdict.scaled else "another loop scales its own loss"
    return f"{verdict.sees_scale or own}; and {verdict.reason}"


def _models(verdicts: list[Verdict]) -> set[str]:
    """The paths of the models that rewritten loops train; those of a caller, where a helper's parameter is one."""
    trained = {forward.path for verdict in verdicts if verdict.form != "none" for forward in verdict.loop.forwards}
    return {path for path in trained if path is not None}


def _first_use(source: Source, blocks: Blocks, edits: list[Edit]) -> int:
    """The first line outside of functions that an edit changes."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, FunctionNode)]
    inside = [(node.lineno, node.end_lineno or node.lineno) for node in functions]
    lines = (source.position(edit.start)[0] for edit in edits)
    outside = [line for line in lines if not any(first <= line <= last for first, last in inside)]
    return min(outside, default=len(source.lines) + 1)


def _changed(source: Source, text: str) -> Source:
    if text == source.text:
        return source
    return Source(source.path, text, parse(text), encoding=source.encoding, bom=source.bom)
