"""Which classes of the file hold weights, and which of their methods run them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.facts.definitions import Class, Function
from oomfix.script.facts.named_like import (
    abbreviates_loss,
    looks_like_forward,
    looks_like_loss,
    looks_like_module,
    looks_like_part,
    looks_like_scaler,
)
from oomfix.script.facts.torch_facts import BOOKKEEPING, INTEGER_RESULTS, LEAVING_THE_GRAPH, kind_of_call
from oomfix.script.facts.values import Kind
from oomfix.script.syntax.names import MOVES, last_of, path_of
from oomfix.script.syntax.nodes import names_in, walk

_OF_TENSORS = frozenset(
    "unsqueeze squeeze expand expand_as view view_as reshape repeat contiguous flatten clamp exp pow sqrt abs mean sum "
    "prod".split()
)
"""Methods that a parameter has, `self.temperature.expand(8)`, and no part of a network.

Behind `self.weight.transpose(0, 1)` stands a product, as of a layer.
"""


def has_no_weights(cls: Class) -> bool:
    """Whether the forward of a module computes with what it is given, with settings and criteria alone."""
    forward = cls.methods.get("forward")
    if forward is None or cls.base_names != ["torch.nn.Module"] or cls.has_own_parameters:
        return False
    gives = any(isinstance(node, ast.Return) and node.value is not None for node in forward.nodes)
    return gives and is_bare(forward) and all(map(_is_setting, _read_of_self(cls)))


def makes_layers(cls: Class) -> bool:
    """Whether a class makes layers of torch for itself, `self.head = nn.Linear(8, 2)`: its methods run them."""
    made = cls.find("__init__")
    called = (
        path_of(node.func) or "" for node in (made.nodes if made is not None else ()) if isinstance(node, ast.Call)
    )
    layers = (last_of(path) for path in called if path.startswith(("nn.", "torch.nn.")))
    return any(kind_of_call(f"torch.nn.{layer}") is Kind.MODULE for layer in layers)


def is_bare(function: Function, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a method runs no submodule, itself or through other methods: bookkeeping, or a loss."""
    for_effect = {id(child.value) for child in function.nodes if isinstance(child, ast.Expr)}
    for child in function.nodes:
        path = path_of(_without_index(child.func)) if isinstance(child, ast.Call) else None
        if path is None or not path.startswith("self."):
            if isinstance(child, ast.For) and _calls_what_it_takes(child):
                return False
            continue
        name = path.split(".")[1]
        own = function.owner.find(name) if function.owner is not None else None
        if own is not None and path == f"self.{name}":
            if name not in seen and not is_bare(own, seen | {name}):
                return False
        elif not _only_keeps_books(path, id(child) in for_effect, isinstance(child, ast.Call) and not child.args):
            return False
    return True


def _only_keeps_books(path: str, for_effect: bool, given_nothing: bool) -> bool:
    """`self.out.detach()` reads a tensor, and `self.head.grow(8)`, as a statement, changes a part and runs none.

    So does `self.backbone.reset()`, which is given nothing. `self.criterion(out, y)` runs no network either.
    """
    _, name, *inner = path.split(".")
    last = inner[-1] if inner else name
    if name in BOOKKEEPING or last in BOOKKEEPING or looks_like_scaler(name):
        return True
    if looks_like_loss(name) and not abbreviates_loss(name):
        return True
    if inner and last in LEAVING_THE_GRAPH | INTEGER_RESULTS | MOVES | _OF_TENSORS:
        return True
    changes = bool(inner) and given_nothing
    return for_effect and not looks_like_forward(last) and (changes or not looks_like_module(name))


def _without_index(called: ast.expr) -> ast.expr:
    """`self.heads` of `self.heads[i]`: what is called is one of its parts."""
    return called.value if isinstance(called, ast.Subscript) else called


def _calls_what_it_takes(loop: ast.For) -> bool:
    """`for layer in self.layers: x = layer(x)`: the parts of a network run one by one."""
    own = any(isinstance(node, ast.Attribute) and path_of(node.value) == "self" for node in walk(loop.iter))
    taken = names_in(loop.target)
    return own and any(isinstance(node, ast.Call) and path_of(node.func) in taken for node in walk(loop))


def _read_of_self(cls: Class) -> Iterator[tuple[str, list[ast.expr]]]:
    """The attributes that the methods of a class read of it, other than methods, and all that they are assigned."""
    nodes = [node for method in cls.methods.values() for node in method.nodes]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and path_of(node.value) == "self"
    }
    for name in read - set(cls.methods):
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        yield name, [one.value for one in assigned if f"self.{name}" in map(path_of, one.targets)]


def _is_setting(attribute: tuple[str, list[ast.expr]]) -> bool:
    """A criterion by its name, or what is assigned without a call, and not named like a network or a list of parts."""
    name, values = attribute
    if looks_like_loss(name) and not abbreviates_loss(name):
        return True
    made = any(isinstance(node, ast.Call) for node in walk(*values))
    return bool(values) and not made and not looks_like_module(name) and not looks_like_part(name.rstrip("s"))
