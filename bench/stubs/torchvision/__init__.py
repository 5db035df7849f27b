"""What the scripts of pytorch/examples use of torchvision, with made-up images in the real shapes."""

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
