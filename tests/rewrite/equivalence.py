"""Runs a training script before and after `oomfix apply` and compares what it trains, step by step."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from oomfix import runtime
from oomfix.equivalence.comparison import Recording, compare
from oomfix.equivalence.recorder import Recorder
from oomfix.rewrite.apply import Applied, apply_to
from oomfix.rewrite.options import Options
from oomfix.rules import all_rules
from oomfix.source import Source

_NUMBER = re.compile(r"[-+]?\d+\.\d+(?:[eE][-+]?\d+)?|nan|inf")


class Run(NamedTuple):
    """What one run of a script did: its standard output, and its optimizer steps."""

    printed: str
    recording: Recording

    @property
    def calls_in_parts(self) -> int:
        """How many calls of `forward_backward` ran in micro-batches."""
        return self.recording.calls_in_parts

    @property
    def numbers(self) -> list[float]:
        """Every number with a decimal point in the output."""
        return [float(number) for number in _NUMBER.findall(self.printed)]


def rewritten(text: str, name: str = "train.py", **overrides: object) -> Applied:
    """A script after `apply --preset 16gb`, with fields of the preset changed."""
    return apply_to(Source.from_bytes(name, text.encode()), all_rules(), options(**overrides))


def options(**overrides: object) -> Options:
    """What `oomfix apply --preset 16gb` does, with fields of the preset changed."""
    return Options("16gb", overrides)


def run(text: str, argv: Sequence[str] = (), *, preset: str = "", seed: int = 0) -> Run:
    """Run a script in this process, as `__main__`, with fixed seeds; OOMFIX_PRESET is `preset`."""
    runtime.reset()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    output = io.StringIO()
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": "train.py"}
    try:
        with (
            Recorder() as recorder,
            mock.patch.object(sys, "argv", ["train.py", *argv]),
            mock.patch.dict(os.environ, {"OOMFIX_PRESET": preset}),
            contextlib.redirect_stdout(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            exec(compile(text, "train.py", "exec", dont_inherit=True), namespace)
    finally:
        runtime.reset()
        # What a script sets for its process must not reach the tests after it.
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
    return Run(output.getvalue(), recorder.recording)


def assert_same_bits(before: Run, after: Run) -> None:
    """The runs printed the same text and had the same weights, to the bit, after each step."""
    assert before.recording.steps, "the script made no optimizer step"
    assert after.printed == before.printed
    found = compare([before.recording], [after.recording])
    assert found.difference is None and found.worst == 0


def assert_close(before: Run, after: Run, relative: float = 1e-5) -> None:
    """Every number printed, and the weights after each step, differ by less than `relative`."""
    assert before.recording.steps, "the script made no optimizer step"
    assert len(after.numbers) == len(before.numbers)
    np.testing.assert_allclose(after.numbers, before.numbers, rtol=relative, atol=relative)
    assert compare([before.recording], [after.recording], relative).difference is None


def parts_as_whole(text: str, after: str, split: str) -> int:
    """How many calls ran in parts, in a rewritten script that trains as before: to the bit when off, and split.

    Args:
        text: the script.
        after: the script after `apply`.
        split: the same, with a preset that splits.
    """
    before = run(text)
    assert_same_bits(before, run(after, preset="off"))
    in_parts = run(split)
    assert_close(before, in_parts)
    return in_parts.calls_in_parts
