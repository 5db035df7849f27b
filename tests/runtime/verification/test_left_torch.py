"""What a forward decides by numbers outside of torch is not seen, and few rows may show nothing of it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification.verify import check


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator).double()
    return x, torch.randint(0, 4, (count,), generator=generator)


def of_the_easiest_by_numpy(loss):
    order = np.argsort(loss.detach().numpy())
    return loss[order[: max(1, int(0.8 * len(order)))]].mean()


def of_the_easiest_by_array(loss):
    order = np.argsort(np.asarray(loss.data))
    return loss[torch.as_tensor(order)[: max(1, int(0.8 * len(order)))]].mean()


def of_the_easiest_by_list(loss):
    values = loss.tolist()
    easiest = sorted(range(len(values)), key=values.__getitem__)[: max(1, len(values) * 3 // 4)]
    return loss[easiest].mean()


def below_a_percentile(loss):
    values = loss.detach().numpy()
    weights = torch.from_numpy((values <= np.percentile(values, 70)).astype(float))
    return (weights * loss).sum() / weights.sum()


REDUCTIONS = [
    of_the_easiest_by_numpy,
    of_the_easiest_by_array,
    of_the_easiest_by_list,
    below_a_percentile,
]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_samples_selected_by_their_losses_outside_of_torch_are_selected_among_the_whole_batch(reduce):
    model, memory = network(), runtime.preset("16gb", micro_batches=3)

    def forward(x, y):
        return reduce(F.cross_entropy(model(x), y, reduction="none"))

    parameters = list(model.parameters())
    for seed, size in enumerate((9, 12, 5, 12, 17, 8, 32, 10, 11)):
        x, y = batch(size, seed)
        expected = torch.autograd.grad(forward(x, y), parameters)
        model.zero_grad()
        memory.forward_backward(forward, x, y)
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def two_networks_that_choose_samples_for_each_other(first, second):
    """Co-teaching, as its authors write it."""

    def forward(x, y):
        outs = first(x), second(x)
        losses = [F.cross_entropy(out, y, reduction="none").detach().numpy() for out in outs]
        orders = [torch.as_tensor(np.argsort(loss)) for loss in losses]
        kept = max(1, int(0.8 * len(y)))
        pairs = zip(outs, reversed(orders), strict=True)
        return sum(F.cross_entropy(out[order[:kept]], y[order[:kept]]) for out, order in pairs)

    return forward


def verdict_of(forward, models, given, most_rows=4):
    modules = [module for model in models for module in model.modules()]
    return check(forward, Batch(given, {}), modules, most_rows)


def test_networks_that_choose_samples_for_each_other_run_whole():
    models = network(), network()
    forward = two_networks_that_choose_samples_for_each_other(*models)
    assert verdict_of(forward, models, batch(12)).rule is None


def test_a_selection_that_begins_with_all_samples_is_seen_before_it_leaves_some_out():
    model, kept = network(), 1.0

    def forward(x, y):
        loss = F.cross_entropy(model(x), y, reduction="none")
        order = np.argsort(loss.detach().numpy())
        return loss[order[: max(1, int(kept * len(order)))]].mean()

    assert "may select among the samples" in verdict_of(forward, [model], batch(12)).reason


def of_each_sample(model):
    def forward(x, y):
        weights = [1 + float(np.max(out.detach().numpy())) ** 2 for out in model(x)]
        return (F.cross_entropy(model(x), y, reduction="none") * torch.tensor(weights).double()).mean()

    return forward


def of_what_is_given(model):
    def forward(x, y):
        scaled = torch.from_numpy(np.tanh(x.numpy()))
        return F.cross_entropy(model(scaled), torch.tensor(y.tolist()))

    return forward


def of_whole_numbers(model):
    def forward(x, y):
        out = model(x)
        right = [float(a == b) for a, b in zip(out.argmax(1).tolist(), y.tolist(), strict=True)]
        return (F.cross_entropy(out, y, reduction="none") * (2 - torch.tensor(right).double())).mean()

    return forward


@pytest.mark.parametrize("make", [of_each_sample, of_what_is_given, of_whole_numbers])
def test_numbers_of_one_sample_and_what_a_batch_is_given_may_leave_torch(make):
    model = network()
    assert verdict_of(make(model), [model], batch(12)).rule is not None


def test_evaluations_return_what_they_like():
    model = network()
    assert verdict_of(lambda x, y: model(x).detach().numpy(), [model], batch(12)).reason == ""
