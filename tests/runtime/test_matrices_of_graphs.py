"""Batches beside which more is passed than the samples have parts: the matrices of a graph that all samples share."""

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch

ATOMS, EDGES, FEATURES = 4, 12, 7


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def matrices():
    pairs = [(one, other) for one in range(ATOMS) for other in range(ATOMS) if one != other]
    receivers, senders = (torch.eye(ATOMS).double()[[pair[end] for pair in pairs]] for end in (0, 1))
    return receivers, senders  # [edges, atoms]


class OfAtoms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.edges, self.head = nn.Linear(2 * FEATURES, 5).double(), nn.Linear(5, 2).double()

    def forward(self, x, receivers, senders):  # [samples, atoms, features] -> [samples, atoms, 2]
        edges = torch.tanh(self.edges(torch.cat([receivers @ x, senders @ x], 2)))
        return self.head(torch.tanh(receivers.T @ edges))


def of_each(model, x, receivers, senders):
    return (model(x, receivers, senders) - 1).pow(2).mean()


def centered(model, x, receivers, senders):
    found = model(x, receivers, senders)
    return (found - found.mean()).pow(2).mean()


def trained(loss, batches, forward_backward):
    model, found = OfAtoms(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        forward_backward(lambda *batch: loss(model, *batch), *batch, *matrices())
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_as_whole(loss, sizes, **overrides):
    """Train in parts as in whole batches; the report on the forward."""
    batches = [(drawn(size, ATOMS, FEATURES, seed=size + call),) for call, size in enumerate(sizes)]
    memory = runtime.preset("16gb", precision="fp32", **overrides)
    found = trained(loss, batches, memory.forward_backward)
    expected = trained(loss, batches, lambda forward, *batch: forward(*batch).backward())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    return memory.report().forwards[0]


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("sizes", [(6, 6, 6, 6, 6), (20, 20, 20, 7, 20), (9, 9, EDGES, ATOMS, 9)])
def test_samples_are_cut_and_the_graph_is_not_though_more_matrices_are_of_its_length(sizes, micro_batches):
    report = assert_as_whole(of_each, sizes, micro_batches=micro_batches)
    assert (report.micro_batches, report.whole_because) == (micro_batches, None)


def test_samples_that_depend_on_each_other_run_whole_beside_a_graph_too():
    report = assert_as_whole(centered, (6, 6, 6), micro_batches=2)
    assert "samples depend on each other" in report.whole_because


def test_a_first_argument_that_the_loss_has_nothing_of_is_no_reason_to_split():
    """Each part would compute the loss of the whole batch."""

    def beside(model, unused, x, y):
        return (model(x, *matrices()) - y.mean()).pow(2).mean() + 0 * unused.sum()

    model, memory = OfAtoms(), runtime.preset("16gb", precision="fp32", micro_batches=2)
    for call in range(3):
        x, y = drawn(8, ATOMS, FEATURES, seed=call), drawn(8, 1, seed=call + 9)
        memory.forward_backward(lambda *batch: beside(model, *batch), drawn(5, 2, seed=call), x, y)
    assert memory.report().forwards[0].whole_because is not None


def test_the_batch_is_what_most_arguments_have_unless_a_check_tells_otherwise():
    batch = Batch((drawn(6, ATOMS, FEATURES), *matrices()), {})
    assert (batch.size, batch.other_readings()[-1]) == (EDGES, "input")
    batch.read("input")
    assert (batch.size, [cut for _, cut in batch.layout()]) == (6, [True, False, False])
    assert "input" not in Batch((drawn(1, ATOMS), *matrices()), {}).other_readings()
    assert "input" not in Batch((drawn(6, 2), drawn(6, 2)), {}).other_readings()
