"""What the benches have in common on a GPU: the clock, and what does not fit."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from oomfix.runtime.compat import OutOfMemoryError


def milliseconds(run: Callable[..., object], *arguments: object) -> float:
    """How long the GPU takes for what `run(*arguments)` asks of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run(*arguments)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@contextmanager
def told_if_out_of_memory(name: str) -> Iterator[None]:
    """What does not fit keeps nobody else from being measured."""
    try:
        yield
    except OutOfMemoryError as error:
        print(f"{name}: {error}", file=sys.stderr)
