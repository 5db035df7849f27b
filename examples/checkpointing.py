"""Activation checkpointing in one call, for models that have a switch for it and for those that have none.

Blocks keep their inputs only, and run once more in backward. The object, its state_dict and its pickles stay as
they are.

Prints:

    checkpointed: 0, 1, 2, 3, 4, 5
    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn

from oomfix.runtime.techniques.checkpointing import enable_checkpointing

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(6)]).to(device)
print("checkpointed:", ", ".join(enable_checkpointing(model)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(3):
    x = torch.randn(8, 32, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = model(x)
    loss = (output.float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
