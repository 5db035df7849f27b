"""DistributedDataParallel: each process cuts its own batch, gradients are averaged once, and nobody waits in vain."""

import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix import runtime
from tests.runtime import torchrun
from tests.runtime.data_parallel import Trouble
from tests.torch_versions import needs_fully_shard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def found():
    """One run of all cases, since starting two processes takes most of the time."""
    return torchrun.cases("tests/runtime/data_parallel.py")


def worst(results):
    return max(result["error"] for result in results)


def test_whole_batches_train_bitwise_as_ddp_does(found):
    assert worst(found["whole"]) == 0.0


@pytest.mark.parametrize(
    "case", ["fixed splits", "noise", "ragged", "options of DDP", "preparing", "large", "sparse", "unseen"]
)
def test_splits_that_differ_between_processes_train_as_ddp_does(found, case):
    assert worst(found[case]) < 1e-12


@pytest.mark.parametrize(
    ("technique", "told"),
    [
        ("chunked loss", "cross entropy in chunks"),
        ("checkpointing", "checkpointing 3 blocks"),
        ("offloading", "activations in host memory"),
        ("half precision", "micro-batches"),
        ("compiled", "micro-batches"),
        ("compiled around", "micro-batches"),
    ],
)
def test_techniques_in_splits_that_differ_between_processes_train_as_ddp_does(found, technique, told):
    for result in found["techniques"]:
        of_technique = result["found"][technique]
        # bf16 keeps 8 bits
        half = technique == "half precision"
        assert of_technique["error"] < (1e-3 if half else 1e-12)
        assert not half or of_technique["error"] > 1e-6
        assert of_technique["spread"] == 0.0
        assert told in of_technique["told"]


@pytest.mark.parametrize("case", ["out of memory in forward", "out of memory in backward", "smaller card"])
def test_out_of_memory_on_one_process_splits_its_batch_alone(found, case):
    results = found[case]
    assert worst(results) < 1e-12
    assert results[0]["retries"] == 0 < results[1]["retries"]


def test_models_that_no_forward_shows_and_nothing_tells_apart_are_refused(found):
    assert all("give the model that it runs to memory.prepare(model)" in result["said"] for result in found["unseen"])


def test_a_branch_that_one_process_did_not_take_counts_as_zero_there(found):
    assert worst(found["branches"]) < 1e-12


def test_parameters_that_no_process_used_stay_without_a_gradient(found):
    for result in found["branches"]:
        assert result["same_none"]
        assert result["none"] == [False] * 6 + [True] * 2


def test_a_window_is_averaged_once_when_it_closes(found):
    assert worst(found["windows"]) < 1e-12
    for result in found["windows"]:
        assert result["apart"] > 1e-3
        assert result["averages"] == 3


def test_a_forward_is_the_same_inside_and_at_the_end_of_a_window(found):
    assert [result["calls"] for result in found["windows"]] == [[7], [7]]


def test_windows_with_two_losses_and_other_samples_on_each_process(found):
    assert worst(found["ragged windows"]) < 1e-12
    assert max(result["spread"] for result in found["ragged windows"]) == 0.0


def test_a_window_of_plain_backwards_is_averaged_by_ddp_and_refused_where_sizes_differ(found):
    assert worst(found["plain backward in windows"]) < 1e-12
    assert all("differ in size between processes" in result["said"] for result in found["plain backward in windows"])


def test_a_window_that_was_left_is_averaged_by_its_step(found):
    assert worst(found["window left"]) < 1e-12
    assert max(result["spread"] for result in found["window left"]) == 0.0


def test_no_sync_of_the_script_is_honoured(found):
    assert worst(found["no_sync"]) == 0.0
    assert found["no_sync"][0]["own"] > 1e-3


def test_buffers_are_those_of_the_first_process(found):
    for result in found["buffers"]:
        assert result["error"] == result["evaluation"] == result["apart"] == 0.0


def test_a_process_may_evaluate_the_inside_of_the_wrapper_alone(found):
    """As scripts do that validate on the first process; it waited for the others' buffers once."""
    assert worst(found["evaluated by one"]) == 0.0
    assert max(result["spread"] for result in found["evaluated by one"]) == 0.0


def test_an_evaluation_in_pieces_on_one_process_has_the_buffers_of_the_first(found):
    assert worst(found["evaluated in pieces"]) < 1e-12
    assert found["evaluated in pieces"][1]["apart"] > 1e-3
    assert [result["largest"] for result in found["evaluated in pieces"]] == [None, 3]


