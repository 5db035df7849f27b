"""Logistic regression on scikit-learn's breast cancer data, updated by hand, then refined by L-BFGS."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

data, target = load_breast_cancer(return_X_y=True)
x = torch.tensor((data - data.mean(0)) / data.std(0), dtype=torch.float64)
y = torch.tensor(target, dtype=torch.float64)
model = nn.Linear(30, 1).double()
for step in range(20):
    rows = torch.arange(step * 25, step * 25 + 50)
    inputs, wanted = x[rows], y[rows]
    loss = nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), wanted)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
            p.grad = None
    print(f"{step} {loss.item():.8f}")

optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
for _ in range(3):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        loss.backward()
        return loss

    print(f"{optimizer.step(closure).item():.8f}")
