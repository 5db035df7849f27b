"""`oomfix apply` for one file: its loops, what they need around them, its local fixes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from oomfix.rewrite.amp import Amp
from oomfix.rewrite.autocast_end import end_autocast_edits
from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.edits import apply_edits
from oomfix.rewrite.effects import Helpers, last_name
from oomfix.rewrite.inplace import InPlace
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.lift import CannotLift, OutsideOfBlock, Site
from oomfix.rewrite.lifting import Lifting
from oomfix.rewrite.liveness import FunctionNode
from oomfix.rewrite.local import Fixed, fix_locally
from oomfix.rewrite.loops import Form, Judge, Verdict
from oomfix.rewrite.module import Names, Overrides, header_edits, manager_in, prepare_edits, unused_amp_imports
from oomfix.rewrite.slices import Slicer
from oomfix.rules.base import Edit, Finding, Rule, Severity
from oomfix.script import Script
from oomfix.script.names import path_of
from oomfix.source import Source, parse

_LONGEST_LINE = 79


class Options(NamedTuple):
    """What to do with a file.

    Attributes:
        preset: the preset's name.
        overrides: fields of `oomfix.presets.Preset` that the script is to change.
        runtime: rewrite loops; False makes local fixes alone.
        only: codes or prefixes to fix; empty for all but notes, which are hygiene and would bloat the diff.
        ignore: codes or prefixes not to fix.
        target_torch: the oldest torch that the script must run on.
    """

    preset: str
    overrides: Overrides = {}  # noqa: RUF012  a default that nobody changes
    runtime: bool = True
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target_torch: tuple[int, int] | None = None

    def wants(self, code: str) -> bool:
        """Whether findings with this code are to be fixed."""
        return (not self.only or code.startswith(self.only)) and not (self.ignore and code.startswith(self.ignore))

    def wants_finding(self, finding: Finding) -> bool:
        """Whether a finding is to be fixed."""
        return self.wants(finding.code) and (bool(self.only) or finding.severity is not Severity.NOTE)


class LoopOutcome(NamedTuple):
    """What became of a training loop.

    Attributes:
        line, end_line: as in the file before; in a notebook, as in the cell.
        rewrite: the form.
        reason: why not more, None where nothing stood in the way.
        cell: the 1-based number of its cell in a notebook, else None.
    """

    line: int
    end_line: int
    rewrite: Form
    reason: str | None
    cell: int | None = None


class Applied(NamedTuple):
    """A file after `apply`.

    Attributes:
        text: the new text, newlines as in the file.
        loops: by line.
        fixed: the local fixes made.
    """

    text: str
    loops: tuple[LoopOutcome, ...]
    fixed: tuple[Fixed, ...]


def apply_to(source: Source, rules: Sequence[Rule], options: Options) -> Applied:
    """Rewrite a source for a preset.

    Raises:
        RecursionError: the source is nested absurdly.
    """
    current = source
    ended: tuple[Fixed, ...] = ()
    loops: tuple[LoopOutcome, ...] = ()
    if options.runtime:
        if options.wants("OOM305"):
            current, ended = _end_autocast(source, options)
        current, loops = _rewrite_loops(current, options)
    last = fix_locally(current, rules, options.wants_finding, options.target_torch)
    return Applied(last.text, loops, ended + last.fixed)


def _changed(source: Source, text: str) -> Source:
    if text == source.text:
        return source
    return Source(source.path, text, parse(text), encoding=source.encoding, bom=source.bom)


# -- loops ---------------------------------------------------------------------------------------------------------


def _end_autocast(source: Source, options: Options) -> tuple[Source, tuple[Fixed, ...]]:
    """Backwards out of autocast blocks, so that loops can be rewritten; lines keep their numbers."""
    if "autocast" not in source.text:
        return source, ()
    script = Script.read(source, options.target_torch)
    blocks = Blocks(source.tree)
    edits = end_autocast_edits(script, blocks, Layout(source), Amp(script, blocks))
    fixed = tuple(Fixed("OOM305", line, "backward inside of autocast") for line in edits)
    return _changed(source, apply_edits(source.text, edits.values())), fixed


def _rewrite_loops(source: Source, options: Options) -> tuple[Source, tuple[LoopOutcome, ...]]:
    script = Script.read(source, options.target_torch)
    if not script.loops:
        return source, ()
    blocks, layout, names = Blocks(source.tree), Layout(source), Names(source.tree)
    amp = Amp(script, blocks)
    verdicts = Judge(script, blocks, amp).verdicts()
    if all(verdict.form == "none" for verdict in verdicts):
        return source, _outcomes(verdicts)
    known = manager_in(script)
    manager = known or names.free("memory", "gpu_memory", "oomfix_memory")
    edits = InPlace(script, blocks, layout, amp, manager).edits(verdicts)
    edits += prepare_edits(script, layout, blocks, manager, _models(script, verdicts))
    if known is None:
        used = _first_use(source, blocks, edits)
        edits += header_edits(layout, names, manager, options.preset, options.overrides, used)
    rewritten = _changed(source, apply_edits(source.text, edits))
    rewritten = _lift(rewritten, _ordered(verdicts, amp), manager, options)
    removals = unused_amp_imports(source.tree, rewritten.tree, Layout(rewritten))
    return _changed(rewritten, apply_edits(rewritten.text, removals)), _outcomes(verdicts)


def _outcomes(verdicts: list[Verdict]) -> tuple[LoopOutcome, ...]:
    return tuple(LoopOutcome(v.loop.line, v.loop.end_line, v.form, v.reason) for v in verdicts)


def _models(script: Script, verdicts: list[Verdict]) -> set[str]:
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


def _ordered(verdicts: list[Verdict], amp: Amp) -> list[tuple[Verdict, bool]]:
    """For each `memory.backward` that was written, in the order of the text: its loop, and whether to lift it."""
    places: dict[tuple[int, int], tuple[Verdict, bool]] = {}
    for verdict in verdicts:
        if verdict.form != "none":
            lifted = {id(call) for call in verdict.liftable}
            for event in verdict.backwards:
                node = event.node
                places[(node.lineno, node.col_offset)] = (verdict, id(node) in lifted)
    return [places[place] for place in sorted(places)]


# -- slices --------------------------------------------------------------------------------------------------------


def _lift(source: Source, order: list[tuple[Verdict, bool]], manager: str, options: Options) -> Source:
    """Turn the backwards that may be into functions, those of one loop together or not at all."""
    calls = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and path_of(node.func) == f"{manager}.backward" and node.args
    ]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    own = calls[-len(order) :] if len(calls) == len(order) else []
    wanted = [(verdict, call) for (verdict, lifted), call in zip(order, own, strict=False) if lifted]
    if not wanted:
        return source
    edits: list[Edit] = []
    lifter = _Lifter(source, manager, options)
    for verdict in dict.fromkeys(id(verdict) for verdict, _ in wanted):
        group = [(owner, call) for owner, call in wanted if id(owner) == verdict]
        owner = group[0][0]
        try:
            edits += [edit for _, call in group for edit in lifter.edits(call)]
        except CannotLift as reason:
            owner.reason = str(reason)
        else:
            owner.form, owner.reason = "micro-batched", None
    return _changed(source, apply_edits(source.text, edits))


class _Lifter:
    """Lifts slices out of a text whose backwards are the manager's."""

    def __init__(self, source: Source, manager: str, options: Options) -> None:
        self._blocks = Blocks(source.tree)
        script = Script.read(source, options.target_torch)
        forwards = {id(forward.node) for forward in script.trace.forwards.values()}
        self._forwards = _RunsForward(source.tree, forwards)
        self._slicer = Slicer(source.tree, Helpers(source.tree), self._forwards)
        longest = max(map(len, source.lines), default=0)
        function = Names(source.tree).free("forward", "forward_batch")
        self._lifting = Lifting(Layout(source), manager, function, min(max(longest, _LONGEST_LINE), 120))

    def edits(self, call: ast.Call) -> list[Edit]:
        """The edits that lift the slice of one backward.

        Raises:
            CannotLift: the slice has to stay where it is.
        """
        statement = self._blocks.statement_of(call)
        assert isinstance(statement, ast.Expr)
        scope = self._blocks.scope_of(statement)
        assert scope is not None
        site = Site(
            statement,
            self._blocks.block_of(statement),
            self._blocks.header_of(statement),
            scope,
            self._blocks.loop_of(statement),
            call.args[0],
            self._blocks.bound_before(statement),
        )
        try:
            lift = self._slicer.lift(site)
        except OutsideOfBlock:
            branch = next(self._blocks.ancestors(statement))
            if not isinstance(branch, ast.If) or statement not in branch.body:
                raise
            block, header = self._blocks.block_of(branch), self._blocks.header_of(branch)
            bound = self._blocks.bound_before(branch)
            lift = self._slicer.lift(replace(site, block=block, header=header, branch=branch, bound_before=bound))
        return self._lifting.edits(lift)


class _RunsForward:
    """Whether a node runs a network: a forward stands in it, or in a function of the file that it calls."""

    def __init__(self, tree: ast.Module, forwards: set[int]) -> None:
        self._forwards = forwards
        self._functions: dict[str, list[FunctionNode]] = {}
        for node in ast.walk(tree):
            if isinstance(node, FunctionNode):
                self._functions.setdefault(node.name, []).append(node)
        self._known: dict[int, bool] = {}

    def __call__(self, node: ast.AST) -> bool:
        return any(
            id(child) in self._forwards or any(self._in_function(f) for f in self._functions.get(last_name(child), ()))
            for child in ast.walk(node)
            if isinstance(child, ast.Call)
        )

    def _in_function(self, function: FunctionNode) -> bool:
        if id(function) not in self._known:
            self._known[id(function)] = False
            self._known[id(function)] = any(self(statement) for statement in function.body)
        return self._known[id(function)]
