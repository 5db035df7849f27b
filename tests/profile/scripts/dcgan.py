"""A generator and a discriminator with an optimizer each, two backwards on the discriminator, BCELoss, `.cuda()`."""

import torch
import torch.nn as nn
import torch.optim as optim

nz, ngf, ndf, batch = 100, 64, 64, 16


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 4), nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, 3, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(3, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)  # fmt: skip
netG.apply(weights_init)
netD.apply(weights_init)
# built before the model moves: on a real card the parameters stay the same objects
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
netG.cuda()
netD.cuda()
criterion = nn.BCELoss()
fixed_noise = torch.randn(batch, nz, 1, 1).cuda()
for _ in range(5):
    netD.zero_grad()
    real = torch.randn(batch, 3, 16, 16).cuda()
    label = torch.full((batch,), 1.0, device="cuda")
    output = netD(real).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    noise = torch.randn(batch, nz, 1, 1, device="cuda")
    fake = netG(noise)
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    print(f"Loss_D: {errD_real.item() + errD_fake.item():.4f} Loss_G: {errG.item():.4f}")
    grid = netG(fixed_noise).detach().cpu().numpy()
    assert grid.shape == (batch, 3, 16, 16)
