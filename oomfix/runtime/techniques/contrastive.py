"""Contrastive losses over large batches: exact, with the activations of a few samples at a time.

A loss with in-batch negatives cannot be split, since each sample is compared with all others. What it is computed
from can: encoders see one sample at a time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix.runtime import trees
from oomfix.runtime.batches.batch import Batch, balanced
from oomfix.runtime.modules import modules_in
from oomfix.runtime.processes.sharding import is_sharded
from oomfix.runtime.state.attributes import Attributes
from oomfix.runtime.state.random_state import RandomState
from oomfix.runtime.state.referenced import reachable_modules
from oomfix.runtime.techniques.cross_entropy import linear_cross_entropy
from oomfix.runtime.techniques.recomputation import Conduct, recomputation_contexts


def encode_in_chunks(
    encode: Callable[..., Any], /, *batch: Any, rows: int, batch_size: int | None = None, **named: Any
) -> Any:
    """`encode(*batch, **named)`, run on `rows` samples at a time, with a graph that keeps no activations.

        images = runtime.encode_in_chunks(model.encode_image, pixels, rows=64)
        texts = runtime.encode_in_chunks(model.encode_text, tokens, rows=64)
        runtime.contrastive_loss(images, texts, model.logit_scale.exp()).backward()

    Backward runs each chunk again, with the random numbers of its first run, and releases its activations before
    the next. Gradients are those of the whole batch, up to the order of sums (1e-12 of the largest in float64).

    Args:
        encode: a module or function whose results for a sample do not depend on the other samples; BatchNorm in
            training mode sees chunks, and updates its statistics once for each.
        batch: tensors of shape [samples, ...], lists with one entry per sample, containers of them; the rest is
            passed on whole.
        rows: the most samples in a chunk.
        batch_size: number of samples; None infers it.
        named: further arguments, treated alike.

    Returns:
        What `encode` returns for the whole batch: tensors [samples, ...], alone or in nested containers.

    Raises:
        ValueError: `rows` is below 1, or `encode` returns a tensor without one row per sample.
        RuntimeError: `encode` runs a model of FSDP2, in more than one chunk.

    Works under autocast, with a GradScaler, under DDP, in `torch.no_grad` and inside a forward of `forward_backward`.
    Costs a second forward. CLIP ViT-B/32 at batch 512 peaks at 5.42 GiB in chunks of 64 instead of 24.45 (simulated
    A100); on a CPU a smaller version takes 1.51 times as long (bench/results/techniques-cpu.md).

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows: got {rows!r}, expected a whole number of samples, at least 1")
    cut = Batch(batch, named, batch_size)
    chunks = balanced(cut.size, max(1, math.ceil(cut.size / rows)))
    if not torch.is_grad_enabled():
        return _concatenated([_checked(encode, cut, start, stop) for start, stop in chunks])
    modules = nn.ModuleList(dict.fromkeys(reachable_modules(encode, (batch, named))))
    if len(chunks) > 1 and any(map(is_sharded, modules.modules())):
        raise RuntimeError(
            "encode: runs a model of FSDP2 (fully_shard), which cannot gather its parameters for several chunks of one "
            "backward; use DistributedDataParallel, or rows=N with all samples of the batch"
        )
    attributes, generators = Attributes(modules_in(modules)), RandomState()
    # what the first chunk does besides computing its result is taken for what all do
    conduct = Conduct(None, draws_outside_torch=True, assigns_attributes=True)
    results = []
    for number, (start, stop) in enumerate(chunks):
        contexts = functools.partial(recomputation_contexts, modules, conduct)
        run = functools.partial(checkpoint, encode, use_reentrant=False, context_fn=contexts)
        results.append(_checked(run, cut, start, stop))
        if number == 0:
            conduct = Conduct(None, generators.moved_outside_torch(), bool(attributes.changed()))
    return _concatenated(results)


def contrastive_loss(
    first: torch.Tensor, second: torch.Tensor, scale: float | torch.Tensor = 1.0, *, rows: int | None = None
) -> torch.Tensor:
    """CLIP's loss: each row of `first` should be nearest to the same row of `second`, and vice versa.

    The similarities [samples, samples] are never made as a whole, nor their softmax.

    Args:
        first, second: embeddings [samples, features]; normalise them first if cosines are wanted.
        scale: what similarities are multiplied by (the inverse temperature); may be learned.
        rows: number of rows whose similarities exist at a time; None: as many as take 64 MiB.

    Returns:
        The mean of the two cross entropies, a scalar in fp32 (float64 for float64 embeddings).

    Raises:
        ValueError: the shapes differ, are not [samples, features], or hold no sample.

    Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision".
    """
    if first.shape != second.shape or first.dim() != 2 or not len(first):
        raise ValueError(
            f"first, second: got shapes {tuple(first.shape)} and {tuple(second.shape)}, expected the same "
            "[samples, features], of one sample or more"
        )
    own = torch.arange(len(first), device=first.device)
    scaled = first * scale
    of_first = linear_cross_entropy(scaled, second, own, rows=rows)
    of_second = linear_cross_entropy(second, scaled, own, rows=rows)
    return (of_first + of_second) / 2


def _checked(run: Callable[..., Any], batch: Batch, start: int, stop: int) -> Any:
    args, kwargs = batch.rows(start, stop)
    result = run(*args, **kwargs)
    for tensor in trees.tensors(result):
        if tensor.dim() == 0 or tensor.shape[0] != stop - start:
            raise ValueError(
                f"encode: returned a tensor of shape {tuple(tensor.shape)} for {stop - start} samples, expected "
                "[samples, ...]; compute what is not per sample (losses, means) from the embeddings of all"
            )
    return result


def _concatenated(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(results)
    inner = trees.children(first)
    if inner is None:
        return first
    columns = zip(*([child for _, child in trees.children(result) or ()] for result in results), strict=True)
    return trees.rebuilt(first, [_concatenated(list(column)) for column in columns])
