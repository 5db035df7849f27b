"""Handwritten digits with a CNN; a Trainer class, AMP, a gradient window, clipping, a weighted loss of two terms."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        features = self.features(x).flatten(1)
        return self.head(features), features


class Trainer:
    def __init__(self, model, loader, steps):
        self.model, self.loader, self.steps = model, loader, steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.scaler = GradScaler()
        self.history = []

    def train_epoch(self):
        self.model.train()
        self.optimizer.zero_grad()
        for i, batch in enumerate(self.loader):
            x, y = batch
            with autocast():
                out, features = self.model(x)
                loss = self.criterion(out, y)
                penalty = features.pow(2).mean()
                loss = loss + 0.01 * penalty
                loss = loss / self.steps
            self.scaler.scale(loss).backward()
            if (i + 1) % self.steps == 0:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
            self.history.append((loss.item() * self.steps, penalty.item()))
        return self.history[-1]


def main():
    torch.manual_seed(5)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    loader = DataLoader(TensorDataset(images[:960], labels[:960]), batch_size=32, shuffle=True)
    trainer = Trainer(Net(), loader, steps=3)
    for epoch in range(2):
        loss, penalty = trainer.train_epoch()
        print(f"epoch {epoch} loss {loss:.7f} penalty {penalty:.7f}")


if __name__ == "__main__":
    main()
