"""Loops of several networks, put together at random, train the same after `apply`: adversaries, actors and critics."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.rewrite.equivalence import Run, assert_close, assert_same_bits, rewritten, run

ADVERSARIES = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
loader = torch.randn(20, 4).split(6)
encoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
gen = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
disc = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
opt_gen = torch.optim.SGD([*gen.parameters(), *encoder.parameters()], lr=0.1, momentum=0.5)
opt_disc = torch.optim.SGD(disc.parameters(), lr=0.1, momentum=0.5)
criterion = nn.BCEWithLogitsLoss()
total, kept = 0.0, []
for i, x in enumerate(loader * 2):
"""
SCORES = {
    "labels": ("criterion({}, torch.ones(len(x), 1))", "criterion({}, torch.zeros(len(x), 1))"),
    "wasserstein": ("-{}.mean()", "{}.mean()"),
    "hinge": ("F.relu(1 - {}).mean()", "F.relu(1 + {}).mean()"),
}
SAMPLES = ["z = torch.randn(len(x), 3)", "fake = gen(z)"]
ENCODED = ["z = encoder(x)", "fake = gen(z)"]
LOOKS = ["print(f'{fake.sum().item():.9f}')", "last = fake.detach()", "total += disc(x).mean().item()", "x = x * 1.0"]

ACTORS = """\
import copy
import random
import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
rows = [(torch.randn(4), torch.randn(2), torch.randn(1), torch.randn(4)) for _ in range(30)]
actor = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
critic = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
value = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
opt_actor = torch.optim.SGD(actor.parameters(), lr=0.05, momentum=0.5)
opt_critic = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
opt_value = torch.optim.SGD(value.parameters(), lr=0.05)
total, kept = 0.0, []
for i in range(5):
    s, a, r, s2 = map(torch.stack, zip(*random.sample(rows, 7)))
"""
TARGET = "y = r + 0.9 * target_critic(torch.cat([s2, target_actor(s2)], 1))"
TARGETS = [["with torch.no_grad():", f"    {TARGET}"], [TARGET, "y = y.detach()"]]
CRITIC = ["q = critic(torch.cat([s, a], 1))", "critic_loss = F.mse_loss(q, y)"]
ACTOR = ["q_new = critic(torch.cat([s, actor(s)], 1))", "actor_loss = -q_new.mean()"]
VALUE = ["v = value(s)", "value_loss = F.mse_loss(v, {}.detach())"]
SOFT = ["for p, t in zip(critic.parameters(), target_critic.parameters()):", "    t.data.mul_(0.9).add_(0.1 * p.data)"]
END = "print(f'{total:.9f} {sum(kept):.9f}')\n"


def script(top: str, lines: list[str]) -> str:
    return top + "".join(f"    {line}\n" for line in lines) + END


@st.composite
def adversaries(draw: st.DrawFn) -> str:
    """A discriminator's block and a generator's, in either order."""
    real, fake = SCORES[draw(st.sampled_from(sorted(SCORES)))]
    made, ahead = draw(st.sampled_from([SAMPLES, ENCODED])), draw(st.booleans())
    kept = ahead and draw(st.booleans())  # the discriminator's loss goes through the generator, and keeps the graph
    seen = "fake" if kept else draw(st.sampled_from(["fake.detach()", "fake.data"]))
    step = ["opt_disc.step()"]
    together = draw(st.booleans())
    discriminate = [
        *([] if ahead else made),
        f"real_loss = {real.format('disc(x)')}",
        f"fake_loss = {fake.format(f'disc({seen})')}",
        draw(st.sampled_from(["loss_d = real_loss + fake_loss", "loss_d = (real_loss + fake_loss) / 2"])),
        draw(st.sampled_from(["disc.zero_grad()", "opt_disc.zero_grad()"])),
        f"loss_d.backward({'retain_graph=True' if kept else ''})",
        *([] if together else step),
        "kept.append(loss_d.item())",
    ]
    generate = [
        *([] if ahead else made),
        f"loss_g = {real.format('disc(fake)')}",
        *draw(st.sampled_from([[], ["loss_g = loss_g + 0.5 * F.l1_loss(fake, x)"]])),
        draw(st.sampled_from(["gen.zero_grad(); encoder.zero_grad()", "opt_gen.zero_grad()"])),
        "loss_g.backward()",
        "opt_gen.step()",
        *(step if together else []),
        "kept.append(loss_g.item())",
    ]
    generator_first = ahead and not kept and not together and draw(st.booleans())
    lines = [*generate, *discriminate] if generator_first else [*discriminate, *generate]
    lines = [*(made if ahead else []), *lines]
    for look in draw(st.lists(st.sampled_from(LOOKS), max_size=2)):
        lines.insert(draw(st.integers(2, len(lines))), look)
    return script(ADVERSARIES, lines)


@st.composite
def actors_and_critics(draw: st.DrawFn) -> str:
    """The losses of a critic, an actor and perhaps a value, computed in turn or all ahead of the first backward."""
    groups = [(draw(st.sampled_from(TARGETS)) + CRITIC, "critic"), (ACTOR, "actor")]
    if draw(st.booleans()):
        read = draw(st.sampled_from(["y", "q", "q_new"]))
        value = (["v = value(s)", VALUE[1].format(read)], "value")
        groups.insert(2 if read == "q_new" else draw(st.integers(1, 2)), value)
    updates = []
    for _, name in groups:
        reset, train = f"opt_{name}.zero_grad()", [f"{name}_loss.backward()", f"opt_{name}.step()"]
        updates.append([reset, *train] if draw(st.booleans()) else [*train, reset])
    if draw(st.booleans()):
        lines = [line for (made, _), update in zip(groups, updates, strict=True) for line in (*made, *update)]
    else:
        lines = [line for made, _ in groups for line in made] + [line for update in updates for line in update]
    lines += [f"kept.append({name}_loss.item())" for _, name in groups if draw(st.booleans())]
    return script(ACTORS, lines + (SOFT if draw(st.booleans()) else []))


def whole_run(text: str) -> Run:
    """What a script trains; those that change what a later backward needs are none."""
    try:
        return run(text)
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error))
        raise


def assert_trains_the_same(text: str) -> None:
    before, after = whole_run(text), rewritten(text)
    assert rewritten(after.text).text == after.text
    assert_same_bits(before, run(after.text, preset="off"))
    assert_close(before, run(rewritten(text, micro_batches=3).text), relative=1e-9)


quickly = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quickly
@given(adversaries())
def test_generated_adversaries_train_the_same(text):
    assert_trains_the_same(text)


@pytest.mark.slow
@quickly
@given(actors_and_critics())
def test_generated_actors_and_critics_train_the_same(text):
    assert_trains_the_same(text)
