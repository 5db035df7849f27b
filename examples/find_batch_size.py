"""The largest batch that fits the card, before training begins.

The model and the optimizer are put back afterwards. Where the batch size is part of a recipe, keep it and let
`memory.forward_backward` cut the batch instead.

Prints:

    512 samples fit (512 is the most that was asked for)
"""

import torch
from torch import nn

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def run(size):
    x, y = torch.randn(size, 64, device=device), torch.zeros(size, dtype=torch.int64, device=device)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


size = runtime.find_batch_size(run, start=16, most=512, multiple_of=8, restore=[model, optimizer])
print(f"{size} samples fit (512 is the most that was asked for)")
