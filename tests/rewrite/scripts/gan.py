"""Two optimizers, two networks: a GAN on points of a circle."""

import torch
from torch import nn

torch.manual_seed(2)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
angles = torch.rand(320) * 6.2832
points = torch.stack([angles.cos(), angles.sin()], dim=1)

for epoch in range(3):
    for i in range(0, len(points), 32):
        real = points[i : i + 32]
        netD.zero_grad()
        label = torch.ones(real.size(0), 1)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), 4)
        fake = netG(noise)
        label.fill_(0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()

        netG.zero_grad()
        label.fill_(1)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
    print(f"epoch {epoch} D {(errD_real + errD_fake).item():.7f} G {errG.item():.7f}")
