"""Loops with several backwards, and backwards that several loops share."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import TOP, apply

GAN = """\
critic = nn.Linear(2, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in loader:
    critic_optimizer.zero_grad()
    fake = model(x)
    critic(fake.detach()).mean().backward()
    critic_optimizer.step()
    optimizer.zero_grad()
    loss = -critic(fake).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("second", "given"), [("critic(fake)", "fake"), ("critic(again)", "again")])
def test_what_two_losses_are_made_of_stays_ahead_of_both_and_gradient_resets_are_kept(second, given):
    loss = GAN.replace("critic(fake)", second).replace("    loss =", "    again = fake * 2\n    loss =")
    text, forms = apply(loss.replace("    optimizer.zero", "    model.zero"))
    assert forms == [("micro-batched", None)]
    assert text.endswith(f"""\
for x, y in loader:
    critic_optimizer.zero_grad()
    fake = model(x)

    def forward(fake):
        return critic(fake.detach()).mean()

    memory.forward_backward(forward, fake)
    memory.step(critic_optimizer)
    model.zero_grad()
    again = fake * 2

    def forward_2({given}):
        loss = -{second}.mean()
        return loss

    memory.forward_backward(forward_2, {given})
    memory.step(optimizer, zero_grad=False)
""")


def test_backwards_with_forwards_of_their_own_become_functions_each():
    text, forms = apply(GAN.replace("critic(fake)", "critic(model(x))"))
    assert forms == [("micro-batched", None)]
    assert text.endswith("""\
for x, y in loader:
    critic_optimizer.zero_grad()

    def forward(x):
        fake = model(x)
        return critic(fake.detach()).mean()

    memory.forward_backward(forward, x)
    memory.step(critic_optimizer)
    optimizer.zero_grad()

    def forward_2(x):
        loss = -critic(model(x)).mean()
        return loss

    memory.forward_backward(forward_2, x)
    memory.step(optimizer)
""")


TWO_NETWORKS = """\
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
make = torch.optim.Adam(generator.parameters(), lr=0.01)
judge = torch.optim.Adam(critic.parameters(), lr=0.01)
criterion = nn.BCEWithLogitsLoss()
"""
GENERATOR_FIRST = (
    TWO_NETWORKS
    + """\
for x in [torch.randn(6, 4) for _ in range(5)]:
    true, false = torch.ones(len(x), 1), torch.zeros(len(x), 1)
    make.zero_grad()
    fake = generator(torch.randn(len(x), 3))
    made = criterion(critic(fake), true)
    made.backward()
    make.step()
    judge.zero_grad()
    judged = (criterion(critic(x), true) + criterion(critic({taken}), false)) / 2
    judged.backward()
    judge.step()
    print(f"{made.item():.9f} {judged.item():.9f} {fake.data.mean().item():.9f}")
"""
)


@pytest.mark.parametrize("taken", ["fake.detach()", "fake.data"])
def test_a_discriminator_that_takes_detached_samples_is_a_function_behind_that_of_the_generator(taken):
    text = GENERATOR_FIRST.replace("{taken}", taken)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "made, fake = memory.forward_backward(forward, x, true)\n" in after.text
    assert "judged = memory.forward_backward(forward_2, x, true, fake, false)\n" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


LABELS = {
    "    true, false =": "    false, true =",
    "torch.ones(len(x), 1), torch.zeros(len(x), 1)": "torch.zeros(len(x), 1), None",
    "    made =": "    true = torch.ones(len(x), 1).to(x.device)\n    made =",
}
FREED = [
    {"{taken}": "shown(fake)", "for x in": "def shown(fake):\n    return fake.detach()\n\n\nfor x in"},
    {"{taken}": "fake", "    judge.zero": "    fake = fake.detach()\n    judge.zero"},
    {"{taken}": "old", "    judge.zero": "    pool.append(fake)\n    old = pool[-1].detach()\n    judge.zero"},
    {"{taken}": "torch.tensor(fake.tolist())"},
    {"{taken}": "shown(fake)", "for x in": "def shown(fake):\n    return fake.detach()\n\n\nfor x in", **LABELS},
]


@pytest.mark.parametrize("changes", FREED, ids=["function", "name", "pool", "numbers", "labels"])
def test_what_is_made_of_samples_without_their_freed_graph_is_taken_as_well(changes):
    text = "pool = []\n" + GENERATOR_FIRST
    for old, new in changes.items():
        text = text.replace(old, new)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


@pytest.mark.parametrize("taken", ["fake.detach() + bias", "shown(fake) + bias", "(fake + bias).detach() + bias"])
def test_what_is_made_of_parameters_alone_has_a_graph_behind_the_first_backward_too(taken):
    """A view of a parameter saves nothing that the first backward could free."""
    made = "offset = nn.Parameter(torch.zeros(4))\n\n\ndef shown(fake):\n    return fake.detach()\n\n\nmake ="
    text = GENERATOR_FIRST.replace("make =", made).replace("{taken}", taken)
    text = text.replace("critic.parameters(), lr", "[offset, *critic.parameters()], lr")
    moved = "    bias = offset.view(1, -1)\n    made = criterion(critic(fake + bias)"
    text = text.replace("    made = criterion(critic(fake)", moved)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "goes through bias, made for the one in line" in (after.loops[0].reason or "")
    assert_same_bits(run(text), run(after.text, preset="off"))


