"""`memory.loss(forward, *batch)`: the gradients of a call, computed ahead of a backward that something else runs.

Accelerate and scalers such as timm's are given a loss whose graph exists, and no batch can be cut any more. So
the call runs forward and backward at once, in as many pieces as memory asks for, and keeps the gradients apart. The
loss that it returns has a graph of one node: a backward is linear in what comes down to it, so that node multiplies
them and passes them on.

In fp16 the loss has to be scaled while they are computed, and who scales it is not seen before. They are computed with
what came down to the loss of the call before. Where nothing changes that, the factor is 1, and the gradients of a whole
batch are bitwise those of its own backward; where it changes, they are rounded once more, unless by a power of two. The
first call takes 1, and under fp16 what a GradScaler begins with, unless that makes them overflow.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oomfix.presets import Preset
from oomfix.runtime import compat, trees
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.outputs import the_loss
from oomfix.runtime.calls.accumulation import Window
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.calls.known import Known, KnownForwards
from oomfix.runtime.recovery.ladder import Ladder
from oomfix.runtime.splitter import Splitter

_log = logging.getLogger("oomfix")
_FIRST_SCALE_OF_FP16 = 2.0**16  # that of torch.amp.GradScaler
_SCALES = 2.0**-32, 2.0**32  # gradients computed with others may overflow or vanish


class GradientsAhead:
    """Losses whose backward something else runs.

    Args:
        preset: the policies; the precision is that of whoever runs the backward.
        ladder: the techniques for calls that splitting does not make fit.

    Attributes:
        forwards: what is known about each forward.
        splitter: what runs them.
    """

    def __init__(self, preset: Preset, ladder: Ladder) -> None:
        self.forwards = KnownForwards(preset.first_micro_batches)
        self.splitter = Splitter(replace(preset, precision="fp32"), ladder)
        self._scales: weakref.WeakKeyDictionary[Known, _Scale] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()

    def result(self, forward: Callable[..., Any], batch: Batch, prepared: Iterable[nn.Module]) -> Any:
        """What `forward` returns, as for the whole batch, with a loss that passes on what was computed.

        Raises:
            RuntimeError: the loss reaches a tensor with a hook.
        """
        known = self.forwards.about(forward, True, batch, prepared)
        reason = known.must_be_whole() if known.ranks.alone else "several processes train together"
        if reason is not None:
            self._say(f"{known.name}: batches run whole, because {reason}.")
            return forward(*batch.args, **batch.kwargs)
        scale = self._scales.setdefault(known, _Scale())
        overflowed_at = None
        if scale.is_new:
            with compat.begun_autocasts() as scale.autocasts:
                result, iteration = self._run(known, forward, batch, scale)
            overflows = scale.value == _FIRST_SCALE_OF_FP16 and not _are_finite(iteration.apart)
            if overflows and not iteration.graph_is_spent:
                iteration.give_up()
                scale.value, overflowed_at = 1.0, _FIRST_SCALE_OF_FP16
                result, iteration = self._run(known, forward, batch, scale)
        else:
            result, iteration = self._run(known, forward, batch, scale)
        leaves = [leaf for leaf, _ in iteration.apart]
        ahead = _Ahead([gradient for _, gradient in iteration.apart], scale, overflowed_at)
        loss = the_loss(result)
        with_graph = _PassOn.apply(loss, ahead, *leaves)  # type: ignore[no-untyped-call]
        return trees.map_leaves(lambda leaf: with_graph if leaf is loss else leaf, result)

    def _run(self, known: Known, forward: Callable[..., Any], batch: Batch, scale: "_Scale") -> tuple[Any, Iteration]:
        iteration = Iteration(known, forward, batch, trains=True, keeps_apart=True)
        return self.splitter.run(iteration, Window(), scale), iteration

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning(message)


class _Scale:
    """What the losses of one forward are multiplied by, in place of a `GradScaler`.

    Attributes:
        value: a number, or a tensor [] with one.
        is_new: there was no loss yet.
        autocasts: the dtypes of autocast in the first call.
    """

    def __init__(self) -> None:
        self.value: float | torch.Tensor = 1.0
        self.is_new = True
        self.autocasts: set[torch.dtype] = set()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss`, multiplied."""
        if self.is_new and torch.float16 in self.autocasts:
            self.value = _FIRST_SCALE_OF_FP16
        self.is_new = False
        if isinstance(self.value, torch.Tensor) and self.value.device != loss.device:
            self.value = self.value.to(loss.device)  # the model has moved
        return loss * self.value

    def follow(self, coming: torch.Tensor) -> None:
        """Take over what came down to a loss, unless no gradient can be made with that; the device is not waited for.

        Args:
            coming: a tensor [].
        """
        value = torch.as_tensor(self.value, dtype=coming.dtype, device=coming.device)
        least, most = _SCALES
        size = coming.abs()
        self.value = torch.where((size >= least) & (size <= most), coming, value)


class _Ahead:
    """Gradients until their backward.

    Args:
        gradients: of the leaves, multiplied by a scale.
        scale: what they are multiplied by, until it follows another call.
        overflowed_at: what made them overflow; a scaler that comes with as much is to see that, and skips its step.
    """

    def __init__(self, gradients: list[torch.Tensor], scale: _Scale, overflowed_at: float | None) -> None:
        self._gradients: list[torch.Tensor] | None = gradients
        self._scale = scale
        self._computed_with = scale.value
        self._overflowed_at = overflowed_at

    def passed_on(self, coming: torch.Tensor) -> list[torch.Tensor]:
        """The gradients for what comes down to their loss: a tensor [] or [1]."""
        if self._gradients is None:
            raise RuntimeError(
                "memory.loss: a second backward through a loss whose gradients have been passed on; add the losses "
                "up and run one backward, or call the forward again"
            )
        gradients, self._gradients = self._gradients, None
        coming = coming.reshape(())
        factor = coming / self._computed_with
        if self._overflowed_at is not None:
            factor = torch.where(coming.abs() < self._overflowed_at, factor, torch.inf)
        factors = {coming.device: factor}
        for gradient in gradients:
            if gradient.device not in factors:
                factors[gradient.device] = factor.to(gradient.device)
            gradient.mul_(factors[gradient.device])
        self._scale.follow(coming)
        return gradients


def _are_finite(apart: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether no gradient, of leaves each with its own, has overflowed; waits for the device."""
    strided = (one if one.layout == torch.strided else one.coalesce().values() for _, one in apart)
    return all(bool(one.isfinite().all()) for one in strided)


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, ahead: _Ahead, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.ahead = ahead
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, coming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("memory.loss: its gradients have no graph (create_graph=True); call the forward itself")
        return None, None, *ctx.ahead.passed_on(coming)
