"""The training loops of one file, rewritten together: one manager serves them all."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial

from oomfix import presets
from oomfix.rewrite.dataflow.step_functions import StepFunction
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.facts.verdict import WINDOW_STAYS, Attempt, Scaling, Verdict
from oomfix.rewrite.facts.window_shape import CannotFold
from oomfix.rewrite.in_place.inplace import InPlace
from oomfix.rewrite.in_place.windows import WindowFolder
from oomfix.rewrite.loops import Judge, scaling_of
from oomfix.rewrite.preparations.joined_lines import separate
from oomfix.rewrite.preparations.same_branches import merge_branches
from oomfix.rewrite.slicing.lifter import lift_backwards
from oomfix.rewrite.surroundings.loader_arguments import Written, loader_arguments
from oomfix.rewrite.surroundings.prepare import prepare_edits
from oomfix.rewrite.surroundings.stages import stage_edits
from oomfix.rewrite.text.edits import line_before, with_lines
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.rewrite.text.header import Overrides, header_edits, manager_in, runtime_name
from oomfix.rewrite.text.removal import together
from oomfix.rules.base import Edit
from oomfix.script import Forward, Script
from oomfix.script.syntax.patterns import Pattern

_MOST_PREPARATIONS = 8
_WORD, _LINE = Pattern(r"\w+"), Pattern(r"\bline (\d+)")

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
        reading: the script.
        preset: the preset's name.
        overrides: fields of the preset that the script is to change.
        wants: whether findings with a code are to be mended.

    Attributes:
        verdicts: what becomes of each loop; final after `rewrite`.
        mended: the codes and lines of what is mended on the way.
    """

    def __init__(self, reading: Reading, preset: str, overrides: Overrides, wants: Callable[[str], bool]) -> None:
        script = reading.script
        self._preset, self._overrides, self._wants = preset, overrides, wants
        self._loops = reading.loops
        self._known = manager_in(script)
        self._names = FreeNames(script)
        self._manager = self._known or self._names.one_of("memory", "gpu_memory", "oomfix_memory")
        self._begun = _Stages(reading)
        self._written_to_loaders: list[Written] = []
        self.mended: list[tuple[str, int]] = []
        judge = Judge(reading)
        self._take(reading, judge, judge.verdicts())

    def _take(self, reading: Reading, judge: Judge, verdicts: list[Verdict]) -> None:
        """Go on from a state of the script."""
        self._reading, self._script, self._source = reading, reading.script, reading.source
        self._judge, self.verdicts = judge, verdicts

    def rewrite(self) -> Callable[[], Reading]:
        """Decide what becomes of each loop; what is returned writes the file with its loops rewritten."""
        if self._known is not None:
            self._leave(lambda verdict: verdict.sees_scale)
        if scaling_of(self.verdicts) != "script's":
            self._fold_windows()
        while any(verdict.form != "none" for verdict in self.verdicts):
            scaling = scaling_of(self.verdicts)
            rewritten = self._rewritten(scaling)
            if scaling != "script's" or all(verdict.form != "in-place" for verdict in self.verdicts):
                self._note(scaling)
                return partial(self._finished, rewritten, scaling)
            self._leave(_why_nothing_is_gained)
        return lambda: self._reading

    def lines_of(self, verdict: Verdict) -> tuple[int, int]:
        """The first and last line of a loop in the script as it was."""
        loop = self._loops[next(number for number, other in enumerate(self.verdicts) if other is verdict)]
        return loop.line, loop.end_line

    # -- accumulation windows ----------------------------------------------------------------------------------

    def _fold_windows(self) -> None:
        """Fold the windows that lose something; what is left to do is done to the script with folded windows."""
        folder = WindowFolder(self._reading, self._manager, self._wants)
        edits: list[Edit] = []
        notes: dict[int, list[str]] = {}
        mended: list[tuple[str, int]] = []
        for number, verdict in enumerate(self.verdicts):
            try:
                folded = folder.fold(verdict) if verdict.form != "none" else None
            except CannotFold as reason:
                verdict.notes.append(f"{WINDOW_STAYS}: {reason}")
                continue
            if folded is not None:
                edits += folded.edits
                mended += folded.mended
                notes[number] = folded.notes
        if not edits:
            return
        stages = self._begun.copy()
        stages.edit(edits)
        judge = Judge(stages.reading)
        verdicts = judge.verdicts()
        if len(verdicts) != len(self._loops) or any(verdicts[number].form == "none" for number in notes):
            return
        for number, verdict in enumerate(verdicts):
            verdict.notes = self.verdicts[number].notes + notes.get(number, [])
        self._begun, self.mended = stages, mended
        self._take(stages.reading, judge, verdicts)

    # -- everything else ---------------------------------------------------------------------------------------

    def _rewritten(self, scaling: Scaling) -> Reading:
        manager = self._manager
        edits = InPlace(self._reading, manager, scaling).edits(self.verdicts)
        edits += prepare_edits(self._reading, manager, _trained(self.verdicts))
        if self._known is None:
            edits += self._stages()
            used = _first_use(self._script, edits, manager)
            overrides = {**_PRECISION[scaling], **self._overrides}
            if scaling != "ours" and any(map(reads_gradients, self._source.tree.body)):
                # without `unscale_` ahead of them the manager does not know of the script's own clips
                overrides.pop("clip_norm", None)
            edits += header_edits(self._reading.layout, self._names, manager, self._preset, overrides, used)
        preset = presets.get(self._preset, **self._overrides)
        self._written_to_loaders = loader_arguments(self._reading, preset, self.verdicts)
        edits += [edit for written in self._written_to_loaders for edit in written.edits]
        stages = self._begun.copy()
        stages.edit(together(self._source.text, edits), in_place=True)
        order = self._order()
        while (merged := merge_branches(stages.reading, manager)).edits:
            stages.edit(merged.edits, in_place=True)
            order = [place for number, place in enumerate(order) if number not in merged.gone]
        lifted = self._lift(stages, order)
        self._share()
        for verdict in self.verdicts:
            if verdict.form == "in-place" and verdict.reason is not None and verdict.liftable:
                verdict.reason = stages.with_lines_before(verdict.reason)
            if verdict.state is not None:
                verdict.state = stages.with_lines_before(verdict.state)
            verdict.said = [stages.with_lines_before(one) for one in verdict.said]
        stages.edit(lifted)
        return stages.reading

    def _finished(self, rewritten: Reading, scaling: Scaling) -> Reading:
        """The file once models that run outside of lifted functions have their precision, and idle scalers are gone."""
        # imported here: who only asks what becomes of the loops needs neither
        from oomfix.rewrite.text.unused import unused_scalers

        stays = any(verdict.form == "in-place" or verdict.runs_ahead for verdict in self.verdicts)
        if scaling != "script's" and stays:
            from oomfix.rewrite.in_place.model_calls import model_call_edits

            rewritten = rewritten.edited(model_call_edits(rewritten, self.verdicts, self._manager))
        return rewritten.edited(unused_scalers(rewritten.source.tree, self._manager, rewritten.layout))

    def _lift(self, stages: _Stages, order: list[tuple[Verdict, bool]]) -> list[Edit]:
        """The edits that lift slices, and what becomes of their loops in the verdicts.

        Where more is lifted, or less of it prints for every part of a batch, once joined statements have lines of their
        own, losses names, logs loops, and so on, `stages` takes that over. Where it is not, loops that stay are told
        what was in the way at last.
        """
        first = lift_backwards(stages.reading, order, self._manager)
        apart = stages.copy()
        while (last := self._lift_prepared(apart, order, first)).is_more_than(first):
            stages.become(apart.copy())
            first = last
        repeats = last is not first and last.lifted == first.lifted
        told = {id(verdict): lifted.reason for verdict, lifted in last.loops if repeats}
        for verdict, lifted in first.loops:
            reason = stages.reason_told_of(apart, told.get(id(verdict)))
            verdict.become(lifted._replace(reason=reason or lifted.reason))
        return first.edits

    def _lift_prepared(self, apart: _Stages, order: list[tuple[Verdict, bool]], first: Attempt) -> Attempt:
        """The first attempt that lifts more than another one, or the last, behind edits that `apart` is given."""
        last, names_losses = first, False
        for _ in range(_MOST_PREPARATIONS):
            edits, of_losses = separate(apart.reading, last.joined_lines), False
            if not edits and (last.stays or last.say_again):
                # imported here: most loops are lifted as they are, and every module takes its time
                from oomfix.rewrite.preparations.in_turn import prepare

                edits, of_losses = prepare(apart.reading, self._manager)
            if not edits:
                break
            names_losses = of_losses
            apart.edit(edits)
            last = lift_backwards(apart.reading, order, self._manager)
            if last.is_more_than(first) and not last.joined_lines:
                break
        # losses get names only where that lifts all
        return first if names_losses and last.stays and last.lifted != first.lifted else last

    def _stages(self) -> list[Edit]:
        """Transitions between stages, where no loop may leave gradients behind that the next stage would add to."""
        stays = any(note.startswith(WINDOW_STAYS) for verdict in self.verdicts for note in verdict.notes)
        if stays or any(verdict.form == "none" or isinstance(verdict.loop, StepFunction) for verdict in self.verdicts):
            return []
        runtime = runtime_name(self._source.tree.body, self._names)
        return stage_edits(self._reading, f"{runtime}.free")

    def _share(self) -> None:
        """Loops whose backwards are those of another become what that one became."""
        of = {id(event.node): verdict for verdict in self.verdicts for event in verdict.backwards}
        for verdict in self.verdicts:
            others = {id(of[id(event.node)]): of[id(event.node)] for event in verdict.backwards}
            if verdict.form == "in-place" and verdict.reason is None and len(others) == 1:
                other = next(iter(others.values()))
                verdict.form, verdict.reason = other.form, other.reason

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
        for written in self._written_to_loaders:
            said = f"{written.argument} for the loader in line {written.line}"
            written.verdict.notes.append(self._begun.with_lines_before(said))
        for verdict in self.verdicts:
            if verdict.form != "none" and verdict.handed_to is not None:
                verdict.notes.append(f"{verdict.handed_to}; where several processes train, batches run whole")
            elif verdict.form != "none" and verdict.sees_scale is not None:
                said = f"{_SAID[scaling]}: {self._begun.with_lines_before(verdict.sees_scale)}"
                verdict.notes.append(said)
            if verdict.form == "micro-batched" and verdict.state is not None:
                verdict.notes.append(f"{verdict.state}: batches run whole, and again in less memory where it runs out")
            verdict.notes += verdict.said if verdict.form == "micro-batched" else []
            if verdict.reason is not None and not (verdict.form == "in-place" and verdict.liftable):
                verdict.reason = self._begun.with_lines_before(verdict.reason)


