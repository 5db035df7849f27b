"""Functions called between forward and backward that change, or read, what is not among their arguments."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])) for _ in range(4)]
active, loss = True, None
state = {{"scale": 1.0}}


class Monitor:
    strict = False


class Meter:
    def update(self, value):
        Monitor.strict = value > 0.7


def update_active(value):
    global active
    active = value > 0.7


def update_scale(value):
    state["scale"] = 1.0 + value


def update_all(value):
    update_scale(value)


def scaled(loss):
    return loss * state["scale"]


def log_loss():
    print("before", 0.0 if loss is None else loss.item())


def log_shapes(value):
    total = [row for row in range(3)]
    print(value, total)


for x, y in loader * 2:
    optimizer.zero_grad()
    out = model(x)
    {between}
    loss = {loss}
    {later}
    if {test}:
        loss.backward()
        optimizer.step()
    print(loss.item())
"""
PLAIN = {"between": "pass", "loss": "F.cross_entropy(out, y)", "later": "pass", "test": "y.sum() > 0"}


@pytest.mark.parametrize(
    "changes",
    [
        {"later": "update_active(loss.item())", "test": "active"},
        {"later": "Meter().update(loss.item())", "test": "Monitor.strict"},
        {"between": "update_scale(out.mean().item())", "loss": "state['scale'] * F.cross_entropy(out, y)"},
        {"between": "update_all(out.mean().item())", "loss": "scaled(F.cross_entropy(out, y))"},
        {"between": "log_loss()"},
    ],
)
def test_what_a_call_changes_outside_of_its_function_keeps_the_loss_that_meets_it_in_place(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    "changes",
    [
        {"later": "update_scale(loss.item())"},
        {"between": "log_shapes(out.mean().item())", "loss": "sum(F.cross_entropy(out, y) for row in range(2))"},
    ],
)
def test_a_call_that_changes_what_no_loss_meets_goes_behind_it(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, after.text)


def test_a_name_of_a_function_is_not_the_global_of_that_name():
    text = SCRIPT.format(**PLAIN | {"later": "update_active(loss.item())", "test": "active"})
    start = text.index("for x, y")
    lines = "".join(f"    {line}\n" for line in text[start:].splitlines())
    text = f"{text[:start]}def main():\n    active = True\n{lines}\n\nmain()\n"
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, after.text)


CALLBACK = """\
import torch
from torch import nn

torch.manual_seed(0)


class Callback:
    def __init__(self, trainer):
        self.trainer = trainer

    def update(self, value):
        self.trainer.{attribute} = value > 0.0


class Trainer:
    def __init__(self):
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.callback, self.active, self.seen = Callback(self), False, False

    def fit(self, batches):
        for x in batches:
            self.optimizer.zero_grad()
            loss = self.model(x).pow(2).mean()
            self.callback.update(loss.item())
            if self.active:
                loss.backward()
                self.optimizer.step()
            print(loss.item())


Trainer().fit([torch.randn(6, 4) for _ in range(6)])
"""


def test_a_callback_that_decides_for_the_object_that_holds_it_is_called_ahead_of_the_decision():
    text = CALLBACK.format(attribute="active")
    after = rewritten(text)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [
        ("in-place", "line 25 calls what may change what the loss is computed from")
    ]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_callback_that_keeps_something_else_there_follows_the_call():
    text = CALLBACK.format(attribute="seen").replace("False, False", "True, False")
    after = rewritten(text, micro_batches=3)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, after.text)
