"""What runs networks one by one: `for layer in net.children(): x = layer(x)`, `[net(x) for net in networks]`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Set

from oomfix.script.facts.named_like import looks_like_module, looks_like_part
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import walk

_LAYERS = frozenset("children named_children modules named_modules".split())
_OF_A_DICT = frozenset({"items", "values"})
_GOING_THROUGH = frozenset("enumerate list tuple reversed tqdm".split())


def layer_called(target: ast.expr, rounds: ast.AST, called: Set[str]) -> ast.Name | None:
    """The last name that a loop binds, where a round calls that: `layer` of `for i, (name, layer) in ...`.

    Args:
        target: what the loop binds.
        rounds: the loop or comprehension.
        called: the paths of all that the file calls.
    """
    while isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[-1]
    if not isinstance(target, ast.Name) or target.id not in called:
        return None
    here = (part.func for part in walk(rounds) if isinstance(part, ast.Call))
    return target if any(isinstance(part, ast.Name) and part.id == target.id for part in here) else None


def network_gone_through(source: ast.expr, as_assigned: Callable[[ast.expr], ast.expr]) -> ast.expr | None:
    """The network whose layers a loop goes through; None where it may go through anything else.

    Args:
        source: what the loop is over.
        as_assigned: what a name was assigned, as it is written.
    """
    while True:
        match source:
            case ast.Call(ast.Name(name), [inner, *_]) if name in _GOING_THROUGH:
                source = inner
            case ast.Subscript(inner):
                source = inner
            case ast.Call(ast.Attribute(network, method), []) if method in _LAYERS:
                return network
            case ast.Call(ast.Attribute(ast.Attribute(network, "_modules"), method), []) if method in _OF_A_DICT:
                return network
            case ast.Attribute(network, name) if path_of(network) != "self" and _names_layers(name):
                return network
            case ast.Name():
                assigned = as_assigned(source)
                if isinstance(assigned, ast.Name):
                    return None
                source = assigned
            case _:
                return None


def networks_gone_through(source: ast.expr) -> ast.expr | None:
    """`self.critics` of `enumerate(self.critics)`: what is named after networks that it holds; or None."""
    while True:
        match source:
            case ast.Call(ast.Name(name), [inner, *_]) if name in _GOING_THROUGH:
                source = inner
            case ast.Call(ast.Attribute(inner, method), []) if method in _OF_A_DICT:
                source = inner
            case ast.Name() | ast.Attribute():
                name = last_of(path_of(source))
                return source if name.endswith("s") and looks_like_module(name.removesuffix("s")) else None
            case _:
                return None


def _names_layers(name: str) -> bool:
    """`features`, `layers`, `blocks`: what networks call the layers that they hold."""
    return looks_like_part(name) or looks_like_part(name.removesuffix("s"))
