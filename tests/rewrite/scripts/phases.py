"""One loop for training and validation, gradients switched by the phase; the best epoch is kept."""

import copy

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
features, labels = load_wine(return_X_y=True)
features = torch.tensor(features, dtype=torch.float32)
features = (features - features.mean(0)) / features.std(0)
labels = torch.tensor(labels)
order = torch.randperm(len(labels))
sets = {"train": order[:120], "val": order[120:]}
loaders = {
    phase: DataLoader(TensorDataset(features[rows], labels[rows]), batch_size=24, shuffle=phase == "train")
    for phase, rows in sets.items()
}


def train_model(model, criterion, optimizer, scheduler, num_epochs=4):
    best_model_wts = copy.deepcopy(model.state_dict())
    best_acc = 0.0
    for _epoch in range(num_epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running_loss = 0.0
            running_corrects = 0
            for inputs, targets in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, targets)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == targets.data)
            if phase == "train":
                scheduler.step()
            epoch_loss = running_loss / len(sets[phase])
            epoch_acc = running_corrects.double() / len(sets[phase])
            print(f"{phase} loss {epoch_loss:.7f} accuracy {epoch_acc:.4f}")
            if phase == "val" and epoch_acc > best_acc:
                best_acc = epoch_acc
                best_model_wts = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_model_wts)
    return model


net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))
sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
train_model(net, nn.CrossEntropyLoss(), sgd, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9))
