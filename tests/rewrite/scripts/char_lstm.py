"""Characters of Python's own help texts with an LSTM whose state is carried from batch to batch."""

from pydoc_data.topics import topics

import torch
from torch import nn

text = "".join(topics[key] for key in sorted(topics))[:12000]
vocab = sorted(set(text))
stream = torch.tensor([vocab.index(c) for c in text])
stream = stream[: len(stream) // 10 * 10].view(10, -1)  # [rows, characters]


class CharLSTM(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(len(vocab), width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, len(vocab))

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.embed(x), hidden)
        return self.head(out), hidden


def repackage(hidden):
    return tuple(state.detach() for state in hidden)


def train(model, steps=30, length=20):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    hidden = None
    losses = []
    for step in range(steps):
        x = stream[:, step * length : (step + 1) * length]
        y = stream[:, step * length + 1 : (step + 1) * length + 1]
        if hidden is not None:
            hidden = repackage(hidden)
        model.zero_grad()
        output, hidden = model(x, hidden)
        loss = criterion(output.reshape(-1, len(vocab)), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss)
        if step % 10 == 9:
            print(f"step {step} loss {sum(losses).item() / len(losses):.7f}")
            losses = []


torch.manual_seed(7)
train(CharLSTM())
