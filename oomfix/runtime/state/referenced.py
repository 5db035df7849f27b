"""What a forward refers to (models, generators, state), found by reading its code, without running it."""

import functools
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from oomfix.runtime.state.attributes import Containers
from oomfix.runtime.state.held_objects import MOST_ENTRIES, held_by
from oomfix.runtime.state.random_state import is_generator
from oomfix.runtime.state.variables import Variables, assigned_outside
from oomfix.runtime.trees import tensors

_DEPTH = 3  # a helper's helper, or the attribute of an object in a list
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def code_of(forward: Callable[..., Any]) -> Any:
    """The code that `forward` runs: what is learned about a forward is kept under it.

    A function's code object, which stays the same when a loop defines the function anew; for other callables
    the code of their `__call__`, or their type.
    """
    if type(forward) is types.FunctionType and not forward.__dict__:
        return forward.__code__
    function = _function_of(forward)
    return type(forward) if function is None else function.__code__


def generators_in(forward: Callable[..., Any], modules: Iterable[nn.Module]) -> list[Any]:
    """Random number generators of the program's own that `forward`, its helpers, objects and modules refer to."""
    values = [value for helper in _helpers(forward) for _, value in references(helper)]
    objects = [value for value in values if _is_object(value) and len(vars(value)) <= MOST_ENTRIES]
    values += itertools.chain.from_iterable(vars(holder).values() for holder in (*objects, *modules))
    # a method of a generator, which a program may have given a name of its own, is built in
    values += [value.__self__ for value in values if isinstance(value, types.BuiltinMethodType)]
    one_of_each = dict(zip(map(type, values), values, strict=True))
    if not any(map(is_generator, one_of_each.values())):
        return []
    return list({id(value): value for value in values if is_generator(value)}.values())


def state_of(forward: Callable[..., Any]) -> list[Any]:
    """Where `forward` may keep state, its modules apart.

    Returns:
        Objects that it and its helpers refer to, the variables that they assign, and the containers that they refer to.
    """
    helpers = _helpers(forward)
    named = {id(value): (name, value) for helper in helpers for name, value in references(helper)}.values()
    objects = [value for _, value in named if _is_object(value) and len(vars(value)) <= MOST_ENTRIES]
    functions = [function for helper in helpers if (function := _function_of(helper)) is not None]
    variables = [Variables(function) for function in functions if any(assigned_outside(function.__code__))]
    containers = Containers()
    for name, value in named:
        if isinstance(value, list | dict | set | deque) and len(value) <= MOST_ENTRIES:
            containers[name if name not in containers else (name, id(value))] = value
    return [*objects, *variables, *([containers] if containers else [])]


def owners_of(forward: Callable[..., Any], modules: Iterable[nn.Module]) -> list[Any]:
    """Whose attributes `forward` may change: the modules, where it keeps state, and the objects that these hold."""
    owners = [*modules, *state_of(forward)]
    return [*owners, *held_by(owners)]


