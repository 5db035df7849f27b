"""The reason why a loop stays in place is that of the last attempt to lift it, with the lines of the script."""

import re

import pytest

from tests.rewrite.small_loops import TOP, apply

LOGGED = """\
tasks, log, seen = [0, 1], [], []
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    loss = 0
    for task in tasks:
        one = F.cross_entropy(out, y * task)
        log.append(one.item())
        loss = loss + one
    {more}
    loss.backward()
    optimizer.step()
"""
TWO = """\
critic = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1))
model = nn.Sequential(model, nn.Dropout(0.1))
second = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in loader:
    out = model(x)
    {logged}
    value = critic(x)
    first_loss = value.pow(2).mean()
    loss = F.cross_entropy(out, y)
    second.zero_grad()
    first_loss.backward()
    second.step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def line_of(body: str, part: str) -> int:
    return next(number for number, line in enumerate((TOP + body).splitlines(), 1) if part in line)


def test_what_no_preparation_takes_away_is_the_reason():
    body = LOGGED.format(more="seen.append(1)\n    loss = loss * len(seen)")
    told = f"line {line_of(body, 'seen.append')} changes seen, which was made outside of the slice"
    assert apply(body)[1] == [("in-place", told)]


def test_a_reason_that_names_what_a_preparation_made_is_not_told():
    body = LOGGED.format(more="loss = loss + torch.rand(1)[0] if seen.append(1) is None else one.retain_grad()")
    (_, reason), *_ = apply(body)[1]
    assert "kept" not in str(reason)


@pytest.mark.parametrize("logged", ["pass", "print(out.shape)"])
def test_a_network_that_runs_ahead_of_an_earlier_loss_is_named(logged):
    body = TWO.format(logged=logged)
    told = f"line {line_of(body, 'out = model')} runs the network of a later loss ahead of an earlier one"
    [(form, reason)] = apply(body)[1]
    assert form == "in-place" and str(reason).endswith(told)


MOVED = """\
critic, actor, value = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), nn.Linear(4, 1)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
third = torch.optim.SGD(value.parameters(), lr=0.1)
optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
for x, y in loader:
    q = critic(x)
    acts = actor(x)
    new_q = critic(acts)
    state_value = value(x)
    target = new_q - acts.mean()
    q_loss = q.pow(2).mean()
    value_loss = F.mse_loss(state_value, target.detach())
    policy_loss = (acts.mean() - new_q).mean()
    second.zero_grad()
    third.zero_grad()
    optimizer.zero_grad()
    q_loss.backward(retain_graph=True)
    value_loss.backward(retain_graph=True)
    policy_loss.backward()
    second.step()
    third.step()
    optimizer.step()
"""


def test_no_reason_names_a_line_that_a_preparation_moved():
    [(form, reason)] = apply(MOVED)[1]
    lines = [int(number) for number in re.findall(r"\d+", str(reason).split("; ")[-1])]
    assert form == "in-place"
    assert not any("backward" in (TOP + MOVED).splitlines()[number - 1] for number in lines)
