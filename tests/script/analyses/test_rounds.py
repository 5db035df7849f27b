"""What one round of a loop hands to the next through names: `retain_graph=True` may be for it."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

ROUND = """
def train(loader):
    for x, y in loader:
{before}
        loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        optimizer.step()
{after}
"""


def round_with(before: str, after: str) -> str:
    return ROUND.format(before=indent(dedent(before).strip(), " " * 8), after=indent(after, " " * 8))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("scalars = {}", "scalars['loss'] = y[0]"),
        ("for t in range(3): show(t)", "t = y"),
        ("with timer() as t: show(t)", "t = y"),
        ("values = [v for v in x]", "v = y"),
        ("part = lambda p: p + 1", "p = y"),
        ("def part(p): return p + 1", "p = y"),
        (
            """
            if flag:
                last = x
            else:
                last = y
            """,
            "show(last); last = y",
        ),
        (
            """
            try:
                last = x
            except KeyError:
                last = y
            """,
            "show(last); last = y",
        ),
        ("if mode == 'both': last = x", "if mode == 'both': show(last)\nlast = y"),
    ],
)
def test_a_name_that_the_round_binds_first_carries_nothing_over(report, before, after):
    assert [code for code, _ in report(round_with(before, after))] == ["OOM103"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("show(last)", "last = y"),
        ("if flag: last = x", "show(last); last = y"),
        ("if asks(): last = x", "if asks(): show(last)\nlast = y"),
        ("if flag: last = x", "flag = next(flags)\nif flag: show(last)\nlast = y"),
        ("for t in parts: last = t", "show(last); last = y"),
        ("while flag: last = x", "show(last); last = y"),
        ("last += x", "last = y"),
        ("show(kept[0])", "kept[0] = y"),
    ],
)
def test_a_name_that_is_read_before_the_round_binds_it_may(report, before, after):
    assert report(round_with(before, after)) == []


ACTING = """
while True:
    action = agent.act(state)
    {answer}
    loss = criterion(model(batch), y)
    loss.backward(retain_graph=True)
    optimizer.step()
    state = next_state
"""


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("next_state, reward, done, _ = env.step(action)", ["OOM103"]),
        ("next_state, reward, over, cut, _ = self.envs.step(action)", ["OOM103"]),
        ("next_state, reward, done, _ = simulator.step(action)", []),
        ("next_state, reward = env.step(action)", []),
        ("next_state, reward, done, _ = env.step(action); next_state = model(next_state)", []),
    ],
)
def test_what_an_environment_answers_carries_nothing_over(report, answer, found):
    assert [code for code, _ in report(ACTING.format(answer=answer)) if code == "OOM103"] == found


COPYING = """
class Trainer:
    def fit(self):
        for x, y in self.loader:
            loss = criterion(self.model(x), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            self.optimizer.step()
            {copy}

    def show(self):
        {read}
"""


@pytest.mark.parametrize("copy", ["self.best = y", "first = self.best = y", "self.records.best = y"])
@pytest.mark.parametrize(
    ("read", "found"),
    [("pass", ["OOM103"]), ("self.best = 0", ["OOM103"]), ("show(self.best)", []), ("show(getattr(self, 'best'))", [])],
)
def test_an_attribute_that_nothing_reads_carries_nothing_over(report, copy, read, found):
    assert [code for code, _ in report(COPYING.format(copy=copy, read=read)) if code == "OOM103"] == found


AGENTS = """
def train(agents, critic, states):
    actions = []
    for agent in agents:
        actions.append({actor}.forward(states))
    joined = torch.cat([action for action in actions], dim=1)
    for agent in agents:
        value = agent.get_policy().critic.forward(states, {given})
        loss = -value.mean()
        loss.backward(retain_graph=True)
        agent.optimizer.step()
"""


@pytest.mark.parametrize(
    ("actor", "given", "found"),
    [
        ("agent.get_policy().actor", "joined", []),
        ("agent.actor", "joined", []),
        ("agent.get_policy().actor", "states", ["OOM103"]),
    ],
)
def test_networks_without_a_name_are_not_all_one(report, actor, given, found):
    code = AGENTS.format(actor=actor, given=given)
    assert [code for code, _ in report(code) if code == "OOM103"] == found
