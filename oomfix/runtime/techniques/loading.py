"""Arguments of DataLoaders that feed a GPU without holding more host memory than that takes."""

import os
from typing import Any

import torch

_ENOUGH_WORKERS = 8


def loader_kwargs(num_workers: int | None = None, *, prefetch_factor: int = 2) -> dict[str, Any]:
    """Arguments for a `DataLoader`, to be passed with `**`.

    Args:
        num_workers: processes that load batches; None: the processors that this process may use, less one for the
            training itself, at most 8.
        prefetch_factor: batches that each worker prepares ahead. The loader holds `num_workers * prefetch_factor`
            batches in host memory, and as many page-locked as have arrived.

    Returns:
        `num_workers`, `pin_memory` (True where there is CUDA: only from page-locked memory does
        `.to("cuda", non_blocking=True)` run beside the computation) and, with workers, `persistent_workers` (True:
        no new processes, and no second copy of the data set while they start, in each epoch) and `prefetch_factor`.

    Raises:
        ValueError: a number out of its range.

    None of it takes memory of the card: a batch gets there when it is moved.
    """
    if num_workers is None:
        num_workers = max(0, min(_ENOUGH_WORKERS, _processors() - 1))
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers: got {num_workers!r}, expected a whole number of at least 0, or None")
    if isinstance(prefetch_factor, bool) or not isinstance(prefetch_factor, int) or prefetch_factor < 1:
        raise ValueError(f"prefetch_factor: got {prefetch_factor!r}, expected a whole number of at least 1")
    arguments: dict[str, Any] = {"num_workers": num_workers, "pin_memory": torch.cuda.is_available()}
    if num_workers:
        # a loader without workers refuses these two
        arguments.update(persistent_workers=True, prefetch_factor=prefetch_factor)
    return arguments


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
