"""What an audit costs grows as the file does: nothing looks at the whole file for each of its loops."""

import sys

import pytest

from oomfix.rules import all_rules
from oomfix.script import Script
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


def bytecodes(part, copies):
    """How many bytecode instructions all rules take on a script of so many functions, those of their regular
    expressions and other compiled code not counted.
    """
    text = "import torch\n" + "".join(part.format(number=number) for number in range(copies))
    source = Source.from_bytes("train.py", text.encode())
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        script = Script.read(source)
        for rule in all_rules():
            list(rule.check(script))
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("part", [ACCUMULATES, IN_HALF], ids=["accumulates", "in_half"])
def test_four_times_the_functions_take_four_times_the_work(part):
    bytecodes(part, 1)  # what is read or compiled once
    assert bytecodes(part, 32) < 4.4 * bytecodes(part, 8)
