"""Cross entropy over many classes without the copies: a few rows of logits at a time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from oomfix.runtime import compat

Reduction = Literal["mean", "sum", "none"]

_In = ParamSpec("_In")

CHUNK_BYTES = 64 * 2**20
_COUNTED, _IGNORED = 0, -100


def _shown_to_modes(function: Callable[_In, torch.Tensor]) -> Callable[_In, torch.Tensor]:
    """Let contexts around a program see a call of `function` as one of torch's, with the targets that it was given."""

    @functools.wraps(function)
    def shown(*args: _In.args, **kwargs: _In.kwargs) -> torch.Tensor:
        tensors = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if not has_torch_function(tensors):
            return function(*args, **kwargs)
        result: torch.Tensor = handle_torch_function(shown, tensors, *args, **kwargs)
        return result

    return shown


@_shown_to_modes
def chunked_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> torch.Tensor:
    """`functional.cross_entropy` that keeps one number per row for backward instead of all log-probabilities.

    Half-precision logits are converted to fp32 a few rows at a time, never as a whole.

    Args:
        logits: [..., classes], any floating type.
        target: [...], class numbers (int64).
        weight: [classes], a weight for each class.
        reduction: "mean" divides by the weights of the targets that count; "sum"; "none" gives a loss per target.
        ignore_index: the target that does not count.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.
        rows: number of rows to process at a time; None: as many as take 64 MiB in fp32.

    Returns:
        The loss, fp32 (float64 for float64 logits); shape [] or that of `target`.

    Raises:
        ValueError: shapes, types or numbers that do not go together.

    For a language model shift the targets, not the logits (`pad(ids[:, 1:], (0, 1), value=-100)`): a slice of the
    logits would be copied. Values and gradients differ from torch's by rounding. The mean without class weights is
    reduced by torch's own NLL loss, where `memory.forward_backward` reads what it divides by. A gradient that is to be
    differentiated again (`create_graph=True`) takes torch's memory. GPT-2 124M with 16 x 1024 tokens under bf16 peaks
    at 17.35 GiB instead of 23.42 (simulated A100); on a CPU a smaller version takes 1.05 times as long
    (bench/results/techniques-cpu.md).
    """
    _check(logits, target, weight, reduction, label_smoothing, rows)
    classes = logits.shape[-1]
    spec = _Spec(classes, weight, ignore_index, label_smoothing, rows or _rows_for(classes))
    losses = _FromLogits.apply(logits.reshape(-1, classes), target.reshape(-1), spec)  # type: ignore[no-untyped-call]
    return _reduced(losses, target, spec, reduction)


@_shown_to_modes
def linear_cross_entropy(
    hidden: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> torch.Tensor:
    """Cross entropy of `linear(hidden, linear_weight, linear_bias)` that never holds all logits.

    Logits exist for a few rows at a time, and once more in backward: a third more arithmetic in this layer.
    Under autocast the products are computed in its type, the softmax in fp32.

    Args:
        hidden: [..., features], what would have gone into the last layer.
        linear_weight: [classes, features], the weight of the last layer.
        target: [...], class numbers (int64).
        linear_bias: [classes].
        weight, reduction, ignore_index, label_smoothing, rows: as for `chunked_cross_entropy`.

    Returns:
        The loss, fp32 (float64 for float64 inputs); shape [] or that of `target`.

    Raises:
        ValueError: shapes, types or numbers that do not go together.

    GPT-2 124M with 16 x 1024 tokens under bf16 peaks at 14.82 GiB instead of 23.42 (simulated A100); on a CPU a
    smaller version takes 1.09 times as long (bench/results/techniques-cpu.md).

    torch 2.13 has `functional.linear_cross_entropy` with `options=`, which peaks at the same. It ignores `options`
    with label smoothing, keeps to the type of its inputs, also for the loss, and hides from `memory.forward_backward`
    what it divides by.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", without its kernels.
    """
    features = hidden.shape[-1] if hidden.dim() else 0
    if linear_weight.dim() != 2 or linear_weight.shape[1] != features or not len(linear_weight):
        raise ValueError(
            f"linear_weight: got shape {tuple(linear_weight.shape)}, expected [classes, {features}], the last "
            f"dimension of hidden"
        )
    classes = linear_weight.shape[0]
    if linear_bias is not None and linear_bias.shape != (classes,):
        raise ValueError(f"linear_bias: got shape {tuple(linear_bias.shape)}, expected [{classes}]")
    _check(hidden, target, weight, reduction, label_smoothing, rows, classes)
    spec = _Spec(classes, weight, ignore_index, label_smoothing, rows or _rows_for(classes))
    losses = _FromHidden.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, features), linear_weight, linear_bias, target.reshape(-1), spec
    )
    return _reduced(losses, target, spec, reduction)


