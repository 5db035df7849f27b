"""Carry a recurrent state from batch to batch without the graphs of all batches before.

Prints:

    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
lstm = nn.LSTM(16, 32, batch_first=True).to(device)
head = nn.Linear(32, 16).to(device)
optimizer = torch.optim.AdamW([*lstm.parameters(), *head.parameters()], lr=1e-2)
state = None

for _ in range(3):
    x = torch.randn(4, 20, 16, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # few CPUs have LSTMs in bf16
        output, state = lstm(x, state)
        output = head(output)
    loss = (output.float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = runtime.detach_(state)
    print(f"loss {loss.item():.4f}")
