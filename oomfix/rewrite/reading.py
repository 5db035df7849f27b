"""A script with what rewriting asks of it, each made once however many ask."""

from __future__ import annotations

from functools import cached_property

from oomfix.rewrite.amp import Amp
from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.step_functions import training_loops
from oomfix.script import Script, TrainingLoop


class Reading:
    """One state of a file on its way through `apply`: every edit makes a new text, and with it a new reading.

    Args:
        script: the file.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.source = script.source

    @cached_property
    def loops(self) -> list[TrainingLoop]:
        """Its training loops and step functions, by line."""
        return training_loops(self.script)

    @cached_property
    def blocks(self) -> Blocks:
        """Where its nodes stand."""
        return Blocks(self.source.tree)

    @cached_property
    def layout(self) -> Layout:
        """Its lines."""
        return Layout(self.source)

    @cached_property
    def amp(self) -> Amp:
        """What it does about precision."""
        return Amp(self.script, self.blocks)
