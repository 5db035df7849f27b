"""One of several ranks: what DistributedDataParallel holds is what it really holds, and shares are right by hand."""

import os

import pytest
import torch
from torch import nn

from oomfix.profile import MemoryTrace
from oomfix.profile.ledger import Moment
from oomfix.profile.ranks import blocks_of, shares
from oomfix.profile.refusals import CannotSimulate
from tests.process_groups import group_of_one

MIB = 2**20

TORCHRUN = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
assert dist.get_world_size() == torch.cuda.device_count() == 4
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
model = DistributedDataParallel(model.to(rank), device_ids=[rank], gradient_as_bucket_view=VIEW)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.zeros(64, 1024))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
assert len(loader) == 2
for (x,) in loader:
    with model.no_sync():
        pass
    loss = model(x.to(rank)).sum()
    loss.backward()
    dist.all_reduce(loss)
    optimizer.step()
    optimizer.zero_grad()
    del x, loss
assert model.module is not None and dist.get_rank() == 0
dist.destroy_process_group()
"""


@pytest.fixture
def as_torchrun(monkeypatch):
    """What a run with ranks writes into the environment is taken out again."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def really(view):
    """Bytes live after the second step, with the real wrapper."""
    with MemoryTrace() as trace:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(2):
            wrapped(torch.zeros(8, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return trace.steps[1][1]


@pytest.mark.parametrize(("view", "gradients_mib"), [(False, 128), (True, 64)])
def test_ddp_holds_its_buckets_as_it_really_does(simulate, as_torchrun, view, gradients_mib):
    """64 MiB of weights; the gradients beside the buckets, or in them."""
    found = simulate(TORCHRUN.replace("VIEW", str(view)), ranks=4)
    assert found["error"] is None
    loss = 512
    live = found["steps"][1]["live_bytes"] - found["breakdown"]["workspaces"] - loss
    with group_of_one():
        assert live == really(view)
    assert live == pytest.approx((64 + gradients_mib) * MIB, rel=0.001)
    assert found["shares"] is None


def test_without_ranks_several_processes_are_refused_and_the_option_is_named(simulate):
    with pytest.raises(CannotSimulate, match=r"trains in several processes.*`--ranks N` simulates one of N"):
        simulate(TORCHRUN)


def test_spawned_processes_are_one_of_them(simulate, as_torchrun):
    source = """
import torch
def main(rank, size):
    w = torch.ones(size, device=rank if False else "cuda", requires_grad=True)
    w.sum().backward()
    torch.optim.SGD([w], lr=1).step()
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(1000,), nprocs=torch.cuda.device_count())
"""
    assert simulate(source, ranks=2)["error"] is None


def test_fsdp_is_refused_with_what_can_be_done(simulate, as_torchrun):
    source = "import torch\nfrom torch.distributed.fsdp import fully_shard\nfully_shard(torch.nn.Linear(2, 2))\n"
    with pytest.raises(CannotSimulate, match=r"shards its model \(FSDP\); without that call, `--ranks N` computes"):
        simulate(source, ranks=2)


def moment(phase, **breakdown):
    categories = ("weights", "optimizer state", "gradients", "inputs", "activations", "temporaries", "workspaces")
    return Moment(1, phase, 0, {name: breakdown.get(name.replace(" ", "_"), 0) for name in categories})


def test_shares_by_hand():
    """Weights of 100, a block of 10 and 20 outside; the peak alone is in the backward."""
    lasting = {"weights": 100, "optimizer_state": 200}
    timeline = [
        moment("forward", **lasting, activations=50),
        moment("backward", **lasting, gradients=100, activations=40),
        moment("optimizer", **lasting, gradients=100, temporaries=100),
    ]
    found = shares(timeline, block_bytes=10, outside_bytes=20, ranks=4)
    # 300 + 100 + 100 of temporaries at the optimizer's peak, and buckets
    assert found.ddp_bytes == 500 + 100
    # backward: a fourth of 400, activations, what is outside, two blocks and two blocks' gradients
    assert found.fsdp2_bytes == 100 + 40 + 20 + 20 + 20


ALONE = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_trains_alone_gets_its_shares(simulate, as_torchrun):
    found = simulate(ALONE, ranks=8)
    assert found["shares"]["ranks"] == 8
    assert found["shares"]["ddp_bytes"] == pytest.approx(found["peak_allocated_bytes"] + 64 * MIB, rel=0.01)
    # an eighth of weights and gradients, two layers, two layers' gradients, the workspaces
    assert found["shares"]["fsdp2_bytes"] == pytest.approx((16 + 8 + 8 + 16.25) * MIB, rel=0.03)


def test_blocks_are_those_of_the_list_with_the_most_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3))
            self.head = nn.Sequential(nn.Linear(4, 2))

    assert blocks_of(Model()) == ((4 * 8 + 8 + 8 * 4 + 4) * 4, (40 + 4 * 2 + 2) * 4)
    assert blocks_of(nn.Linear(2, 2)) == (6 * 4, 0)


WRAPPED = """
import torch
from torch import nn
model = nn.Linear(512, 512, bias=False).cuda()
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.zeros(64, 512)).sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("wrap", "ranks"),
    [
        ("model = nn.DataParallel(model)", 0),
        ("model = nn.parallel.DistributedDataParallel(model, device_ids=[0])", 2),
    ],
)
def test_wrappers_that_know_their_card_move_inputs_there(simulate, as_torchrun, wrap, ranks):
    found = simulate(WRAPPED.format(wrap=wrap), ranks=ranks)
    assert found["error"] is None and found["stopped"]
    # the batch is on the card as what the backward of the product keeps
    assert any(tensor["shape"] == (64, 512) for tensor in found["top_tensors"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cuda', (2, 2))", "a mesh of"),
        ("import torch.distributed as dist\ndist.TCPStore('127.0.0.1', 29599, 2)", "it waits for other processes"),
        ("import torch.distributed.rpc as rpc\nrpc.init_rpc('a', rank=0, world_size=2)", "it waits for other"),
    ],
)
def test_what_would_wait_for_other_processes_is_refused(simulate, as_torchrun, monkeypatch, source, reason):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29598")
    with pytest.raises(CannotSimulate, match=reason):
        simulate(source, ranks=4)


def test_a_script_of_torchrun_is_told_the_option_that_stands_for_it(simulate, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(CannotSimulate, match="torchrun sets; `--ranks N`"):
        simulate("import os\nlocal = os.environ['LOCAL_RANK']\n")
