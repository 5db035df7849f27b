"""A term over pairs of samples of one class is seen though hardly any two samples of a batch are of one class."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

LABELS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0])


def pairs(labels):
    return (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)


def if_there_are_any(z, labels):
    return (torch.cdist(z, z) * pairs(labels)).sum() if pairs(labels).any() else 0


def unless_their_sum_is_0(z, labels):
    return 0 if pairs(labels).sum() == 0 else (torch.cdist(z, z) * pairs(labels)).sum()


def if_a_pair_is_true(z, labels):
    return (torch.cdist(z, z) * pairs(labels)).sum() if pairs(labels).sum() else 0


def if_their_count_is_above_0(z, labels):
    return (torch.cdist(z, z) * pairs(labels)).sum() if pairs(labels).sum() > 0 else 0


def as_numbers(z, labels):
    same = torch.eq(labels.view(-1, 1), labels.view(1, -1))
    return (torch.logical_and(same, ~torch.eye(len(z)).bool()).double() * torch.cdist(z, z)).sum()


def as_a_mean_for_each(z, labels):
    mask = pairs(labels).double()
    return ((mask * torch.cdist(z, z)).sum(1) / (mask.sum(1) + 1e-8)).sum()


def in_python(z, labels):
    classes = labels.tolist()
    found = [(z[i] - z[j]).square().sum() for i in range(len(z)) for j in range(i) if classes[i] == classes[j]]
    return sum(found) if found else 0 * z.sum()


def by_class_in_python(z, labels):
    groups: dict[int, list[torch.Tensor]] = {}
    for sample, label in zip(z, labels.tolist(), strict=True):
        groups.setdefault(label, []).append(sample)
    return sum((torch.stack(group) - torch.stack(group).mean(0)).square().sum() for group in groups.values())


def from_the_mean_of_a_class(z, labels):
    means = torch.zeros(11, 4, dtype=z.dtype).index_reduce(0, labels, z, "mean", include_self=False)
    return (z - means[labels]).square().sum()


def of_sums_of_a_class(z, labels):
    sums = torch.zeros(11, 4, dtype=z.dtype).index_add(0, labels, z)
    counts = torch.bincount(labels, minlength=11)
    return (z - (sums / counts.clamp(min=1)[:, None])[labels]).square().sum()


TERMS = [if_there_are_any, unless_their_sum_is_0, if_a_pair_is_true, if_their_count_is_above_0, as_numbers,
         as_a_mean_for_each, in_python, by_class_in_python, from_the_mean_of_a_class, of_sums_of_a_class]  # fmt: skip


@pytest.mark.parametrize("micro_batches", [2, 3, 6])
@pytest.mark.parametrize("term", TERMS)
def test_a_term_over_pairs_of_one_class_keeps_the_batch_whole(term, micro_batches):
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(6, 4), "other": nn.Linear(6, 4)}).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)

    def loss(x, labels):
        return F.cross_entropy(model["one"](x), labels % 4) + term(model["other"](x), labels) / len(x)

    for _ in range(3):
        x = torch.randn(12, 6, dtype=torch.float64)
        expected = torch.autograd.grad(loss(x, LABELS), list(model.parameters()))
        memory.forward_backward(loss, x, LABELS)
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(gradients, list(expected), rtol=1e-11, atol=1e-13)
        model.zero_grad()
    (known,) = memory._forwards
    assert known.split_calls == 0


def neighbours_in_python(z, labels):
    classes = labels.tolist()
    found = [(z[i] - z[i - 1]).abs().sum() for i in range(1, len(z)) if classes[i] == classes[i - 1]]
    return sum(found)


# of these random batches the rows of a check have each class once, or no two neighbours of one
@pytest.mark.parametrize(
    ("term", "size", "seed"),
    [
        (by_class_in_python, 16, 4),
        (by_class_in_python, 12, 4),
        (neighbours_in_python, 16, 0),
        (neighbours_in_python, 12, 5),
    ],
)
def test_a_class_that_few_rows_have_once_is_seen(term, size, seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"one": nn.Linear(6, 4), "other": nn.Linear(6, 4)}).double()
    x = torch.randn(size, 6, dtype=torch.float64)
    labels = torch.randint(0, {16: 40, 12: 20}[size], (size,))
    labels = labels.sort().values if term is neighbours_in_python else labels
    memory = runtime.preset("16gb", precision="fp32", micro_batches=size // 4)

    def loss(x, labels):
        return F.cross_entropy(model["one"](x), labels % 4) + term(model["other"](x), labels) / len(x)

    expected = torch.autograd.grad(loss(x, labels), list(model.parameters()))
    memory.forward_backward(loss, x, labels)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected), rtol=1e-11, atol=1e-13)
    (known,) = memory._forwards
    assert known.split_calls == 0


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("known", range(1, 32, 3))
def test_pairs_of_what_a_network_leaves_at_0_for_the_rows_that_are_checked_keep_the_batch_whole(known):
    """Gradients that are 0 show nothing, and behind the hinge the rows differ by less than numbers are rounded."""
    torch.manual_seed(0)
    words, linear = nn.Embedding(32, 4), nn.Linear(4, 1)
    nn.init.normal_(words.weight, std=1e-4)
    nn.init.constant_(linear.bias, -1.0)
    words.weight.data[known] = 5 * linear.weight[0].detach().sign()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)
    ids, targets = torch.randperm(32), torch.randint(1, 6, (32,)).float()

    def loss(ids, targets):
        return F.mse_loss(linear(words(ids)).relu(), targets)  # of [samples, 1] and [samples]: of every two samples

    expected = torch.autograd.grad(loss(ids, targets), list(linear.parameters()))
    memory.forward_backward(loss, ids, targets)
    torch.testing.assert_close([linear.weight.grad, linear.bias.grad], list(expected))
