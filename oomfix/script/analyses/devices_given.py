"""What the functions and classes of a file are given for a device, wherever it calls them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import Nodes
from oomfix.script.syntax.parameters import bind_call, defaults_of, named_parameters


class _Taker(NamedTuple):
    """A function or class that takes a device: its calls, and the parameter of the function that runs."""

    calls: list[ast.Call]
    parameters: ast.arguments
    constructs: bool
    device: ast.arg


def all_are_given(nodes: Nodes, is_device: Callable[[str], bool], is_fitting: Callable[[ast.expr], bool]) -> bool:
    """Whether devices are parameters alone, and every call in the file gives one of some devices.

    `Agent(size, device="cpu")` where `def __init__(self, size, device="cuda")` leaves it as `self.device`. What the
    file does not call is for others to call, with whatever device they have; so are methods.

    Args:
        nodes: those of the file.
        is_device: whether a name is one of a device.
        is_fitting: whether an expression is one of those devices.
    """
    takers = list(_takers(nodes, is_device))
    parameters = {taker.device.arg for taker in takers}
    passed = parameters | _kept(nodes, parameters, is_fitting)

    def fits(value: ast.expr | None) -> bool:
        return value is not None and (is_fitting(value) or path_of(value) in passed)

    if not takers or not _reads(nodes, is_device) <= passed:
        return False
    values = [_given(call, taker) for taker in takers for call in taker.calls] + list(_bound(nodes, is_device))
    # what is only handed on comes from somewhere out of sight: an import, a parameter of a function nobody calls
    settled = any(value is not None and is_fitting(value) for value in values)
    return settled and all(taker.calls for taker in takers) and all(map(fits, values))


def _takers(nodes: Nodes, is_device: Callable[[str], bool]) -> Iterator[_Taker]:
    owners = {method: node.name for node in nodes.of(ast.ClassDef) for method in node.body}
    named: dict[str, list[ast.Call]] = {}
    for call in nodes.of(ast.Call):
        named.setdefault(last_name(call), []).append(call)
    for function in nodes.functions:
        constructs = function.name == "__init__" and function in owners
        for parameter in named_parameters(function.args):
            if not is_device(parameter.arg):
                continue
            calls: list[ast.Call] = []
            if constructs:
                calls = named.get(owners[function], [])
            elif function not in owners:
                calls = [call for call in named.get(function.name, ()) if isinstance(call.func, ast.Name)]
            yield _Taker(calls, function.args, constructs, parameter)


def _bound(nodes: Nodes, is_device: Callable[[str], bool]) -> Iterator[ast.expr | None]:
    """What names and attributes of devices are bound to in the file; None for what is taken out of several things."""
    for node in nodes.of(ast.Assign):
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if is_device((path_of(part) or "").rpartition(".")[2]):
                    yield node.value if part is target else None


def _kept(nodes: Nodes, parameters: set[str], is_fitting: Callable[[ast.expr], bool]) -> set[str]:
    """`self.device`, where nothing but a parameter, or one of those devices, is ever assigned to it."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in nodes.of(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                assigned.setdefault(path_of(target) or "", []).append(node.value)
    return {
        path
        for path, values in assigned.items()
        if all(path_of(value) in parameters or is_fitting(value) for value in values)
    }


def _reads(nodes: Nodes, is_device: Callable[[str], bool]) -> set[str | None]:
    """The paths under which devices are read; None for that of something computed."""
    names = {node.id for node in nodes.of(ast.Name) if isinstance(node.ctx, ast.Load) and is_device(node.id)}
    attributes = (node for node in nodes.of(ast.Attribute) if is_device(node.attr) and isinstance(node.ctx, ast.Load))
    return {*names, *map(path_of, attributes)} - {"torch.device"}


def _given(call: ast.Call, taker: _Taker) -> ast.expr | None:
    """What a call gives for the device: its default where nothing is given, None where that is not in sight."""
    bound = bind_call(call, taker.parameters, of_object=taker.constructs)
    default = None if bound.perhaps else defaults_of(taker.parameters).get(taker.device)
    return next(bound.arguments(taker.device.arg), default)
