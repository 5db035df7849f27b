"""What two losses of an iteration may have in common, and still be functions each: a body, a precision."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import apply, assert_trains_the_same

GAN = """\
import torch
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
make = torch.optim.SGD(generator.parameters(), lr=0.1)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
scaler, flag = GradScaler("cuda", enabled=False), False
for x in [torch.randn(6, 4) for _ in range(4)]:
    with {autocast}:
        fake = generator(x)
    judge.zero_grad()
    with {autocast}:
        judged = critic(fake.detach()).exp().mean() - critic(x[:, :2]).mean()
    {judged}
    make.zero_grad()
    with {autocast}:
        made = -critic({again}).mean()
    {made}
    print(judged.item(), made.item())
"""
PLAIN = {"judged": "judged.backward()\n    judge.step()", "made": "made.backward()\n    make.step()"}
SCALED = {
    "judged": "scaler.scale(judged).backward()\n    scaler.step(judge)",
    "made": "scaler.scale(made).backward()\n    scaler.step(make)\n    scaler.update()",
}


@pytest.mark.parametrize("again", ["fake", "generator(x)"])
@pytest.mark.parametrize("autocast", ['autocast("cuda")', 'autocast("cuda", enabled=flag)'])
@pytest.mark.parametrize("steps", [PLAIN, SCALED], ids=["plain", "scaled"])
def test_two_losses_in_autocast_are_functions_each(again, autocast, steps):
    text = GAN.format(again=again, autocast=autocast, **steps)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert "    with memory.autocast" in after.text
    assert parts_as_whole(text, after.text, after.text) == 8


ACTOR_CRITIC = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body, actor, critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
acting = torch.optim.SGD([*body.parameters(), *actor.parameters()], lr=0.1)
judging = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, action, gain in [(torch.randn(6, 4), torch.randint(0, 3, (6,)), torch.randn(6, 1)) for _ in range(4)]:
    hidden = torch.tanh(body(x))
    value = critic({taken})
    judged = F.mse_loss(value, gain)
    judging.zero_grad()
    judged.backward({options})
    judging.step()
    advantage = {advantage}
    acted = (F.cross_entropy(actor(hidden), action, reduction="none")[:, None] * advantage).mean()
    acting.zero_grad()
    acted.backward()
    acting.step()
    print(judged.item(), acted.item())
"""


@pytest.mark.parametrize(
    "advantage",
    ["gain - value.detach()", "(gain - value).detach()", "torch.relu(gain - value.view(-1, 1)).data"],
)
def test_an_actor_and_a_critic_that_share_a_body_are_functions_each(advantage):
    text = ACTOR_CRITIC.format(taken="hidden.detach()", advantage=advantage, options="")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, after.text) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": "gain - value"},
        {"advantage": "(gain - value).detach() + 0.1 * value"},
        {"advantage": "weigh(value).detach()"},
        {"taken": "hidden", "options": "retain_graph=True"},
    ],
    ids=["graph", "graph beside", "a function of the script", "through the body"],
)
def test_a_critic_whose_graph_may_be_gone_through_again_stays_in_place(changes):
    text = ACTOR_CRITIC.format(**{"taken": "hidden.detach()", "options": "", "advantage": "gain"} | changes)
    weigh = "def weigh(value):\n    value.pow(2).mean().backward()\n    return value\n\n\n"
    text = text.replace("for x, action", f"{weigh}for x, action")
    assert [loop.rewrite for loop in rewritten(text).loops] == ["in-place"]


NOISE = """\
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
offset = nn.Parameter(torch.zeros(4))
make = torch.optim.SGD([offset, *generator.parameters()], lr=0.1)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
for x in [torch.randn(6, 2) for _ in range(4)]:
    size = x.shape[0]
    real = critic(x)
    noise = {noise}
    seed = noise
    fake = generator(seed)
    judged = critic(fake).exp().mean() - real.mean()
    judge.zero_grad()
    judged.backward()
    judge.step()
    seed = noise
    fake = generator(seed)
    made = -critic(fake).mean()
    make.zero_grad()
    made.backward()
    make.step()
    print(judged.item(), made.item())
"""