def test_buffers_inside_of_a_window_are_those_of_each_process(found):
    assert worst(found["buffers in windows"]) < 1e-12
    assert found["buffers in windows"][0]["apart"] > 1e-3


def test_several_models_in_one_forward(found):
    assert worst(found["several models"]) < 1e-12


def test_parts_that_begin_to_train_are_exchanged_from_then_on(found):
    assert worst(found["unfrozen in phases"]) < 1e-12
    assert max(result["spread"] for result in found["unfrozen in phases"]) == 0.0


def test_gradients_are_clipped_after_they_are_averaged(found):
    assert worst(found["clipping"]) < 1e-12


def test_an_overflow_on_one_process_is_a_step_left_out_on_all(found):
    for result in found["overflow"]:
        assert (result["spread"], result["skipped"]) == (0.0, 1)
    assert found["overflow"][0]["scale"] == found["overflow"][1]["scale"]


def test_a_sample_that_does_not_fit_on_one_process_ends_the_call_of_all(found):
    told, failed = found["nowhere to go"]
    assert "process 1 failed" in told["said"] and "out of memory" in told["said"]
    assert "1 sample(s) at a time do not fit" in failed["said"]
    for result in (told, failed):
        assert not result["left"]
        assert result["error"] < 1e-12


def test_a_mistake_in_the_forward_of_one_process_ends_the_call_of_all(found):
    assert [result["kind"] for result in found["mistake"]] == ["RuntimeError", "KeyError"]
    assert worst(found["mistake"]) < 1e-12


def test_what_is_inside_of_the_wrapper_is_averaged_too(found):
    """DDP by itself lets such replicas drift apart."""
    assert worst(found["inside of the wrapper"]) < 1e-12
    first, second = found["inside of the wrapper"]
    assert first["spread"] == second["spread"] == 0.0 < second["alone"]


def test_a_process_that_has_more_batches_than_another_is_told_so():
    first, second = torchrun.cases("tests/runtime/data_parallel.py", "fewer batches")["fewer batches"]
    assert first["said"] == ""
    assert "had fewer batches, and all must make the same calls" in second["said"]


def test_what_works_inside_of_the_backward_of_ddp_is_refused_by_name(found):
    for result in found["refused"]:
        hook, static = result["said"]
        assert "communication hook" in hook
        assert "static_graph=True" in static


def under_torchrun():
    return torchrun.run(*torchrun.TORCHRUN, "examples/distributed.py")


def of_shards():
    return torchrun.forked("tests/runtime/launched.py", "examples/distributed.py", "--shard")


@pytest.mark.parametrize(
    "run", [pytest.param(under_torchrun, marks=pytest.mark.slow), pytest.param(of_shards, marks=needs_fully_shard)]
)
def test_the_example_trains_two_processes_alike(run):
    status, printed, said = run()
    assert status == 0, said[-4000:]
    assert "batches in 2 micro-batches, 3 training calls" in printed
    for rank in (0, 1):
        losses = re.findall(rf"process {rank}: loss ([\d.]+)", printed)
        assert len(losses) == 3 and float(losses[-1]) < float(losses[0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(Trouble.apply(torch.relu(self.first(x))))


def train(wrap):
    torch.manual_seed(0)
    runtime.reset()
    memory, model = runtime.preset("16gb"), wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
        memory.forward_backward(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        memory.step(optimizer)
    return list(model.parameters())


@pytest.mark.parametrize("where", [None, "backward"])
def test_one_process_trains_bitwise_as_without_a_process_group(group_of_one, monkeypatch, where):
    monkeypatch.setattr(Trouble, "where", where)
    monkeypatch.setattr(Trouble, "limit", 2)
    alone = train(lambda model: model)
    assert all(map(torch.equal, train(DistributedDataParallel), alone))


def test_join_is_refused_by_name(group_of_one):
    """Its shadow collectives are those of DDP's own backward, so that the other processes would wait for ever."""
    memory, model = runtime.preset("16gb"), DistributedDataParallel(Net())
    with pytest.raises(RuntimeError, match=r"join\(\), for processes with different numbers of batches"), model.join():
        memory.forward_backward(lambda x: model(x).square().mean(), torch.randn(8, 6))


def test_what_was_learned_does_not_keep_a_replica_alive(group_of_one):
    memory, model = runtime.preset("16gb"), DistributedDataParallel(Net())
    memory.forward_backward(lambda x, model=model: model(x).square().mean(), torch.randn(8, 6))
    memory.step(torch.optim.SGD(model.parameters(), lr=0.1))
    alive = weakref.ref(model.module.first.weight)
    del model
    gc.collect()
    assert alive() is None
