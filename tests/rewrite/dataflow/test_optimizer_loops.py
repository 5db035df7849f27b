"""Gradients of several optimizers, clipped together, are unscaled for each, also where a loop goes through them."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import apply


def test_gradients_of_a_step_in_a_loop_are_unscaled_inside_of_the_loop():
    """Ahead of the loop, which the loop of the caller sees as well, its names mean nothing."""
    text, _ = apply("""\
        nets = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        def others(x, y):
            for i in range(2):
                optimizers[i].zero_grad()
                x = x + 1
                loss = F.cross_entropy(nets[i](x), y)
                loss.backward(retain_graph=flag)
                nn.utils.clip_grad_norm_(nets[i].parameters(), 1)
                optimizers[i].step()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            others(x, y)
        """)
    lines = text.splitlines()
    assert [line for line in lines if "unscale_" in line] == ["        memory.unscale_(optimizers[i])"]


def test_gradients_clipped_ahead_of_the_steps_of_two_optimizers_are_unscaled_for_both():
    text, _ = apply("""\
        critic = nn.Linear(4, 2)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for x, y in loader:
            loss, other = F.cross_entropy(model(x), y), F.cross_entropy(critic(x), y)
            optimizer.zero_grad()
            second.zero_grad()
            loss.backward()
            other.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            nn.utils.clip_grad_norm_(critic.parameters(), 1)
            optimizer.step()
            second.step()
        """)
    both = "    memory.unscale_(optimizer)\n    memory.unscale_(second)\n    nn.utils.clip_grad_norm_(model"
    assert both in text and text.count("unscale_") == 2


SEVERAL = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)]
for step in range(4):
    {header}x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    {margin}loss = F.cross_entropy(model(x), y)
    {margin}loss.backward()
    {clip}
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    print(f"{{loss.item():.9f}}")
"""
PLAIN = {"header": "", "margin": ""}
STEPS = "    for optimizer in optimizers:\n        optimizer.step()\n"
PARTS = {"header": "for part in range(3):\n        ", "margin": "    "}


@pytest.mark.parametrize("around", [PLAIN, PARTS], ids=["one batch", "an inner loop"])
@pytest.mark.parametrize(
    ("clip", "unscaled"),
    [
        (
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "    for optimizer in optimizers:\n        memory.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(",
        ),
        (
            "x = y; torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "    x = y; [memory.unscale_(optimizer) for optimizer in optimizers]; torch.nn.utils.clip_grad_norm_(",
        ),
    ],
    ids=["a line of its own", "a shared line"],
)
def test_each_optimizer_that_a_loop_steps_is_unscaled_ahead_of_a_clip_of_all(around, clip, unscaled):
    text = SEVERAL.format(clip=clip, **around)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert unscaled in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


@pytest.mark.parametrize(
    ("header", "optimizer"),
    [
        ("for i in range(2):", "optimizers[i]"),
        ("for i, _ in enumerate(optimizers):", "optimizers[i]"),
        ('for part in [{"optimizer": one} for one in optimizers]:', 'part["optimizer"]'),
    ],
)
def test_each_optimizer_that_a_loop_asks_for_is_unscaled_ahead_of_a_clip_of_all(header, optimizer):
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    text = SEVERAL.format(clip=clip, **PLAIN).replace(STEPS, f"    {header}\n        {optimizer}.step()\n")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert f"    {header}\n        memory.unscale_({optimizer})\n    {clip}\n" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


def test_an_optimizer_that_is_named_behind_a_clip_takes_no_scaled_gradients():
    text, forms = apply("""\
        optimizers = {"all": optimizer}
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            mine = optimizers["all"]
            mine.step()
            mine.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert 'preset("16gb", precision="no-fp16")' in text and "unscale_" not in text


@pytest.mark.parametrize(
    ("clip", "steps"),
    [
        ("{clip}; named = dict(enumerate(optimizers))", "for _, optimizer in named.items():\n        optimizer.step()"),
        ("{clip}; print(step)", "for step, optimizer in enumerate(optimizers):\n        optimizer.step()"),
        ("every = iter(optimizers); {clip}", "for optimizer in every:\n        optimizer.step()"),
        ("every = (o for o in optimizers); {clip}", "for optimizer in every:\n        optimizer.step()"),
        (
            "{clip}",
            "for group in [optimizers]:\n        for optimizer in group:\n            optimizer.step()",
        ),
    ],
    ids=["bound behind", "name of another", "iterator", "generator", "in another loop"],
)
def test_a_loop_that_cannot_run_ahead_of_the_clip_as_well_takes_no_scaled_gradients(clip, steps):
    clip = clip.format(clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)").replace("; ", "\n    ")
    text = SEVERAL.format(clip=clip, **PLAIN).replace(STEPS, f"    {steps}\n")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert 'precision="no-fp16"' in after.text and "unscale_" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_optimizers_that_a_loop_names_without_brackets_are_unscaled_on_a_shared_line():
    clip = "x = y; nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    text = SEVERAL.format(clip=clip, **PLAIN).replace("for step", "first, second = optimizers\nfor step")
    text = text.replace(STEPS, STEPS.replace("optimizers", "first, second"))
    after = rewritten(text)
    assert "x = y; [memory.unscale_(optimizer) for optimizer in (first, second)]; nn" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


BOUND_BEHIND_A_CLIP = """\
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            {bound}
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("bound", "unscaled"),
    [
        ("self.norm = norm", True),
        ("self.optimizer.seen = norm", True),
        ("self.optimizer = self.optimizer_of(norm)", False),
    ],
)
def test_an_attribute_beside_the_optimizer_may_be_bound_behind_a_clip(bound, unscaled):
    text, _ = apply(BOUND_BEHIND_A_CLIP.format(bound=bound))
    assert ("memory.unscale_(self.optimizer)" in text) is unscaled
    assert ('precision="no-fp16"' in text) is not unscaled


def test_networks_that_train_side_by_side_are_split_one_by_one():
    text, forms = apply("""\
        nets = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for x, y in loader:
            for net, own in zip(nets, optimizers):
                loss = F.cross_entropy(net(x), y)
                own.zero_grad()
                loss.backward()
                own.step()
        """)
    assert "        memory.forward_backward(forward, x, y)\n        memory.step(own)\n" in text
    assert forms == [("micro-batched", None)]
