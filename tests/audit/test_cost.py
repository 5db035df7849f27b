"""What an audit costs grows as the file does: nothing looks at the whole file for each of its loops."""

import sys

import pytest

from oomfix.audit import Auditor, Selection
from oomfix.rules import all_rules
from oomfix.script import Script
from oomfix.script.analyses import into_numbers, precision
from oomfix.script.facts.trace import Trace
from oomfix.script.interpreter import follow
from oomfix.source import Source

ACCUMULATES = """
def train_{number}(model, loader, optimizer, criterion):
    history = []
    seen = 0
    for images, labels in loader:
        seen += 1
        loss = criterion(model(images), labels) / 4
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if seen % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        history.append(loss)
"""
IN_HALF = """
class Trainer{number}:
    def __init__(self, model):
        self.model = model
        self.device_{number} = torch.device("cuda")
        self.scaler = torch.cuda.amp.GradScaler()

    def fit(self, loader, optimizer):
        for batch in loader:
            with torch.cuda.amp.autocast():
                loss = self.model(batch).loss
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()

    def evaluate(self, loader):
        self.model.eval()
        return [self.model(batch).loss for batch in loader]
"""
ADDS_UP = """
def train_{number}(model, loader, optimizer):
    total = 0
    for images, labels in loader:
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        total += loss
    return total
"""
LOADS = """
state_{number} = torch.load("state.pt")
model.load_state_dict(state_{number})
"""
SILENCED = """
state_{number} = torch.load("state.pt")  # oomfix: ignore[OOM205]
"""


def with_all_rules(text):
    script = Script.read(Source.from_bytes("train.py", text.encode()))
    for rule in all_rules():
        list(rule.check(script))


def audited(text):
    report = Auditor(all_rules()).audit("train.py", text.encode())
    assert Selection((), (), ("OOM205",)).visible(report) == []


def bytecodes(part, copies, work=with_all_rules):
    """How many bytecode instructions the work takes on a script of so many functions, those of regular expressions
    and other compiled code not counted.
    """
    text = "import torch\n" + "".join(part.format(number=number) for number in range(copies))
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work(text)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize(
    ("part", "copies"),
    [(ACCUMULATES, 8), (IN_HALF, 8), (ADDS_UP, 24), (LOADS, 24)],
    ids=["accumulates", "in_half", "adds_up", "loads"],
)
def test_four_times_the_functions_take_four_times_the_work(part, copies):
    bytecodes(part, 1)  # what is read or compiled once
    assert bytecodes(part, 4 * copies) < 4.4 * bytecodes(part, copies)


def test_four_times_the_comments_take_four_times_the_work():
    assert bytecodes(SILENCED, 96, audited) < 4.4 * bytecodes(SILENCED, 24, audited)


def test_a_call_out_of_sight_does_not_go_through_all_forwards_before_it(monkeypatch):
    class Counted(dict):
        passed = 0

        def values(self):
            for value in super().values():
                Counted.passed += 1
                yield value

    monkeypatch.setattr(follow, "Trace", lambda: Trace(forwards=Counted()))
    script = Script.read(Source.from_bytes("train.py", b"for x in loader:\n" + b"    show(model(x))\n" * 8))
    assert len(script.trace.forwards) == 8
    assert Counted.passed == 0


@pytest.mark.parametrize(("context", "looked_for"), [("torch.no_grad()", False), ("torch.autocast('cuda')", True)])
def test_what_scales_losses_is_looked_for_where_something_runs_in_fp16(monkeypatch, context, looked_for):
    looked_at = []
    monkeypatch.setattr(precision, "_words_of_scaling", lambda statement: looked_at.append(statement) or set())
    with_all_rules(
        "import torch\n"
        "for x in loader:\n"
        f"    with {context}:\n"
        "        target = teacher(x)\n"
        "        loss = model(x, target)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    assert bool(looked_at) is looked_for


def test_what_a_round_reads_first_is_found_out_once_for_all_names_of_it(monkeypatch):
    asked = []
    read_first = into_numbers.read_first
    monkeypatch.setattr(into_numbers, "read_first", lambda loop: asked.append(loop) or read_first(loop))
    script = Script.read(
        Source.from_bytes(
            "show.py",
            b"def show(model, loader):\n"
            b"    for x in loader:\n"
            b"        out = model(x)\n"
            b"        total = out.sum()\n"
            b"        mean = total / 8\n"
            b"        print(mean.item())\n",
        )
    )
    assert script.evaluation_forwards
    assert len(asked) == 1
