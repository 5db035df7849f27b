"""A call that takes another branch than those that were checked is checked itself, before it goes on in parts.

So are micro-batches of which some take a branch that others do not.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.verification.ways import Graphs, Ways, edges

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CALLS = 16


def trained(
    parts: int | None, forwards: Callable[[nn.ModuleDict], Iterator[Forward]], split: str = "verified"
) -> tuple[torch.Tensor, int]:
    """The weights of the head after some steps in float64, and how many calls ran in `parts` micro-batches."""
    runtime.reset()
    torch.manual_seed(0)
    random.seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), "head": nn.Linear(8, 4)})
    model = model.double()
    sizes = {} if parts is None else {"micro_batches": parts}
    memory = runtime.preset("16gb", precision="fp32", split=split, **sizes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(CALLS, 12, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (CALLS, 12), generator=generator)
    for batch, label, forward in zip(batches, labels, forwards(model), strict=False):
        memory.forward_backward(forward, batch, label)
        memory.step(optimizer)
    (known,) = memory._forwards
    return model["head"].weight.detach(), known.split_calls


def mixup_of_some_batches(model: nn.ModuleDict) -> Iterator[Forward]:
    """`if coin < 0.5` ahead of the batch decides; the first batches that are checked are not mixed."""
    coins = torch.rand(CALLS, generator=torch.Generator().manual_seed(3))
    coins[:4] = 1
    for coin in coins:

        def forward(samples: torch.Tensor, labels: torch.Tensor, coin: torch.Tensor = coin) -> torch.Tensor:
            if coin > 0.5:
                return F.cross_entropy(model["head"](samples), labels)
            share, order = random.betavariate(1, 1), torch.randperm(len(samples))
            output = model["head"](share * samples + (1 - share) * samples[order])
            return share * F.cross_entropy(output, labels) + (1 - share) * F.cross_entropy(output, labels[order])

        yield forward


def layers_left_out_at_random(model: nn.ModuleDict) -> Iterator[Forward]:
    def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in model["layers"]:
            if random.random() > 0.3:
                samples = samples + layer(samples).tanh()
        return F.cross_entropy(model["head"](samples), labels)

    while True:
        yield forward


def sequences_of_any_length(model: nn.ModuleDict) -> Iterator[Forward]:
    for times in map(torch.empty, range(1, CALLS + 1)):

        def forward(samples: torch.Tensor, labels: torch.Tensor, times: torch.Tensor = times) -> torch.Tensor:
            for _ in times:
                samples = model["layers"][0](samples).tanh()
            return F.cross_entropy(model["head"](samples), labels)

        yield forward


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("forwards", [mixup_of_some_batches, layers_left_out_at_random, sequences_of_any_length])
def test_branches_train_as_in_whole_batches(forwards, parts):
    whole, _ = trained(None, forwards)
    split, split_calls = trained(parts, forwards)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert split_calls >= 4


@pytest.mark.parametrize("forwards", [layers_left_out_at_random, sequences_of_any_length])
def test_branches_of_independent_samples_never_run_whole(forwards):
    _, split_calls = trained(3, forwards)
    assert split_calls == CALLS


def test_a_branch_that_couples_samples_is_told_once_with_its_reason(caplog):
    trained(3, mixup_of_some_batches)
    assert sum("run whole, because samples depend on each other" in line for line in caplog.messages) == 1
    assert not any("branch" in line for line in caplog.messages)


def test_a_branch_that_couples_samples_is_split_where_that_was_asked_for(caplog):
    _, split_calls = trained(3, mixup_of_some_batches, split="always")
    assert split_calls == CALLS
    assert any("split although samples depend on each other" in line for line in caplog.messages)


def test_a_branch_of_a_batch_of_another_size_is_checked_too():
    """Only the last batch is mixed, and its micro-batches have a number of samples that no check has seen."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)
    for rows in (12, 12, 12, 12, 6):
        mixed = torch.tensor(rows < 12)

        def forward(samples: torch.Tensor, labels: torch.Tensor, mixed: torch.Tensor = mixed) -> torch.Tensor:
            if not mixed:
                return F.cross_entropy(model(samples), labels)
            output = model((samples + samples.flip(0)) / 2)
            return (F.cross_entropy(output, labels) + F.cross_entropy(output, labels.flip(0))) / 2

        samples, labels = torch.randn(rows, 8).double(), torch.randint(0, 4, (rows,))
        model.zero_grad()
        memory.forward_backward(forward, samples, labels)
    split = model.weight.grad.clone()
    model.zero_grad()
    forward(samples, labels).backward()
    torch.testing.assert_close(split, model.weight.grad, rtol=1e-12, atol=1e-14)