@dataclass(frozen=True)
class _Spec:
    """What kind of cross entropy it is, and its arithmetic on a chunk of rows.

    Attributes:
        rows: how many rows a chunk has.
    """

    classes: int
    weight: torch.Tensor | None
    ignore_index: int
    smoothing: float
    rows: int

    def losses(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [rows], 0 where ignored, and log-sum-exps [rows] of fp32 logits [rows, classes]."""
        normaliser = logits.logsumexp(1)
        counts = target != self.ignore_index
        label = target.where(counts, 0)
        losses = normaliser - logits.gather(1, label.unsqueeze(1)).squeeze(1)
        if self.weight is not None:
            losses = losses * self.weight[label]
        if self.smoothing:
            if self.weight is None:
                spread = normaliser - logits.mean(1)
            else:
                spread = (normaliser * self.weight.sum() - logits @ self.weight.to(logits.dtype)) / self.classes
            losses = (1 - self.smoothing) * losses + self.smoothing * spread
        return losses.where(counts, 0), normaliser

    def gradient_(
        self, logits: torch.Tensor, target: torch.Tensor, normaliser: torch.Tensor, upstream: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of fp32 logits [rows, classes], written over them; `upstream` [rows] is that of the losses."""
        counts = target != self.ignore_index
        label = target.where(counts, 0)
        upstream = upstream.where(counts, 0)
        of_label = (1 - self.smoothing) * upstream
        of_spread = self.smoothing / self.classes * upstream
        if self.weight is not None:
            of_label = of_label * self.weight[label]
            total = of_label + of_spread * self.weight.sum()
        else:
            total = upstream
        gradient = logits.sub_(normaliser.unsqueeze(1)).exp_().mul_(total.unsqueeze(1))
        if self.smoothing:
            if self.weight is None:
                gradient.sub_(of_spread.unsqueeze(1))
            else:
                gradient.addr_(of_spread, self.weight.to(gradient.dtype), alpha=-1)
        return gradient.scatter_add_(1, label.unsqueeze(1), -of_label.unsqueeze(1))


class _FromLogits(torch.autograd.Function):
    """(logits [rows, classes], target [rows], spec) -> losses [rows]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, spec: _Spec) -> torch.Tensor:
        parts = [
            spec.losses(chunk.to(_precise(logits)), labels) for chunk, labels in _chunks(spec.rows, logits, target)
        ]
        losses, normaliser = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, target, normaliser)
        ctx.spec = spec
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        logits, target, normaliser = ctx.saved_tensors
        if torch.is_grad_enabled():
            (alias,) = _aliases(logits)
            losses, _ = ctx.spec.losses(alias.to(_precise(logits)), target)
            return *_with_a_graph(losses, [alias], ctx.needs_input_grad, upstream), None, None
        gradient = torch.empty_like(logits)
        for into, chunk, *rest in _chunks(ctx.spec.rows, gradient, logits, target, normaliser, upstream):
            # a copy, which the gradient is written over
            into.copy_(ctx.spec.gradient_(chunk.to(_precise(logits), copy=True), *rest))
        return gradient, None, None


class _FromHidden(torch.autograd.Function):
    """(hidden [rows, features], weight [classes, features], bias, target [rows], spec) -> losses [rows]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        spec: _Spec,
    ) -> torch.Tensor:
        ctx.dtype = compat.active_autocast_dtype(hidden.device.type) or hidden.dtype
        precise = _precise(hidden)
        layer = weight.to(ctx.dtype)
        parts = []
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, labels in _chunks(spec.rows, hidden, target):
                parts.append(spec.losses(_logits(chunk.to(ctx.dtype), layer, bias, precise), labels))
        losses, normaliser = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, target, normaliser)
        ctx.spec = spec
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, target, normaliser = ctx.saved_tensors
        precise, dtype = _precise(hidden), ctx.dtype
        if torch.is_grad_enabled():
            inputs = _aliases(hidden, weight, bias)
            with torch.autocast(hidden.device.type, enabled=False):
                logits = _logits(inputs[0].to(dtype), inputs[1].to(dtype), inputs[2], precise)
            losses, _ = ctx.spec.losses(logits, target)
            return *_with_a_graph(losses, inputs, ctx.needs_input_grad, upstream), None, None
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, precise)) if wanted else None
            for tensor, wanted in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        layer = weight.to(dtype)
        into = hidden if of_hidden is None else of_hidden
        for chunk, part, *rest in _chunks(ctx.spec.rows, hidden, into, target, normaliser, upstream):
            chunk = chunk.to(dtype)
            gradient = ctx.spec.gradient_(_logits(chunk, layer, bias, precise), *rest)
            if of_bias is not None:
                of_bias += gradient.sum(0)
            gradient = gradient.to(dtype)
            if of_hidden is not None:
                part.copy_(gradient @ layer)
            if of_weight is None:
                continue
            if of_weight.dtype == dtype:
                of_weight.addmm_(gradient.T, chunk)
            else:
                of_weight += gradient.T @ chunk
        wanted = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return *(None if g is None else g.to(tensor.dtype) for g, tensor in wanted), None, None


