"""Run by test_two_processes.py: each technique on two processes under DDP, beside the plain DDP step.

Prints, by process 0, the largest gradient error of each technique relative to the largest gradient.
"""

import copy
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from oomfix import runtime
from oomfix.runtime.techniques import offloading


def gradients(technique: str, model: nn.Module, batch: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    if technique == "checkpointing":
        assert runtime.enable_checkpointing(model)
    wrapped = DistributedDataParallel(model)
    with runtime.offload_activations(0) if technique == "offloading" else nullcontext():
        chunks = technique == "chunks"
        hidden = runtime.encode_in_chunks(wrapped, batch, rows=4) if chunks else wrapped(batch)
    # every sample is compared with all others of its process
    similarities = hidden @ hidden.T
    if technique == "linear loss":
        loss = runtime.linear_cross_entropy(hidden, hidden, target, rows=3)
    else:
        loss = functional.cross_entropy(similarities, target)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def work(rank: int, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    offloading._on_accelerator = lambda tensor: True
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    model = nn.Sequential(block, copy.deepcopy(block), nn.Flatten(), nn.Linear(40, 6).double())
    torch.manual_seed(rank + 1)
    batch, target = torch.randn(10, 5, 8, dtype=torch.float64), torch.arange(10)
    expected = gradients("plain", model, batch, target)
    largest = max(gradient.abs().max() for gradient in expected)
    for technique in ("checkpointing", "offloading", "chunks", "linear loss"):
        found = gradients(technique, model, batch, target)
        worst = max((a - b).abs().max() for a, b in zip(found, expected, strict=True))
        if rank == 0:
            print(technique, float(worst / largest), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    # forked, what was imported is there already
    mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")
