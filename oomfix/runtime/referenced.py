"""Which models a forward runs: found by reading what its code refers to, without running it."""

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_DEPTH = 3  # a helper's helper, or the attribute of an object in a list


def code_of(forward: Callable[..., Any]) -> Any:
    """The code that `forward` runs: what is learned about a forward is kept under it.

    A function's code object, which stays the same when a loop defines the function anew; for other callables
    the code of their `__call__`, or their type.
    """
    function = _function_of(forward)
    return type(forward) if function is None else function.__code__


def named_modules(forward: Callable[..., Any]) -> list[nn.Module]:
    """Modules that `forward` refers to directly: by a name it uses, or as an attribute of its `self`.

    Cheap enough for every call, and another list as soon as a name stands for another model.
    """
    found: list[nn.Module] = []
    for name, value in _references(forward):
        if isinstance(value, nn.Module):
            found.append(value)
        elif name == "self":
            found += [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, nn.Module)]
    return found


def reachable_modules(forward: Callable[..., Any]) -> list[nn.Module]:
    """Modules that `forward` can get at, helper functions, objects and containers looked into."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    layer: list[Any] = [forward]
    for _ in range(_DEPTH + 1):
        following: list[Any] = []
        for value in layer:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                found[id(value)] = value
            else:
                following += _inside(value)
        layer = following
    return list(found.values())


def _function_of(forward: Any) -> types.FunctionType | None:
    while not isinstance(forward, types.FunctionType):
        if isinstance(forward, types.MethodType):
            forward = forward.__func__
        elif hasattr(forward, "func"):  # functools.partial
            forward = forward.func
        elif hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        elif isinstance(forward, nn.Module):
            forward = type(forward).forward
        else:
            call = type(forward).__dict__.get("__call__")
            return call if isinstance(call, types.FunctionType) else None
    return forward


def _references(forward: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(forward, nn.Module):
        yield "forward", forward
        return
    bound = getattr(forward, "__self__", None)
    if bound is not None:
        yield "forward" if isinstance(bound, nn.Module) else "self", bound
    for argument in (*getattr(forward, "args", ()), *(getattr(forward, "keywords", None) or {}).values()):
        yield "argument", argument
    function = _function_of(forward)
    if function is None:
        yield "self", forward
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # a name that is not bound yet
    names = function.__globals__
    for name in code.co_names:
        if name in names:
            yield name, names[name]
    for default in function.__defaults__ or ():
        yield "default", default


def _inside(value: Any) -> list[Any]:
    """What to look at next: a helper of this program, or an object that holds models."""
    if isinstance(value, types.FunctionType | types.MethodType) or hasattr(value, "func"):
        module = getattr(value, "__module__", None) or ""
        return [] if module.split(".")[0] == "torch" else [found for _, found in _references(value)]
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= 64 else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= 64 else []
    if isinstance(value, type | types.ModuleType | str | bytes | int | float | type(None)):
        return []
    return list(getattr(value, "__dict__", {}).values())
