"""Networks of a file that are seen to draw no random numbers when they run: all of their layers are known."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from oomfix.rewrite.dataflow.bindings import bindings
from oomfix.rewrite.dataflow.given_parameters import GivenParameters
from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.script import Script
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_LAYERS = Pattern(
    r"(Bili|Li)near|Identity|Conv(Transpose)?[123]d|(Batch|Instance)Norm[123]d|(Layer|Group|RMS)Norm|Embedding|"
    r"(Adaptive)?(Max|Avg)Pool[123]d|Upsample|Pixel(Un)?[sS]huffle|(Un)?[fF]latten|(Zero|Reflection|Replication)Pad\w*|"
    r"\w*ReLU6?|[CS]?ELU|GELU|SiLU|Mish|Hard(tanh|swish|sigmoid)|Tanh|Sigmoid|(Log)?Softmax|Softplus|Sequential|"
    r"Module(List|Dict)|Parameter(List|Dict)?"
)
_DRAWING = Pattern(
    r"rand|[dD]rop|sampl|noise|gumbel|bernoulli|multinomial|rrelu|RReLU|fractional|poisson|shuffle|choice|cauchy|"
    r"geometric|checkpoint|^load|apply$|(normal|uniform|exponential|permutation)_?$"
)
_HOOKING = Pattern("^register_.*forward")
"""What gives a network, or all of them, a function that runs with it, and may draw."""

_MOVING = frozenset("to cuda cpu train eval float double device is_available DataParallel super".split())
_KNOWN = ("torch", "math", "numpy", "typing", "collections", "functools", "itertools")


class SteadyNetworks:
    """Says of networks, by path, whether they draw nothing.

    Args:
        script: the script.
    """

    def __init__(self, script: Script) -> None:
        nodes = script.imports.nodes
        self._classes = {node.name: node for node in nodes.of(ast.ClassDef)}
        self._functions = {one.name: one for one in nodes.functions}
        self._imported = dict(_imported_names(nodes.of(ast.Import), nodes.of(ast.ImportFrom)))
        parameters = GivenParameters(script)
        self._unseen = parameters.unseen
        self._bound = {name: list(values) for name, values in parameters.given.items()}
        for node in nodes:
            for target, value in bindings(node):
                if (path := path_of(target)) is not None:
                    self._bound.setdefault(path, []).append(value)
        self._known: dict[ast.AST, bool] = {}
        self._hooked = any(_HOOKING.search(last_name(call)) for call in nodes.of(ast.Call))

    def draws_nothing(self, path: str | None) -> bool:
        """Whether a network is made of nothing but layers of this file and of torch that draw no random numbers."""
        values = list(self._values_of(path and path.removesuffix(".forward"), set()))
        if not values or self._hooked:
            return False
        return all(isinstance(one, ast.Call) and self._makes_steady(one, set()) for one in values)

    def _values_of(self, path: str | None, seen: set[str | None]) -> Iterator[ast.expr | None]:
        """What a path is bound to, by the names of what parameters are given too; None for what is out of sight."""
        if path in seen:
            return
        seen.add(path)
        if path in self._unseen or path not in self._bound:
            yield None
        for value in self._bound.get(path or "", ()):
            if isinstance(value, ast.Name | ast.Attribute):
                yield from self._values_of(path_of(value), seen)
            else:
                yield value

    def _makes_steady(self, value: ast.AST, inside: set[str]) -> bool:
        """Whether all calls in a node are known, and those of the functions and classes they run.

        Args:
            value: the node.
            inside: the names that a function around it binds to layers or tensors.
        """
        calls = (node for node in walk(value) if isinstance(node, ast.Call))
        return all(self._is_steady(call, inside) for call in calls)

    def _is_steady(self, call: ast.Call, inside: set[str]) -> bool:
        name, path = last_name(call), path_of(call.func)
        if any("drop" in (one.arg or "drop") for one in call.keywords) or any(map(_is_starred_name, call.args)):
            return False
        if isinstance(call.func, ast.Name):
            if name in self._classes:
                return self._is_steady_class(self._classes[name])
            if name in self._functions:
                return self._is_steady_function(self._functions[name])
            known = name in inside or name in _MOVING or hasattr(builtins, name)
            return known or self._is_of_torch(name, name)
        root = (path or "").split(".")[0]
        if root in self._imported:
            parts = (path or "").split(".")
            return "distributions" in parts or "optim" in parts or self._is_of_torch(root, name)
        return name in _MOVING or not _DRAWING.search(name)

    def _is_of_torch(self, root: str, name: str) -> bool:
        module = self._imported.get(root, "")
        if module.split(".")[0] not in _KNOWN or _DRAWING.search(name):
            return False
        known = _LAYERS.fullmatch(name) or name in _MOVING or module.startswith("torch.distributions")
        return bool(known) or not name[:1].isupper()

    def _is_steady_class(self, owner: ast.ClassDef) -> bool:
        if owner not in self._known:
            self._known[owner] = True
            bases = [path_of(base) or "" for base in owner.bases]
            known = (
                self._is_steady_class(self._classes[base]) if base in self._classes else base.endswith("Module")
                for base in bases
            )
            methods = (one for one in owner.body if isinstance(one, FunctionNode))
            plain = bool(bases) and not owner.keywords and not owner.decorator_list and all(known)
            steady = plain and self._holds_layers(owner) and all(map(self._is_steady_function, methods))
            self._known[owner] = steady
        return self._known[owner]

    def _holds_layers(self, owner: ast.ClassDef) -> bool:
        """Whether what a class keeps in its objects and calls is made in it: no network that it is given."""
        kept = {
            path_of(target) or ""
            for node in walk(owner)
            for target, value in bindings(node)
            if not any(isinstance(one, ast.Call | ast.List | ast.Constant) for one in walk(value))
        }
        called = {path_of(node.func) or "" for node in walk(owner) if isinstance(node, ast.Call)}
        return not any(path.startswith("self.") and path in kept for path in called)

    def _is_steady_function(self, function: FunctionNode) -> bool:
        if function not in self._known:
            self._known[function] = True
            made = [node for node in walk(function) if isinstance(node, ast.For | ast.comprehension)]
            inside = {
                name.id
                for loop in made
                if (path_of(loop.iter) or "").startswith("self.")
                for name in walk(loop.target)
                if isinstance(name, ast.Name)
            }
            begins = re.search(r"init|reset", function.name)
            self._known[function] = bool(begins and self._only_makes(function)) or all(
                self._makes_steady(statement, inside) for statement in function.body
            )
        return self._known[function]

    def _only_makes(self, function: FunctionNode) -> bool:
        """Whether what a method that makes layers draws is all for their weights: `nn.init.normal_(layer.weight)`."""
        calls = (node for node in walk(function) if isinstance(node, ast.Call))
        return all("init." in (path_of(one.func) or "") or self._is_steady(one, set()) for one in calls)


def _is_starred_name(node: ast.expr) -> bool:
    """`*layers`, where these come from elsewhere."""
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Call)


def _imported_names(
    modules: Iterator[ast.Import] | list[ast.Import], others: Iterator[ast.ImportFrom] | list[ast.ImportFrom]
) -> Iterator[tuple[str, str]]:
    """What imports bind, with the module that it is of."""
    for node in modules:
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], alias.name
    for one in others:
        for alias in one.names:
            yield alias.asname or alias.name, one.module or ""
