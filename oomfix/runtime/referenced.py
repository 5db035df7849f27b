"""Which models a forward runs: found by reading what its code refers to, without running it."""

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from oomfix.runtime.random_state import is_generator
from oomfix.runtime.trees import tensors
from oomfix.runtime.variables import Variables, assigned_outside

_DEPTH = 3  # a helper's helper, or the attribute of an object in a list
_MOST_ENTRIES = 64  # of a container: longer ones hold data, not models or flags


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
    things stays the same. This is called for every batch, so it is written for speed.
    """
    found: list[Any] = [code_of(forward)]
    for name, value in _references(forward):
        _identify(name, value, 2, found)
    for place, argument in enumerate(args):
        if type(argument) is not torch.Tensor:
            _identify(place, argument, 1, found)
    for argument_name, argument in kwargs.items():
        _identify(argument_name, argument, 1, found)
    return tuple(found)


class _Kind(Enum):
    """What tells two values of a type apart."""

    NOTHING = auto()
    FLAG = auto()
    MODULE = auto()
    FUNCTION = auto()
    CONTAINER = auto()
    OBJECT = auto()


_kinds: dict[type, _Kind] = {}


def _kind_of(type_: type) -> _Kind:
    kind = _kinds.get(type_)
    if kind is None:
        kind = _kinds[type_] = _judge_type(type_)
    return kind


def _judge_type(type_: type) -> _Kind:
    if issubclass(type_, torch.Tensor | types.ModuleType | type | int | float) and not issubclass(type_, bool | Enum):
        return _Kind.NOTHING
    if issubclass(type_, bool | str | torch.dtype | types.NoneType | Enum):
        return _Kind.FLAG
    if issubclass(type_, nn.Module):
        return _Kind.MODULE
    if issubclass(type_, types.FunctionType | types.MethodType | functools.partial):
        return _Kind.FUNCTION
    if issubclass(type_, list | tuple | dict):
        return _Kind.CONTAINER
    return _Kind.OBJECT


def _identify(name: Any, value: Any, depth: int, found: list[Any]) -> None:
    """Append to `found` what tells `value` from others under the same name."""
    kind = _kind_of(type(value))
    if kind is _Kind.NOTHING:
        return
    if kind is _Kind.FLAG:
        found.append((name, value))
    elif kind is _Kind.MODULE:
        # a criterion may be made anew in each iteration
        is_model = value._parameters or value._modules
        found.append((name, id(value) if is_model else type(value), *_settings(value)))
    elif kind is _Kind.FUNCTION:
        found.append((name, code_of(value)))
        if depth and not _of_torch(value):
            for inner, bound in _references(value):
                _identify((name, inner), bound, depth - 1, found)
    elif kind is _Kind.CONTAINER:
        if depth and len(value) <= _MOST_ENTRIES:
            of_names = isinstance(value, dict)
            for key, entry in value.items() if of_names else enumerate(value):
                # texts in a container are samples rather than flags
                if of_names or isinstance(entry, nn.Module | bool | types.FunctionType):
                    _identify((name, key), entry, depth - 1, found)
    elif name == "self" or depth:
        attributes = getattr(value, "__dict__", {})
        if len(attributes) <= _MOST_ENTRIES or name == "self":
            found.append((name, type(value), *_settings(value)))
            for attribute, entry in attributes.items():
                if isinstance(entry, nn.Module | list | tuple | dict):
                    _identify((name, attribute), entry, depth - 1, found)


def _settings(value: Any) -> Iterator[Any]:
    """Flags and functions among the attributes of `value`; numbers may be schedules, which change at every call."""
    for name, entry in getattr(value, "__dict__", {}).items():
        kind = _kind_of(type(entry))
        if kind is _Kind.FLAG:
            yield name, entry
        elif kind is _Kind.FUNCTION:
            yield name, code_of(entry)


def generators_in(forward: Callable[..., Any], modules: Iterable[nn.Module]) -> list[Any]:
    """Random number generators of the program's own that `forward` refers to, or its modules hold."""
    values = [value for _, value in _references(forward)]
    values += [value for module in modules for value in vars(module).values()]
    return list({id(value): value for value in values if is_generator(value)}.values())


def state_of(forward: Callable[..., Any]) -> list[Any]:
    """Where `forward` may keep state, its modules apart: objects that it refers to, and variables that it assigns."""
    found = {id(value): value for _, value in _references(forward) if _kind_of(type(value)) is _Kind.OBJECT}
    objects = [value for value in found.values() if 0 < len(getattr(value, "__dict__", {})) <= _MOST_ENTRIES]
    helpers = [
        value for _, value in _references(forward) if _kind_of(type(value)) is _Kind.FUNCTION and not _of_torch(value)
    ]
    functions = [function for helper in (forward, *helpers) if (function := _function_of(helper)) is not None]
    variables = [Variables(function) for function in functions if any(assigned_outside(function.__code__))]
    return [*objects, *variables]


def graph_in(forward: Callable[..., Any]) -> str | None:
    """The name of a tensor made outside of `forward` that it refers to and that has a graph, if there is one."""
    for name, value in _references(forward):
        kind = _kind_of(type(value))
        if isinstance(value, torch.Tensor) or (kind is _Kind.CONTAINER and len(value) <= _MOST_ENTRIES):
            if any(tensor.grad_fn is not None for tensor in tensors(value)):
                return name
    return None


def reachable_modules(forward: Callable[..., Any], arguments: Any = ()) -> list[nn.Module]:
    """Modules that `forward` can get at, or is given: helper functions, objects and containers looked into."""
    return [value for value in _reachable(forward, arguments) if isinstance(value, nn.Module)]


def leaves_in(forward: Callable[..., Any], arguments: Any = ()) -> list[torch.Tensor]:
    """Parameters outside of modules that `forward` can get at, or is given, and other tensors that want a gradient."""
    found = (value for value in _reachable(forward, arguments) if isinstance(value, torch.Tensor))
    return [value for value in found if value.is_leaf and (value.requires_grad or isinstance(value, nn.Parameter))]


def _reachable(forward: Callable[..., Any], arguments: Any) -> Iterator[Any]:
    """Everything that `forward` can get at, up to some depth, each once; modules are not looked into."""
    seen: set[int] = set()
    layer: list[Any] = [forward, arguments]
    for _ in range(_DEPTH + 1):
        following: list[Any] = []
        for value in layer:
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield value
            if not isinstance(value, nn.Module):
                following += _inside(value)
        layer = following


def _of_torch(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] == "torch"


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
    if function is None or type(forward).__dict__.get("__call__") is function:
        yield "self", forward
    if function is None:
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
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return [] if _of_torch(value) else [found for _, found in _references(value)]
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _MOST_ENTRIES else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= _MOST_ENTRIES else []
    if isinstance(value, type | types.ModuleType | str | bytes | int | float | type(None)):
        return []
    return list(getattr(value, "__dict__", {}).values())
