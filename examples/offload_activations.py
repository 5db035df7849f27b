"""Keep activations in host memory until backward needs them.

For models whose activations do not fit even with checkpointing, or together with it. Gradients stay bitwise the
same. Parameters, and tensors below `min_bytes`, stay on the card.

Prints:

    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)])
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(3):
    x = torch.randn(64, 256, device=device)
    with runtime.offload_activations(min_bytes=64 * 1024), torch.autocast(device, torch.bfloat16):
        loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
