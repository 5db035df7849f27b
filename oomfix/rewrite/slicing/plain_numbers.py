"""Names that stand for numbers, texts and settings, and not for data: a slice sees them from where it stands."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.dataflow.liveness import Scope, names_bound_by_target, nodes_of_scope_body
from oomfix.script.syntax.names import last_name, last_of, path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.parameters import defaults_of, named_parameters
from oomfix.script.syntax.patterns import Pattern

_NUMBER_METHODS = ("item", "size", "time", "perf_counter", "get_lr", "dim", "numel")
_NUMBER_FUNCTIONS = ("len", "int", "float", "bool", "str", "round")
_NUMBER_TYPES = frozenset({"int", "float", "bool", "str"})
_SETTINGS = Pattern(r"^(args?|cfg|config|conf|opts?|hparams|settings)$", re.IGNORECASE)
COUNTING = frozenset({"range", "trange"})


def stands_for_number(name: str, scope: Scope) -> bool:
    """Whether all that a scope binds to a name, or is given by it, are counters, numbers, texts and settings."""
    nodes = list(nodes_of_scope_body(scope))
    stores = sum(isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load) for n in nodes)
    if stores != sum(_binds_number(node, name) for node in nodes):
        return False
    parameters = None if isinstance(scope, ast.Module) else scope.args
    given = [] if parameters is None else [one for one in named_parameters(parameters) if one.arg == name]
    if not given or parameters is None:
        return stores > 0
    annotated = given[0].annotation is not None and ast.unparse(given[0].annotation) in _NUMBER_TYPES
    default = defaults_of(parameters).get(given[0])
    return annotated or (isinstance(default, ast.Constant) and default.value is not None)


def _binds_number(node: ast.AST, name: str) -> bool:
    """Whether a node binds a name to a number, as far as it binds it."""
    match node:
        case ast.Assign(targets=[ast.Name(id)], value=value) | ast.AugAssign(target=ast.Name(id), value=value):
            return id == name and is_scalar(value)
        case ast.Assign(targets=[ast.Tuple(targets)], value=ast.Tuple(values)) if len(targets) == len(values):
            pairs = zip(targets, values, strict=True)
            return any(isinstance(one, ast.Name) and one.id == name and is_scalar(value) for one, value in pairs)
        case ast.Assign(targets=[ast.Tuple() as target], value=value):
            return name in names_bound_by_target(target) and _asks_sizes(value)
        case ast.For(target=ast.Name(id), iter=ast.Call() as header):
            return id == name and last_name(header) in COUNTING
        case ast.For(target=ast.Tuple([ast.Name(id), *_]), iter=header):
            return id == name and any(
                isinstance(one, ast.Call) and last_name(one) == "enumerate" for one in walk(header)
            )
    return False


def is_scalar(value: ast.expr) -> bool:
    """Whether an expression gives a number, a text or a setting."""
    match value:
        case ast.Constant():
            return True
        case ast.Call(func=function):
            return last_name(value) in (_NUMBER_FUNCTIONS if isinstance(function, ast.Name) else _NUMBER_METHODS)
        case ast.BinOp(left=left, right=right):
            return is_scalar(left) and is_scalar(right)
        case ast.IfExp(body=body, orelse=orelse):
            return is_scalar(body) and is_scalar(orelse)
        case ast.UnaryOp(operand=operand):
            return is_scalar(operand)
    return _asks_sizes(value) or _is_setting(value)


def _is_setting(value: ast.expr) -> bool:
    """`args.steps`, `config["train"]["steps"]`, `self.args.steps`; `args[0]` is what a function is given."""
    owners = []
    while isinstance(value, ast.Attribute | ast.Subscript):
        if isinstance(value, ast.Subscript) and not isinstance(getattr(value.slice, "value", None), str):
            return False
        value = value.value
        owners.append(last_of(path_of(value)))
    return any(map(_SETTINGS.match, owners))


def _asks_sizes(value: ast.expr) -> bool:
    """`x.shape`, `x.shape[1:3]`, `envs.observation_space.shape`, `np.shape(x)[0]`, `x.size()`."""
    if isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.Call):
        return last_name(value) in ("size", "shape") or size_of(value) is not None
    return isinstance(value, ast.Attribute) and value.attr == "shape"


def size_of(value: ast.expr) -> str | None:
    """The name whose size an expression asks for: `len(x)`, `x.size(0)`, `x.shape[0]`, `x.shape`, `np.shape(x)[0]`."""
    if isinstance(value, ast.Subscript):
        value = value.value
    match value:
        case ast.Attribute(value=ast.Name(name), attr="shape"):
            return name
        case ast.Call(func=ast.Name("len"), args=[ast.Name(name)]):
            return name
        case ast.Call(func=ast.Attribute(attr="shape"), args=[ast.Name(name)]):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(name), attr="size")):
            return name
    return None
