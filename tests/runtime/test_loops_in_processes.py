"""Training loops of every kind on two processes end with the weights of plain torch, under DDP and under FSDP2."""

import pytest
import torch.distributed as dist

from tests.runtime import torchrun
from tests.torch_versions import needs_fully_shard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
KINDS = ["ddp", pytest.param("fsdp2", marks=needs_fully_shard)]


@pytest.fixture(scope="module")
def found():
    """One run of all cases, since starting two processes takes most of the time."""
    return torchrun.cases("tests/runtime/loops_in_processes.py")


@pytest.mark.parametrize("micro_batch", [1, 3, 4], ids=["first", "third", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_on_one_process_in_any_of_four_micro_batches(found, kind, micro_batch):
    """Under DDP one process starts again alone, under FSDP2 both do."""
    results = [result[f"{kind} {micro_batch}"] for result in found["fails in one"]]
    assert all(result["error"] < 1e-12 for result in results)
    assert [result["retries"] for result in results] == ([0, 1] if kind == "ddp" else [1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_frozen_parameters(found, kind):
    assert all(result[kind]["error"] < 1e-12 for result in found["frozen"])


@pytest.mark.parametrize("kind", KINDS)
def test_two_models_that_train_against_each_other(found, kind):
    for result in found["gan"]:
        assert result[kind]["split"] < 1e-12
        assert result[kind]["in place"] == 0.0


@needs_fully_shard
@pytest.mark.parametrize("case", ["split", "failed"])
def test_shards_that_wait_on_the_host(found, case):
    assert all(result[f"on the host, {case}"]["error"] < 1e-12 for result in found["policies"])


@needs_fully_shard
def test_the_mixed_precision_of_fsdp_is_left_to_it(found):
    """bf16 keeps 8 bits, and weights here are below 1: whole batches are bitwise those of plain FSDP2."""
    for result in found["policies"]:
        assert result["half, whole"]["error"] == 0.0
        assert 0.0 < result["half, split"]["error"] < 1e-3
        assert 0.0 < result["half, failed"]["error"] < 1e-3


def test_a_run_goes_on_from_checkpoints_of_the_first_process(found):
    for result in found["checkpoints"]:
        assert result["error"] == 0.0
        assert result["same"]


def test_a_process_climbs_the_ladder_alone(found):
    assert all(result["error"] < 1e-12 for result in found["climbs alone"])
    assert [result["techniques"] for result in found["climbs alone"]] == [[], ["checkpointing 3 blocks"]]


@needs_fully_shard
@pytest.mark.parametrize(
    ("technique", "prepared", "told"),
    [
        ("chunked loss", "after", "cross entropy in chunks"),
        ("checkpointing", "before", "checkpointing 3 blocks"),
        ("checkpointing", "after", "checkpointing 3 blocks"),
        ("offloading", "after", "activations in host memory"),
        ("half precision", "after", "micro-batches"),
    ],
)
def test_techniques_train_shards_as_plain_fsdp_does(found, technique, prepared, told):
    """In more micro-batches on one process than the other asks for; prepared before and after `fully_shard`."""
    for result in found["techniques of shards"]:
        of_technique = result[f"{technique} {prepared}"]
        # bf16 keeps 8 bits
        half = technique == "half precision"
        assert of_technique["error"] < (1e-3 if half else 1e-12)
        assert not half or of_technique["error"] > 1e-6
        assert told in of_technique["told"]


@needs_fully_shard
@pytest.mark.parametrize("who", ["one", "both"])
def test_processes_with_shards_climb_the_ladder_together(found, who):
    for result in found["shards climb"]:
        assert result[who]["error"] < 1e-12
        assert result[who]["techniques"] == ["checkpointing 3 blocks"]
        assert result[who]["retries"] == 1