DISCRIMINATOR_FIRST = (
    TWO_NETWORKS
    + """

def shown(fake):
    return fake.detach()


for x in [torch.randn(6, 4) for _ in range(5)]:
    x = x.to("cuda" if torch.cuda.is_available() else "cpu")
    true, false = torch.ones(len(x), 1), torch.zeros(len(x), 1)
    fake = generator(torch.randn(len(x), 3))
    judge.zero_grad()
    judged = criterion(critic(x), true) + criterion(critic({taken}), false)
    judged.backward()
    judge.step()
    make.zero_grad()
    made = criterion({again}, true) + 0.1 * (fake - x).abs().mean()
    made.backward()
    make.step()
    print(f"{made.item():.9f} {judged.item():.9f} {fake.data.mean().item():.9f}")
"""
)


@pytest.mark.parametrize("taken", ["fake.detach()", "shown(fake)", "fake.detach() * torch.ones_like(fake)"])
def test_samples_that_a_discriminator_sees_first_are_given_to_both_losses(taken):
    """The generator runs once, on the whole batch and in the preset's precision, and is differentiated once."""
    text = DISCRIMINATOR_FIRST.replace("{taken}", taken).replace("{again}", "critic(fake)")
    after = rewritten(text, micro_batches=3, precision="fp32")
    (loop,) = after.loops
    said = "line 19 runs its network on whole batches: a later loss needs what it gives"
    assert (loop.rewrite, loop.notes) == ("micro-batched", (said,))
    assert "    fake = memory.forward(generator, torch.randn(len(x), 3))\n" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    split = run(after.text)
    assert_close(run(text), split)
    assert split.calls_in_parts == 10


CRITIC_FIRST = """\
import torch
from torch import nn

torch.manual_seed(0)


class Trainer:
    def __init__(self):
        self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)
        self.make = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        self.judge = torch.optim.Adam(self.critic.parameters(), lr=0.01)

    def step_critic(self, x):
        fake = self.generator(torch.randn(len(x), 3))
        judged = self.critic(fake.detach()).mean() - self.critic(x).mean()
        self.judge.zero_grad()
        judged.backward()
        self.judge.step()
        {kept}
        return judged.item()

    def step_generator(self):
        {taken}
        made = -self.critic(fake).mean()
        self.make.zero_grad()
        made.backward()
        self.make.step()
        return made.item()


trainer = Trainer()
for x in [torch.randn(6, 4) for _ in range(5)]:
    print(f"{trainer.step_critic(x):.9f} {trainer.step_generator():.9f}")
"""
CRITIC_LOOP = """\
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
make = torch.optim.Adam(generator.parameters(), lr=0.01)
judge = torch.optim.Adam(critic.parameters(), lr=0.01)
for x in [torch.randn(6, 4) for _ in range(5)]:
    for _ in range(2):
        fake = generator(torch.randn(len(x), 3))
        judged = critic(fake.detach()).mean() - critic(x).mean()
        judge.zero_grad()
        judged.backward()
        judge.step()
    {taken}
    made = -critic(fake).mean()
    make.zero_grad()
    made.backward()
    make.step()
    print(f"{judged.item():.9f} {made.item():.9f}")
"""


def test_samples_that_another_backward_goes_through_first_keep_their_graph():
    text = CRITIC_FIRST.replace("{kept}", "self.fake = fake").replace("{taken}", "fake = self.fake")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert {loop.rewrite for loop in after.loops} == {"in-place"}
    assert "goes through what line 14 computes" in " ".join(loop.reason or "" for loop in after.loops)
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


def test_samples_made_anew_behind_the_loop_of_a_critic_leave_it_to_be_lifted():
    text = CRITIC_LOOP.replace("{taken}", "fake = generator(torch.randn(len(x), 3))")
    assert {loop.rewrite for loop in rewritten(text).loops} == {"micro-batched"}


def test_samples_stay_with_losses_that_cannot_be_split():
    text = DISCRIMINATOR_FIRST.replace("{taken}", "fake.detach()")
    text = text.replace("{again}", "critic(locals()['fake'])")
    (loop,) = rewritten(text).loops
    # not that both need the samples, which could be given to both
    assert loop.rewrite == "in-place" and loop.reason.endswith("; `locals()` in line 25 may read any local name")