class _Stages:
    """A file on its way through several rounds of edits.

    Attributes:
        reading: as it is now.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._rounds: list[tuple[str, list[Edit]]] = []

    def copy(self) -> _Stages:
        """The same rounds, to go on from apart."""
        copied = _Stages(self.reading)
        copied._rounds = list(self._rounds)
        return copied

    def become(self, other: _Stages) -> None:
        """Take over the rounds of a copy."""
        self.reading, self._rounds = other.reading, other._rounds

    def reason_told_of(self, later: _Stages, reason: str | None) -> str | None:
        """A reason told of a copy that was edited on, with the lines from before.

        None where it names what is new, or a line that has moved or is another one now.
        """
        if reason is None:
            return None
        words = [set(_WORD.findall(stages.reading.source.text)) for stages in (self, later)]
        if not (words[1] - words[0]).isdisjoint(_WORD.findall(reason)):
            return None
        since = later.copy()
        since._rounds = later._rounds[len(self._rounds) :]
        for number in map(int, _LINE.findall(reason)):
            before = self.reading.source.lines[since._line_before(number) - 1]
            # of statements that shared a line, each has its own now
            if later.reading.source.lines[number - 1].strip() not in before:
                return None
        return since.with_lines_before(reason)

    def edit(self, edits: list[Edit], *, in_place: bool = False) -> None:
        """Make one round of edits, after which networks may still run where they ran (see `Reading.edited`)."""
        self._rounds.append((self.reading.source.text, edits))
        self.reading = self.reading.edited(edits, in_place=in_place)

    def with_lines_before(self, reason: str) -> str:
        """A reason with the lines of the script as it was, not as it is now."""
        return with_lines(reason, self._line_before)

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


def _trained(verdicts: list[Verdict]) -> list[Forward]:
    """The forwards of rewritten loops."""
    return [forward for verdict in verdicts if verdict.form != "none" for forward in verdict.loop.forwards]


def _first_use(script: Script, edits: list[Edit], manager: str) -> int:
    """The first line outside of functions that an edit changes, or that uses the manager."""
    source, nodes = script.source, script.imports.nodes
    inside = {line for node in nodes.functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = [source.position(edit.start)[0] for edit in edits]
    lines += [node.lineno for node in nodes.of(ast.Name) if node.id == manager]
    return min((line for line in lines if line not in inside), default=len(source.lines) + 1)
