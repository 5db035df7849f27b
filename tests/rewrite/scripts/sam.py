"""Sharpness-aware minimisation on scikit-learn's wine: two forwards and two backwards per batch."""

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        self.moved = [p.grad * (self.rho / (norm + 1e-12)) for p in self.params]
        with torch.no_grad():
            for p, move in zip(self.params, self.moved, strict=True):
                p.add_(move)
        self.base.zero_grad()

    def second_step(self):
        with torch.no_grad():
            for p, move in zip(self.params, self.moved, strict=True):
                p.sub_(move)
        self.base.step()
        self.base.zero_grad()


data, target = load_wine(return_X_y=True)
inputs = torch.tensor((data - data.mean(0)) / data.std(0), dtype=torch.float32)
loader = DataLoader(TensorDataset(inputs, torch.tensor(target)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
optimizer = SAM(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.first_step()
        again = criterion(model(x), y)
        again.backward()
        optimizer.second_step()
        total += loss.item()
    print(f"{epoch} {total / len(loader):.8f}")
