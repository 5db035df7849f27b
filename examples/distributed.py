"""Train in several processes, each of which cuts its batch as its own memory asks for.

    torchrun --nproc-per-node 4 distributed.py            DistributedDataParallel
    torchrun --nproc-per-node 4 distributed.py --shard    FSDP2 (torch 2.13 and on splits batches under it)

The loop is the one for a single process. Gradients are averaged once, after the last micro-batch, so a process that
runs out of memory starts again alone; under FSDP2 all processes make the same number of micro-batches. With GPUs or
without; without torchrun it trains alone.

Prints:

    process 0: loss ...
    process 0: loss ...
    process 0: loss ...
    preset 16gb: 3 optimizer steps
      forward: batches in 2 micro-batches, 3 training calls
      forward: micro-batches since training call 1, because micro_batches=2 was asked for; ...
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix import runtime

rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 10)).to(device)
if "--shard" in sys.argv:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    fully_shard(model)
elif dist.is_initialized():
    model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)

memory = runtime.preset("16gb", micro_batches=2)  # "auto", unless asked for: only what does not fit is cut
model = memory.prepare(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def forward(x, y):
    return nn.functional.cross_entropy(model(x), y)


torch.manual_seed(rank)  # other samples on each process
x, y = torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)
for _ in range(3):
    loss = memory.forward_backward(forward, x, y)
    memory.step(optimizer, clip_norm=1.0)
    print(f"process {rank}: loss {loss.item():.4f}")

if rank == 0:
    print(memory.report())
if dist.is_initialized():
    dist.destroy_process_group()
