"""Where values of a file come from: what binds a name or an attribute of `self`, what is given for a parameter."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator

from oomfix.rewrite.effects import last_name
from oomfix.rewrite.functions_called import fits
from oomfix.rewrite.liveness import FunctionNode, nodes_of_scope_body
from oomfix.script.nodes import walk
from oomfix.script.scopes import Scopes, Variable

Function = ast.FunctionDef | ast.AsyncFunctionDef
Origin = ast.expr | Function | ast.ClassDef | ast.alias
"""An expression, a definition, or an import."""

_UNBOUND_METHODS = frozenset({"staticmethod"})
_Found = list[Origin] | None


class Origins:
    """What the names and attributes of a file may stand for.

    Args:
        tree: the module.

    Attributes:
        scopes: its variables.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.scopes = Scopes(tree)
        self._known: dict[Hashable, _Found] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._stores: dict[str, list[ast.Attribute]] = {}
        for node in walk(tree):
            if isinstance(node, ast.Call):
                self._calls.setdefault(last_name(node), []).append(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._stores.setdefault(node.attr, []).append(node)

    def of_variable(self, variable: Variable) -> _Found:
        """Everything that is bound to a variable; None where some of it cannot be known.

        What a `with` enters stands for what that gives, `f()[0]` for the first of several that are unpacked, and
        `loader[:]` for each that a loop gets.
        """
        if variable not in self._known:
            self._known[variable] = _all(self._of_binding(binding) for binding in variable.bindings)
        return self._known[variable]

    def of_attribute(self, node: ast.Attribute) -> _Found:
        """Everything that the class around a method assigns to `self.name`; None where that cannot be known."""
        owner = self.class_of(node.value)
        if owner is None:
            return None
        if (owner, node.attr) not in self._known:
            stores = [store for store in self._stores.get(node.attr, ()) if self.class_of(store.value) is owner]
            self._known[owner, node.attr] = _all(map(self._of_target, stores)) if stores else None
        return self._known[owner, node.attr]

    def class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """The class whose object a name is, where it is the `self` of a method."""
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            return None
        variable = self.scopes.variable(node)
        if variable is None or len(variable.bindings) != 1 or not isinstance(variable.bindings[0], ast.arg):
            return None
        function = variable.scope.node
        owner = self.scopes.parent(function)
        if not isinstance(function, FunctionNode) or not isinstance(owner, ast.ClassDef) or _is_static(function):
            return None
        return owner if function.args.args[:1] == [variable.bindings[0]] else None

    def returned_by(self, call: ast.Call) -> _Found:
        """What the function or method of the file that a call runs returns; None for any other."""
        function = self.function_of(call)
        if function is None:
            return None
        nodes = list(nodes_of_scope_body(function))
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
            return None
        return [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]

    def function_of(self, call: ast.Call) -> Function | None:
        """The one function or method of the file that a call is seen to run."""
        found: list[ast.AST] = []
        if isinstance(call.func, ast.Name):
            variable = self.scopes.variable(call.func)
            found = [] if variable is None else variable.bindings
        elif isinstance(call.func, ast.Attribute) and (owner := self.class_of(call.func.value)) is not None:
            name = call.func.attr
            found = [one for one in owner.body if isinstance(one, FunctionNode) and one.name == name]
        return found[0] if len(found) == 1 and isinstance(found[0], FunctionNode) else None

    def _of_binding(self, binding: ast.AST) -> _Found:
        if isinstance(binding, ast.alias | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return [binding]
        if isinstance(binding, ast.arg):
            return self._given_for(binding)
        return self._of_target(binding) if isinstance(binding, ast.Name) else None

    def _of_target(self, target: ast.expr) -> _Found:
        """What is assigned to a name or an attribute."""
        indices: list[int] = []
        for parent, child in self.scopes.ancestors(target):
            match parent:
                case ast.Tuple() | ast.List() if not any(isinstance(one, ast.Starred) for one in parent.elts):
                    indices.insert(0, next(index for index, one in enumerate(parent.elts) if one is child))
                case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
                    return [] if parent.value is None else [part_of(parent.value, indices)]
                case ast.AugAssign():
                    return [parent.value]
                case ast.For() | ast.AsyncFor() | ast.comprehension():
                    return [ast.Subscript(parent.iter, ast.Slice(), ast.Load())]
                case ast.withitem():
                    return [parent.context_expr]
                case ast.Delete():
                    return []
                case _:
                    return None
        return None

    def _given_for(self, argument: ast.arg) -> _Found:
        """What the calls of a function give for a parameter of it; None where one is out of sight."""
        function = next(
            (node for node, _ in self.scopes.ancestors(argument) if not isinstance(node, ast.arguments)), None
        )
        if not isinstance(function, FunctionNode):
            return None
        owner = self.scopes.parent(function)
        if isinstance(owner, ast.ClassDef):
            calls: list[ast.Call] | None = self._calls_of_method(function, owner)
        else:
            calls = self._calls_of_function(function)
        bound = isinstance(owner, ast.ClassDef) and not _is_static(function)
        return _all(_given(call, function, argument, bound=bound) for call in calls) if calls else None

    def _calls_of_function(self, function: Function) -> list[ast.Call] | None:
        """The calls of a function; None where something else names it, and may call it with anything."""
        calls = []
        for load in self.scopes.bound_by(function).loads:
            parent = self.scopes.parent(load)
            if not isinstance(parent, ast.Call) or parent.func is not load:
                return None
            calls.append(parent)
        return calls

    def _calls_of_method(self, function: Function, owner: ast.ClassDef) -> list[ast.Call]:
        """The calls that may run a method, by name and arguments: `net.train()` is none of `train(self, loader)`."""
        name = owner.name if function.name == "__init__" else function.name
        parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        return [call for call in self._calls.get(name, ()) if fits(function.args, parameters[1:], call)]


def _all(parts: Iterator[_Found]) -> _Found:
    found: list[Origin] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found


def part_of(value: ast.expr, indices: list[int]) -> ast.expr:
    """The part of a value under some indices, one within the other: itself where it is written, else `value[0]`."""
    for index in indices:
        if isinstance(value, ast.Tuple | ast.List) and not any(isinstance(one, ast.Starred) for one in value.elts):
            value = value.elts[index] if index < len(value.elts) else value
        else:
            value = ast.Subscript(value, ast.Constant(index), ast.Load())
    return value


def _given(call: ast.Call, function: Function, argument: ast.arg, *, bound: bool) -> _Found:
    """What a call gives for a parameter, or its default."""
    parameters = function.args
    positional = [*parameters.posonlyargs, *parameters.args]
    if argument in (parameters.vararg, parameters.kwarg):
        return None
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return None
    named = next((keyword.value for keyword in call.keywords if keyword.arg == argument.arg), None)
    if named is not None:
        return [named]
    if argument in positional:
        index = positional.index(argument) - bound
        if 0 <= index < len(call.args):
            return [call.args[index]]
        default = dict(zip(reversed(positional), reversed(parameters.defaults), strict=False)).get(argument)
    else:
        default = parameters.kw_defaults[parameters.kwonlyargs.index(argument)]
    return None if default is None else [default]


def _is_static(function: Function) -> bool:
    return any(isinstance(one, ast.Name) and one.id in _UNBOUND_METHODS for one in function.decorator_list)


def parameter_for(call: ast.Call, given: ast.expr, function: Function) -> ast.arg | None:
    """The parameter of a function that an argument of a call is given for."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    bound = int(isinstance(call.func, ast.Attribute))
    for index, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            return None
        if argument is given:
            return parameters[index + bound] if index + bound < len(parameters) else None
    names = [keyword.arg for keyword in call.keywords if keyword.value is given]
    return next((one for one in (*parameters, *function.args.kwonlyargs) if one.arg in names), None)
