"""Train an autoencoder with Lightning, as its introduction does."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 784))

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    data = TensorDataset(torch.rand(2048, 1, 28, 28))
    loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=2)
    trainer = L.Trainer(max_epochs=2, precision="bf16-mixed", logger=False)
    trainer.fit(AutoEncoder(), loader, DataLoader(data, batch_size=256))


if __name__ == "__main__":
    main()
