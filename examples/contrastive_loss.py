"""CLIP-like training with thousands of negatives on one card.

The loss compares every image with every text, so its batch cannot be split into micro-batches. The encoders can
run on a few samples at a time: gradients are those of the whole batch, activations those of `rows` samples.

Prints:

    loss ...
    loss ...
    loss ...
"""

import torch
from torch import nn
from torch.nn import functional

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
image_encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 128), nn.GELU(), nn.Linear(128, 32)).to(device)
text_encoder = nn.Sequential(nn.EmbeddingBag(100, 128), nn.GELU(), nn.Linear(128, 32)).to(device)
log_scale = nn.Parameter(torch.tensor(2.0, device=device))
parameters = [*image_encoder.parameters(), *text_encoder.parameters(), log_scale]
optimizer = torch.optim.AdamW(parameters, lr=1e-3)

for _ in range(3):
    pixels = torch.randn(256, 3, 8, 8, device=device)
    tokens = torch.randint(0, 100, (256, 12), device=device)
    images = functional.normalize(runtime.encode_in_chunks(image_encoder, pixels, rows=32), dim=-1)
    texts = functional.normalize(runtime.encode_in_chunks(text_encoder, tokens, rows=32), dim=-1)
    loss = runtime.contrastive_loss(images, texts, log_scale.exp())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
