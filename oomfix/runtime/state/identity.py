"""What tells a forward, called with certain arguments, from other forwards, found without running it.

What was learned about a forward holds as long as its code, models, functions, criteria and flags stay the same: these
are its identity. Numbers are no part of it, since step counters change at every call; but a number that stood still and
then moves (an epoch, the weight of a term) may make the forward another computation, so numbers are told apart too.
All this is looked at in every call, so it is written for speed.
"""

import argparse
import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix.runtime.state.held_objects import MOST_ENTRIES
from oomfix.runtime.state.referenced import code_of, is_of_torch, names_in, references

Numbers = tuple[float, ...]


def identity(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], Numbers]:
    """What tells `forward`, called with these arguments, from other forwards: equal where what is known applies.

    Returns:
        The code, the models, functions, criteria and flags that it is bound to (closure, defaults, arguments of a
        partial) and has among its arguments, and which arguments these are: a function that a loop defines anew from
        the same things stays the same. And the numbers that it reads.
    """
    code = code_of(forward)
    look = _Look(code if isinstance(code, types.CodeType) else None)
    look.key.append(code)
    for name, value in references(forward):
        look.at(name, value, 2)
    # what is given decides what a forward computes: without labels, it may have another loss
    look.key.append((len(args), *kwargs))
    for place, argument in enumerate(args):
        if type(argument) is not torch.Tensor:
            look.at(place, argument, 1)
    for argument_name, argument in kwargs.items():
        look.at(argument_name, argument, 1)
    return tuple(look.key), tuple(look.numbers)


def flags_inside(modules: Iterable[nn.Module]) -> list[Any]:
    """The flags of modules of the program's own: torch's have none that change what they compute."""
    own = (module for module in modules if not is_of_torch(type(module)))
    return [entry for module in own for entry in vars(module).values() if _kinds[type(entry)] is _Kind.FLAG]


class _Kind(Enum):
    """What tells two values of a type apart."""

    NOTHING = auto()
    NUMBER = auto()
    FLAG = auto()
    MODULE = auto()
    WRAPPER = auto()
    FUNCTION = auto()
    CONTAINER = auto()
    SETTINGS = auto()
    OBJECT = auto()


_TELL_AS_ATTRIBUTES = (_Kind.NUMBER, _Kind.FLAG, _Kind.FUNCTION, _Kind.SETTINGS)
# types of attributes that tell nothing, which most of the twenty of a module are
_silent: set[type] = set()


class _Kinds(dict[type, _Kind]):
    """The kind of each type, judged when it is first asked for."""

    def __missing__(self, type_: type) -> _Kind:
        kind = self[type_] = _judge_type(type_)
        if kind not in _TELL_AS_ATTRIBUTES:
            _silent.add(type_)
        return kind


_kinds = _Kinds()


def _judge_type(type_: type) -> _Kind:
    if issubclass(type_, bool | str | torch.dtype | types.NoneType | Enum):
        return _Kind.FLAG
    if issubclass(type_, int | float):
        return _Kind.NUMBER
    # a scaler has no scale before its first loss: it is the same scaler afterwards
    if issubclass(type_, torch.Tensor | types.ModuleType | type | torch.amp.GradScaler):
        return _Kind.NOTHING
    if issubclass(type_, DistributedDataParallel):
        return _Kind.WRAPPER
    if issubclass(type_, nn.Module):
        return _Kind.MODULE
    if issubclass(type_, types.FunctionType | types.MethodType | functools.partial):
        return _Kind.FUNCTION
    if issubclass(type_, list | tuple | dict):
        return _Kind.CONTAINER
    if issubclass(type_, argparse.Namespace | types.SimpleNamespace) or is_dataclass(type_):
        return _Kind.SETTINGS
    return _Kind.OBJECT


class _Look:
    """One look at everything that a function refers to.

    Attributes:
        key: what tells the function from others.
        numbers: those that it reads.

    Args:
        code: of the function, which tells which attributes it reads.
    """

    def __init__(self, code: types.CodeType | None) -> None:
        self.key: list[Any] = []
        self.numbers: list[float] = []
        self._code = code

    def at(self, name: Any, value: Any, depth: int) -> None:
        """Add what tells `value` from others under the same name."""
        kind = _kinds[type(value)]
        if kind is _Kind.NOTHING:
            return
        if kind is _Kind.FLAG:
            self.key.append((name, value))
        elif kind is _Kind.NUMBER:
            self.numbers.append(value)
        elif kind is _Kind.MODULE:
            # a criterion may be made anew in each iteration
            is_model = value._parameters or value._modules
            self.key.append((name, id(value) if is_model else type(value)))
            self._settings(value, code_of(getattr(type(value), "forward", value)), depth, self._code)
        elif kind is _Kind.WRAPPER:
            # its own flags say where it is between two exchanges
            self.key.append((name, id(value)))
            self.at(name, value.module, depth)
        elif kind is _Kind.FUNCTION:
            self.key.append((name, code_of(value)))
            if depth and not is_of_torch(value):
                for inner, bound in references(value):
                    self.at((name, inner), bound, depth - 1)
        elif kind is _Kind.CONTAINER:
            self.key.append((name, type(value)))
            if depth and len(value) <= MOST_ENTRIES:
                self._entries(name, value, depth)
        elif name == "self" or depth:
            attributes = getattr(value, "__dict__", {})
            if len(attributes) <= MOST_ENTRIES or name == "self":
                self.key.append((name, type(value)))
                self._settings(value, self._code, depth)
                for attribute, entry in attributes.items():
                    if isinstance(entry, nn.Module | list | tuple | dict):
                        self.at((name, attribute), entry, depth - 1)

    def _entries(self, name: Any, container: Any, depth: int) -> None:
        of_names = isinstance(container, dict)
        for key, entry in container.items() if of_names else enumerate(container):
            # texts and numbers in a list are samples rather than settings
            if of_names or isinstance(entry, nn.Module | bool | types.FunctionType):
                self.at((name, key), entry, depth - 1)

    def _settings(self, value: Any, code: Any, depth: int, user: types.CodeType | None = None) -> None:
        """Flags and functions among the attributes of `value`, and numbers that `code` or `user` reads."""
        owner: Any = type(value)
        read = _names_read(code, owner, user) if isinstance(code, types.CodeType) else frozenset()
        for name, entry in getattr(value, "__dict__", {}).items():
            if type(entry) in _silent:
                continue
            kind = _kinds[type(entry)]
            if kind is _Kind.FLAG:
                self.key.append((name, entry))
            elif kind is _Kind.FUNCTION:
                self.key.append((name, code_of(entry)))
            elif kind is _Kind.NUMBER:
                if name in read:
                    self.numbers.append(entry)
            elif kind is _Kind.SETTINGS:
                if depth:
                    self._settings(entry, code, depth - 1)


@functools.lru_cache(maxsize=256)
def _names_read(code: types.CodeType, owner: type, user: types.CodeType | None) -> frozenset[str]:
    """Names in `code`, and in the methods of `owner` that it names, and in `user`."""
    names = frozenset((*names_in(code), *(names_in(user) if user is not None else ())))
    methods = (getattr(owner, name, None) for name in names)
    return names.union(*(names_in(method.__code__) for method in methods if isinstance(method, types.FunctionType)))