@pytest.mark.parametrize(
    "noise", ["(torch.rand(size, 4) - 0.5) / 0.5", "2 * -torch.rand(size, 4).to(x.device)", "torch.rand(size, 4)"]
)
def test_noise_of_two_losses_is_drawn_once(noise):
    text = NOISE.format(noise=noise)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, after.text) == 8


@pytest.mark.parametrize("noise", ["torch.rand(size, 4) + offset", "torch.as_tensor(offset.expand(size, 4))"])
def test_noise_that_may_have_a_graph_keeps_both_losses_in_place(noise):
    after = rewritten(NOISE.format(noise=noise))
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "goes through noise, made for the one in line 17" in (after.loops[0].reason or "")


COPIES = """\
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
make = torch.optim.SGD(generator.parameters(), lr=0.1)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
for x in [torch.randn(6, 4) for _ in range(4)]:
    ones = torch.ones(len(x), 1)
    fake = generator(x)
    copies = {copies}
    made = (critic(fake) - ones).pow(2).mean()
    make.zero_grad()
    judge.zero_grad()
    made.backward()
    make.step()
    judged = (critic(x[:, :2]) - ones).pow(2).mean() + critic(copies).pow(2).mean()
    judge.zero_grad()
    judged.backward()
    judge.step()
    print(made.item(), judged.item())
print(copies.sum().item())
"""


def test_copies_taken_ahead_of_the_backward_of_a_generator_are_given_to_the_discriminator():
    text = COPIES.format(copies="fake.detach()")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert "    made, fake = memory.forward_backward(" in after.text
    assert parts_as_whole(text, after.text, after.text) == 8


def test_copies_whose_graph_is_kept_leave_both_losses_in_place():
    text = COPIES.format(copies="fake * 2").replace("made.backward()", "made.backward(retain_graph=True)")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


LATE_GENERATOR = """\
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
make = torch.optim.SGD(generator.parameters(), lr=0.1)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
for number, x in enumerate([torch.randn(6, 4) for _ in range(4)]):
    fake = generator(x)
    judge.zero_grad()
    judged = critic(x[:, :2]).pow(2).mean() - critic(fake.detach()).mean()
    judged.backward()
    judge.step()
    {decision}
        make.zero_grad()
        far = (fake - x[:, 2:]).abs().mean()
        made = critic(fake).mean() + far
        made.backward()
        make.step()
    print(judged.item(), far.item(), made.item())
"""


@pytest.mark.parametrize("decision", ["if number % 2 == 0:", "if number != 1:\n      if number != 2:"])
def test_samples_made_ahead_are_given_to_a_generator_whose_backward_is_in_a_branch(decision):
    text = LATE_GENERATOR.format(decision=decision)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert "    fake = generator(x)\n    judge.zero_grad()" in after.text
    assert parts_as_whole(text, after.text, after.text) == 6


def test_samples_of_an_iteration_are_not_given_to_the_rounds_of_a_loop_within():
    text = LATE_GENERATOR.format(decision="for _ in range(2):").replace(
        "made.backward()", "made.backward(retain_graph=True)"
    )
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"] * 2
    assert_same_bits(run(text), run(after.text, preset="off"))


TWO_HEADS = """\
    encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    first, second = nn.Linear(4, 2), nn.Linear(2, 2)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.SGD(second.parameters(), lr=0.1)
    for x, y in loader * 2:
        one.zero_grad()
        two.zero_grad()

        seen = encoder(x){detached}
        half = seen[:, ::2]

        loss_of_first = F.cross_entropy(first(seen), y)
        loss_of_second = F.cross_entropy(second(half), y)
        print(loss_of_first.item(), loss_of_second.item())

        loss_of_first.backward({kept})
        loss_of_second.backward()
        one.step()
        two.step()
    """


def test_two_heads_on_what_a_network_gave_without_its_graph_are_split_each():
    text = assert_trains_the_same(TWO_HEADS.format(detached=".detach()", kept=""))
    assert text.count("memory.forward_backward(") == 2
    assert "\n\n\n" not in text[text.index("for x, y") :]


def test_two_heads_on_one_graph_stay_in_place():
    _, loops = apply(TWO_HEADS.format(detached="", kept="retain_graph=True"))
    assert [form for form, _ in loops] == ["in-place"]