def tensors_of(forward: Callable[..., Any], modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Tensors outside of `modules` that `forward` may write: that it, its helpers, containers and objects refer to."""
    modules = list(modules)
    values = [value for helper in _helpers(forward) for _, value in references(helper)]
    for state in owners_of(forward, modules)[len(modules) :]:
        values += (state if isinstance(state, Mapping) else vars(state)).values()
    shallow = [value for value in values if not isinstance(value, list | tuple | dict) or len(value) <= MOST_ENTRIES]
    return list({id(tensor): tensor for value in shallow for tensor in tensors(value)}.values())


def _helpers(forward: Any) -> list[Any]:
    """`forward`, and the functions of the program that it refers to, or that these refer to, each once."""
    found, layer = {id(forward): forward}, [forward]
    for _ in range(_DEPTH):
        values = [value for helper in layer for _, value in references(helper)]
        layer = [value for value in values if isinstance(value, _FUNCTIONS) and not is_of_torch(value)]
        layer = [value for value in layer if id(value) not in found]
        found.update((id(value), value) for value in layer)
    return list(found.values())


def _is_object(value: Any) -> bool:
    """Whether `value` is an object of the program's own, rather than data, code or a module."""
    others = (torch.Tensor, nn.Module, types.ModuleType, type, str, int, float, list, tuple, dict, Enum, *_FUNCTIONS)
    return hasattr(value, "__dict__") and not isinstance(value, others)


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


def is_of_torch(function: Any) -> bool:
    """Whether `function` is one of torch's own."""
    return (getattr(function, "__module__", None) or "").split(".")[0] == "torch"


def names_used(forward: Callable[..., Any], modules: Iterable[nn.Module]) -> set[str]:
    """Names of globals and attributes in the code of `forward`, of its helpers and of the forwards of `modules`.

    Code of torch itself is left out, and so are methods that none of that code names.
    """
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[tuple[Any, Any]] = [(forward, getattr(forward, "__self__", None))]
    waiting += [(_forward_of(module), module) for module in modules]
    while waiting:
        value, owner = waiting.pop()
        function = _function_of(value)
        if function is None or function.__code__ in seen or is_of_torch(function):
            continue
        seen.add(function.__code__)
        names = set(names_in(function.__code__))
        found |= names
        for thing in (owner, *(bound for _, bound in references(value))):
            if isinstance(thing, type) and issubclass(thing, torch.autograd.Function):
                waiting.append((thing.forward, None))
            elif isinstance(thing, _FUNCTIONS):
                waiting.append((thing, getattr(thing, "__self__", None)))
            elif thing is not None and not isinstance(thing, type | types.ModuleType | torch.Tensor):
                methods = (getattr(type(thing), name, None) for name in names)
                waiting += [(method, thing) for method in methods if isinstance(method, types.FunctionType)]
    return found


def _forward_of(module: nn.Module) -> Any:
    # torch.jit leaves a network no forward in Python
    return getattr(type(module), "forward", None)


def _function_of(forward: Any) -> types.FunctionType | None:
    if type(forward) is types.FunctionType and not forward.__dict__:
        return forward
    if isinstance(forward, nn.Module):
        return _function_of(_forward_of(forward))
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
            return _function_of(forward)
        else:
            call = type(forward).__dict__.get("__call__")
            return call if isinstance(call, types.FunctionType) else None
    return None


def references(forward: Any) -> list[tuple[str, Any]]:
    """Everything that `forward` is bound or refers to, under its name: owner, arguments, closure, globals, defaults."""
    if type(forward) is types.FunctionType and not forward.__dict__:
        return _references_of_function(forward)
    if isinstance(forward, nn.Module):
        return [("forward", forward)]
    found: list[tuple[str, Any]] = []
    bound = getattr(forward, "__self__", None)
    if bound is not None:
        found.append(("forward" if isinstance(bound, nn.Module) else "self", bound))
    for argument in (*getattr(forward, "args", ()), *(getattr(forward, "keywords", None) or {}).values()):
        found.append(("argument", argument))
    function = _function_of(forward)
    if function is None or type(forward).__dict__.get("__call__") is function:
        found.append(("self", forward))
    return found if function is None else [*found, *_references_of_function(function)]


def _references_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:
            continue  # a name that is not bound yet
    names = function.__globals__
    for name in names_in(code):
        if name in names:
            found.append((name, names[name]))
    for default in function.__defaults__ or ():
        found.append(("default", default))
    return found


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Global names and attributes in `code`, and in the lambdas and comprehensions inside it."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *itertools.chain.from_iterable(inner))


def _inside(value: Any) -> list[Any]:
    """What to look at next: a helper of this program, or an object that holds models."""
    if isinstance(value, _FUNCTIONS):
        return [] if is_of_torch(value) else [found for _, found in references(value)]
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= MOST_ENTRIES else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= MOST_ENTRIES else []
    if isinstance(value, type | types.ModuleType | str | bytes | int | float | type(None)):
        return []
    return list(getattr(value, "__dict__", {}).values())
