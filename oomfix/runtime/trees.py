"""Nested containers of tensors: the one place that knows which containers are looked into."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


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


def rebuilt(node: Any, values: list[Any]) -> Any:
    """A container like `node` that holds `values`, given in the order of `children(node)`."""
    if isinstance(node, Mapping):
        keys = list(node)
        try:
            # a shallow copy keeps what else the mapping carries (encodings of a tokenizer, default factories)
            result: Any = copy.copy(node)
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
    for field, value in zip(fields(node), values, strict=True):
        # frozen dataclasses refuse setattr
        object.__setattr__(result, field.name, value)
    return result


def map_leaves(function: Callable[[Any], Any], node: Any) -> Any:
    """The same nesting with `function` applied to each leaf; containers in which nothing changed are kept."""
    inner = children(node)
    if inner is None:
        return function(node)
    values = [map_leaves(function, value) for _, value in inner]
    if all(new is old for new, (_, old) in zip(values, inner, strict=True)):
        return node
    return rebuilt(node, values)


def tensors(node: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `node`, in order."""
    if isinstance(node, torch.Tensor):
        yield node
        return
    for _, child in children(node) or ():
        yield from tensors(child)
