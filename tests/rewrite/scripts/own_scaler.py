"""An MLP on scikit-learn's digits that scales its loss by itself, clips at every batch and logs gradient norms."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data, target = load_digits(return_X_y=True)
inputs = torch.tensor(data[:640] / 16, dtype=torch.float32)
loader = DataLoader(TensorDataset(inputs, torch.tensor(target[:640])), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
steps = 2
for epoch in range(2):
    total, norms = 0.0, []
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cpu", enabled=False):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
        total += loss.item()
        scaler.scale(loss / steps).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1024.0).item())
        if (i + 1) % steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    print(f"{epoch} {total / len(loader):.8f} {sum(norms) / len(norms):.6f}")
