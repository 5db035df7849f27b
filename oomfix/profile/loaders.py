"""Data loaders of a simulated run: in this process, and with the batches that matter."""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import data
from torch.utils._python_dispatch import _disable_current_modes

from oomfix.profile.boundary import CardTrace
from oomfix.profile.patches import Patches
from oomfix.profile.progress import Progress

_IN_THIS_PROCESS = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "timeout": 0}
# no matter how long they take: what is found must not depend on the machine, or what else it does
_MOST_BATCHES_AHEAD = 64
_MOST_NUMBERS_AHEAD = 2**27  # seconds, where each is decoded and augmented


class Loaders:
    """Every `DataLoader` of a run: without workers and page-locked memory, which make no difference to the card.

    Where the first two batches differ in size, every batch is the largest of those to come, since that is the one that
    has to fit. Before the stage that is asked for, a pass ends after one batch.

    Args:
        progress: whether the run hurries.
        batch_size: (what the script asks for, what it gets instead), or None.

    Attributes:
        batch_size: of the loader that was last asked for a batch; None where there was none, or it has no fixed one.
        samples: how many it draws in a pass; None where neither its sampler nor its data set says.
    """

    def __init__(
        self, patches: Patches, trace: CardTrace, progress: Progress, batch_size: tuple[int, int] | None = None
    ) -> None:
        self._trace, self._progress = trace, progress
        self.batch_size: int | None = None
        self.samples: int | None = None
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
        loader_init, loader_iter = data.DataLoader.__init__, data.DataLoader.__iter__
        signature = inspect.signature(loader_init)

        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(loader, *args, **kwargs)
            if given.arguments.get("num_workers"):
                self._with_workers.add(loader)
            given.arguments.update(_IN_THIS_PROCESS)
            for name in ("prefetch_factor", "multiprocessing_context"):
                given.arguments.pop(name, None)
            if batch_size is not None and given.arguments.get("batch_size", 1) == batch_size[0]:
                if given.arguments.get("batch_sampler") is None:
                    given.arguments["batch_size"] = batch_size[1]
            loader_init(*given.args, **given.kwargs)

        def passes(loader: Any) -> Iterator[Any]:
            return self._pass(loader, loader_iter)

        patches.set(data.DataLoader, __init__=init, __iter__=passes)

    def _pass(self, loader: Any, iterate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        batches = iterate(loader)
        batches = self._largest_first(_unseen(batches) if loader in self._with_workers else batches)
        for batch in batches:
            self.batch_size = loader.batch_size
            self.samples = _samples(loader)
            yield batch
            if self._progress.hurrying:
                return

    def _largest_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        ahead = [batch for _, batch in zip(range(2), batches, strict=False)]
        sizes = [elements(batch) for batch in ahead]
        if len(set(sizes)) < 2 or None in sizes:
            yield from ahead
            yield from batches
            return
        largest, size, numbers, seen = max(ahead, key=_size), max(map(_size, ahead)), sum(map(_size, ahead)), len(ahead)
        while seen < _MOST_BATCHES_AHEAD and numbers < _MOST_NUMBERS_AHEAD:
            batch = next(batches, None)
            if batch is None:
                break
            seen += 1
            numbers += _size(batch)
            if _size(batch) > size:
                largest, size = batch, _size(batch)
        self._trace.assume(f"batches differ in size: every one is the largest of the first {seen}")
        # scripts may change a batch in place
        for _ in range(seen):
            yield copy.deepcopy(largest)
        for _ in batches:
            yield copy.deepcopy(largest)


def _samples(loader: Any) -> int | None:
    """How many samples a pass has: a sampler may draw fewer than the data set holds, as that of one process does."""
    if not isinstance(loader.dataset, Sized):
        return None
    # that of an iterable data set has no end
    return len(loader.sampler) if isinstance(loader.sampler, Sized) else len(loader.dataset)


def _unseen(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, made without the trace: workers have no card, and every operation of theirs would cost its time."""
    end = object()
    while True:
        with _disable_current_modes():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


def elements(batch: Any) -> int | None:
    """How many numbers the tensors of a batch hold together; None where it has tensors of the card already."""
    if isinstance(batch, FakeTensor):
        return None
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    sizes = [elements(part) for part in parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _size(batch: Any) -> int:
    return elements(batch) or 0
