"""A number that a loss is divided by is believed where rows were seen that tell what becomes of it, not elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

ROWS = 24
IGNORED = -100


def batches(count: int, share: float, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """Inputs, labels, a mask, and labels of which few count; `share`: of the rows that the mask leaves."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 4, (ROWS,), generator=generator)
        mask = torch.rand(ROWS, generator=generator) < share
        few = y.masked_fill(torch.rand(ROWS, generator=generator) > share, IGNORED)
        found.append((x, y, mask, few))
    return found


def split_calls(loss, data, micro_batches: int = 3) -> int:
    """How many calls ran in parts of a training whose losses and gradients are those of plain torch."""
    runtime.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in data:
        whole = loss(model, *batch)
        if not bool(whole.isfinite()):
            continue
        expected = torch.autograd.grad(whole, list(model.parameters()))
        found = memory.forward_backward(lambda *batch: loss(model, *batch), *batch)
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close([found, *gradients], [whole.detach(), *expected], rtol=1e-11, atol=1e-13)
        memory.step(optimizer)
    (known,) = memory._forwards
    return known.split_calls


def of_mask(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (out.square().mean(1) * mask).sum() / mask.double().sum().clamp(min=1)


def sum_and_mean(model, x, y, mask, few):
    out = model(x)
    return F.cross_entropy(out, y, reduction="sum") + 3 * of_mask(out, mask)


def two_means(model, x, y, mask, few):
    out = model(x)
    return F.cross_entropy(out, few) + of_mask(out, mask)


def two_bounded_means(model, x, y, mask, few):
    each, counts = F.cross_entropy(model(x), y, reduction="none"), few >= 0
    return (each * counts).sum() / max(1, int(counts.sum())) + of_mask(model(x), mask)


def mean_of_both(model, x, y, mask, few):
    out = model(x)
    return out.abs().mean() + of_mask(out, mask & (few >= 0))


def by_weights(model, x, y, mask, few):
    weights = mask / mask.sum().clamp(min=1)
    return (F.cross_entropy(model(x), y, reduction="none") * weights).sum() + model(x).sum()


def a_factor_that_counts(model, x, y, mask, few):
    out = model(x)
    return (mask & (few >= 0)).sum() * out[mask].square().mean() + out.abs().mean()


def of_other_targets(model, x, y, mask, few):
    """Rows without any of what is divided by still have what is divided."""
    out = model(x)
    total = F.cross_entropy(out, y.masked_fill(~mask, IGNORED), reduction="sum")
    return 0.1 * F.cross_entropy(out, few) + 0.1 * total / (few >= 0).sum()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
LOSSES = [
    sum_and_mean, two_means, two_bounded_means, mean_of_both, by_weights, a_factor_that_counts, of_other_targets,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("share", [0.06, 0.12, 0.25, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mean_of_which_few_rows_have_something_is_never_taken_for_another(loss, share, seed):
    split_calls(loss, batches(5, share, seed))


@pytest.mark.parametrize("loss", [two_means, two_bounded_means, mean_of_both])
def test_means_over_different_rows_are_split_where_rows_tell(loss):
    assert split_calls(loss, batches(6, 0.6)) >= 4


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_one_row_of_a_mean_tells_nothing_and_two_do(micro_batches):
    """What counts stands in one half, far from what is checked first."""
    for places, splits in (((20,), False), ((13, 20), True)):
        data = batches(3, 0.5)
        for _, _, mask, _ in data:
            mask[:] = False
            mask[list(places)] = True
        assert (split_calls(lambda model, *batch: mean_of_mask(model, *batch), data, micro_batches) > 0) == splits


def mean_of_mask(model, x, y, mask, few):
    out = model(x)
    return F.cross_entropy(out, y) + of_mask(out, mask)


DIVISORS = [
    lambda count: max(int(count) // 2, 1),
    lambda count: -(-int(count) // 2) + 1,
    lambda count: round(int(count) / 3 + 1),
    lambda count: max(4, int(count)),
    lambda count: min(int(count) + 1, 5),
]


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_python_makes_of_a_count_is_no_count(divisor, share, seed):
    def alone(model, x, y, mask, few):
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / divisor(mask.sum())

    def beside(model, x, y, mask, few):
        return alone(model, x, y, mask, few) + F.cross_entropy(model(x), y)

    for loss in (alone, beside):
        split_calls(loss, batches(4, share, seed))


WEIGHTS = torch.linspace(0.2, 1.3, 4, dtype=torch.float64)
BESIDE = [
    lambda out, y, rare: F.cross_entropy(out, y, weight=WEIGHTS) + rare.mean(),
    lambda out, y, rare: F.cross_entropy(out, y, reduction="sum") + rare.mean(),
    lambda out, y, rare: F.cross_entropy(out, y) + rare.sum(),
]


@pytest.mark.parametrize("beside", BESIDE)
def test_a_term_that_is_0_on_few_rows_is_not_taken_for_what_stands_beside_it(beside):
    def loss(model, x, y, mask, few):
        out = model(x)
        return beside(out, y, torch.where(x[:, 0] > 1.2, out.square().mean(1), 0.0))

    for seed in range(12):
        split_calls(loss, batches(3, 0.1, seed))
