"""The functions of a file that a call may mean, by their name and the arguments they take."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.effects import function_called
from oomfix.rewrite.liveness import FunctionNode
from oomfix.script.names import path_of
from oomfix.script.nodes import Nodes

_KEEPING_ARGUMENTS = frozenset({"staticmethod", "classmethod"})


class FunctionsCalled:
    """The functions and methods of a file.

    Args:
        nodes: all nodes of the file.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._functions: dict[str, list[FunctionNode]] = {}
        for function in nodes.functions:
            self._functions.setdefault(function.name, []).append(function)
        self._methods = {id(statement) for owner in nodes.of(ast.ClassDef) for statement in owner.body}
        self._bound_anew = {node.id for node in nodes.of(ast.Name) if isinstance(node.ctx, ast.Store)}
        self._bound_anew |= {node.attr for node in nodes.of(ast.Attribute) if isinstance(node.ctx, ast.Store)}

    def by(self, call: ast.Call) -> list[FunctionNode]:
        """Those that a call may run: `scores.log()` does not mean a `log(self, row)` of the file."""
        named = self._functions.get(function_called(call), ())
        return [one for one in named if self._takes(one, call) and not _asks_a_part(one, call)]

    def certain(self, call: ast.Call) -> FunctionNode | None:
        """The one function that a call by name, or of a method of `self`, can only mean."""
        named = self._functions.get(function_called(call), [])
        by_name = isinstance(call.func, ast.Name) or path_of(call.func) == f"self.{function_called(call)}"
        if not by_name or len(named) != 1 or named[0].name in self._bound_anew or named[0].decorator_list:
            return None
        is_method = id(named[0]) in self._methods
        return named[0] if is_method != isinstance(call.func, ast.Name) and self.by(call) == named else None

    def _takes(self, function: FunctionNode, call: ast.Call) -> bool:
        if function.name in self._bound_anew:  # `step = partial(step, model)`
            return True
        decorators = (node.id if isinstance(node, ast.Name) else "" for node in function.decorator_list)
        if any(name not in _KEEPING_ARGUMENTS for name in decorators):
            return True
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            return True
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if id(function) in self._methods and _fits(function.args, names[1:], call):
            return True
        return _fits(function.args, names, call)


def _asks_a_part(method: FunctionNode, call: ast.Call) -> bool:
    """Whether a call in a method asks a part of its object for the same: `self.model.train_step(x)` in `train_step`."""
    receiver = path_of(call.func.value) if isinstance(call.func, ast.Attribute) else None
    within = method.lineno <= call.lineno <= (method.end_lineno or method.lineno)
    return within and (receiver or "").startswith("self.")


def _fits(arguments: ast.arguments, names: list[str], call: ast.Call) -> bool:
    """Whether a call gives parameters, these by position or name, what they need and nothing else."""
    named = {keyword.arg for keyword in call.keywords}
    only_named = [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg is None and not named <= {*names, *only_named}:
        return False
    if arguments.vararg is None and len(call.args) > len(names):
        return False
    needed = names[: max(len(names) - len(arguments.defaults), 0)][len(call.args) :]
    needed += [name for name, value in zip(only_named, arguments.kw_defaults, strict=True) if value is None]
    return named.issuperset(needed)


def parameters_of(function: FunctionNode) -> list[ast.arg]:
    """The parameters of a function, but for what gathers others."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def arguments_given(call: ast.Call, function: FunctionNode) -> Iterator[tuple[ast.arg, ast.expr]]:
    """The parameters of a function, and what a call gives for them."""
    arguments = parameters_of(function)
    places = arguments[1:] if arguments and arguments[0].arg in ("self", "cls") else arguments
    yield from zip(places, call.args, strict=False)
    if function.args.vararg is not None:
        yield from ((function.args.vararg, value) for value in call.args[len(places) :])
    by_name = {argument.arg: argument for argument in arguments}
    for keyword in call.keywords:
        if keyword.arg in by_name:
            yield by_name[keyword.arg], keyword.value
