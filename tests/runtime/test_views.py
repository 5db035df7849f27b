"""Lists of tensors of one length: one for each agent, view or crop of all samples, or one for each sample."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.batches.batch import Batch

AGENTS, OBSERVED, ACTIONS = 3, 5, 2


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def of_agents(rows, entries, seed):
    return [drawn(rows, entries, seed=seed + agent) for agent in range(AGENTS)]


def replayed(rows, seed):
    return of_agents(rows, OBSERVED, seed), of_agents(rows, ACTIONS, seed + 10), of_agents(rows, 1, seed + 20)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(AGENTS * (OBSERVED + ACTIONS), 8), nn.Tanh(), nn.Linear(8, 1))
        self.recurrent = nn.GRU(OBSERVED, 4, batch_first=True)

    def forward(self, observed, actions):
        return self.layers(torch.cat([*observed, *actions], 1))


def one_value(critic, observed, actions, rewards):
    return F.mse_loss(critic(observed, actions), rewards[0])


def all_in_one_list(critic, replay):
    return one_value(critic, *replay)


def one_for_each_agent(critic, agents):
    observed, actions, rewards = ([agent[name] for agent in agents] for name in ("observed", "actions", "rewards"))
    return one_value(critic, observed, actions, rewards)


def beside_a_tensor(critic, observed, actions, over):
    return (critic(observed, actions) * over).pow(2).mean()


SPLIT = {
    "lists": (one_value, replayed),
    "a list of lists": (all_in_one_list, lambda rows, seed: (list(replayed(rows, seed)),)),
    "a list of dictionaries": (
        one_for_each_agent,
        lambda rows, seed: (
            [
                dict(zip(("observed", "actions", "rewards"), agent, strict=True))
                for agent in zip(*replayed(rows, seed), strict=True)
            ],
        ),
    ),
    "beside a tensor": (beside_a_tensor, lambda rows, seed: (*replayed(rows, seed)[:2], drawn(rows, 1, seed=99))),
}


def trained(loss, batches, forward_backward, before=lambda call: None):
    """The gradients of each call, with a step behind it."""
    torch.manual_seed(0)
    critic = Critic().double()
    optimizer, found = torch.optim.SGD(critic.parameters(), lr=0.1), []
    for call, batch in enumerate(batches):
        before(call)
        forward_backward(lambda *batch: loss(critic, *batch), *batch)
        found += [parameter.grad.clone() for parameter in critic.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_hand(forward, *batch):
    forward(*batch).backward()


def assert_as_whole(loss, batches, **overrides):
    """Train in parts as in whole batches; why these run whole, if they do."""
    memory = runtime.preset("16gb", precision="fp32", **overrides)
    found = trained(loss, batches, memory.forward_backward)
    torch.testing.assert_close(found, trained(loss, batches, by_hand), rtol=1e-12, atol=1e-14)
    return memory.report().forwards[0]


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize("kind", SPLIT)
def test_what_each_agent_sees_is_cut_along_the_samples(kind, micro_batches):
    loss, batch = SPLIT[kind]
    report = assert_as_whole(loss, [batch(12, seed) for seed in range(5)], micro_batches=micro_batches)
    assert (report.micro_batches, report.whole_because) == (micro_batches, None)


@pytest.mark.parametrize("kind", SPLIT)
def test_a_last_batch_with_as_many_samples_as_there_are_agents_is_cut_along_the_samples_too(kind):
    loss, batch = SPLIT[kind]
    report = assert_as_whole(loss, [batch(rows, rows) for rows in (12, 12, AGENTS, AGENTS + 1)], micro_batches=2)
    assert (report.micro_batches, report.whole_because) == (2, None)


@pytest.mark.parametrize("kind", SPLIT)
def test_agents_that_run_out_of_memory_go_on_in_parts(kind):
    loss, batch = SPLIT[kind]
    batches = [batch(12, seed) for seed in range(4)]
    expected, memory = trained(loss, batches, by_hand), runtime.preset("16gb", precision="fp32")
    with SimulatedCard() as card:
        found = trained(loss, batches, memory.forward_backward, lambda call: card.fail_at(6) if call == 1 else None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert (memory.report().retries, memory.report().forwards[0].whole_because) == (1, None)


def states(critic, sequences):
    """Of each sequence, the last state."""
    return torch.stack([critic.recurrent(sequence[None])[1][0, 0] for sequence in sequences])


def test_sequences_that_happen_to_be_of_one_length_are_samples():
    batches = [([drawn(length, OBSERVED, seed=n) for n in range(6)],) for length in (9, 9, 4)]
    batches[1][0][0] = drawn(7, OBSERVED, seed=0)
    report = assert_as_whole(
        lambda critic, sequences: states(critic, sequences).pow(2).mean(), batches, micro_batches=3
    )
    assert (report.micro_batches, report.whole_because) == (3, None)
    assert [Batch(batch, {}).size for batch in batches] == [6, 6, 6]


def test_what_can_be_cut_in_neither_way_runs_whole_and_says_why():
    def centered(critic, observed, actions, rewards):
        values = critic(observed, actions)
        return (values - values.mean() - rewards[0]).pow(2).mean()

    why = assert_as_whole(centered, [replayed(12, seed) for seed in range(3)], micro_batches=2).whole_because
    assert "with a sample in each entry of its lists, it fails on 4 rows" in why
    assert "with the tensors in its lists cut into samples, samples depend on each other" in why


def test_sequences_that_depend_on_each_other_and_along_their_length_are_not_said_to_be_something_else():
    def compared(critic, sequences):
        last = F.normalize(states(critic, sequences), dim=1)
        return F.cross_entropy(last @ last.t() * 5, torch.arange(len(last)))

    batches = [([drawn(9, OBSERVED, seed=n) for n in range(6)],) for _ in range(2)]
    assert "depend on each other" in assert_as_whole(compared, batches, micro_batches=2).whole_because


def test_what_there_is_one_of_says_nothing_of_the_number_of_samples():
    x, shared = drawn(8, 4, seed=1), {"temperature": drawn(1, seed=2), "prototypes": [drawn(3, 4, seed=3)]}
    assert Batch((x, shared), {}).size == 8
    assert Batch((x[:1], shared), {}).size == 1