Rare = Callable[[nn.ModuleDict, torch.Tensor, torch.Tensor], torch.Tensor]


def over_all(model: nn.ModuleDict, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model["layers"][0](samples).pow(2).mean()


def over_the_rare(model: nn.ModuleDict, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model["layers"][0](samples[labels == 3]).pow(2).mean()


def sum_of_the_rare(model: nn.ModuleDict, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (model["layers"][0](samples).pow(2).sum(1) * (labels == 3)).mean()


def differing(
    forward: Callable[[nn.ModuleDict], Callable[..., torch.Tensor]],
    batches: list[tuple],
    parts: int | str,
    most_rows: int | None = None,
) -> tuple[list[int], int]:
    """The calls whose gradients are not those of the whole batch, and how many ran in `parts` micro-batches.

    With `most_rows`, memory holds no more.
    """
    runtime.reset()
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(8, 4), "dropout": nn.Dropout(0.5)}).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=parts)
    function, found = forward(model), []
    for number, batch in enumerate(batches):
        function(*batch).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        memory.forward_backward(function if most_rows is None else out_of_memory(function, most_rows), *batch)
        given = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        for name, gradient in expected.items():
            if (gradient is None) != (given[name] is None) or (
                gradient is not None and not torch.allclose(gradient, given[name], rtol=1e-12, atol=1e-14)
            ):
                found.append(number)
                break
    (known,) = memory._forwards
    return found, known.split_calls


def out_of_memory(function: Callable[..., torch.Tensor], most_rows: int) -> Callable[..., torch.Tensor]:
    def limited(samples: torch.Tensor, *others: Any) -> torch.Tensor:
        if len(samples) > most_rows:
            raise OutOfMemoryError("CUDA out of memory. Tried to ...")
        return function(samples, *others)

    return limited


def with_a_term_for_batches_with_rare_labels(term: Rare) -> Callable[[nn.ModuleDict], Forward]:
    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model["head"](samples), labels)
            if (labels == 3).any():
                loss = loss + term(model, samples, labels)
            return loss

        return forward

    return make


def labelled(seed: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator).double(), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(16)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("term", [over_all, over_the_rare])
def test_a_branch_of_some_micro_batches_only_is_seen(term, seed):
    size, parts = ((12, 3), (24, 4))[seed % 2]
    wrong, _ = differing(with_a_term_for_batches_with_rare_labels(term), labelled(seed, size), parts)
    assert wrong == []


def test_a_branch_of_some_micro_batches_that_adds_nothing_else_is_split():
    wrong, split_calls = differing(with_a_term_for_batches_with_rare_labels(sum_of_the_rare), labelled(0, 12), 3)
    assert (wrong, split_calls) == ([], 16)


@pytest.mark.parametrize(("term", "splits"), [(sum_of_the_rare, True), (over_all, False)])
def test_two_micro_batches_that_do_not_fit_together_are_checked_in_smaller_ones(term, splits):
    """Four rows fit, and a check of two micro-batches of four does not."""
    forward, batches = with_a_term_for_batches_with_rare_labels(term), labelled(0, 12)
    if splits:
        assert differing(forward, batches, "auto", most_rows=4) == ([], 16)
        return
    with pytest.raises(runtime.DoesNotFitError, match="cannot be split"):
        differing(forward, batches, "auto", most_rows=4)


