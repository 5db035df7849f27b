"""Losses whose backwards stand in methods of their own, which a loop calls one after the other."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

TRAINER = """\
import torch
from torch import nn

torch.manual_seed(0)


class Trainer:
    def __init__(self):
        self.G, self.D = nn.Linear(3, 4), nn.Linear(4, 1)
        self.g_opt = torch.optim.SGD(self.G.parameters(), lr=0.1)
        self.d_opt = torch.optim.SGD(self.D.parameters(), lr=0.1)

    def critic_step(self, data, z):
        fake = self.G(z)
        data = data * 2
        self.d_opt.zero_grad()
        loss = self.D(fake.detach()).mean() - self.D(data).mean()
        loss.backward()
        self.d_opt.step()
        print(loss.item())
        return fake

    def generator_step(self, data, z):
        {fake}
        self.g_opt.zero_grad()
        loss = -self.D(fake).mean() + fake.mean() * data.size(1)
        loss.backward()
        self.g_opt.step()
        print(loss.item())

    def fit(self, loader):
        for data, z in loader:
            {calls}


Trainer().fit([(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(4)])
"""
OF_ITS_OWN = {
    "fake": "fake = self.G(z)",
    "calls": "self.critic_step(data, z)\n            self.generator_step(data, z)",
}
HANDED_ON = {
    "fake": "fake = z",
    "calls": "fake = self.critic_step(data, z)\n            self.generator_step(data, fake)",
}


def forms_of_same_training(text):
    """The forms of the loops, which train in parts and with `off` as before."""
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))
    return [loop.rewrite for loop in after.loops]


def test_a_name_of_one_method_is_another_in_the_next():
    assert forms_of_same_training(TRAINER.format(**OF_ITS_OWN)) == ["micro-batched"]


def test_each_method_has_the_first_name_for_its_function():
    text = rewritten(TRAINER.format(**OF_ITS_OWN)).text
    assert text.count("        def forward(") == 2


@pytest.mark.parametrize("name", ["fake", "made"])
def test_what_one_method_hands_on_with_its_graph_stays_whole(name):
    text = TRAINER.format(**HANDED_ON).replace("fake = self.critic", f"{name} = self.critic")
    assert forms_of_same_training(text.replace("(data, fake)", f"(data, {name})")) == ["in-place"]


def test_a_name_that_a_method_declares_global_is_the_same_in_the_next():
    text = TRAINER.format(**OF_ITS_OWN).replace(
        "        fake = self.G(z)\n        data", "        global fake\n        fake = self.G(z)\n        data"
    )
    text = text.replace("        fake = self.G(z)\n        self.g_opt", "        self.g_opt")
    assert forms_of_same_training(text) == ["in-place"]
