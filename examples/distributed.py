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
    preset 16gb: 6 optimizer steps
      forward: batches in 2 micro-batches, 6 training calls
      forward: micro-batches since training call 1, because micro_batches=2 was asked for; ...
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from oomfix import runtime

rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
processes = int(os.environ.get("WORLD_SIZE", "1"))
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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def forward(x, y):
    return nn.functional.cross_entropy(model(x), y)


samples = torch.randn(64, 64)
data = TensorDataset(samples, samples[:, :10].argmax(1))
sampler = DistributedSampler(data, processes, rank)  # as many batches for each: all make the same calls
loader = DataLoader(data, batch_size=32, sampler=sampler, **memory.loader_kwargs(num_workers=0))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = memory.forward_backward(forward, x.to(device, non_blocking=True), y.to(device, non_blocking=True))
        memory.step(optimizer, clip_norm=1.0)
    print(f"process {rank}: loss {loss.item():.4f}")

if rank == 0:
    print(memory.report())
if dist.is_initialized():
    dist.destroy_process_group()
