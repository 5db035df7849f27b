"""Transforms of images that are tensors already, or PIL's."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn import functional as F


class Compose:
    def __init__(self, transforms: list[Callable[[Any], Any]]):
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        if isinstance(image, torch.Tensor):
            return image
        pixels = torch.from_numpy(numpy.array(image)).float() / 255
        return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)


class Normalize:
    def __init__(self, mean: Any, std: Any):
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


class Resize:
    def __init__(self, size: int | tuple[int, int]):
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image: Any) -> Any:
        if not isinstance(image, torch.Tensor):
            return image.resize(self.size[::-1])
        return F.interpolate(image[None], self.size)[0]


CenterCrop = RandomResizedCrop = Resize


class RandomHorizontalFlip:
    def __call__(self, image: Any) -> Any:
        return image


class Lambda:
    def __init__(self, change: Callable[[Any], Any]):
        self.change = change

    def __call__(self, image: Any) -> Any:
        return self.change(image)
