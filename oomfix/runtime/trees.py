"""Nested containers of tensors: the one place that knows which containers are looked into."""

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_MOST_OBJECTS = 1000  # in an object that is taken for data


_Into = Callable[[Any], list[tuple[Any, Any]] | None]


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) pairs of a container: mapping, list, tuple or dataclass instance; None for a leaf."""
    if isinstance(node, torch.Tensor | str | bytes):
        return None
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    if is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in fields(node)]
    return None


def contents(node: Any) -> list[tuple[Any, Any]] | None:
    """As `children`, and for other objects that hold tensors (a cache of keys, a distribution) their attributes."""
    inner = children(node)
    if inner is None and _is_data_object(node) and _leads_to_tensors(node):
        return list(vars(node).items())
    return inner


def _is_data_object(node: Any) -> bool:
    others = torch.Tensor | types.ModuleType | int | float
    return hasattr(node, "__dict__") and not callable(node) and not isinstance(node, others)


def _leads_to_tensors(node: Any) -> bool:
    """Whether attributes of `node` lead to a tensor, and nothing leads back or twice to the same object."""
    seen, layer, found = {id(node)}, list(vars(node).values()), False
    while layer:
        following: list[Any] = []
        for value in layer:
            if isinstance(value, torch.Tensor):
                found = True
                continue
            inner = children(value)
            below = list(vars(value).values()) if inner is None and _is_data_object(value) else []
            below += [child for _, child in inner or ()]
            if below and (id(value) in seen or len(seen) > _MOST_OBJECTS):
                return False
            seen.add(id(value))
            following += below
        layer = following
    return found


def rebuilt(node: Any, values: list[Any]) -> Any:
    """A container like `node` that holds `values`, given in the order of `contents(node)`."""
    if isinstance(node, Mapping):
        keys = list(node)
        try:
            # a shallow copy keeps what else the mapping carries (encodings of a tokenizer, default factories)
            result = _copied(node)
            if getattr(node, "__dict__", None) is node:
                # `self.__dict__ = self`, which a copy would keep the old attributes of
                result.__dict__ = result
            before = [node[key] for key in keys]
            for key, value in zip(keys, values, strict=True):
                result[key] = value
            if any(node[key] is not value for key, value in zip(keys, before, strict=True)):
                # a copy that shares its contents with the caller's mapping
                for key, value in zip(keys, before, strict=True):
                    result[key] = value
                return dict(zip(keys, values, strict=True))
        except TypeError:
            return dict(zip(keys, values, strict=True))
        return result
    if isinstance(node, tuple):
        # named tuples take their fields one by one
        return type(node)(*values) if hasattr(node, "_fields") else tuple(values)
    if isinstance(node, list):
        return values
    result = copy.copy(node)
    names = [field.name for field in fields(node)] if is_dataclass(node) else list(vars(node))
    for name, value in zip(names, values, strict=True):
        # frozen dataclasses refuse setattr
        object.__setattr__(result, name, value)
    return result


def _copied(node: Any) -> Any:
    """A shallow copy, also of a dict with `__getattr__ = dict.__getitem__`.

    Python 3.10 asks that for a `__getstate__`, and gets a KeyError.
    """
    try:
        return copy.copy(node)
    except KeyError:
        if not isinstance(node, dict):
            raise
        result = type(node).__new__(type(node))
        dict.update(result, node)
        return result


def map_leaves(function: Callable[[Any], Any], node: Any, into: _Into = children) -> Any:
    """The same nesting with `function` applied to each leaf; containers in which nothing changed are kept.

    Args:
        into: `children`, or `contents` to look into objects too.
    """
    inner = into(node)
    if inner is None:
        return function(node)
    values = [map_leaves(function, value, into) for _, value in inner]
    if all(new is old for new, (_, old) in zip(values, inner, strict=True)):
        return node
    return rebuilt(node, values)


def leaves(node: Any) -> Iterator[Any]:
    """Everything in `node` that is no container, in order."""
    inner = children(node)
    if inner is None:
        yield node
        return
    for _, child in inner:
        yield from leaves(child)


def tensors(node: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `node`, in order."""
    return (leaf for leaf in leaves(node) if isinstance(leaf, torch.Tensor))


def with_places(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor in `node`, in order, behind the keys that lead to it."""
    if isinstance(node, torch.Tensor):
        yield place, node
        return
    for key, child in children(node) or ():
        yield from with_places(child, (*place, key))


def at(node: Any, place: Iterable[Any]) -> Any:
    """What the keys `place` lead to in `node`."""
    for key in place:
        node = dict(children(node) or ())[key]
    return node
