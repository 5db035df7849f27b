"""A variational autoencoder with reparameterisation, then a siamese network with shared weights, in one script."""

import torch
from torch import nn, optim
from torch.nn import functional as F

device = "cuda:0" if torch.cuda.is_available() else "cpu"


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, a, b):
        return self.head(torch.cat((self.body(a), self.body(b)), 1))


vae = VAE().to(device)
optimizer = optim.Adam(vae.parameters(), lr=1e-3)
for _ in range(1):
    data = torch.rand(128, 1, 28, 28).to(device)
    optimizer.zero_grad()
    recon, mu, logvar = vae(data)
    bce = F.binary_cross_entropy(recon, data.view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    (bce + kld).backward()
    optimizer.step()

siamese = Siamese().to(device)
optimizer = optim.Adadelta(siamese.parameters())
best = None
for _ in range(3):
    a, b = torch.rand(64, 1, 28, 28).to(device), torch.rand(64, 1, 28, 28).to(device)
    labels = torch.randint(0, 2, (64, 1), device=device).float()
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(siamese(a, b), labels)
    if torch.isnan(loss):
        raise ValueError("loss is not a number")
    loss.backward()
    optimizer.step()
    best = loss.item() if best is None or loss.item() < best else best
    torch.cuda.empty_cache()
    print(torch.cuda.memory_allocated() / 1e6, torch.cuda.max_memory_reserved() / 1e6, best)
