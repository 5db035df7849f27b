"""Optimizers that step the same parameters, and clips of several networks: gradients stay until all had theirs."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

TOP = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body, one, other = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1)
"""
TWO_STEPS = """\
for x in [torch.randn(6, 4) for _ in range(4)]:
    first.zero_grad()
    second.zero_grad()
    loss = one(body(x)).pow(2).mean() + other(body(x)).pow(2).mean()
    loss.backward()
    first.step()
    {between}
    second.step()
    print(f"{loss.item():.9f}")
"""
RESETS_BEHIND = """\
for x in [torch.randn(6, 4) for _ in range(4)]:
    loss = one(body(x)).pow(2).mean() + other(body(x)).pow(2).mean()
    loss.backward()
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
    print(f"{loss.item():.9f}")
"""
TWO_BACKWARDS = """\
for x in [torch.randn(6, 4) for _ in range(4)]:
    first.zero_grad()
    loss = one(body(x)).pow(2).mean()
    loss.backward()
    first.step()
    loss = other(body(x)).pow(2).mean()
    loss.backward()
    second.step()
    second.zero_grad()
    print(f"{loss.item():.9f}")
"""
STEPPED_TWICE = """\
for x in [torch.randn(6, 4) for _ in range(4)]:
    first.zero_grad()
    loss = one(body(x)).pow(2).mean()
    loss.backward()
    first.step()
    loss = other(body(x)).pow(2).mean()
    loss.backward()
    first.step()
    print(f"{loss.item():.9f}")
"""
SHARED = """\
first = torch.optim.SGD([*body.parameters(), *one.parameters()], lr=0.1)
second = torch.optim.SGD([*body.parameters(), *other.parameters()], lr=0.1)
"""
IN_GROUPS = """\
heads = list(other.parameters())
heads += list(body.parameters())
first = torch.optim.SGD([{"params": body.parameters(), "lr": 0.01}, {"params": one.parameters()}], lr=0.1)
second = torch.optim.SGD(heads, lr=0.1)
"""
BY_ANOTHER_NAME = """\
class Head(nn.Module):
    def __init__(self, trunk, last):
        super().__init__()
        self.trunk, self.last = trunk, last

    def forward(self, x):
        return self.last(self.trunk(x))


actor, critic = Head(body, one), Head(body, other)
first = torch.optim.SGD(actor.parameters(), lr=0.1)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
"""
PUT_INTO_BOTH = """\
actor, critic = nn.Sequential(nn.Linear(4, 5), one), nn.Sequential(nn.Linear(4, 5), other)
actor[0] = body
critic[0] = body
first = torch.optim.SGD(actor.parameters(), lr=0.1)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
"""
TIED = """\
actor, critic = nn.Sequential(body, one), nn.Sequential(nn.Linear(4, 5), other)
critic[0] = actor[0]
first = torch.optim.SGD(actor.parameters(), lr=0.1)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
"""
APART = """\
first = torch.optim.SGD(one.parameters(), lr=0.1)
second = torch.optim.SGD([*body.parameters(), *other.parameters()], lr=0.1)
"""
CLIPPED_TOGETHER = "nn.utils.clip_grad_norm_([p for net in (body, one, other) for p in net.parameters()], 0.1)"


def alike(text):
    """The text after apply, which trains as before."""
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))
    return after.text


@pytest.mark.parametrize("made", [SHARED, IN_GROUPS, BY_ANOTHER_NAME, PUT_INTO_BOTH, TIED])
@pytest.mark.parametrize("loop", [TWO_STEPS, RESETS_BEHIND, TWO_BACKWARDS])
def test_a_step_keeps_gradients_that_the_step_of_another_optimizer_needs(made, loop):
    assert "memory.step(first, zero_grad=False)" in alike(TOP + made + loop.replace("{between}", "pass"))


def test_a_step_keeps_gradients_that_a_second_step_of_its_optimizer_needs():
    made = "first = torch.optim.SGD([*body.parameters(), *one.parameters(), *other.parameters()], lr=0.1)\n"
    text = alike(TOP + made + STEPPED_TWICE)
    assert text.count("memory.step(first, zero_grad=False)") == text.count("memory.step(first)") == 1


def test_a_step_keeps_gradients_that_a_later_clip_measures_too():
    text = TOP + APART + TWO_STEPS.replace("{between}", CLIPPED_TOGETHER)
    assert "memory.step(first, zero_grad=False)" in alike(text)


@pytest.mark.parametrize("between", ["pass", "nn.utils.clip_grad_norm_(body.parameters(), 0.1)"])
def test_steps_of_optimizers_that_share_nothing_drop_their_gradients(between):
    text = alike(TOP + APART + TWO_STEPS.replace("{between}", between))
    assert "memory.step(first)" in text
    assert "memory.step(second)" in text


def test_optimizers_of_one_class_share_what_its_networks_do():
    text = TOP + textwrap.dedent("""\
        class Trainer:
            def __init__(self, size):
                self.one, self.other = nn.Linear(size, 3), nn.Linear(size, 1)
                self.first = torch.optim.SGD({first}, lr=0.1)
                self.second = torch.optim.SGD(self.other.parameters(), lr=0.1)

            def train(self, batches):
                for x in batches:
                    self.first.zero_grad()
                    self.second.zero_grad()
                    loss = self.one(x).pow(2).mean() + self.other(x).pow(2).mean()
                    loss.backward()
                    self.first.step()
                    self.second.step()
                    print(f"{loss.item():.9f}")


        Trainer(4).train([torch.randn(6, 4) for _ in range(4)])
        """)
    shared = "[*self.one.parameters(), *self.other.parameters()]"
    assert "memory.step(self.first, zero_grad=False)" in alike(text.replace("{first}", shared))
    assert "memory.step(self.first)" in alike(text.replace("{first}", "self.one.parameters()"))


def test_steps_in_two_branches_drop_their_gradients_each():
    text = TOP + textwrap.dedent("""\
        first = torch.optim.SGD([*body.parameters(), *one.parameters()], lr=0.1)
        for number, x in enumerate([torch.randn(6, 4) for _ in range(4)]):
            first.zero_grad()
            loss = one(body(x)).pow(2).mean()
            loss.backward()
            if number % 2:
                nn.utils.clip_grad_norm_(body.parameters(), 0.1)
                first.step()
            else:
                first.step()
            print(f"{loss.item():.9f}")
        """)
    after = alike(text)
    assert after.count("memory.step(first)") == 2
