"""Train a head first, then the whole model, with nothing of the first stage left in memory.

`del optimizer` frees nothing while a scheduler still refers to it. At the end of a `stage` its optimizers and their
gradients are gone, whoever refers to them; `free` does the same for single things. In the second stage the parts
of the backbone begin to train one after the other.

Prints:

    loss ...
    loss ...
    ... MiB freed
    epoch 2: 2 more tensors train
    loss ...
    epoch 3: 2 more tensors train
    loss ...
    epoch 4: 4 more tensors train
    loss ...
    epoch 5: 0 more tensors train
    loss ...
"""

import logging

import torch
from torch import nn

from oomfix import runtime

logging.basicConfig(level=logging.INFO, format="%(message)s")
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential()
model.add_module("backbone", nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]))
model.add_module("head", nn.Linear(64, 10))
model.to(device)


def train(optimizer, scheduler):
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"loss {loss.item():.4f}")


unfreezing = runtime.ProgressiveUnfreezing(model, {2: ["backbone.3"], 3: ["backbone.2"], 4: ["backbone"]})

with runtime.stage("head") as first:
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        train(optimizer, scheduler)
print(first.freed)

with runtime.stage("everything"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for epoch in range(2, 6):
        print(f"epoch {epoch}: {len(unfreezing.at(epoch))} more tensors train")
        train(optimizer, scheduler)