def test_two_samples_that_do_not_fit_together_are_not_split_unchecked():
    forward = with_a_term_for_batches_with_rare_labels(sum_of_the_rare)
    with pytest.raises(runtime.DoesNotFitError, match="to check a branch that only one of them takes, do not fit"):
        differing(forward, [(x, y % 3 + 3 * (y == 3)) for x, y in labelled(0, 12)], "auto", most_rows=2)


class SyncBatchNorm(torch.autograd.Function):
    """As torch computes it over processes in training; a check computes what a single process would."""

    @staticmethod
    def forward(ctx: Any, samples: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return samples * weight + bias


def test_a_layer_that_is_computed_in_another_way_is_no_other_branch():
    samples, weight, bias = nn.Linear(3, 3)(torch.ones(2, 3)), *nn.BatchNorm1d(3).parameters()
    one = SyncBatchNorm.apply(samples, weight, bias).sum()
    other = F.batch_norm(samples, torch.zeros(3), torch.ones(3), weight, bias).sum()
    assert edges(one) == edges(other)


def test_a_loss_that_is_a_constant_in_some_micro_batches_only_is_seen():
    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return over_all(model, samples, labels) if (labels == 3).any() else samples.new_zeros(())

        return forward

    batches = [(samples, labels) for samples, labels in labelled(1, 12) if (labels == 3).any()]
    wrong, _ = differing(make, batches, 3)
    assert wrong == []


def boxed(least: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    numbers = [torch.randint(least, 6, (13,), generator=generator).tolist() for _ in range(16)]
    return [
        (
            torch.randn(13, 8, generator=generator).double(),
            [torch.randn(number, 4, generator=generator).double() for number in of_batch],
        )
        for of_batch in numbers
    ]


def a_loss_for_each_box(model: nn.ModuleDict, samples: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
    loss = samples.new_zeros(())
    for sample, of_sample in zip(samples, boxes, strict=True):
        for box in of_sample:
            loss = loss + (model["head"](sample) - box).pow(2).sum()
    return loss / len(samples)


def a_loss_for_each_image(model: nn.ModuleDict, samples: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
    losses = []
    for sample, of_sample in zip(samples, boxes, strict=True):
        hidden = model["layers"][0](sample)
        if not len(of_sample):
            losses.append(hidden.sigmoid().sum())
            continue
        losses.append((model["head"](hidden) - of_sample).abs().mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("loss", [a_loss_for_each_box, a_loss_for_each_image])
def test_lists_of_any_length_are_split_from_the_first_call_on(loss, least):
    wrong, split_calls = differing(lambda model: partial(loss, model), boxed(least), 4)
    assert (wrong, split_calls) == ([], 16)


def test_a_branch_of_some_micro_batches_is_seen_beside_lists_of_any_length():
    def make(model: nn.ModuleDict) -> Callable[..., torch.Tensor]:
        def forward(samples: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
            loss = a_loss_for_each_box(model, samples, boxes)
            if any(len(of_sample) == 1 for of_sample in boxes):
                loss = loss + model["layers"][0](samples).sigmoid().mean()
            return loss

        return forward

    wrong, _ = differing(make, boxed(1), 4)
    assert wrong == []


def test_chunks_of_as_many_samples_as_memory_allows_are_split():
    """The last batch has another number of chunks, and its micro-batches have it too."""

    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            chunks = zip(samples.split(8), labels.split(8), strict=True)
            losses = [F.cross_entropy(model["head"](x), y, reduction="sum") for x, y in chunks]
            return torch.stack(losses).sum() / len(samples)

        return forward

    batches = labelled(3, 34)
    batches[5], batches[11] = labelled(4, 13)[:2]
    wrong, split_calls = differing(make, batches, 2)
    assert (wrong, split_calls) == ([], 16)


def rarely_labelled(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rare = [torch.rand(10, generator=generator) < 0.15 for _ in range(16)]
    return [
        (samples, labels % 3 + where * 3) for (samples, labels), where in zip(labelled(seed, 10), rare, strict=True)
    ]


@pytest.mark.parametrize("seed", range(12, 22))
def test_a_mean_over_the_rare_that_is_a_sum_on_other_rows_is_no_mean_over_samples(seed):
    """On six rows with two rare ones, one in each part, it is a mean; on four with one, it is a sum."""

    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            output, rare = model["head"](samples), labels >= 3
            return F.mse_loss(output[rare], samples[rare, :4]) if rare.any() else output.sum() * 0.0

        return forward

    torch.manual_seed(seed)
    wrong, _ = differing(make, rarely_labelled(seed), 2)
    assert wrong == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_loss_that_is_a_plain_number_in_some_micro_batches_runs_whole(first):
    """`total = 0`, to which samples without boxes add nothing."""

    def loss(model: nn.ModuleDict, samples: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        total = 0
        for sample, of_sample in zip(samples, boxes, strict=True):
            if len(of_sample):
                total = total + (model["head"](sample) - of_sample).abs().mean()
        return total / len(samples)

    boxes = [(x, [of if n % 3 == first else of[:0] for n, of in enumerate(of_batch)]) for x, of_batch in boxed(1)]
    wrong, _ = differing(lambda model: partial(loss, model), boxes, 6)
    assert wrong == []


def test_a_loss_that_is_a_plain_number_for_the_whole_batch_is_refused():
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)
    with pytest.raises(ValueError, match="returned int, expected the loss as a tensor"):
        memory.forward_backward(lambda samples: 0, torch.randn(8, 2))


def no_number(total: Any) -> Any:
    return total if isinstance(total, torch.Tensor) else None


@pytest.mark.parametrize("returned", [lambda total: {"loss": total}, lambda total: ((total, 1), 2), no_number])
def test_parts_whose_result_holds_no_tensor_for_a_loss_leave_the_batch_whole(returned, caplog):
    """As of a model that returns its loss under a name; samples without boxes add nothing to it."""
    torch.manual_seed(0)
    head = nn.Linear(8, 4).double()

    def forward(samples: torch.Tensor, boxes: list[torch.Tensor]) -> Any:
        total = 0
        for sample, of_sample in zip(samples, boxes, strict=True):
            if len(of_sample):
                total = total + (head(sample) - of_sample).abs().mean()
        return returned(total)

    memory = runtime.preset("16gb", precision="fp32", micro_batches=6)
    without = ({9, 10}, {3, 4}, {5, 6}, set(range(13)) - {0, 4, 8}, set(range(13)) - {1, 12})
    for (samples, of_batch), empty in zip(boxed(1), without, strict=False):
        boxes = [box[:0] if n in empty else box for n, box in enumerate(of_batch)]
        memory.forward_backward(forward, samples, boxes)
        split, head.weight.grad = head.weight.grad, None
        sum((head(x) - of).abs().mean() for x, of in zip(samples, boxes, strict=True) if len(of)).backward()
        torch.testing.assert_close(split, head.weight.grad, rtol=1e-12, atol=1e-14)
        head.weight.grad = None
    assert sum("its loss is a plain number, or none" in line for line in caplog.messages) == 1
    assert not any("depend on each other" in line for line in caplog.messages)


def test_branches_that_were_checked_do_not_put_off_the_next_look():
    """At the ninth call a new branch gives 0, which leaves everything open until the tenth."""

    def forwards(model: nn.ModuleDict) -> Iterator[Forward]:
        for layers, share in zip([1, 2, 3, 4, 5, 6, 6, 6, 7, *[6] * 7], [*[1.0] * 8, 0.0, *[1.0] * 7], strict=True):

            def forward(
                samples: torch.Tensor,
                labels: torch.Tensor,
                times: torch.Tensor = torch.empty(layers),  # noqa: B008
                share: torch.Tensor = torch.tensor(share),  # noqa: B008
            ) -> torch.Tensor:
                for _ in times:
                    samples = model["layers"][0](samples).tanh()
                return F.cross_entropy(model["head"](samples), labels) * share

            yield forward

    whole, _ = trained(None, forwards)
    split, split_calls = trained(3, forwards)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert split_calls == 15


def test_a_branch_that_is_a_mean_where_others_are_sums_is_seen():
    """Each micro-batch of the fifth batch has one of the rare samples, which are none of the few that a check takes."""

    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            of_each = model["head"](samples).pow(2).sum(1)
            if (samples[:, 0] == 3).any():
                return of_each.mean() + model["layers"][0](samples).pow(2).mean()
            return of_each.sum()

        return forward

    batches = labelled(5, 24)
    rare = batches[4][0]
    rare[[5, 13], 1] += rare[[5, 13], 0] - 3
    rare[[5, 13], 0] = 3
    wrong, _ = differing(make, batches, 2)
    assert wrong == []


def test_a_mean_over_what_a_mask_leaves_is_split_though_some_micro_batches_take_a_branch():
    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            of_each = model["head"](samples).pow(2).sum(1)
            if (labels == 3).any():
                of_each = of_each + model["layers"][0](samples).pow(2).sum(1) * (labels == 3)
            return (of_each * (labels != 0)).sum() / (labels != 0).sum()

        return forward

    wrong, split_calls = differing(make, labelled(0, 12), 3)
    assert (wrong, split_calls) == ([], 16)


def test_a_window_that_is_averaged_in_another_way_ends_in_an_error_where_its_batch_does_not_fit():
    """The first batch is a sum over samples, the second a mean."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()

    def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_each = model(samples).pow(2).sum(1)
        return of_each.mean() if (labels == 3).any() else of_each.sum()

    memory = runtime.preset("16gb", precision="fp32", checkpointing="off", offloading="off")
    batches = [
        (samples, torch.full_like(labels, label))
        for (samples, labels), label in zip(labelled(0, 12)[:2], (0, 3), strict=True)
    ]
    with pytest.raises(runtime.DoesNotFitError, match="its window is averaged in another way"):
        for batch in memory.accumulate(batches, 2):
            memory.forward_backward(out_of_memory(forward, 4), *batch)


def with_a_term_by_samples(model: nn.Module) -> Forward:
    def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = model(samples)
        return F.cross_entropy(output, labels) + (output.pow(2).sum(1) * (labels == 3)).mean()

    return forward


@pytest.mark.parametrize("parts", ["auto", 3])
def test_a_window_by_samples_goes_on_with_a_batch_that_is_seen_to_divide_by_targets(parts):
    """The second batch has no rare label; each of its samples has one target, so both are one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    forward = with_a_term_by_samples(model)
    memory = runtime.preset("16gb", precision="fp32", micro_batches=parts, checkpointing="off", offloading="off")
    (samples, labels), (others, _) = labelled(0, 12)[:2]
    batches = [(samples, labels), (others, labels % 3)]
    for batch in memory.accumulate(batches, 2):
        memory.forward_backward(out_of_memory(forward, 4), *batch)
    split, model.weight.grad = model.weight.grad, None
    forward(*(torch.cat(both) for both in zip(*batches, strict=True))).backward()
    torch.testing.assert_close(split, model.weight.grad, rtol=1e-12, atol=1e-14)


def test_a_window_by_samples_is_not_cut_where_targets_are_not_in_proportion():
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    forward = with_a_term_by_samples(model)
    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    (samples, labels), (others, _) = labelled(0, 12)[:2]
    batches = [(samples, labels), (others, torch.where(labels == 3, -100, labels))]
    for batch in memory.accumulate(batches, 2):
        memory.forward_backward(forward, *batch)
    split, model.weight.grad = model.weight.grad, None
    (sum(forward(*batch) for batch in batches) / 2).backward()
    torch.testing.assert_close(split, model.weight.grad, rtol=1e-12, atol=1e-14)


def test_branches_with_graphs_of_one_size_are_told_apart():
    """A mean over the rare samples takes as many steps as a sum that adds nothing, to reach all parameters."""

    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss, rare = F.cross_entropy(model["head"](samples), labels), samples[:, 0] == 3
            if rare.any():
                return loss + model["layers"][0](samples[rare]).pow(2).mean()
            return loss + model["layers"][0](samples).sum() * 0

        return forward

    batches = labelled(5, 24)
    for samples, _ in batches[4:]:
        samples[5, 1] += samples[5, 0] - 3
        samples[5, 0] = 3
    wrong, _ = differing(make, batches, 2)
    assert wrong == []


def one_of_two_layers(model: nn.ModuleDict) -> Forward:
    def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        layer = model["layers"][bool((samples[:, 0] > 1.5).any())]
        return F.cross_entropy(model["head"](layer(samples).tanh()), labels)

    return forward


def one_of_two_layers_for_each_sample(model: nn.ModuleDict) -> Forward:
    def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        layer = model["layers"][bool((labels == 3).any())]
        outputs = [layer(sample).tanh() if sample[0] > 0 else layer(sample) for sample in samples]
        return F.cross_entropy(model["head"](torch.stack(outputs)), labels)

    return forward


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("forward", [one_of_two_layers, one_of_two_layers_for_each_sample])
def test_networks_of_one_kind_of_which_rare_samples_choose_one_are_told_apart(forward, seed):
    """Their graphs have the same nodes, and come to other parameters."""
    batches = [(samples, labels * (samples[:, 1] > 0.5)) for samples, labels in labelled(seed, 12)]
    wrong, _ = differing(forward, batches, 3)
    assert wrong == []


def test_layers_that_run_for_some_samples_only_are_split():
    def make(model: nn.ModuleDict) -> Forward:
        def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            output = torch.zeros_like(samples)
            for number, layer in enumerate(model["layers"]):
                chosen = ((samples[:, 0] > 1) == bool(number)).nonzero()[:, 0]
                if len(chosen):
                    output = output.index_put((chosen,), layer(samples[chosen]))
            return F.cross_entropy(model["head"](output), labels)

        return forward

    assert differing(make, labelled(0, 12), 4) == ([], 16)


def refusals(ways: Ways, *losses: torch.Tensor) -> list[str]:
    """Why a call of these micro-batches was checked, until it went through."""
    reasons = []
    while True:
        ways.begin()
        first = next(filter(None, (ways.refuses(loss, len(edges(loss)), (), 1) for loss in losses)), None)
        if first is None:
            return reasons
        ways.admit()
        reasons.append(first)


def test_branches_seen_together_count_no_more_once_they_are_told_apart_otherwise():
    x = torch.ones(3, requires_grad=True)
    chains = [x.sin().sum(), x.sin().cos().sum(), x.sin().exp().cos().sum(), x.sin().exp().cos().tan().sum()]
    chains.append(x.sin().exp().cos().tan().tanh().sum())
    ways = Ways()
    ways.learn(Graphs(edges(chains[0]), frozenset()))
    for pair in itertools.islice(itertools.combinations(chains, 2), 8):
        assert refusals(ways, *pair)
    ways.learn(Graphs(edges(chains[0]), frozenset({("TanBackward0", "TanhBackward0")})))
    one, other = x.relu().sum(), x.abs().sum()
    assert refusals(ways, one) == refusals(ways, other) == ["it takes a branch that no check has seen yet"]
    assert refusals(ways, one, other) == ["some of its micro-batches take a branch that others do not"]
    assert not refusals(ways, one, other)
