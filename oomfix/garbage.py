"""Garbage collection while syntax trees are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect a hundred times less often: a tree is many objects and hardly any cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] * 100, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
