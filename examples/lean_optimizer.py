"""The optimizer's share of memory: its state, and what a step holds for a moment.

`use_lean_step` takes away the copies of all parameters that torch's multi-tensor step makes on a GPU.
`adamw_8bit` keeps a quarter of AdamW's state, with bitsandbytes or torchao.

Prints:

    AdamW...
    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).to(device)
try:
    optimizer = runtime.adamw_8bit(model.parameters(), lr=1e-3)
    print("AdamW with 8-bit state")
except ImportError:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print("AdamW; its step:", runtime.use_lean_step(optimizer))

for _ in range(3):
    x = torch.randn(32, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = model(x)
    loss = (output.float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
