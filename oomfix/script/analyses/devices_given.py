"""What the functions and classes of a file are given for a device, wherever it calls them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import Nodes, names_in
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
    passed = (parameters - _chosen_here(nodes, parameters, is_fitting)) | _kept(nodes, parameters, is_fitting)

    def fits(value: ast.expr | None) -> bool:
        return value is not None and (is_fitting(value) or path_of(value) in passed)

    if not takers or not _reads(nodes, is_device) <= passed:
        return False
    return all(taker.calls and all(fits(_given(call, taker)) for call in taker.calls) for taker in takers)


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


def _chosen_here(nodes: Nodes, parameters: set[str], is_fitting: Callable[[ast.expr], bool]) -> set[str]:
    """`device` of `device = config["device"]`, where other functions take theirs under the same name."""
    return {
        target.id
        for node in nodes.of(ast.Assign)
        if not (is_fitting(node.value) or names_in(node.value) & parameters)
        for target in node.targets
        if isinstance(target, ast.Name)
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
