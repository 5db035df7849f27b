"""Following what is done to networks as a whole: their mode, and whether their parameters are trained."""

from __future__ import annotations

import ast

from oomfix.script.facts.definitions import Instance
from oomfix.script.facts.named_like import looks_like_module, looks_like_part
from oomfix.script.facts.values import LOADED, Graph, Kind, Value
from oomfix.script.interpreter.functions import Functions
from oomfix.script.interpreter.state import Layer
from oomfix.script.syntax.names import last_of, path_of, path_of_each
from oomfix.script.syntax.nodes import evaluates_what_it_is_given, only_argument

_OF_THE_WHOLE = frozenset(
    "requires_grad_ eval train to cuda half cpu parameters named_parameters load_state_dict state_dict "
    "add_module apply zero_grad register_forward_hook register_backward_hook register_full_backward_hook".split()
)
"""Methods that replace and thaw no part of a network; what is added is added where it is made."""

_PARTS = frozenset("modules children named_modules named_children _modules".split())
"""Methods that give all parts of a network, for whatever is done to them."""


class Networks(Functions):
    """Knows which networks are in `eval()` mode, and which are frozen."""

    def freeze(self, node: ast.expr, frozen: bool) -> None:
        """All parameters of a network are frozen, or trained again; of each that a loop goes through, if it is one."""
        network = self.evaluate(node)
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value  # `net.eval().cuda()` is `net`
        path, binding = path_of(node), self.binding_of(node)
        if path is not None and binding is not None and isinstance(binding.statement, ast.For):
            self._freeze_each(path, binding.statement, frozen)
        self._freeze_one(node, network, frozen)

    def _freeze_each(self, path: str, loop: ast.For, frozen: bool) -> None:
        """What a loop over several networks calls `path`: those that are known, and any other by that name."""
        source = loop.iter
        if path_of(source) is not None and self.scopes and self.scopes[-1] is loop:  # all of them
            self.state.frozen[self._frozen_key(self.evaluate(source), path_of(source))] = frozen
        items = self.evaluate(source).items or ()
        known = [one for one in items if one.kind is Kind.MODULE and not isinstance(one.ref, str | None)]
        for one in known:
            self.state.frozen[self._identity(one, None)] = frozen
        if frozen and not (known and len(known) == len(items)):
            self.frozen_elements.add(path)
        for each in self._listed(source):
            self._freeze_one(each, self.evaluate(each), frozen)

    def _freeze_one(self, node: ast.expr, network: Value, frozen: bool) -> None:
        path, binding = path_of(node), self.binding_of(node)
        if network.kind is Kind.UNKNOWN and path is not None:
            # From here on it is known wherever it is handed to, under whatever name.
            network = Value(Kind.MODULE, ref=self.trace.number("frozen", path, self.way))
            self.assign(node, network, self.statement, binding.loops if binding is not None else ())
        self.state.frozen[self._frozen_key(network, path)] = frozen

    def _listed(self, node: ast.expr) -> list[ast.expr]:
        """What stands in a list: `[encoder, head]`, or the name that it was given."""
        binding = self.binding_of(node)
        if binding is not None and isinstance(binding.statement, ast.Assign):
            node = binding.statement.value
        return node.elts if isinstance(node, ast.List | ast.Tuple) else []

    def is_frozen(self, module: Value, path: str | None) -> bool:
        """Whether a network was frozen, all of it, and no part of it was replaced or thawed since."""
        frozen = path in self.frozen_elements or bool(self.state.frozen.get(self._frozen_key(module, path)))
        return frozen and self._stays_frozen(path)

    def is_of_frozen(self, called: ast.expr, module: Value, path: str | None) -> bool:
        """Whether what is called is a network that was frozen, or a layer of one: `self.layers[i]`, `net.encoder`."""
        if isinstance(called, ast.Subscript) and self.is_frozen(self.evaluate(called.value), path_of(called.value)):
            return True
        if isinstance(called, ast.Attribute) and path_of(called.value) != "self":
            whole, name = self.evaluate(called.value), path_of(called.value)
            if self.state.frozen.get(self._frozen_key(whole, name)) and self._stays_frozen(name, run_in_parts=True):
                return True
        return self.is_frozen(module, path)

    def note_replaced(self, target: ast.expr) -> None:
        """`net.head = nn.Linear(8, 2)`: what was frozen before has a part that trains."""
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
            key = self._frozen_key(self.evaluate(target), path_of(target))
            if self.state.frozen.get(key):
                self.state.frozen[key] = False

    def _frozen_key(self, module: Value, path: str | None) -> object:
        """A network made in sight, or the path under which one made elsewhere is known in a function or class."""
        if not isinstance(module.ref, str | None):
            return self._identity(module, path)
        function = self.frame.function
        if path is not None and path.startswith("self.") and function is not None:
            return (function.owner, path)
        holder = self.holder(path.split(".")[0]) if path is not None else None
        return (holder.function if holder is not None else None, path)

    def copied(self, network: Value, number: int) -> Value:
        """`teacher = copy.deepcopy(net)`: as frozen as the first is and in its mode, and from here on another one."""
        if isinstance(network.ref, str | None):
            return network
        first = self._identity(network, None)
        for known in (self.state.frozen, self.state.evaluating):
            if (state := known.get(first)) is not None:
                known[number] = state
        if not isinstance(network.ref, Instance):
            return network._replace(ref=number)
        attributes = self.state.attributes
        for owner, name in attributes.changes_over(Layer()):
            if owner == first and (held := attributes.get((owner, name))) is not None:
                attributes[number, name] = held
        return network._replace(ref=Instance(network.ref.cls, number))

    def _requires_grad(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """`net.requires_grad_(False)`."""
        given = only_argument(node)
        value = True if given is None else self.evaluate(given).constant
        if isinstance(value, bool) and not (value and self.is_made_leaf(function.value)):
            self.freeze(function.value, not value)
        if value is True and isinstance(function.value, ast.Call):
            asked = self.evaluate(function.value)
            if asked.kind is Kind.TENSOR and not asked.graph:
                return asked.with_graph(Graph.MAYBE)  # a leaf that a loss may go back to
        return None

    def is_made_leaf(self, node: ast.expr) -> bool:
        """`image.requires_grad_()`, `image.requires_grad = True`: a loss may go back to what it names from here on."""
        tensor, binding = self.evaluate(node), self.binding_of(node)
        used = tensor.kind in (Kind.UNKNOWN, Kind.NUMBER) and path_of(node) in self.hints.leaves
        known = used or tensor.kind is Kind.TENSOR
        if not known or tensor.graph or binding is None or isinstance(binding.statement, ast.For):
            return False
        self.assign(node, Value(Kind.TENSOR, Graph.MAYBE), binding.statement, binding.loops)
        return True

    def _stays_frozen(self, path: str | None, run_in_parts: bool = False) -> bool:
        """No part of the network is replaced or trained again: nothing under its path is assigned or asked for.

        `run_in_parts` says that its layers may be called one by one.
        """
        prefix = f"{path}."
        harmless = _OF_THE_WHOLE if self.hints.thaws else _OF_THE_WHOLE | _PARTS
        asked = {other[len(prefix) :] for other in self.hints.called if other.startswith(prefix)}
        asked_for = {other.split(".")[0] for other in asked}
        if run_in_parts:
            asked_for -= {part for part in asked if _only_runs(part, asked)}
        # `crnn = crnn.CRNN(size)` asks the module of the file's imports for a class.
        followed = {function.name for function in self.functions}
        parts = {name for name in asked_for - harmless - followed if not (name[:1].isupper() and len(name) > 2)}
        return not parts and not any(target.startswith(prefix) for target in self.hints.assigned)

    def _identity(self, module: Value, path: str | None) -> object:
        if isinstance(module.ref, Instance):
            return module.ref.number
        return path if module.ref is None or module.ref == LOADED.ref else module.ref

    def is_of_its_own(self, called: ast.expr) -> bool:
        """`loss = net.train(batch)`, which is backpropagated: a method of its own under the name of one of torch's."""
        path = path_of(called)
        return last_of(path) in ("train", "eval") and path in self.hints.graph_callees

    def _mode(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        receiver = self.evaluate(function.value)
        path = path_of_each(function.value)
        if isinstance(receiver.ref, Instance) and receiver.ref.cls.find(function.attr) is not None:
            return None
        if receiver.kind not in (Kind.MODULE, Kind.UNKNOWN, Kind.INSTANCE) or len(node.args) > 1:
            return None
        if self.is_of_its_own(function) or evaluates_what_it_is_given(node):
            return None
        evaluating = function.attr == "eval"
        if node.args:
            truth = self.evaluate(node.args[0]).constant
            evaluating = truth is False if function.attr == "train" else True
        known = evaluating or self.hints.is_module(path or "")
        if receiver.kind is Kind.UNKNOWN and path is not None and known:
            receiver = Value(Kind.MODULE, ref=path)  # under whatever name it is kept: `self.net = net.eval()`
        self.state.evaluating[self._identity(receiver, path)] = evaluating
        return receiver


def _only_runs(part: str, asked: set[str]) -> bool:
    """`encoder` of `net.encoder(x)`: called like a layer, and nothing of it is asked for."""
    named = looks_like_part(part) or looks_like_module(part)
    return named and not any(other.startswith(f"{part}.") for other in asked)
