"""What torch before 1.10 and transformers of January 2022 did otherwise, for measurements that were taken with them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

_gelu = F.gelu


class _Softmax(torch.autograd.Function):
    """Softmax that keeps its input as well as its result for the backward, as torch did before 1.11."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, dim: int) -> torch.Tensor:
        result = torch.softmax(inputs, dim)
        ctx.save_for_backward(inputs, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        inputs, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, result, ctx.dim, inputs.dtype), None


def _softmax(inputs: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _Softmax.apply(inputs if dtype is None else inputs.to(dtype), dim)


def _gelu_in_fp32(inputs: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return _gelu(inputs.float() if torch.is_autocast_enabled("cuda") else inputs, approximate=approximate)


@contextmanager
def torch_before_1_10() -> Iterator[None]:
    """Context in which softmax keeps its input and gelu runs in fp32 under autocast.

    Source: gelu was on autocast's fp32 list until pull request 59639 of pytorch, June 2021.
    """
    with patch.object(F, "softmax", _softmax), patch.object(F, "gelu", _gelu_in_fp32):
        yield


class AdamW(torch.optim.Optimizer):
    """Adam as the Trainer's default ran it: one parameter after the other, whose state is made at its turn."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    def _update(self, parameter: torch.Tensor, rate: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if gradient is None:
            return
        if not state:
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
        state["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-rate)


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The Trainer's order: weights that decay before biases and layer norms, which do not."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters()
    }
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for name, parameter in model.named_parameters():
        groups["bias" in name or id(parameter) in norms]["params"].append(parameter)
    return groups


def zeroing_in_place(
    make: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[Any], torch.optim.Optimizer]:
    """The default of torch before 2.0: `zero_grad` fills gradients with zeros."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        zero_grad = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=False: zero_grad(set_to_none=False)
        return optimizer

    return made