def test_where_giving_samples_to_both_losses_gets_no_further_the_reason_is_that_of_the_first_attempt():
    text = DISCRIMINATOR_FIRST.replace("{taken}", "fake.detach() * len(locals())").replace("{again}", "critic(fake)")
    (loop,) = rewritten(text).loops
    assert loop.rewrite == "in-place" and loop.reason.endswith("; `locals()` in line 21 may read any local name")


@pytest.mark.parametrize(
    "changes",
    [{"{taken}": "fake"}, {"{taken}": "again", "    judge.zero": "    again = fake * 1\n    judge.zero"}],
    ids=["itself", "made of it"],
)
def test_a_graph_that_is_gone_is_missed_as_before(changes):
    text = GENERATOR_FIRST
    for old, new in changes.items():
        text = text.replace(old, new)
    for script, preset in ((text, ""), (rewritten(text).text, "off"), (rewritten(text, micro_batches=3).text, "")):
        with pytest.raises(RuntimeError, match="second time"):
            run(script, preset=preset)


SCORED_AHEAD = GENERATOR_FIRST.replace("    make.zero", "    seen = critic(x)\n    kept = [seen]\n    make.zero")


@pytest.mark.parametrize(("seen", "in_parts"), [("seen", 10), ("kept[-1]", 10), ("seen.mean()", 5)])
def test_what_another_network_computed_ahead_is_given_to_a_discriminator_that_goes_through_it(seen, in_parts):
    text = SCORED_AHEAD.replace("{taken}", f"fake.detach() * {seen}")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
    split = run(after.text)
    assert_close(run(text), split)
    assert split.calls_in_parts == in_parts


def test_a_discriminator_behind_another_network_that_it_is_not_seen_to_go_through_stays_in_place():
    text = SCORED_AHEAD.replace("seen = critic(x)", "seen = nn.functional.dropout(critic(x), 0.1)")
    (loop,) = rewritten(text.replace("{taken}", "fake.detach() * seen.detach()")).loops
    assert loop.rewrite == "in-place" and "go through" in loop.reason


def test_a_loss_that_takes_only_numbers_of_an_earlier_one_is_its_own():
    _, forms = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            first = F.cross_entropy(model(x), y)
            first.backward()
            print(first.item())
            if first > 0:
                second = F.cross_entropy(model(x + 1), y)
                second.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]


def test_loops_that_share_their_backward_have_one_form():
    _, forms = apply("""\
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        for x, y in loader:
            step(x, y)
        for i in range(3):
            step(*loader[i])
        """)
    assert forms == [("micro-batched", None)] * 2


def test_the_backward_of_an_optimizer_stays_beside_that_of_the_loss_unscaled():
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if args.fp16:
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        """)
    )
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert result.loops[0].notes[0].endswith("`optimizer.backward` in line 12 scales the loss by itself")
    assert "    if args.fp16:\n        loss = forward(x, y)\n        optimizer.backward(loss)\n" in result.text
    assert "    else:\n        loss = memory.forward_backward(forward, x, y)\n" in result.text


SOFT_ACTOR = """\
critic = nn.Linear(2, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
log_alpha = torch.zeros(1, requires_grad=True)
alpha_optimizer = torch.optim.SGD([log_alpha], lr=0.1)
for x, y in loader * 3:
    with torch.no_grad():
        target = y[:, None] + critic({next}).detach()
    critic_loss = F.mse_loss(critic(x[:, :2]), target)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    out = model(x)
    loss = (log_alpha.exp().item() * out - critic(out)).mean()
    optimizer.zero_grad()
    loss.backward({kept})
    optimizer.step()
    alpha_loss = (log_alpha.exp() * ({seen} + 1)).mean()
    alpha_optimizer.zero_grad()
    alpha_loss.backward()
    alpha_optimizer.step()
    print(critic_loss.item(), loss.item(), alpha_loss.item())
"""


@pytest.mark.parametrize("seen", ["out.detach()", "(0.5 - out).detach()", "out[:1].mean().item()"])
def test_a_temperature_behind_a_policy_runs_no_network_and_keeps_its_backward_alone(seen):
    text = TOP + SOFT_ACTOR.format(next="model(x)", kept="", seen=seen)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert after.text.count("memory.forward_backward(") == 2
    assert "    memory.backward(alpha_loss)\n    memory.step(alpha_optimizer" in after.text
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3, precision="fp32").text) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"kept": "retain_graph=True", "seen": "out"},
        {"next": "grown(x)", "seen": "held[-1]"},
    ],
    ids=["through the policy", "through a graph made within no_grad"],
)
def test_a_temperature_whose_backward_may_go_through_a_network_keeps_the_losses_in_place(changes):
    grown = (
        "held = []\n\n\ndef grown(x):\n    with torch.enable_grad():\n        held.append(model(x))\n"
        "    return held[-1].detach()\n\n\n"
    )
    parts = {"next": "model(x)", "kept": "", "seen": "out.detach()"} | changes
    _, forms = apply(grown + SOFT_ACTOR.format(**parts))
    assert forms[0][0] == "in-place"
