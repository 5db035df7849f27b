"""Data sets of made-up images in the shapes of the real ones; a few hundred samples, which no peak depends on."""

from collections.abc import Callable
from typing import Any

import torch


class _Images(torch.utils.data.Dataset):
    shape: tuple[int, ...] = (3, 256, 256)
    samples = 512
    classes: tuple[str, ...] = tuple("0123456789")

    def __init__(self, root: Any = None, *args: Any, transform: Callable[[Any], Any] | None = None, **kwargs: Any):
        self.transform = transform
        self.targets = torch.arange(self.samples) % len(self.classes)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = torch.rand(self.shape)
        return (self.transform(image) if self.transform else image), int(self.targets[index])


class MNIST(_Images):
    shape = (1, 28, 28)
    samples = 60_000

    def __init__(self, root: Any = None, *args: Any, **kwargs: Any):
        super().__init__(root, *args, **kwargs)
        self.data = torch.zeros(self.samples, 28, 28, dtype=torch.uint8)


class CIFAR10(_Images):
    shape = (3, 32, 32)


class ImageFolder(_Images):
    pass


class FakeData(_Images):
    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
    ):
        self.samples, self.shape, self.classes = size, image_size, tuple(map(str, range(num_classes)))
        super().__init__(transform=transform)
