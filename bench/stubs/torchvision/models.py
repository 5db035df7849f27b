"""Networks as torchvision builds them."""

from enum import Enum
from typing import Any

from torch import nn

from bench import profile_models


class VGG16_Weights(Enum):
    IMAGENET1K_V1 = "random numbers here"


class _BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        layers: list[nn.Module] = []
        for channels, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
            layers += [_BasicBlock(channels, out, stride), _BasicBlock(out, out, 1)]
        self.layers, self.avgpool, self.fc = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Linear(512, 1000)

    def forward(self, x: Any) -> Any:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(*args: Any, **kwargs: Any) -> nn.Module:
    return ResNet()


def resnet50(*args: Any, **kwargs: Any) -> nn.Module:
    return profile_models.resnet50()


def vgg16(*args: Any, **kwargs: Any) -> nn.Module:
    network = profile_models.vgg16()
    assert isinstance(network, nn.Sequential)
    network.features = network[:-8]
    return network
