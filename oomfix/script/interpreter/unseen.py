"""Calls of what is out of sight: their uses and their names say what they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from oomfix.script.facts import torch_facts
from oomfix.script.facts.named_like import (
    is_average_of_network,
    is_named_by_a_verb,
    looks_like_detaching,
    looks_like_encoding,
    looks_like_logging,
    looks_like_loss,
    looks_like_metric,
    looks_like_module,
    looks_like_noising,
    looks_like_optimizer,
    looks_like_saving,
    looks_like_thawing,
    looks_like_training,
)
from oomfix.script.facts.trace import Handed
from oomfix.script.facts.values import NO_ORIGINS, UNKNOWN, Given, Graph, Kind, Value, combine
from oomfix.script.interpreter.containers import Containers
from oomfix.script.syntax.names import last_of, owner_of, path_of, unpacked, without_moves
from oomfix.script.syntax.patterns import Pattern

_COPYING = Pattern(r"(deep_?)?(copy|clone)(_?(module|model|net|network|learner))?$", re.IGNORECASE)
_OF_OPTIMIZERS = frozenset({"param_groups", "state", "defaults"})
"""What is read of an optimizer without a call."""
_DRAWING_GRAPHS = frozenset({"make_dot", "make_dot_from_trace"})
"""Functions of torchviz, by what the scripts that copy them call them as well."""
_TRANSFORMS = Pattern(r"(^|[._])transforms?\b", re.IGNORECASE)


class Unseen(Containers):
    """Finds out what a call does whose function is not in the file, nor known from torch."""

    def _unknown(
        self,
        node: ast.Call,
        path: str | None,
        given: Given,
        imported: bool = False,
    ) -> Value:
        """A call of something out of sight: its uses and its name say what it is."""
        last, values = last_of(path), given.all
        if self.enclosing_forward is not None and (path or "").startswith("self.") and not self.is_for_effect(node):
            self.unseen_parts_record.add(self.state.grad)  # `self.decoder.sample(8)`, of which nothing else is known
        called_back = self._call_back(node, values)
        if self._is_backward_out_of_sight(path, given):
            return self._backward_out_of_sight(node, given)
        if (result := self._runs_network_in_sight(node, path, given)) is not None:
            return result
        if looks_like_thawing(last):
            self._thaw(node, given)
        content = combine(values)
        content = content if content.graph else self._left_on(node)
        if content.graph and looks_like_detaching(last):
            return self._detached(node, content)
        self._take_as_differentiated(node, path, values, content)
        if (network := self._in_its_place(node, given.positional)) is not None:
            return network
        is_class = last[:1].isupper() and not looks_like_loss(last) and not self._is_a_named_object(path)
        if is_class and self._is_made_around_network(node, values):
            return self._network_made(node)
        called_module = (path in self.hints.modules or is_average_of_network(last)) and not imported
        if is_class and not last.isupper() and not called_module:
            made = self._made(node, last, content)
            return made._replace(ref=Handed(called_back)) if called_back and made.kind is Kind.UNKNOWN else made
        if path is not None:
            named = bool(values) and not imported and looks_like_module(path)
            if (result := self._by_its_path(node, path, given, is_class, named)) is not None:
                return result
            if torch_facts.kind_of_call(path) is Kind.LOSS and last[:1].isupper() and not content.graph:
                return Value(Kind.LOSS)
        return self._computed_out_of_sight(node, path, content)

    def _runs_network_in_sight(self, node: ast.Call, path: str | None, given: Given) -> Value | None:
        """What a network gives that the call is handed, or that holds what is called."""
        if node.args and torch_facts.runs_module(last_of(path)):
            return self.run_argument(node, given)
        if self.solves_equation_of_network(node, last_of(path), given):
            return self.run_argument(node, given, direct=False)
        if given.all and self._is_entry_of_network(node.func):
            return self.forward(node, Value(Kind.MODULE, ref=path), path, given)
        return None

    def _take_as_differentiated(self, node: ast.Call, path: str | None, values: list[Value], content: Value) -> None:
        """Note what may go back through the graph that a call is given."""
        if last_of(path) in _DRAWING_GRAPHS:
            self.trace.backpropagated |= content.origins
        if content.graph and self._is_handed_on(node, path):
            self.trace.handed_on.append((self.trace.next_order(), content.origins))
            self._leave_on(node, content)
        if content.graph and (self._is_given_what_it_trains(node, values) or self._is_given_terms(path, values)):
            # `update_parameters(model, loss)`: what is handed a loss and what it trains may well backpropagate.
            self.trace.backpropagated |= content.origins

    def _by_its_path(self, node: ast.Call, path: str, given: Given, is_class: bool, named: bool) -> Value | None:
        """A network that the path of a call says is made or run.

        Args:
            is_class: what is called is written as classes are.
            named: it is called as networks are, and given something.
        """
        last = last_of(path)
        if self._takes_the_name_of(node, path) or (named and self._is_entry_of_makers(node.func)):
            return self._network_made(node)
        makes = last.endswith("_cls") or last.isupper()  # `model_cls(**config)` and `GAN(**config)` make one
        named = named and not (self._is_another_function(path) or self._is_method_of_an_object(node))
        named = named and (bool(given.positional) or not makes)
        if not (self.hints.is_module(path) or named):
            return None
        target = self._assigned_to(node)
        asked = self.hints.owners_of_parts | self.hints.modules | self.hints.filled
        if target in asked or (is_class and target in self.hints.called) or self._made_to_be_module(node):
            return self._network_made(node)
        if self.hints.is_loss(path) and not self._is_network_and_loss(path, given):
            return None
        return self.forward(node, Value(Kind.MODULE, ref=path), path, given)

    def _computed_out_of_sight(self, node: ast.Call, path: str | None, content: Value) -> Value:
        """What a function gives that makes no object and runs no network that is known as one."""
        returned = self._as_hinted(path, content)
        if returned is not None:
            return returned
        if content.graph:
            last = last_of(path)
            certain = looks_like_loss(last) and last.islower()
            graph = content.graph if certain else Graph.MAYBE
            return Value(Kind.TENSOR, graph, content.origins, is_tensor=certain, carried_from=content.carried_from)
        if self._made_to_be_module(node):
            return self._network_made(node)
        if node.args and path is not None and self._is_parameter(path) and self.state.grad is not Graph.NO:
            return Value(Kind.TENSOR, Graph.MAYBE, self.unseen_forward(path))
        return UNKNOWN

    def _thaw(self, node: ast.Call, given: Given) -> None:
        """`unfreeze(net, stages=2)`: some of the network trains again."""
        for argument, value in zip(node.args, given.positional, strict=False):
            if self.is_network(argument, value):
                self.freeze(argument, False)

    def is_network(self, node: ast.expr, value: Value) -> bool:
        """Whether an argument is a network, by what is known of it or by its uses."""
        return value.kind is Kind.MODULE or self.hints.is_module(path_of(node) or "")

    def as_network(self, node: ast.expr, value: Value) -> Value:
        """A value as it is, or the network that the uses of its name say it is."""
        path = path_of(node)
        known = value.kind is not Kind.UNKNOWN or value.graph or path is None or not self.hints.is_module(path)
        return value if known else Value(Kind.MODULE, ref=path)

    def solves_equation_of_network(self, node: ast.Call, last: str, given: Given) -> bool:
        """`odeint(net, start, times)`, by the last name of the function."""
        if not (torch_facts.solves_equation_of(last) and node.args):
            return False
        return self.is_network(node.args[0], given.positional[0]) or looks_like_module(path_of(node.args[0]) or "")

    def _is_network_and_loss(self, path: str, given: Given) -> bool:
        """Whether what is called like a criterion has parameters, and is given no outputs of a network."""
        return path in self.hints.distributed and not combine(given.all).graph

    def _is_another_function(self, path: str) -> bool:
        """`transformer = data_transforms["val"]`, `decoder = tokenizer.get_symbol`: no network, whatever its name."""
        binding = self.lookup(path)
        value = binding.statement.value if binding is not None and isinstance(binding.statement, ast.Assign) else None
        if isinstance(value, ast.Name | ast.Attribute) and is_named_by_a_verb(path_of(value) or ""):
            return True
        while isinstance(value, ast.Call | ast.Subscript):
            value = value.func if isinstance(value, ast.Call) else value.value
        return value is not None and bool(_TRANSFORMS.search(path_of(value) or ""))

    def _is_method_of_an_object(self, node: ast.Call) -> bool:
        """`agent.epsilon_greedy_policy(state)`, where a class of the file that is no network has such a method."""
        if not isinstance(node.func, ast.Attribute):
            return False
        owners = [function.owner for function in self.functions if function.name == node.func.attr]
        return any(owner is not None and not owner.is_module for owner in owners)

    def _in_its_place(self, node: ast.Call, arguments: Sequence[Value]) -> Value | None:
        """`net = to_gpu(net)`: what takes the place of a network is that network; `clone(net)` is one like it."""
        path = path_of(node.args[0]) if node.args else None
        if arguments and arguments[0].kind is Kind.MODULE and _COPYING.match(last_of(path_of(node.func))):
            return self.copied(arguments[0], self.number_of_made(node))
        if path is None or self._assigned_to(node) != path:
            return None
        if arguments[0].kind is Kind.UNKNOWN and self.hints.is_module(path):
            return Value(Kind.MODULE, ref=path)
        return arguments[0] if arguments[0].kind is Kind.MODULE else None

    def _is_a_named_object(self, path: str | None) -> bool:
        """`Enc1(x)` of a network that a function is handed: it is asked for its state, as no class is."""
        return path is not None and self._is_parameter(path) and f"{path}.state_dict" in self.hints.called

    def _is_parameter(self, name: str) -> bool:
        """Whether the function around was handed it: what is handed over and called is most often a network."""
        function = self.frame.function
        return function is not None and name in function.parameters

    def _detached(self, node: ast.Call, content: Value) -> Value:
        """`h = repackage(h)`, `h = model.detach(h)`; as a statement of its own it works in place."""
        if self.is_for_effect(node):
            for argument in node.args:
                self._take_graph_off(argument)
        return content.with_graph(Graph.NO, NO_ORIGINS)

    def _takes_the_name_of(self, node: ast.Call, path: str | None) -> bool:
        """`model = model(config)`, `self.body = backbone(config)` in a constructor: a class that it was given."""
        target = self._assigned_to(node) or ""
        function = self.frame.function
        if target.startswith("self.") and function is not None and function.name == "__init__":
            return target in self.hints.called and path in function.parameters
        return target == path and path in self.hints.modules

    def _made(self, node: ast.Call, name: str, content: Value) -> Value:
        """A call of a class out of sight makes an object; what it does with a graph is its own."""
        if looks_like_encoding(name):
            return Value(Kind.LOSS)  # as of a criterion, its result carries the graph of what goes in
        if looks_like_module(name) or self._made_to_be_module(node):
            return self._network_made(node)
        return Value(Kind.TENSOR, Graph.MAYBE, content.origins) if content.graph else UNKNOWN

    def _network_made(self, node: ast.Call) -> Value:
        """A network that a call makes, told from others."""
        return Value(Kind.MODULE, ref=self.number_of_made(node))

    def _adds_noise(self, node: ast.Call) -> bool:
        """`noisy, noise = self.diffuser.forward(x, t)`: what is given says that the process has no weights."""
        holder = owner_of(node)
        if holder is None or not looks_like_noising(holder):
            return False
        targets = self.statement.targets if isinstance(self.statement, ast.Assign) else []
        first = [target.elts[0] if isinstance(target, ast.Tuple) else target for target in targets]
        return any("nois" in (path_of(target) or "").lower() for target in first)

    def _is_autograd_function(self, path: str | None) -> bool:
        """`crop = CropFunction()`, whose `crop.forward(x)` records nothing."""
        makers = (maker for maker, paths in self.hints.made_by.items() if path in paths)
        return any(last_of(maker).endswith("Function") for maker in makers)

    def _is_made_around_network(self, node: ast.Call, values: list[Value]) -> bool:
        """`elbo = SVI(network)`, and what `elbo(x)` gives is backpropagated: a call of it runs the network."""
        statement = self.statement
        networks = any(value.kind is Kind.MODULE for value in values) or any(
            path_of(argument) in self.hints.modules for argument in node.args
        )
        if not isinstance(statement, ast.Assign) or not networks:
            return False
        return any(path_of(target) in self.hints.graph_callees for target in statement.targets)

    def _is_handed_on(self, node: ast.Call, path: str | None) -> bool:
        """A call for its effect alone, and not for a log: it may well go back through the graph."""
        return self.is_for_effect(node) and not looks_like_logging(path or "")

    def _is_given_terms(self, path: str | None, values: list[Value]) -> bool:
        """`agent.update(log_probs, values)`: graphs for a loss out of sight, and not `evaluator.update(results)`."""
        collected = any(value.kind is Kind.CONTAINER and value.graph for value in values)
        holder = (path or "").rpartition(".")[0]
        return collected and looks_like_training(last_of(path)) and not looks_like_metric(holder)

    def _is_entry_of_network(self, called: ast.expr) -> bool:
        """`agents.heads[i](x)`: what a network holds in a list and what is called is a part of it."""
        if not isinstance(called, ast.Subscript) or not isinstance(called.value, ast.Attribute):
            return False
        holder = called.value.value
        return path_of(holder) != "self" and self.is_network(holder, self.evaluate(holder))

    def _is_entry_of_makers(self, called: ast.expr) -> bool:
        """`MODELS[name](classes=10)`, of a table of what is imported: `MODELS = {"small": ResNet18}`."""
        binding = self.binding_of(called.value) if isinstance(called, ast.Subscript) else None
        table = getattr(binding and binding.statement, "value", None)
        entries = table.values if isinstance(table, ast.Dict) else []
        return bool(entries) and all(map(self._is_class_or_imported, entries))

    def _is_class_or_imported(self, node: ast.expr) -> bool:
        named = isinstance(node, ast.Name | ast.Attribute)
        return named and (last_of(path_of(node))[:1].isupper() or self.evaluate(node).kind is Kind.EXTERNAL)

    def _is_given_what_it_trains(self, node: ast.Call, values: list[Value]) -> bool:
        if self.enclosing_forward is not None:
            return False  # `decode(state, self.rnn)` is a part of the forward
        asked_for_loss = looks_like_loss(path_of(node.func) or "")
        if (self.is_for_effect(node) or asked_for_loss) and self._is_shown_evaluation(node, values):
            return False
        if self.is_for_effect(node) and looks_like_saving(path_of(node.func) or ""):
            return False
        if any(value.kind in (Kind.MODULE, Kind.OPTIMIZER) for value in values):
            return True
        paths = [path_of(argument) or "" for argument in (*node.args, *(keyword.value for keyword in node.keywords))]
        return any(path in self.hints.modules or self._names_optimizer(path) for path in paths)

    def _names_optimizer(self, path: str) -> bool:
        """`opt`, where it is not what a script is told: `opt.batch_size` is read, and nothing asks for `opt.step()`."""
        if not looks_like_optimizer(path):
            return False
        if f"{path}.step" in self.hints.called or f"{path}.zero_grad" in self.hints.called:
            return True
        function = self.frame.function
        nodes = self.trace.module_level if function is None else function.nodes
        read = (node for node in nodes if isinstance(node, ast.Attribute) and path_of(node.value) == path)
        return all(node.attr in _OF_OPTIMIZERS or path_of(node) in self.hints.called for node in read)

    def _is_shown_evaluation(self, node: ast.Call, values: list[Value]) -> bool:
        """`callback.on_step(model, out)` in a function that evaluates, of a network that was switched to `eval()`."""
        evaluating = any(
            self._is_evaluating(argument, value) for argument, value in zip(node.args, values, strict=False)
        )
        return evaluating and self.site().within_evaluation and not looks_like_training(last_of(path_of(node.func)))

    def _is_evaluating(self, node: ast.expr, value: Value) -> bool:
        """Whether a network was switched to `eval()`, or the one that it is a part of: `model.generator`."""
        if self.state.evaluating.get(self._identity(value, path_of(node))) is True:
            return True
        return isinstance(node, ast.Attribute) and self._is_evaluating(node.value, self.evaluate(node.value))

    def _made_to_be_module(self, node: ast.Call) -> bool:
        """The call is assigned to a path that is used as a network."""
        path = self._assigned_to(node)
        return path in self.hints.modules and path in self.hints.called

    def _assigned_to(self, node: ast.Call) -> str | None:
        """The one path that a call is assigned to, moved to a device or not."""
        statement = self.statement
        if not isinstance(statement, ast.Assign) or without_moves(statement.value) is not node:
            return None
        return path_of(statement.targets[0]) if len(statement.targets) == 1 else None

    def _as_hinted(self, path: str | None, content: Value) -> Value | None:
        """What an unseen helper returns, when elsewhere in the file its result is backpropagated."""
        positions = self.hints.graph_callees.get(path or "")
        if positions is None or self.state.grad is Graph.NO:
            return None
        targets = self.statement.targets if isinstance(self.statement, ast.Assign) else []
        if any(self.is_bound_anew(path_of(one)) for target in targets for one in unpacked(target)):
            return None
        graph = self.state.grad
        origins = content.origins or self.unseen_forward(path or "")
        if None in positions:
            return Value(Kind.TENSOR, graph, origins, is_tensor=True, carried_from=content.carried_from)
        size = max(position for position in positions if position is not None) + 1
        certain = Value(Kind.TENSOR, graph, origins, is_tensor=True)
        other = Value(Kind.TENSOR, Graph.MAYBE, content.origins)
        statement = self.statement
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            size = max(size, len(statement.targets[0].elts))
        return Value(Kind.SEQUENCE, items=tuple(certain if i in positions else other for i in range(size)))
