"""Handwritten digits with an MLP; flat script, accuracy from the training batches, a scheduler, a short last batch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train_set = TensorDataset(images[:1200], labels[:1200])
loader = DataLoader(train_set, batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
criterion = nn.CrossEntropyLoss()

for epoch in range(3):
    total_loss, correct = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()  # gradients of the last step
        out = model(x)
        # mean over the batch
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * x.size(0)
        correct += (out.argmax(1) == y).sum().item()
    scheduler.step()
    print(f"epoch {epoch} loss {total_loss / len(train_set):.7f} accuracy {correct / len(train_set):.4f}")

model.eval()
test_loss = 0.0
for x, y in DataLoader(TensorDataset(images[1200:], labels[1200:]), batch_size=100):
    test_loss += criterion(model(x), y)
print(f"test {test_loss.item():.7f}")
