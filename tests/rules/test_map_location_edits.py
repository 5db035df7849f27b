"""The edit of OOM205: a checkpoint goes to the CPU where nothing else can want it on the card."""

from __future__ import annotations

from textwrap import dedent

import pytest

from oomfix.rules.load_on_gpu import LoadOnGpu
from oomfix.script import Script
from oomfix.source import Source


def is_fixed(code: str) -> bool:
    code = dedent(code).lstrip("\n")
    (finding,) = LoadOnGpu().check(Script.read(Source.from_bytes("train.py", code.encode())))
    return bool(finding.edits)


@pytest.mark.parametrize(
    ("given", "fixed"),
    [
        ("torch.load(path)", True),
        ('torch.load(path)["model"]', True),
        ('torch.load(path)["nets"]["model"]', True),
        ('torch.load(path).get("model")', True),
        ("move(torch.load(path))", False),
        ("torch.load(path).model", False),
    ],
)
def test_a_state_or_an_entry_of_it_that_goes_into_a_network(given, fixed):
    assert is_fixed(f"import torch\nstate = {given}\nmodel.load_state_dict(state)\n") is fixed


RESUME = """
    import torch

    def resume(path):
        {declared}
        checkpoint = torch.load(path)
        {used}
"""


@pytest.mark.parametrize(
    ("declared", "used", "fixed"),
    [
        ("pass", "print('resumed')", True),
        ("pass", "del checkpoint", True),
        ("pass", "return checkpoint", False),
        ("global checkpoint", "print('resumed')", False),
    ],
)
def test_a_local_name_that_nothing_reads(declared, used, fixed):
    assert is_fixed(RESUME.format(declared=declared, used=used)) is fixed


def test_a_name_of_the_module_may_be_read_by_another_file():
    assert not is_fixed("import torch\ncheckpoint = torch.load(path)\n")
