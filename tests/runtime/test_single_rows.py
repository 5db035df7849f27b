"""Forwards that fail, or return something else, on a batch of one sample: `squeeze()` takes its only dimension away."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.verification.verify import check


class Scores(nn.Module):
    """One score for each sample, in a tensor of no dimension for a single one."""

    def __init__(self, most_rows=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.most_rows = most_rows
        self.sizes = []

    def forward(self, x):
        if self.most_rows is not None and torch.is_grad_enabled():
            self.sizes.append(len(x))
            if len(x) > self.most_rows:
                raise OutOfMemoryError("CUDA out of memory.")
        return self.layers(x).squeeze()


def rows(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator).double(), torch.rand(count, generator=generator).double().round()


def loss_alone(model):
    return lambda x, y: F.binary_cross_entropy_with_logits(model(x), y)


def loss_and_scores(model):
    def forward(x, y):
        out = model(x)
        return F.mse_loss(out, y.view_as(out)), out

    return forward


FORWARDS = pytest.mark.parametrize("make", [loss_alone, loss_and_scores])


def check_like_plain(memory, make, model, batch, relative_error):
    plain = Scores()
    plain.load_state_dict(model.state_dict())
    model.zero_grad()
    result = memory.forward_backward(make(model), *batch)
    expected = make(plain)(*batch)
    (expected[0] if isinstance(expected, tuple) else expected).backward()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-15)
    assert relative_error(model, plain) < 1e-12


@FORWARDS
@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 12])
def test_parts_of_a_check_that_are_no_single_rows_allow_the_split(make, size):
    model = Scores()
    for most_rows in range(1, (size + 1) // 2 + 1):
        verdict = check(make(model), Batch(rows(size), {}), list(model.modules()), most_rows)
        assert verdict.rule is not None, (most_rows, verdict.reason)


@FORWARDS
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_they_are_split_into_parts_of_two_rows_and_more(make, micro_batches, relative_error):
    memory = runtime.preset("16gb", micro_batches=micro_batches)
    model = Scores(most_rows=9)
    for size in (8, 5, 16, 17, 4):
        for call in range(3):
            model.sizes.clear()
            check_like_plain(memory, make, model, rows(size, seed=call), relative_error)
            assert min(model.sizes) >= 2


@FORWARDS
@pytest.mark.parametrize(
    ("size", "most_rows", "expected"), [(33, 9, [9, 8, 8, 8]), (9, 3, [3, 3, 3]), (7, 3, [3, 2, 2])]
)
def test_a_batch_that_leaves_one_row_over_is_cut_evenly(make, size, most_rows, expected, relative_error):
    memory = runtime.preset("16gb")
    model = Scores(most_rows)
    for call in range(5):
        check_like_plain(memory, make, model, rows(size, seed=call), relative_error)
    model.sizes.clear()
    check_like_plain(memory, make, model, rows(size), relative_error)
    assert model.sizes == expected


@FORWARDS
def test_where_only_single_rows_fit_it_is_said_that_nothing_can_be_cut_any_further(make):
    memory = runtime.preset("16gb", checkpointing="off")
    model = Scores(most_rows=1)
    with pytest.raises(runtime.DoesNotFitError, match=r"2 sample.*squeeze\(\)"):
        memory.forward_backward(make(model), *rows(16))
    assert all(parameter.grad is None for parameter in model.parameters())


@FORWARDS
def test_where_two_rows_fit_a_batch_of_an_odd_number_that_would_leave_one_takes_three(make, relative_error):
    memory = runtime.preset("16gb")
    model = Scores(most_rows=2)
    check_like_plain(memory, make, model, rows(8), relative_error)
    with pytest.raises(runtime.DoesNotFitError):
        memory.forward_backward(make(model), *rows(5))


def test_one_that_takes_single_rows_is_cut_into_these(relative_error):
    memory = runtime.preset("16gb")
    model, plain = Scores(most_rows=1), Scores()
    batch = rows(16)
    forward = lambda model: lambda x, y: (model(x).reshape(len(x)) - y).pow(2).mean()  # noqa: E731
    memory.forward_backward(forward(model), *batch)
    forward(plain)(*batch).backward()
    assert model.sizes[-16:] == [1] * 16
    assert relative_error(model, plain) < 1e-12


def test_what_fails_on_single_rows_is_evaluated_in_larger_parts():
    model = Scores()
    memory = runtime.preset("16gb")

    def predict(x):
        if len(x) > 6:
            raise OutOfMemoryError("CUDA out of memory.")
        return model(x)

    x, _ = rows(9)
    with torch.no_grad():
        torch.testing.assert_close(memory.evaluate(predict, x), copy.deepcopy(model)(x))
