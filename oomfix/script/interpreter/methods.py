"""Following methods of networks: which run a part of the network, and what they leave behind."""

from __future__ import annotations

import ast

from oomfix.script.facts import torch_facts
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.named_like import (
    draws_from_network,
    gives_gradients,
    is_chance,
    is_letter_of_part,
    looks_like_detaching,
    looks_like_discriminator,
    looks_like_forward,
    looks_like_loss,
    looks_like_module,
    looks_like_part,
    runs_network,
)
from oomfix.script.facts.values import NUMBER, UNKNOWN, Given, Graph, Value, combine
from oomfix.script.interpreter.contexts import NULL
from oomfix.script.interpreter.unseen import Unseen
from oomfix.script.syntax.names import last_of, left_by_methods, owner_of, path_of, receivers, unpacked

SAME_MODULE = frozenset(
    "to cuda cpu half float double bfloat16 requires_grad_ train eval apply share_memory compile".split()
)
"""Methods that give the network itself."""


_TAKEN_OFF = ("detach", "data")


class Methods(Unseen):
    """Finds out what a method of a network does: its forward, a part of it, a loss, or bookkeeping."""

    def _module_method(
        self,
        node: ast.Call,
        receiver: Value,
        name: str,
        path: str | None,
        given: Given,
    ) -> Value:
        if name in ("forward", "__call__") and isinstance(node.func, ast.Attribute):
            method = self._own(receiver, "forward")
            if method is None and self._adds_noise(node):
                return self.computed(combine(given.all))
            return self.forward(node, receiver, path_of(node.func.value), given, method=method)
        if (name in SAME_MODULE and not self.is_of_its_own(node.func)) or name == "clone":
            return receiver
        if name in ("no_sync", "join"):
            return NULL
        content = combine(given.all)
        if (found := self._without_a_forward(node, name, path, given, content)) is not None:
            return found
        if content.graph and looks_like_loss(name) and not self._judges_others(node, content):
            loss = self._through_loss(given.all)
            if self.is_for_effect(node) and isinstance(node.func, ast.Attribute):
                self.assign(left_by_methods(node.func.value), loss, self.statement)
            return loss
        if content.graph and self._is_handed_on(node, path):
            # `learner.transfer(weights)`: a network that is given a graph for itself is trained through it.
            self.trace.backpropagated |= content.origins
            if not looks_like_forward(name):
                return UNKNOWN
        part = looks_like_module(name) or looks_like_part(name) or is_letter_of_part(name)
        part = part or self.hints.is_module(path or "")
        if part and not given.all and self.is_for_effect(node):
            return NUMBER  # `net.stop_backbone_bn()` is named after the part that it changes
        runs = (runs_network(name) and not _reads(name, content)) or self._is_shown_to_run(name)
        direct = part or (runs and bool(given.all) and not _evaluates_itself(receiver))
        result = self._run_method(node, receiver, name, path, given, direct)
        if not part and isinstance(self.statement, ast.Assign) and isinstance(self.statement.targets[0], ast.Tuple):
            return result.perhaps()  # `loss, tags, lengths = net.forward_all(x)`
        if part or looks_like_forward(name):
            return result
        return self._as_hinted(path, result) or result.perhaps()

    def _without_a_forward(
        self, node: ast.Call, name: str, path: str | None, given: Given, content: Value
    ) -> Value | None:
        """What a method gives that only tells, changes or computes on what it is given; None for any other."""
        computes = (looks_like_forward(name) or self._gives_likelihood(node)) and bool(given.all)
        if name == "init_hidden" or (name.startswith("get_") and not content.graph and not computes):
            return UNKNOWN
        # `loss = net.set_forward_loss(x)`, of a set, is backpropagated
        runs_nothing = torch_facts.runs_nothing(name) and path not in self.hints.graph_callees
        if runs_nothing or (gives_gradients(name) and not given.all):
            return NUMBER
        if name.startswith("get_") and not looks_like_loss(name) and not computes:
            return content.with_graph(Graph.MAYBE)  # `net.get_coefficients(out)` computes on what it is given
        return self._detached(node, content) if looks_like_detaching(name) else None

    def _run_method(
        self, node: ast.Call, receiver: Value, name: str, path: str | None, given: Given, direct: bool
    ) -> Value:
        """The forward of a method, without gradients where all methods of its name turn them off."""
        grad = self.state.grad
        if self._always_without_graph(name):
            self.state.grad = Graph.NO
        result = self.forward(node, receiver, path, given, direct=direct)
        self.state.grad = grad
        if draws_from_network(name) and self._is_taken_off_its_graph(node):
            for forward in self.trace.forwards_of(result.origins):
                forward.taken_off |= forward.node is node
        return result

    def _judges_others(self, node: ast.Call, content: Value) -> bool:
        """`disc.generator_loss(fake)`: a discriminator that is asked about what only others gave runs itself."""
        holder = owner_of(node)
        if holder is None or not looks_like_discriminator(holder):
            return False
        gave = [forward.path for forward in self.trace.forwards_of(content.origins)]
        return bool(gave) and not any(f"{path}.".startswith(f"{holder}.") for path in gave)

    def _gives_likelihood(self, node: ast.Call) -> bool:
        """`action, log_prob = policy.get_action(state)`, `action, entropy = policy.get_action(state)`."""
        statement = self.statement
        if not isinstance(statement, ast.Assign) or statement.value is not node:
            return False
        parts = (part for target in statement.targets if isinstance(target, ast.Tuple) for part in target.elts)
        return any(is_chance(last_of(path_of(part))) for part in parts)

    def _is_shown_to_run(self, name: str) -> bool:
        """`model.predict(x)`, where all methods of this name are networks' own in sight, and switch no gradients."""
        methods = [function for function in self.functions if function.name == name]
        return bool(methods) and all(
            function.evaluates and function.owner is not None and function.owner.is_module and _runs_parts(function)
            for function in methods
        )

    def _is_taken_off_its_graph(self, node: ast.Call) -> bool:
        """`images = net.sample(noise)`, and `images.cpu().detach()`: who takes the graph off has met one."""
        function, statement = self.frame.function, self.statement
        nodes = self.trace.module_level if function is None else function.nodes
        names: set[str | None] = set()
        if isinstance(statement, ast.Assign) and node in receivers(statement.value):
            names = {path_of(part) for target in statement.targets for part in unpacked(target)}
        taken_off = (part.value for part in nodes if isinstance(part, ast.Attribute) and part.attr in _TAKEN_OFF)
        return any(one is node or path_of(one) in names for value in taken_off for one in receivers(value))

    def _always_without_graph(self, name: str) -> bool:
        """Whether all methods of this name in the file turn gradients off by a decorator."""
        effects = [function.effects for function in self.functions if function.name == name]
        return bool(effects) and all(any("no_grad" in effect.ref for effect in each) for each in effects)


def _reads(method: str, content: Value) -> bool:
    """`net.get_word_embeddings(out)`, of what the network gave: it looks something up there."""
    return method.startswith("get_") and bool(content.graph)


def _evaluates_itself(network: Value) -> bool:
    """Whether a network is one of a library whose methods turn gradients off."""
    return isinstance(network.ref, tuple) and str(network.ref[0]).startswith("sentence_transformers.")


def _runs_parts(method: Function) -> bool:
    """Whether a method calls something of its object, and nothing in it may turn gradients off.

    `self.policy.act(x)` in `def act` says no more of what that does than the name that is asked about.
    """
    paths = [path_of(node.func) or "" for node in method.nodes if isinstance(node, ast.Call)]
    switches = any("grad" in path or "inference" in path or "detach" in path for path in paths)
    runs = any(path.startswith("self.") and last_of(path) != method.name for path in paths)
    return not method.effects and not switches and runs
