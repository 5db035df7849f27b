"""Micro-batches where Accelerate runs the backward: `memory.loss` gives it a loss whose gradients are there already.

Prints:

    loss ...
    loss ...
    loss ...
    forward: batches in 4 micro-batches, 6 training calls
"""

import torch
from accelerate import Accelerator
from torch import nn

from oomfix import runtime

accelerator = Accelerator(gradient_accumulation_steps=2)
memory = runtime.preset("16gb", micro_batches=4)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
criterion = nn.CrossEntropyLoss()


def forward(x, y):
    return criterion(model(x), y)


for _ in range(6):
    x = torch.randn(16, 32, device=accelerator.device)
    y = torch.randint(0, 10, (16,), device=accelerator.device)
    with accelerator.accumulate(model):
        loss = memory.loss(forward, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        print(f"loss {loss.item():.4f}")

print(str(memory.report()).splitlines()[1].strip())
