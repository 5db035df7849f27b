"""A script with what rewriting asks of it, each made once however many ask."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cached_property

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.calls_run import CallsRun
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.measuring import last_called, measures
from oomfix.rewrite.dataflow.step_functions import training_loops
from oomfix.rewrite.facts.amp import Amp
from oomfix.rewrite.facts.events import Events
from oomfix.rewrite.text.edits import Shift, apply_edits, with_text
from oomfix.rewrite.text.layout import Layout, Lines
from oomfix.script import Script, TrainingLoop
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_SWITCHING = Pattern(r"grad|autocast|inference_mode")


class Reading:
    """One state of a file on its way through `apply`: every edit makes a new text, and with it a new reading.

    Args:
        script: the file.
        before: the reading that was edited, and the edits, where networks still run where they ran.
    """

    def __init__(self, script: Script, before: tuple[Reading, list[Edit]] | None = None) -> None:
        self.script = script
        self.source = script.source
        self._before = before

    def edited(self, edits: Iterable[Edit], *, in_place: bool = False) -> Reading:
        """The file with edits made; this reading where they change nothing.

        Args:
            edits: what to change.
            in_place: networks run where they ran, and the same backwards go through them.

        Raises:
            EditsOverlap: two edits overlap.
            EditsBreakSource: the new text is no Python.
        """
        edits = list(edits)
        source = with_text(self.source, apply_edits(self.source.text, edits))
        if source is self.source:
            return self
        return Reading(Script.read(source, self.script.target_torch), (self, edits) if in_place else None)

    @cached_property
    def events(self) -> Events:
        """Its networks and backwards: those of the file before, where it was only edited in place."""
        moved = None if self._before is None else self._moved(*self._before)
        return Events.of(self.script) if moved is None else moved

    def _moved(self, before: Reading, edits: list[Edit]) -> Events | None:
        """The events of the file before, if all of their calls are still there."""
        shift = Shift(edits)
        here = {bounds(self.source, call): call for call in self.script.imports.nodes.of(ast.Call)}

        def counterpart(call: ast.Call) -> ast.Call | None:
            span = shift.span(*bounds(before.source, call))
            return None if span is None else here.get(span)

        def unchanged(call: ast.Call) -> ast.Call | None:
            other = counterpart(call)
            return other if other and self.source.segment(other) == before.source.segment(call) else None

        return before.events.moved(unchanged, counterpart)

    @cached_property
    def loops(self) -> list[TrainingLoop]:
        """Its training loops and step functions, by line."""
        return training_loops(self.script)

    @cached_property
    def blocks(self) -> Blocks:
        """Where its nodes stand."""
        return Blocks(self.source.tree)

    def calls_to(self, path: str) -> list[ast.Call]:
        """The calls of a function or method by its path: `memory.backward`."""
        return [call for call in self.script.imports.nodes.of(ast.Call) if path_of(call.func) == path]

    @cached_property
    def functions(self) -> FunctionsCalled:
        """Its functions, by what calls of them may mean."""
        return FunctionsCalled(self.script.imports)

    @cached_property
    def calls_run(self) -> CallsRun:
        """The calls that run in its nodes."""
        return CallsRun(self.functions)

    @cached_property
    def layout(self) -> Layout:
        """Its lines."""
        return Layout(self.source)

    def chunk(self, statement: ast.stmt) -> Lines | None:
        """The lines of a statement with the comments above it; None where it shares them."""
        return self.layout.chunk(statement, self.blocks.block_of(statement), self.blocks.header_of(statement))

    def chunks(self, statements: Sequence[ast.stmt]) -> list[Lines] | None:
        """The lines of each of some statements, see `chunk`; None where one of them shares its lines."""
        found = [lines for one in statements if (lines := self.chunk(one)) is not None]
        return found if len(found) == len(statements) else None

    def measures(self, block: ast.With) -> bool:
        """Whether a block only measures what runs in it; where the file itself says how, by what stands there."""
        contexts = [item.context_expr for item in block.items]
        return all(map(measures, contexts)) and self._switching.isdisjoint(map(last_called, contexts))

    @cached_property
    def _switching(self) -> set[str]:
        """The names of the file's classes and functions that may switch gradients or precision."""
        nodes = self.script.imports.nodes
        return {
            owner.name
            for owner in (*nodes.of(ast.ClassDef), *nodes.functions)
            if any(_SWITCHING.search(path_of(part) or "") for part in walk(owner) if isinstance(part, ast.Attribute))
        }

    @cached_property
    def amp(self) -> Amp:
        """What it does about precision."""
        return Amp(self.script, self.blocks)