def _aliases(*tensors: torch.Tensor | None) -> list[Any]:
    """Each apart, though two may be the same tensor."""
    return [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]


def _with_a_graph(
    losses: torch.Tensor, inputs: list[Any], wanted: Sequence[bool], upstream: torch.Tensor
) -> Iterator[torch.Tensor | None]:
    """Gradients of `losses` that can be differentiated again; None where `wanted` says so."""
    chosen = [tensor for tensor, is_wanted in zip(inputs, wanted, strict=False) if is_wanted]
    found = iter(torch.autograd.grad(losses, chosen, upstream, create_graph=True))
    return (next(found) if is_wanted else None for _, is_wanted in zip(inputs, wanted, strict=False))


def _chunks(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same `rows` rows of each tensor, one chunk after the other; an empty batch is one empty chunk."""
    for start in range(0, max(len(tensors[0]), 1), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, precise: torch.dtype
) -> torch.Tensor:
    logits = (hidden @ weight.T).to(precise)
    return logits if bias is None else logits.add_(bias)


def _reduced(losses: torch.Tensor, target: torch.Tensor, spec: _Spec, reduction: Reduction) -> torch.Tensor:
    if reduction == "none":
        return losses.reshape(target.shape)
    if reduction == "sum":
        return losses.sum()
    target = target.reshape(-1)
    counts = target != spec.ignore_index
    if spec.weight is not None:
        return losses.sum() / spec.weight[target.where(counts, 0)].where(counts, 0).sum()
    # a single class whose log-probability is minus the loss: the mean is over the targets that count
    single = torch.full_like(target, _COUNTED).where(counts, _IGNORED)
    return functional.nll_loss(-losses.unsqueeze(1), single, ignore_index=_IGNORED)


def _precise(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _rows_for(classes: int) -> int:
    return max(1, CHUNK_BYTES // (4 * classes))


def _check(
    values: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    smoothing: float,
    rows: int | None,
    classes: int | None = None,
) -> None:
    if not values.is_floating_point() or values.dim() < 1 or not values.shape[-1]:
        raise ValueError(
            f"input: got {values.dtype} of shape {tuple(values.shape)}, expected floats [..., n] of one class or more"
        )
    if target.dtype != torch.int64 or target.shape != values.shape[:-1]:
        raise ValueError(
            f"target: got {target.dtype} of shape {tuple(target.shape)}, expected class numbers (int64) of shape "
            f"{tuple(values.shape[:-1])}"
        )
    classes = values.shape[-1] if classes is None else classes
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected [{classes}], one per class")
    if weight is not None and weight.requires_grad:
        raise ValueError("weight: got one that requires a gradient, expected constants: weight.detach()")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: got {reduction!r}, expected 'mean', 'sum' or 'none'")
    if not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing: got {smoothing!r}, expected a share from 0 to 1")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows: got {rows!r}, expected a whole number of at least 1, or None")
