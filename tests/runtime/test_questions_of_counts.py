"""Whether a count of the batch is 0, or all there is, its parts tell, as by `any` and `all`; other numbers not."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from oomfix import runtime

ROWS, CALLS = 12, 8

ANY = [
    lambda marks: marks.sum() > 0,
    lambda marks: marks.sum() >= 1,
    lambda marks: not marks.sum() <= 0,
    lambda marks: not marks.sum() < 1,
    lambda marks: marks.double().sum() > 0,
    lambda marks: torch.count_nonzero(marks) > 0,
]
ALL = [
    lambda marks: marks.sum() == marks.numel(),
    lambda marks: (marks.sum() != marks.numel()).logical_not(),
    lambda marks: not marks.sum() < marks.numel(),
    lambda marks: torch.count_nonzero(marks) == marks.numel(),
]


def split_calls(loss, share: float, micro_batches: int = 3) -> int:
    """How many calls ran in parts of a training whose losses and gradients are those of plain torch."""
    runtime.reset()
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(6, 4), "other": nn.Linear(6, 4)}).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(CALLS):
        batch = torch.randn(ROWS, 6, dtype=torch.float64), torch.randint(0, 4, (ROWS,)), torch.rand(ROWS) < share
        whole = loss(model, *batch)
        expected = torch.autograd.grad(whole, list(model.parameters()), allow_unused=True, materialize_grads=True)
        found = memory.forward_backward(lambda *batch: loss(model, *batch), *batch)
        gradients = [0 * weight if weight.grad is None else weight.grad for weight in model.parameters()]
        torch.testing.assert_close([found, *gradients], [whole.detach(), *expected], rtol=1e-11, atol=1e-13)
        memory.step(optimizer)
    (known,) = memory._forwards
    return known.split_calls


def beside(model, x, labels, extra):
    return F.cross_entropy(model["one"](x), labels) + extra / len(x)


def for_batches_that_have_some(ask):
    def loss(model, x, labels, marks):
        extra = (model["other"](x).square().sum(1) * marks).sum() if ask(marks) else 0
        return beside(model, x, labels, extra)

    return split_calls(loss, 0.2)


def left_out_where_it_is_full(ask):
    def loss(model, x, labels, marks):
        other = model["other"](x).square().sum(1)
        return beside(model, x, labels, other.sum() if ask(marks) else (other * marks).sum())

    return split_calls(loss, 0.8)


@pytest.mark.parametrize("ask", ANY)
def test_a_count_that_is_above_0_is_taken_as_any_is(ask):
    assert for_batches_that_have_some(ask) == for_batches_that_have_some(torch.any) > CALLS / 2


@pytest.mark.parametrize("ask", ALL)
def test_a_count_that_is_all_there_is_is_taken_as_all_is(ask):
    assert left_out_where_it_is_full(ask) == left_out_where_it_is_full(torch.all) > CALLS / 2


@pytest.mark.parametrize("ask", [*ANY, *ALL])
@pytest.mark.parametrize("share", [0.2, 0.8])
def test_a_term_that_is_there_for_every_sample_if_the_batch_has_something_is_never_wrong(ask, share):
    def loss(model, x, labels, marks):
        return beside(model, x, labels, model["other"](x).square().sum() if ask(marks) else 0)

    split_calls(loss, share)


def of_classes(marks, labels):
    return (torch.bincount(labels, minlength=4) - 2.5).sum() > 0


def less_some(marks, labels):
    count = marks.sum()
    count -= 5
    return count > 0


def twice(marks, labels):
    return (marks.sum() - 5).sum() > 0


@pytest.mark.parametrize("ask", [of_classes, less_some, twice])
def test_a_sum_that_is_not_over_samples_is_never_taken_for_a_count(ask):
    def loss(model, x, labels, marks):
        return beside(model, x, labels, model["other"](x).square().sum() if ask(marks, labels) else 0)

    assert split_calls(loss, 0.5) == 0


def test_a_decoder_of_transformers_is_split_with_and_without_padding():
    """Its attention asks by a count whether a mask is full."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    for padded in (True, False, True):
        ids = torch.randint(1, 37, (9, 7))
        lengths = torch.randint(3, 8, (9, 1)) if padded else torch.full((9, 1), 7)
        mask = (torch.arange(7) < lengths).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
        expected = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
        memory.forward_backward(lambda **batch: model(**batch).loss, **batch)
        # its normalisation and its rotary embeddings are computed in fp32
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(gradients, list(expected), rtol=1e-4, atol=1e-6)
        model.zero_grad()
    (known,) = memory._forwards
    assert known.split_calls == 3
