"""Log the card's memory once per epoch, and give useless blocks back where there are many.

The monitor writes to the log of "oomfix", and to TensorBoard or W&B where it is given a writer or a run is under
way. The janitor asks the allocator once in a hundred steps and hardly ever empties its cache.

Prints:

    epoch 0: loss ..., ... bytes at the peak
    epoch 1: loss ..., ... bytes at the peak
"""

import logging

import torch
from torch import nn

from oomfix import runtime

logging.basicConfig(level=logging.INFO, format="%(message)s")
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(64, 10).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
monitor, janitor = runtime.MemoryMonitor(), runtime.CacheJanitor(every=100)

for epoch in range(2):
    for _ in range(5):
        with torch.autocast(device, torch.bfloat16):
            output = model(torch.randn(32, 64, device=device))
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        janitor.after_step()
    reading = monitor.log(epoch)
    print(f"epoch {epoch}: loss {loss.item():.4f}, {reading.peak_bytes} bytes at the peak")
