"""Losses whose backward something else runs are computed in micro-batches ahead of it, and nothing else changes."""

import textwrap

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten

DATA = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(12, 6), torch.randint(0, 4, (12,))) for _ in range(6)]
"""
ACCELERATE = (
    "from accelerate import Accelerator\n"
    + DATA
    + "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
    + "model, optimizer = accelerator.prepare(model, optimizer)\n"
)
SCALER = "from tests.rewrite.native_scaler import NativeScaler\n" + DATA + "loss_scaler = NativeScaler()\n"
LOOPS = {
    "Accelerate": (
        ACCELERATE,
        """\
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                out = model(x)
                loss = F.cross_entropy(out, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
            print(f"{total:.6f}", (out.argmax(1) == y).sum().item())
        """,
    ),
    "Accelerate, divided": (
        ACCELERATE,
        """\
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss / 4)
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    "an attribute that scales": (
        SCALER,
        """\
        class Trainer:
            def __init__(self):
                self.loss_scaler = loss_scaler

            def train(self):
                for x, y in loader:
                    loss = F.cross_entropy(model(x), y)
                    self.loss_scaler(loss, optimizer, parameters=model.parameters(), create_graph=False)
                    optimizer.zero_grad()

        Trainer().train()
        """,
    ),
    "a scaler": (
        SCALER,
        """\
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cpu", enabled=False):
                out = model(x)
                loss = F.cross_entropy(out, y)
            loss_value = loss.item()
            if loss_value != loss_value:
                raise SystemExit(1)
            loss /= 2
            norm = loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), update_grad=step % 2 == 1)
            if step % 2 == 1:
                optimizer.zero_grad()
                print(f"{loss_value:.6f} {norm:.6f}")
        """,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_it_trains_the_same_in_parts(name):
    top, loop = LOOPS[name]
    text = top + textwrap.dedent(loop)
    after = rewritten(text)
    assert [outcome.rewrite for outcome in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)
    assert rewritten(after.text).text == after.text
    assert [(outcome.rewrite, outcome.reason) for outcome in rewritten(after.text).loops] == [
        ("none", "it already trains through oomfix.runtime")
    ]


def test_the_loss_is_made_where_it_was_and_all_behind_it_stays():
    top, loop = LOOPS["a scaler"]
    before = textwrap.dedent(loop)
    after = rewritten(top + before).text
    _, behind = before.split("    loss_value", 1)
    assert after.endswith(
        """\
    def forward(x, y):
        with torch.autocast("cpu", enabled=False):
            out = model(x)
            loss = F.cross_entropy(out, y)
        return loss

    loss = memory.loss(forward, x, y)
    loss_value"""
        + behind
    )


FACTORS = {
    "out of the network": ("", "out.pow(2).mean()"),
    "by its name": ("weight = 1 + out.pow(2).mean()", "weight"),
    "made by a function": ("def extra():\n        return out.abs().mean()\n", "extra()"),
    "left in the network": ("", "model.factor"),
}


@pytest.mark.parametrize("form", ["loss = loss * {}", "loss *= {}", "if step:\n        loss = loss * {}"])
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_may_carry_a_graph_is_part_of_the_loss(name, form):
    made, factor = FACTORS[name]
    text = ACCELERATE + (
        "for step, (x, y) in enumerate(loader):\n"
        "    out = model(x)\n"
        "    loss = F.cross_entropy(out, y)\n"
        f"    {made}\n"
        f"    {form.format(factor)}\n"
        "    accelerator.backward(loss)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    after = rewritten(text).text
    assert "memory.loss" not in after or after.index(factor) < after.index("memory.loss")
    handed = text.replace("accelerator.backward(loss)", f"accelerator.backward(loss * {factor})")
    assert f"accelerator.backward(loss * {factor})" not in rewritten(handed).text.partition("memory.loss")[2]


@pytest.mark.parametrize(
    "loop",
    [
        # the graph is kept for something else
        """\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        """,
        # gradients get a graph
        """\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss, create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        """,
        # something else differentiates the loss, too
        """\
        for x, y in loader:
            x.requires_grad_()
            loss = F.cross_entropy(model(x), y)
            found = torch.autograd.grad(loss, x, retain_graph=True)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        """,
        # two losses of one graph
        """\
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            other = out.pow(2).mean()
            accelerator.backward(loss)
            accelerator.backward(other)
            optimizer.step()
            optimizer.zero_grad()
        """,
        # nothing has a name
        """\
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        """,
        # made somewhere else than it is handed on
        """\
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            if step:
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        """,
    ],
)
def test_others_are_left_alone(loop):
    text = ACCELERATE + textwrap.dedent(loop)
    after = rewritten(text)
    reason = "Accelerate runs the backward and does its own accumulation and precision"
    assert [(outcome.rewrite, outcome.reason) for outcome in after.loops] == [("none", reason)]
    assert "memory" not in after.text


def test_what_only_has_the_name_of_a_scaler_is_given_no_loss():
    text = SCALER + (
        "total = 0.0\n"
        "for x, y in loader:\n"
        "    out = model(x)\n"
        "    scaled = target_scaler(out, y)\n"
        "    total += (scaled - out).abs().mean().item()\n"
    )
    assert "memory" not in rewritten(text).text


def test_fabric_insists_on_a_backward_of_its_own():
    text = DATA + (
        "from lightning.fabric import Fabric\n"
        "fabric = Fabric()\n"
        "model, optimizer = fabric.setup(model, optimizer)\n"
        "for x, y in loader:\n"
        "    loss = F.cross_entropy(model(x), y)\n"
        "    fabric.backward(loss)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    (outcome,) = rewritten(text).loops
    assert (outcome.rewrite, outcome.reason) == ("none", "Fabric runs the backward and does its own precision")


def test_what_is_in_the_way_of_a_slice_is_told():
    loop = """\
        kept = []
        for x, y in loader:
            out = model(x)
            kept.append(out)
            loss = F.cross_entropy(kept[-1], y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        """
    text = ACCELERATE + textwrap.dedent(loop)
    after = rewritten(text)
    (outcome,) = after.loops
    assert outcome.rewrite == "none" and outcome.reason.startswith("Accelerate runs the backward and does its own")
    assert "; and " in outcome.reason
    assert "memory" not in after.text


def test_one_manager_serves_no_two_precisions():
    plain = """\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    after = rewritten(ACCELERATE + textwrap.dedent(LOOPS["Accelerate"][1]) + textwrap.dedent(plain))
    assert [outcome.rewrite for outcome in after.loops] == ["none", "micro-batched"]
