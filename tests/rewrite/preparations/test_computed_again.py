"""A value that the loss of another network reads without its graph is computed again for its own loss."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(8, 3))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def forward(self, x):
        return self.net(x).log_softmax(1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), {layer}, nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        self.times = 0

    def forward(self, x):
        {counted}
        return self.net(x)


actor = Actor()
critic = Critic()
of_actor, of_critic = torch.optim.SGD({stepped}.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
values = []
for x, action, returns in [(torch.randn(6, 4), torch.randint(3, (6, 1)), torch.randn(6, 1)) for _ in range(4)]:
    # what the critic says
    value = critic(x)
    {between}
    delta = returns - value
    advantage = delta.detach()
    log_prob = actor(x).gather(1, action)
    policy_loss = -(log_prob * advantage).mean()
    {ahead}
    {of_actor}.zero_grad()
    policy_loss.backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
    {of_actor}.step()
    {behind}
    value_loss = F.mse_loss(value, returns)
    {of_critic}.zero_grad()
    value_loss.backward()
    {of_critic}.step()
    print(f"{{policy_loss.item():.9f}} {{value_loss.item():.9f}}")
"""
PLAIN = {
    "dropout": 0.0,
    "layer": "nn.Tanh()",
    "counted": "pass",
    "stepped": "actor",
    "between": "pass",
    "ahead": "pass",
    "behind": "pass",
    "of_actor": "of_actor",
    "of_critic": "of_critic",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer": "nn.LayerNorm(8)"},
        {"between": "actor.train()"},
        {"between": "value = value.clamp(-10, 10)"},
        {"between": "squeezed = value.squeeze(1)", "behind": "value = squeezed.unsqueeze(1)"},
        {"of_actor": "actor.optimizer", "of_critic": "critic.optimizer"},
        {"ahead": "value = value * 2"},
        {"ahead": "print(f'{value.mean().item():.9f}')"},
    ],
    ids=str,
)
def test_a_value_that_is_read_detached_is_computed_again_behind_the_step_of_the_other(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    step = after.text.index("memory.step(")
    assert after.text.count("value = critic(x)") == 2 and step < after.text.rindex("value = critic(x)")
    assert parts_as_whole(text, after.text, after.text) == 8


def test_what_draws_ahead_of_a_value_that_is_computed_again_draws_the_same():
    text = SCRIPT.format(**PLAIN | {"dropout": 0.5})
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_the_second_loss_moves_behind_the_value_that_it_is_made_of():
    made = "value_loss = F.mse_loss(value, returns)"
    text = SCRIPT.format(**PLAIN | {"ahead": f"{made}\n    values.append(value_loss.item())"})
    text = text.replace(f"    {made}\n    of_critic", "    of_critic").replace("    pass\n", "")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    second = after.text[after.text.index("    def forward_2(") : after.text.rindex("    memory.step(")]
    assert (
        second
        == """\
    def forward_2(x, returns):
        value = critic(x)
        value_loss = F.mse_loss(value, returns)
        return value_loss

    of_critic.zero_grad()
    value_loss = memory.forward_backward(forward_2, x, returns)
    values.append(value_loss.item())
"""
    )
    assert parts_as_whole(text, after.text, after.text) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": "nn.Dropout(0.5)"},
        {"layer": "nn.BatchNorm1d(8)"},
        {"layer": "nn.utils.spectral_norm(nn.Linear(8, 8))"},
        {"layer": "nn.TransformerEncoderLayer(8, 1)"},
        {"counted": "self.times += 1"},
        {"counted": "x = x if self.training else 2 * x"},
        {"counted": "x = x + 0.1 * torch.randn_like(x)"},
        {"counted": "x.mul_(2)"},
        {"stepped": "nn.ModuleList([actor, critic])"},
        {"between": "x = x * 2"},
        {"ahead": "x.mul_(2)"},
        {"ahead": "value.mul_(2)"},
        {"ahead": "nn.init.zeros_(critic.net[0].bias)"},
        {"ahead": "for p in critic.parameters():\n        p.requires_grad = True"},
        {"ahead": "critic = Critic()"},
    ],
    ids=str,
)
def test_a_value_that_may_be_another_one_behind_the_step_stays_where_it_is(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert after.text.count("value = critic(x)") == 1
