"""What `apply` costs grows as the file does: nothing looks at the whole file for each of its loops."""

import sys

import pytest

from oomfix.audit import Auditor
from oomfix.rules import all_rules
from oomfix.script.interpreter.follow import Follower
from tests.audit.test_cost import ACCUMULATES, ADDS_UP, IN_HALF
from tests.rewrite.equivalence import rewritten

WINDOWS = """
def train_{number}(model, loader, optimizer, criterion, args):
    for step, (images, labels) in enumerate(loader):
        loss = criterion(model(images), labels) / args.window
        loss.backward()
        if (step + 1) % args.window == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
PLAIN = """
import torch

for images, labels in loader:
    optimizer.zero_grad(set_to_none=True)
    loss = criterion(model(images.cuda()), labels)
    loss.backward()
    optimizer.step()
"""
LOADED = "model.load_state_dict(torch.load(path))\n"


def work(part: str, copies: int) -> int:
    """How many functions of Python are entered to rewrite a script of so many functions, generators resumed too."""
    text = "import torch\n" + "".join(part.format(number=number) for number in range(copies))
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        rewritten(text)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "part", [ACCUMULATES, IN_HALF, ADDS_UP, WINDOWS], ids=["accumulates", "in half", "adds up", "windows"]
)
def test_four_times_the_functions_take_four_times_the_work(part):
    work(part, 1)  # what is read or compiled once
    # one look at all calls of the file for each loop makes it 4.1
    assert work(part, 32) < 4.02 * work(part, 8)


@pytest.fixture
def followed(monkeypatch):
    """The scripts that are followed: nothing else takes as long."""
    scripts = []
    follow = Follower.follow
    monkeypatch.setattr(Follower, "follow", lambda self: scripts.append(self) or follow(self))
    return scripts


@pytest.mark.parametrize(
    ("text", "times"),
    [
        pytest.param(PLAIN, 1, id="as it is"),
        pytest.param(PLAIN.replace("loss.backward()", "loss.backward(gradient)"), 1, id="in place"),
        pytest.param("import torch\n" + WINDOWS.format(number=0), 2, id="as it is, and with its window folded"),
    ],
)
def test_what_becomes_of_loops_is_told_of_a_script_that_is_followed_once(followed, text, times):
    report = Auditor(all_rules(), forms=True).audit("train.py", text.encode())
    assert [loop["rewrite"] for loop in report.loops] != ["none"]
    assert len(followed) == times


@pytest.mark.parametrize(
    ("text", "times"),
    [
        pytest.param(PLAIN, 2, id="as it is, and rewritten"),
        pytest.param(PLAIN + LOADED, 3, id="with its local fixes too"),
    ],
)
def test_a_script_is_followed_once_in_each_state_that_is_asked_for_findings(followed, text, times):
    assert "memory.forward_backward" in rewritten(text).text
    assert len(followed) == times
