"""FSDP2, SyncBatchNorm and losses that gather: processes agree before, start again together, and fail together."""

import pytest
import torch
import torch.distributed as dist

from tests.runtime import in_step, torchrun
from tests.runtime.data_parallel import Trouble, batches, memory_of

SCRIPT = "tests/runtime/in_step.py"
# bringing FSDP2 back after an error is what torch 2.13 has learned
pytestmark = pytest.mark.skipif(
    not dist.is_available() or torch.__version__ < "2.13", reason="torch without distributed, or before 2.13"
)


@pytest.fixture(scope="module")
def found():
    """One run of all cases, since starting two processes takes most of the time."""
    return torchrun.cases(SCRIPT)


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


def test_an_overflow_on_one_process_is_a_step_left_out_on_all(found):
    for result in found["shards overflow"]:
        assert (result["finite"], result["skipped"], result["scale"]) == (True, 1, 32768.0)


def test_evaluations_of_a_sharded_model_are_cut_alike(found):
    assert worst(found["shards evaluated"]) == 0.0
    assert [result["largest"] for result in found["shards evaluated"]] == [3, 3]


def test_a_sample_that_does_not_fit_ends_the_call_of_all(found):
    for result in found["shards fail together"]:
        assert "1 sample(s) at a time do not fit" in result["said"]


def test_layers_that_normalise_over_processes_see_micro_batches_of_all(found):
    assert worst(found["norms split"]) < 1e-12


def test_layers_that_normalise_over_processes_start_again_together(found):
    first, second = found["norms out of memory"]
    assert first["retries"] == second["retries"] > 0


def test_a_loss_that_gathers_from_all_processes_runs_whole(found):
    assert worst(found["gathered loss"]) == 0.0
    for result in found["gathered loss"]:
        assert "all_gather" in result["said"]
        assert "out of memory" in result["failed"] and "all_gather" in result["failed"]


def test_an_exchange_that_no_name_tells_of_is_noticed(found):
    assert all("exchanges tensors" in result["said"] for result in found["unforeseen"])


def test_other_kinds_of_parallelism_are_refused_by_name(found):
    for result in found["refused"]:
        deepspeed, fsdp1, tensor_parallel = result["said"]
        assert "DeepSpeed" in deepspeed
        assert "FSDP1" in fsdp1
        assert "tensor-parallel" in tensor_parallel


@pytest.mark.parametrize("case", ["norms apart", "replicas of shards apart"])
def test_a_process_that_nobody_can_wait_for_any_more_ends_all_in_time(case):
    """One runs out of memory while the other waits for it inside of the forward: both processes are over soon."""
    status, printed, said = torchrun.run(SCRIPT, case, limit_s=60)
    assert status != 0
    assert "ran out of memory at a point where others wait" in printed, said[-4000:]


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
