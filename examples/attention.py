"""Attention without the matrix of its probabilities, also where it adds a bias that is trained.

Written out, `softmax(q @ k.transpose(-2, -1) * scale + bias) @ v` keeps a number for every pair of tokens, several
times, in every head and layer. `attention` keeps none of them. For a bias that is trained torch's own function would:
it has no kernel for that.

Prints:

    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn

from oomfix import runtime


class Attention(nn.Module):
    """Attention of image patches [samples, tokens, features], with a bias for each pair of positions."""

    def __init__(self, features: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)
        self.bias = nn.Parameter(torch.zeros(heads, tokens, tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # each [samples, heads, tokens, features of a head]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = runtime.attention(q, k, v, self.bias, dropout=0.1 if self.training else 0.0)
        return self.out(attended.transpose(1, 2).flatten(2))


device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(Attention(64, 4, 196), nn.Flatten(), nn.Linear(196 * 64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
patches = torch.randn(32, 196, 64, device=device)
labels = torch.randint(0, 10, (32,), device=device)

for _ in range(3):
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(patches), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
