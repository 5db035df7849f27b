"""FSDP2: processes agree on micro-batches before, start again together, and train as a replicated model does."""

import pytest
import torch

from oomfix import runtime
from tests.runtime import in_step, torchrun
from tests.runtime.data_parallel import Trouble, batches, memory_of
from tests.torch_versions import needs_fully_shard

pytestmark = needs_fully_shard


@pytest.fixture(scope="module")
def found():
    """One run of all cases, since starting two processes takes most of the time."""
    return torchrun.cases("tests/runtime/in_step.py", *in_step.OF_SHARDS)


def worst(results):
    return max(result["error"] for result in results)


def test_a_sharded_model_trains_bitwise_as_a_replicated_one(found):
    assert worst(found["shards"]) == 0.0


@pytest.mark.parametrize("case", ["split", "clipped", "ragged", "in windows"])
def test_a_sharded_model_trains_in_micro_batches_as_a_replicated_one_whole(found, case):
    assert worst(found[f"shards {case}"]) < 1e-12


def test_a_branch_that_one_process_takes_is_checked_by_all(found):
    results = found["shards in branches"]
    assert worst(results) < 1e-12
    # the first two steps, and the one whose turn to be checked comes between the mixed ones
    assert [result["split"] for result in results] == [3, 3]


@pytest.mark.parametrize("form", ["two replicas", "one replica", "kept after forward", "compiled"])
def test_other_forms_of_shards_train_in_micro_batches_as_a_replicated_model_whole(found, form):
    for result in found["shards in other forms"]:
        assert result["errors"][form] < 1e-12
        assert result["retries"][form] == (0 if form == "compiled" else 2)


def test_the_processes_take_the_largest_number_of_micro_batches_that_one_asks_for(found):
    assert [result["said"] for result in found["shards split"]] == [None, None]


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_on_one_process_or_all_starts_all_again_in_smaller_pieces(found, where, who):
    results = found[f"out of memory in {where} of {who}"]
    assert worst(results) < 1e-12
    assert results[0]["retries"] == results[1]["retries"] > 0


def test_uneven_windows_of_a_sharded_model_are_refused(found):
    for result in found["shards in uneven windows"]:
        assert "differ in size" in result["said"] and "FSDP2" in result["said"]


@pytest.mark.parametrize("case", ["whole", "split", "out of memory", "replicas of shards"])
def test_gradients_whose_exchange_a_script_puts_off_are_complete_at_its_step(found, case):
    for result in found["shards put off"]:
        assert result["errors"][case] < 1e-12


def test_gradients_that_a_plain_backward_has_not_exchanged_are_not_lost_silently(found):
    for result in found["shards left waiting"]:
        assert "set_requires_gradient_sync(False)" in result["said"]


def test_a_window_of_plain_backwards_is_right_or_refused(found):
    """Which gradients went into shards shows in no graph, so those of batches of other sizes cannot be corrected."""
    assert worst(found["shards after plain backwards"]) < 1e-12
    for result in found["shards after plain backwards"]:
        assert "differ in size" in result["said"] and "memory.forward_backward" in result["said"]


def test_an_overflow_on_one_process_is_a_step_left_out_on_all(found):
    for result in found["shards overflow"]:
        assert (result["finite"], result["skipped"], result["scale"]) == (True, 1, 32768.0)


def test_evaluations_of_a_sharded_model_are_cut_alike(found):
    assert worst(found["shards evaluated"]) == 0.0
    assert [result["largest"] for result in found["shards evaluated"]] == [3, 3]


def test_a_sample_that_does_not_fit_ends_the_call_of_all(found):
    for result in found["shards fail together"]:
        assert "1 sample(s) at a time do not fit" in result["said"]


def test_a_batch_that_another_process_keeps_from_being_cut_says_so(found):
    cut, single = (result["said"] for result in found["shards of a single sample"])
    assert "the batch cannot be split, because another process could not go on like this" in cut
    assert "split='always'" not in cut
    assert "the batch cannot be split, because it is a single sample" in single
    assert "It was another process that ran out of memory" in single


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_process_with_a_sharded_model_trains_bitwise_as_without(group_of_one, monkeypatch, where):
    monkeypatch.setattr(Trouble, "where", where)
    monkeypatch.setattr(Trouble, "limit", 4)
    models = []
    for make in (in_step.sharded, in_step.network):
        memory = memory_of()
        models.append(make())
        in_step.ours(models[-1], batches(3), memory)
        assert memory.report().retries > 0
    shards, alone = (list(model.parameters()) for model in models)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(shards, alone, strict=True))


def test_chunks_of_a_sharded_model_are_refused_by_name(group_of_one):
    """It fails in their backward otherwise, with torch's words about tensors and DTensors that are mixed."""
    model, x = in_step.sharded(), torch.randn(6, 6, dtype=torch.float64)
    runtime.encode_in_chunks(model, x, rows=6).square().mean().backward()
    with pytest.raises(RuntimeError, match="FSDP2"):
        runtime.encode_in_chunks(model, x, rows=3)
