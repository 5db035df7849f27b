"""Objects of the program that others hold: the meter of a trainer, what balances the losses of a model."""

import argparse
import functools
import itertools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oomfix.runtime.state.attributes import namespace

_DEPTH = 3  # the state of a part of a part of a trainer
MOST_ENTRIES = 64  # of a container: longer ones hold data, not models or flags
_CONTAINERS = (dict, list, tuple)
_NO_STATE = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, Enum, *_CONTAINERS)
_PACKAGES = {"site-packages", "dist-packages"}


def held_by(owners: Iterable[Any]) -> list[Any]:
    """Objects with attributes, of classes of the program's own, that `owners` lead to; without these and modules.

    Classes that are installed (loggers, writers, progress bars) keep their own counsel: threads may use them.
    """
    layer = list(owners)
    seen, found = set(map(id, layer)), []
    for _ in range(_DEPTH):
        values = itertools.chain.from_iterable(namespace(owner).values() for owner in layer)
        layer = []
        for value in _objects(values, 2):
            if id(value) not in seen:
                seen.add(id(value))
                layer.append(value)
        found += layer
    return found


def _objects(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Those among `values` that may hold state, and in the containers among them."""
    for value in values:
        kind: type = type(value)
        if _may_hold_state(kind):
            if len(getattr(value, "__dict__", ())) <= MOST_ENTRIES and hasattr(value, "__dict__"):
                yield value
        elif depth and kind in _CONTAINERS and 0 < len(value) <= MOST_ENTRIES:
            yield from _objects(value.values() if kind is dict else value, depth - 1)


@functools.lru_cache(maxsize=1024)
def _may_hold_state(kind: type) -> bool:
    if issubclass(kind, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if issubclass(kind, _NO_STATE) or kind.__module__ == "builtins":
        return False
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return module is None or kind.__module__ == "__main__"  # a notebook
    return not file.startswith(sysconfig.get_path("stdlib")) and _PACKAGES.isdisjoint(Path(file).parts)
