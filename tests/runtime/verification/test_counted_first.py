"""Means over different numbers of what counts are split exactly: a run without gradients counts these first."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix import runtime

ROWS = 24
Batch = tuple[Any, ...]


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.hidden(x).tanh()))


def labelled(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(ROWS, 6, dtype=torch.float64, generator=generator) for _ in range(count)]
    return [(x, torch.randint(0, 4, (ROWS,), generator=generator)) for x in inputs]


def with_boxes(count: int, least: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        numbers = torch.randint(least, 5, (ROWS,), generator=generator).tolist()
        boxes = [{"boxes": torch.rand(n, 4, dtype=torch.float64, generator=generator)} for n in numbers]
        found.append((torch.randn(ROWS, 6, dtype=torch.float64, generator=generator), boxes))
    return found


def trained(loss: Callable[..., Any], data: list[Batch], make: Callable[[], nn.Module], **overrides: Any) -> Any:
    """Every result, and every gradient; and how many calls ran in parts."""
    runtime.reset()
    torch.manual_seed(0)
    np.random.seed(0)
    model = make().double()
    memory = runtime.preset("16gb", precision="fp32", **overrides)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in data:
        seen.append(memory.forward_backward(lambda *batch: loss(model, *batch), *batch))
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        memory.step(optimizer)
    (known,) = memory._forwards
    return [*seen, list(model.buffers())], known.split_calls


def split_calls(
    loss: Callable[..., Any], data: list[Batch], make: Callable[[], nn.Module] = Network, micro_batches: int = 3
) -> int:
    """How many calls ran in parts of a training whose results and gradients are those of whole batches."""
    whole, _ = trained(loss, data, make)
    split, calls = trained(loss, data, make, micro_batches=micro_batches)
    torch.testing.assert_close(split, whole, rtol=1e-11, atol=1e-13)
    return calls


def of_two_masks(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    each, out = F.cross_entropy(model(x), y, reduction="none"), model(x)
    known, far = each[y < 2].mean(), out[y > 1].pow(2).mean()
    return known + 0.5 * far, known.item(), far.detach()


def divided_by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each, out, first, last = F.cross_entropy(model(x), y, reduction="none"), model(x).sum(1), y < 3, y > 0
    return (each * first).sum() / first.sum() + (out * last).sum() / (last.sum() + 1e-8)


def at_least_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each, out, first, last = F.cross_entropy(model(x), y, reduction="none"), model(x).sum(1), y == 0, y == 3
    return (each * first).sum() / first.sum().clamp(min=1) + (out * last).sum() / last.sum().clamp(min=1)


def of_torch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, first = model(x), y < 2
    zeros = torch.zeros_like(out[:, 0][~first])
    return F.cross_entropy(out[first], y[first]) + F.smooth_l1_loss(out[:, 0][~first], zeros) + out.abs().mean()


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    balanced = nn.CrossEntropyLoss(torch.linspace(0.1, 1, 4, dtype=torch.float64))
    return balanced(out, y) + 5 * (out.abs().sum(1) * (y > 0)).sum() / int((y > 0).sum())


def over(divide: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, known = model(x), y > 0
        return divide((out.sum(1) * known).sum(), known) + F.cross_entropy(out, y)

    return loss


def in_place(total: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    total /= known.sum()
    return total


BY_HAND = [
    over(lambda total, known: total / max(1.0, known.sum().item())),
    over(lambda total, known: total / max(1, known.sum())),
    over(lambda total, known: total / max(known.sum(), 1)),
    over(lambda total, known: total * (3 if known.sum() >= 2 else 1) / known.sum()),
    over(lambda total, known: total / float(known.sum().clamp(min=1))),
    over(lambda total, known: total / np.maximum(known.numpy().sum(), 1)),
    over(in_place),
    over(lambda total, known: total.clone().div_(known.sum())),
]


@pytest.mark.parametrize("micro_batches", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [of_two_masks, divided_by_hand, at_least_one, of_torch, weighted, *BY_HAND])
def test_means_over_different_numbers_of_samples_are_split(loss, micro_batches):
    assert split_calls(loss, labelled(6), micro_batches=micro_batches) >= 4


def of_groups(model: nn.Module, x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    scores = model(x)[:, 0]
    return torch.stack([F.softplus(-scores[groups == group].max()) for group in groups.unique()]).mean()


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 4, 4), (4, 2, 3), (6, 3), (1, 5, 3)])
def test_groups_that_may_lie_in_two_parts_are_not_counted(sizes):
    """Of the few rows of a check, each group may lie in one part, which has them all together then."""
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    assert split_calls(of_groups, [(x[: len(groups)], groups) for x, _ in labelled(2)]) == 0


def of_boxes(model: nn.Module, x: torch.Tensor, targets: list[dict[str, torch.Tensor]], count: Any) -> Any:
    out = model(x)
    apart = torch.stack([(one - target["boxes"]).abs().sum() for one, target in zip(out, targets, strict=True)])
    return out.square().mean() + 5 * apart.sum() / count([len(target["boxes"]) for target in targets])


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(
    "count",
    [
        lambda numbers: max(sum(numbers), 1),
        lambda numbers: torch.clamp(torch.as_tensor([sum(numbers)], dtype=torch.float) / 1, min=1).item(),
    ],
)
def test_a_loss_divided_by_the_number_of_boxes_is_split_beside_one_of_all_samples(count, least):
    assert split_calls(lambda model, *batch: of_boxes(model, *batch, count), with_boxes(6, least)) >= 5


def test_boxes_alone_are_weighed_without_a_second_run(caplog):
    def loss(model, x, targets):
        apart = [(one - target["boxes"]).abs().sum() for one, target in zip(model(x), targets, strict=True)]
        return torch.stack(apart).sum() / sum(len(target["boxes"]) for target in targets)

    assert split_calls(loss, with_boxes(6)) == 6
    assert "once more" not in caplog.text


@pytest.mark.parametrize("read", [int, torch.Tensor.item, lambda count: count])
@pytest.mark.parametrize("threshold", [1, 3, 6, 9])
def test_a_least_number_of_the_programs_own_is_never_taken_for_a_count(threshold, read):
    """Some of the parts have fewer than that, and what few rows have of it may be more."""

    def loss(model, x, y):
        rare = y == 3
        return model(x).square().mean() + (model(x).sum(1) * rare).sum() / max(read(rare.sum()), threshold)

    data = labelled(8)
    for _, y in data[3:]:
        y[: ROWS // 3][y[: ROWS // 3] == 3] = 0
    split_calls(loss, data)


def test_parts_that_lack_a_mean_run_whole_and_later_batches_are_split():
    def loss(model, x, y):
        rare, each = y == 3, F.cross_entropy(model(x), y, reduction="none")
        return each[~rare].mean() + (each[rare].mean() if rare.any() else 0)

    data = labelled(6)
    data[4][1][: ROWS // 2] = 0
    assert 3 <= split_calls(loss, data, micro_batches=2) < 6


def kinds_that_are_there(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return torch.stack([each[y == kind].mean() for kind in range(4) if (y == kind).any()]).mean()


@pytest.mark.parametrize("loss", [kinds_that_are_there, lambda *given: kinds_that_are_there(*given) + given[1].mean()])
@pytest.mark.parametrize("micro_batches", [2, 3, 5])
def test_parts_that_have_as_many_means_of_other_kinds_are_not_taken_for_alike(loss, micro_batches):
    split_calls(loss, labelled(6), micro_batches=micro_batches)
    rare = labelled(6)
    for _, y in rare:
        y[: ROWS // 2] %= 3
        y[ROWS // 2 :] = y[ROWS // 2 :].clamp(min=1)
    split_calls(loss, rare, micro_batches=micro_batches)


def test_a_part_on_which_the_program_divides_by_nothing_itself_leaves_the_batch_whole():
    def loss(model, x, y):
        rare = [one.square().sum() for one, label in zip(model(x), y.tolist(), strict=True) if label == 3]
        return sum(rare) / (3 * 5 / len(rare)) + model(x).square().mean()

    data = labelled(6)
    for _, y in data[3:]:
        y[: ROWS // 3] = 0
    split_calls(loss, data)


def test_masks_that_depend_on_the_network_its_dropout_and_draws_are_counted_as_they_are():
    def loss(model, x, y):
        out = model(x + 0.1 * torch.randn_like(x))
        sure = out.detach().softmax(1).amax(1) > 0.3
        each = F.cross_entropy(out, y, reduction="none")
        return each[sure].mean() + 0.1 * out[y == 1].pow(2).mean()

    data = labelled(6)
    assert split_calls(loss, data) >= 3
    runtime.reset()
    torch.manual_seed(0)
    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    model = Network(0.5).double()
    for batch in data:
        assert memory.forward_backward(lambda *batch: loss(model, *batch), *batch).isfinite()
    assert next(iter(memory._forwards)).split_calls >= 3


def test_what_a_forward_writes_down_is_written_once():
    written: list[int] = []

    def loss(model, x, y):
        written.append(len(x))
        return of_two_masks(model, x, y)[0]

    runtime.reset()
    torch.manual_seed(0)
    model, memory = Network().double(), runtime.preset("16gb", precision="fp32", micro_batches=3)
    for x, y in labelled(3):
        written.clear()
        memory.forward_backward(lambda x, y: loss(model, x, y), x, y)
    assert written[-3:] == [ROWS // 3] * 3


def test_windows_add_up():
    data, losses = labelled(4), []
    for overrides in ({}, {"micro_batches": 3}):
        runtime.reset()
        torch.manual_seed(0)
        model, memory = Network().double(), runtime.preset("16gb", precision="fp32", **overrides)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in memory.accumulate(data, 2):
            losses.append(memory.forward_backward(of_two_masks, model, x, y)[0])
            if memory.window_closed:
                memory.step(optimizer)
    torch.testing.assert_close(losses[:4], losses[4:], rtol=1e-11, atol=1e-13)


def ratio(model, x, y):
    out, chosen = model(x).sigmoid(), F.one_hot(y, 4)
    return 1 - 2 * (out * chosen).sum() / (out.sum() + chosen.sum())


def product(model, x, y):
    out = model(x)
    return out[y < 2].pow(2).mean() * out[y > 1].exp().mean()


def perplexity(model, x, y):
    each = F.cross_entropy(model(x), y, reduction="none")
    return each[y < 2].mean().exp() + each.mean()


def hinge(model, x, y):
    each = F.cross_entropy(model(x), y, reduction="none")
    return F.relu(each[y < 2].mean() - each[y > 1].mean() + 0.5) + each.mean()


def above_the_mean(model, x, y):
    each = F.cross_entropy(model(x), y, reduction="none")
    return each[each > each[y < 2].mean()].mean() + each.mean()


def centered(model, x, y):
    out = model(x)
    return (out - out[y < 2].mean()).pow(2).mean() + out[y > 0].pow(2).mean()


def branched(model, x, y):
    each, rare = F.cross_entropy(model(x), y, reduction="none"), y == 3
    return each[~rare].mean() + (each[rare].mean() if rare.sum() > 3 else each[rare].sum())


def normalised(model, x, y):
    each = F.cross_entropy(model(x), y, reduction="none")
    return each[y < 2].mean() / each.detach()[y < 2].mean() + each.mean()


@pytest.mark.parametrize("loss", [ratio, product, perplexity, hinge, above_the_mean, centered, branched, normalised])
def test_what_depends_on_the_whole_batch_otherwise_runs_whole(loss):
    assert split_calls(loss, labelled(6)) == 0


def test_means_inside_of_a_checkpoint_are_left_alone():
    def inside(model, x, y):
        return of_two_masks(model, x, y)[0]

    split_calls(lambda model, x, y: checkpoint(inside, model, x, y, use_reentrant=False), labelled(4))
