"""The modules of a model, of one too that has an attribute `modules` of its own."""

from collections.abc import Iterator

from torch import nn


def modules_in(model: nn.Module) -> Iterator[nn.Module]:
    """A model and every module in it; `self.modules = [...]` hides the method of this name, and trains all the same."""
    return nn.Module.modules(model)
