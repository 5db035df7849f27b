"""Optimizers that were built before their model moved to the card."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomfix.profile.patches import Patches


class Optimizers:
    """Every optimizer of a run, kept pointing at the parameters that train.

    On a real card `model.cuda()` keeps parameter objects; in the simulation modules get new ones. An optimizer built
    before is handed the new ones here, so that the order in a script makes no difference.

    Attributes:
        built: called whenever the script has built one.
    """

    def __init__(self, patches: Patches) -> None:
        self.built: Callable[[], object] = lambda: None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        init = torch.optim.Optimizer.__init__

        def init_and_remember(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)
            self.built()

        patches.set(torch.optim.Optimizer, __init__=init_and_remember)

    def moved(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """A module replaced parameter `old` by `new`."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
