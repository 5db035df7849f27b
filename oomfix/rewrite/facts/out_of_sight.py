"""What a file gives its network to that stands in other files: an attack there may run a backward of its own."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cached_property

from oomfix.rewrite.dataflow.bindings import bindings, bindings_of
from oomfix.rewrite.dataflow.liveness import FunctionNode, Scope
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.facts.named_like import looks_like_differentiating, looks_like_module, looks_like_training
from oomfix.script.facts.torch_facts import BOOKKEEPING, CONTAINERS
from oomfix.script.syntax.names import last_name, owner_of, path_of
from oomfix.script.syntax.nodes import arguments_of, children, walk
from oomfix.script.syntax.parameters import named_parameters

_WRAPPING = frozenset(
    "torch.compile torch.jit.script torch.nn.DataParallel torch.nn.parallel.DataParallel copy.deepcopy "
    "torch.nn.parallel.DistributedDataParallel torch.nn.SyncBatchNorm.convert_sync_batchnorm".split()
)
_LOOKING_ON = ("torch.", "torchinfo.", "torchsummary.", "thop.", "copy.", "pickle.", "wandb.")
"""Packages that save, clip, step, count or draw what they are given, and attack nothing; but for `torch.autograd`."""
_WITHOUT_TRAINING = ("torch.", "abc.", "typing.", "collections.", "enum.", "threading.", "multiprocessing.")
"""Packages whose classes, as bases, run no backward of their own and read no gradient."""
_OF_PARAMETERS = frozenset({"parameters", "named_parameters"})
_COLLECTING = frozenset({"list", "tuple", "filter"})
_RUNNING = frozenset({"forward", "__call__"})
"""Methods that run a network, under whatever name they are handed on."""
_OF_MODULES = BOOKKEEPING | {"train", "requires_grad_"}


class OutOfSight:
    """The calls by which other files get hold of a network, under any name that it has in this file.

    Names are followed through the whole file, whatever function they stand in: two networks of one name count as one.

    Args:
        reading: the script.
        networks: what its loops run forwards of.
    """

    def __init__(self, reading: Reading, networks: set[str]) -> None:
        script = reading.script
        self._blocks = reading.blocks
        self._imports = script.imports
        self._calls = script.imports.nodes.of(ast.Call)
        self._bindings = bindings_of(script.imports.nodes)
        self._functions = reading.functions
        self._classes = {node.name: node for node in script.imports.nodes.of(ast.ClassDef)}
        self._own_attributes = {path_of(target) for target, _ in self._bindings}
        self._called: dict[str, set[str]] = {}
        self._names = self._all_names(networks)
        self._parameters = {path_of(target) for target, value in self._bindings if self._collects_parameters(value)} - {
            None
        }

    def calls(self) -> Iterator[ast.Call]:
        """The calls that give the network to what may run a backward of its own."""
        for call in self._calls:
            if self._asks_network(call) or (
                any(map(self._is_network, arguments_of(call))) and not self._is_in_sight(call)
            ):
                yield call

    def calls_with_parameters(self) -> Iterator[ast.Call]:
        """The calls that give the network, or its parameters, to what may read their gradients."""
        for call in self._calls:
            given = any(self._is_network(one) or self._is_of_parameters(one) for one in arguments_of(call))
            if self._asks_network(call) or (given and not self._is_in_sight(call)):
                yield call

    def calls_of_holders(self) -> Iterator[ast.Call]:
        """The calls of what may have kept the network: files that made it or were given it, and what they made of it.

        `net = library.build()`, then `library.report()`; `average = Average(net)`, then `average.show()`.
        """
        given = set(self.calls_with_parameters())
        files = {file for call in given for file in self._files_of(call)}
        objects = {path_of(target) for target, value in self._bindings if value in given} - {None}
        for target, value in self._bindings:
            if isinstance(value, ast.Call) and path_of(target) in self._names:
                files.update(self._files_of(value))
        for call in self._calls:
            owner = owner_of(call)
            if owner in objects or not files.isdisjoint(self._files_of(call)):
                yield call

    def _files_of(self, call: ast.Call) -> Iterator[str]:
        """The modules that a call runs a function of, but for those that look on."""
        for name in self._imports.qualified(call.func):
            if not name.startswith(_LOOKING_ON):
                yield name.rpartition(".")[0]

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether the network is a name of another file, `library.net`, any function of which may look at it."""
        return any(self._imports.names.get(name.split(".")[0].split("[")[0]) for name in self._names)

    def comes_from_elsewhere(self, loop: ast.AST) -> bool:
        """Whether another file gives the network to a loop, and may have run a backward through it before."""
        if self.is_held_elsewhere:
            return True
        scope = self._blocks.scope_of(loop)
        waiting = [] if scope is None else [scope]
        seen: list[Scope] = []
        for scope in waiting:
            if scope in seen or not isinstance(scope, FunctionNode):
                continue
            seen.append(scope)
            owner = next((one for one in self._blocks.ancestors(scope) if isinstance(one, ast.ClassDef)), None)
            starts = [] if owner is None else self._functions.of_path(owner.name)
            for function in (scope, *starts):
                given = {one.arg for one in named_parameters(function.args)} - {"self"}
                if not given.isdisjoint(self._names):
                    callers = self._functions.calls_of(function)
                    if not callers:
                        return True
                    waiting += [caller for call in callers if (caller := self._blocks.scope_of(call)) is not None]
        return False

    def _all_names(self, networks: set[str]) -> set[str]:
        """The paths that stand for the networks, for what holds them, and for what wraps them."""
        names = set(networks)
        while True:
            known = len(names)
            self._names = names
            for call in self._calls:
                names |= set(self._names_through(call))
            for target, value in self._bindings:
                names |= set(self._names_by(target, value))
            if len(names) == known:
                return names

    def _names_through(self, call: ast.Call) -> Iterator[str]:
        """What the network is called within a function of the file that gets it, and by those who call the function."""
        for function in self._meant(call):
            for argument, value in self._functions.bound(call, function).all:
                path = path_of(value)
                if self._is_network(value):
                    yield argument.arg
                elif argument.arg in self._names and path is not None:
                    yield path

    def _names_by(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        """What an assignment calls the network, or what it makes it of."""
        path = path_of(target)
        if path in self._names:
            yield from self._parts(value)
        for returned in self._returned(value):
            if path is not None and self._is_network(returned):
                yield path
            elif isinstance(target, ast.Tuple) and isinstance(returned, ast.Tuple):
                for place, part in zip(target.elts, returned.elts, strict=False):
                    yield from self._names_by(place, part)

    def _parts(self, value: ast.expr) -> Iterator[str]:
        """The paths of what a network is made of, by the value that is bound to its name."""
        path = path_of(value)
        if path is not None:
            yield path
        elif isinstance(value, ast.Call):
            whole = self._imports.qualified(value.func) & CONTAINERS
            for given in value.args if whole else value.args[:1] if self._wraps(value) else ():
                yield from self._parts(given)
        elif isinstance(value, ast.List | ast.Tuple | ast.Starred):
            for child in children(value):
                yield from self._parts(child) if isinstance(child, ast.expr) else ()

    def _returned(self, value: ast.expr) -> Iterator[ast.expr]:
        """What a value may be: what the functions of the file return, what their classes are given."""
        if not isinstance(value, ast.Call):
            yield value
            return
        yield from arguments_of(value) if self._wraps(value) else ()
        for function in self._meant(value):
            yield from arguments_of(value) if function.name == "__init__" else ()
            yield from self._handed_out[function]

    @cached_property
    def _handed_out(self) -> dict[FunctionNode, list[ast.expr]]:
        """What each function of the file returns, and what the objects that an `__init__` makes keep."""
        found: dict[FunctionNode, list[ast.expr]] = {}
        for function in self._imports.nodes.functions:
            kept = function.body if function.name == "__init__" else []
            found[function] = [value for node in kept for target, value in bindings(node) if path_of(target)]
            found[function] += [node.value for node in walk(function) if isinstance(node, ast.Return) and node.value]
        return found

    def _meant(self, call: ast.Call) -> list[FunctionNode]:
        """The functions of the file that a call may run; of a class, what makes its objects."""
        return [] if self._imports.qualified(call.func) else self._functions.entered_by(call)

    def _wraps(self, call: ast.Call) -> bool:
        return bool(self._imports.qualified(call.func) & _WRAPPING)

    def _asks_network(self, call: ast.Call) -> bool:
        """Whether a call is of a method of the network, out of sight, whose name says that it trains or differentiates.

        `model.update(x)`, `net.plot_grads()`; and of an object that holds it. Of what a base in another file does with
        the network of its class, `self.on_batch_end()`, a name says too little.
        """
        method = call.func
        if not isinstance(method, ast.Attribute) or method.attr in _OF_MODULES or self._meant(call):
            return False
        if self._is_inherited(method):
            return True
        if not self._is_network(method.value):
            return False
        return (
            "grad" in method.attr.lower() or looks_like_training(method.attr) or looks_like_differentiating(method.attr)
        )

    def _is_inherited(self, method: ast.Attribute) -> bool:
        """Whether a method of `self` or `super()` is that of a base in another file, in a class that has a network."""
        asks_super = isinstance(method.value, ast.Call) and path_of(method.value.func) == "super"
        if not asks_super and (path_of(method.value) != "self" or f"self.{method.attr}" in self._own_attributes):
            return False
        owner = next((one for one in self._blocks.ancestors(method) if isinstance(one, ast.ClassDef)), None)
        if owner is None or method.attr == "__init__" or not self._has_base_out_of_sight(owner, set()):
            return False
        return any(name.startswith("self.") for name in self._names)

    def _has_base_out_of_sight(self, owner: ast.ClassDef, seen: set[str]) -> bool:
        for base in owner.bases:
            path = path_of(base) or ""
            if path in self._classes and path not in seen:
                if self._has_base_out_of_sight(self._classes[path], {*seen, path}):
                    return True
            elif any(not name.startswith(_WITHOUT_TRAINING) for name in self._imports.qualified(base)):
                return True
        return False

    def _is_in_sight(self, call: ast.Call) -> bool:
        if self._meant(call) or self._wraps(call):
            return True
        qualified = self._imports.qualified(call.func)
        if qualified:
            return all(name.startswith(_LOOKING_ON) and not name.startswith("torch.autograd") for name in qualified)
        if isinstance(call.func, ast.Attribute):
            return isinstance(call.func.value, ast.Constant)  # `"...".format(model)`
        return isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id) and call.func.id != "setattr"

    def _is_network(self, value: ast.expr) -> bool:
        """Whether a value is the network, a part of it, or holds it; what it computes is not."""
        path = path_of(value)
        if path is not None:
            names = self._names - {"self"}
            if path in names or not names.isdisjoint(self._called_by(path)):
                return True
            if any(name.startswith((f"{path}.", f"{path}[")) for name in names):
                return True
            return _names_a_part(path) and any(path.startswith((f"{name}.", f"{name}[")) for name in names)
        if isinstance(value, ast.Call):
            return self._wraps(value) and any(map(self._is_network, arguments_of(value)))
        if isinstance(value, ast.Lambda):
            return any(self._is_network(child) for child in walk(value.body) if isinstance(child, ast.Name))
        return any(map(self._is_network, _held(value)))

    def _called_by(self, path: str) -> set[str]:
        """The paths of what a function that is handed on calls; of none that runs a backward, which is seen."""
        if path not in self._called:
            calls = [node for node in walk(*self._functions.of_path(path)) if isinstance(node, ast.Call)]
            paths = {path for path in (path_of(call.func) for call in calls) if path is not None}
            self._called[path] = set() if any(last_name(call) == "backward" for call in calls) else paths
        return self._called[path]

    def _is_of_parameters(self, value: ast.expr) -> bool:
        return path_of(value) in self._parameters or any(
            isinstance(child, ast.Attribute) and child.attr in _OF_PARAMETERS and self._is_network(child.value)
            for child in walk(value)
        )

    def _collects_parameters(self, value: ast.expr) -> bool:
        """`list(model.parameters())`, `[p for p in model.parameters() if p.requires_grad]`; not what is summed up."""
        if isinstance(value, ast.ListComp):
            return self._collects_parameters(value.generators[0].iter)
        if not isinstance(value, ast.Call):
            return False
        if path_of(value.func) in _COLLECTING and value.args:
            return self._collects_parameters(value.args[-1])
        method = value.func
        return isinstance(method, ast.Attribute) and method.attr in _OF_PARAMETERS and self._is_network(method.value)


def _names_a_part(path: str) -> bool:
    """Whether a path into a network ends in one: `model.encoder`, `nets["student"]`, `layers[0]`, `model.forward`."""
    last = path.rpartition(".")[2]
    item = last.rpartition("[")[2].rstrip("]")
    return item.isdigit() or last in _RUNNING or looks_like_module(item.strip("'\""))


def _held(value: ast.expr) -> list[ast.expr]:
    """The expressions that are all of a value, or one of which it is."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.NamedExpr | ast.Subscript | ast.Await):
        return [value.value]
    whole = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Starred | ast.BoolOp | ast.ListComp | ast.DictComp
    return [child for child in children(value) if isinstance(child, ast.expr)] if isinstance(value, whole) else []
