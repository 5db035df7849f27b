"""The identity with a backward of one's own."""

from collections.abc import Callable

import torch


def through(backward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that copies its argument, and whose backward is `backward(gradient)`, which may raise."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    return Through.apply
