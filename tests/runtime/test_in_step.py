"""SyncBatchNorm and losses that gather: processes agree before, start again together, and fail together."""

import pytest
import torch.distributed as dist

from tests.runtime import in_step, torchrun
from tests.torch_versions import needs_torch

SCRIPT = "tests/runtime/in_step.py"
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def found():
    """One run of all cases, since starting two processes takes most of the time."""
    return torchrun.cases(SCRIPT, *in_step.CASES)


def worst(results):
    return max(result["error"] for result in results)


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


@needs_torch("2.13", "collectives of gloo that end in their own time, not after the 30 minutes of their group")
@pytest.mark.parametrize("case", ["norms apart", "replicas of shards apart"])
def test_a_process_that_nobody_can_wait_for_any_more_ends_all_in_time(case):
    """One runs out of memory while the other waits for it inside of the forward: both processes are over soon."""
    status, printed, said = torchrun.forked(SCRIPT, case, limit_s=60)
    assert status != 0
    assert "ran out of memory at a point where others wait" in printed, said[-4000:]
