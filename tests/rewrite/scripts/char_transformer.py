"""Characters of Python's own help texts with a small transformer; batches by `get_batch`, padding ignored."""

import math
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F

text = "".join(topics[key] for key in sorted(topics))[:20000]
vocab = sorted(set(text))
data = torch.tensor([vocab.index(c) for c in text])
block_size, batch_size = 32, 12


def get_batch():
    starts = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + block_size + 1] for i in starts])
    for row, length in enumerate(torch.randint(block_size // 2, block_size + 1, (batch_size,)).tolist()):
        y[row, length:] = -100
    return x, y


class CharModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.position = nn.Embedding(len(vocab), width), nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(vocab))

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        x = self.encoder(self.embed(idx) + self.position.weight, mask=mask)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)
        return logits, loss


torch.manual_seed(11)
model = CharModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for iteration in range(40):
    lr = 0.2 * 0.5 * (1 + math.cos(math.pi * iteration / 40))
    for group in optimizer.param_groups:
        group["lr"] = lr
    xb, yb = get_batch()
    logits, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if iteration % 10 == 0:
        print(f"iter {iteration}: loss {loss.item():.7f}, perplexity {math.exp(loss.item()):.5f}")
