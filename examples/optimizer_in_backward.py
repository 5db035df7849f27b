"""Step parameters while backward runs, so that gradients never exist all at once.

Saves the gradients: as much as the weights. Schedulers and checkpoints of the optimizer work as ever. It cannot
clip by the norm of all gradients, and is for fp32 and bf16.

Prints:

    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)

for _ in range(3):
    x = torch.randn(32, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = model(x)
    loss = (output.float() - x).square().mean()
    with runtime.optimizer_in_backward(optimizer):
        loss.backward()
    scheduler.step()
    print(f"loss {loss.item():.4f}")
