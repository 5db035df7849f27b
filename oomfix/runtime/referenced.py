"""Which models a forward runs: found by reading what its code refers to, without running it."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_DEPTH = 3  # a helper's helper, or the attribute of an object in a list


def code_of(forward: Callable[..., Any]) -> Any:
    """The code that `forward` runs: what is learned about a forward is kept under it.

    A function's code object, which stays the same when a loop defines the function anew; for other callables
    the code of their `__call__`, or their type.
    """
    function = _function_of(forward)
    return type(forward) if function is None else function.__code__


def identity(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What tells `forward`, called with these arguments, from other forwards: equal where what is known applies.

    The code, the models, functions, criteria and flags that it is bound to (closure, defaults, arguments of a
    partial), and the flags and models among its arguments. A function that a loop defines anew from the same
    things stays the same.
    """
    found: list[Any] = [code_of(forward)]
    for name, value in _references(forward):
        found += _identities(name, value, 2)
    arguments: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in arguments:
        found += _identities(place, value, 1)
    return tuple(found)


def _identities(name: Any, value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, nn.Module):
        if next(value.parameters(), None) is None and next(value.children(), None) is None:
            # a criterion may be made anew in each iteration
            yield name, type(value), *_settings(value)
        else:
            yield name, id(value)
    elif isinstance(value, bool | str | torch.dtype) or value is None:
        yield name, value
    elif isinstance(value, types.FunctionType | types.MethodType) or hasattr(value, "func"):
        yield name, code_of(value)
        if depth and not (getattr(value, "__module__", None) or "").startswith("torch"):
            for inner, bound in _references(value):
                yield from _identities((name, inner), bound, depth - 1)
    elif isinstance(value, types.ModuleType | type):
        return
    elif isinstance(value, list | tuple | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        if depth and len(value) <= 64:
            for key, entry in entries:
                # texts in a container are samples rather than flags
                if isinstance(entry, nn.Module | bool | types.FunctionType) or isinstance(value, dict):
                    yield from _identities((name, key), entry, depth - 1)
    elif name == "self" or (depth and callable(value)):
        for attribute, entry in getattr(value, "__dict__", {}).items():
            if isinstance(entry, nn.Module | list | tuple | dict):
                yield from _identities((name, attribute), entry, depth - 1)
        if name != "self":
            yield name, type(value), *_settings(value)


def _settings(value: Any) -> Iterator[Any]:
    return (pair for pair in vars(value).items() if isinstance(pair[1], bool | int | float | str | None))


def reachable_modules(forward: Callable[..., Any], arguments: Any = ()) -> list[nn.Module]:
    """Modules that `forward` can get at, or is given: helper functions, objects and containers looked into."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    layer: list[Any] = [forward, arguments]
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
    seen: set[int] = set()
    while id(forward) not in seen:
        seen.add(id(forward))
        # decorators and torch.compile put code of their own, shared by all they wrap, before the function
        attributes = vars(forward) if isinstance(forward, types.FunctionType) else {}
        inner = attributes.get("_torchdynamo_orig_callable") or attributes.get("__wrapped__")
        if inner is not None:
            forward = inner
        elif isinstance(forward, types.FunctionType):
            return forward
        elif isinstance(forward, types.MethodType):
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
    return None


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
    for name in _names_in(code):
        if name in names:
            yield name, names[name]
    for default in function.__defaults__ or ():
        yield "default", default


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Global names and attributes in `code`, and in the lambdas and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


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
