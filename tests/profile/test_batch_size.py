"""The search for the largest batch that fits: right for every limit, with few runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data

from oomfix.profile.batch_size import Trial, find_largest, largest_fitting
from oomfix.profile.command import _search
from oomfix.profile.loaders import _samples
from oomfix.profile.process import COUPLED
from oomfix.profile.text import batch_size_lines

MIB = 2**20


def card(capacity, fixed=500 * MIB, per_sample=40 * MIB, told=True):
    tried = []

    def attempt(size):
        tried.append(size)
        needs = fixed + size * per_sample
        fits = needs <= capacity
        return Trial(size, fits, needs if told or fits else None, capacity)

    return attempt, tried


@settings(max_examples=200, deadline=None)
@given(limit=st.integers(0, 3000), start=st.integers(1, 128), told=st.booleans())
def test_the_answer_fits_and_a_sixteenth_more_does_not(limit, start, told):
    attempt, tried = card(500 * MIB + limit * 40 * MIB, told=told)
    found = largest_fitting(find_largest(attempt, start))
    assert found is None if limit == 0 else found is not None and found <= limit
    if found is not None and found < 1024 * start:
        assert found + max(1, found // 16) >= min(limit, 1024 * start - 1)
        assert any(found < size <= found + max(1, found // 16) for size in tried) or found == limit
    assert len(tried) == len(set(tried)) <= 14


def test_a_limit_far_from_the_start_takes_few_runs():
    attempt, tried = card(14 * 1024 * MIB)
    assert largest_fitting(find_largest(attempt, 16)) == 345
    assert len(tried) <= 5


def test_small_samples_on_a_large_card_are_no_end_of_the_search():
    attempt, tried = card(80 * 1024 * MIB, per_sample=20 * MIB)
    found = largest_fitting(find_largest(attempt, 8))
    assert found is not None and found <= 4071 < found * 17 / 16
    assert len(tried) <= 8


def test_the_samples_of_the_data_set_are_the_most():
    attempt, tried = card(14 * 1024 * MIB)
    assert largest_fitting(find_largest(attempt, 16, most=100)) == 100
    assert max(tried) == 100


def test_a_start_that_does_not_fit_leads_to_less():
    attempt, _ = card(700 * MIB)
    assert largest_fitting(find_largest(attempt, 64)) == 5


def test_where_not_one_sample_fits_none_is_found():
    attempt, tried = card(100 * MIB)
    assert largest_fitting(find_largest(attempt, 8)) is None
    assert 1 in tried


def test_a_start_below_one_is_refused():
    with pytest.raises(ValueError, match=r"start: got 0, expected at least 1 sample"):
        find_largest(card(MIB)[0], 0)


def test_batches_that_the_runtime_would_split_count_as_too_large():
    given = []

    def run(args, options):
        given.append(options)
        size = int(options[-1]) if "--batch-size" in options else 64
        # as `oomfix.profile.run` answers for a loop of the runtime that fits 100 samples whole, and any if split
        fits = size <= 100 or "--coupled" not in options
        return {
            "batch_size": 64, "samples": 4000, "error": None if fits else "DoesNotFitError", "assumptions": [COUPLED],
            "out_of_memory": None if fits else "CUDA out of memory.", "peak_reserved_bytes": size * MIB,
            "budget_bytes": 100 * MIB,
        }  # fmt: skip

    found = _search(run, [])
    assert all("--coupled" in options for options in given)
    assert 94 <= found["largest_batch_size"] <= 100
    assert batch_size_lines(found)[-1] == "  in one piece, that is: oomfix.runtime splits larger ones"
    assert len(batch_size_lines({**found, "assumptions": []})) == 1


class Endless(data.IterableDataset):
    def __iter__(self):
        return iter(())


def test_the_samples_of_a_pass_are_those_that_the_sampler_draws():
    rows = data.TensorDataset(torch.zeros(640, 1))
    half = data.DistributedSampler(rows, num_replicas=2, rank=0)
    assert _samples(data.DataLoader(rows, batch_size=8)) == 640
    assert _samples(data.DataLoader(rows, batch_size=8, sampler=half)) == 320
    assert _samples(data.DataLoader(Endless(), batch_size=8)) is None
