"""Following forwards: the calls of a network, and what the network's own code says about them."""

from __future__ import annotations

import ast

from oomfix.script.facts.definitions import Function
from oomfix.script.facts.named_like import looks_like_module
from oomfix.script.facts.trace import Carry, Forward, Loop, Site
from oomfix.script.facts.values import NO_ORIGINS, PLAIN_TENSOR, UNKNOWN, Given, Graph, Kind, Value, combine
from oomfix.script.interpreter.contexts import autocast_under
from oomfix.script.interpreter.networks import Networks
from oomfix.script.syntax.names import last_of, path_of

_OF_OTHERS = frozenset({"return_tensors", "conf", "imgsz"})
"""Options of what is called like a network, and records no graph."""


class Forwards(Networks):
    """Records forwards; what a network calls inside is part of the one forward."""

    _carrying: dict[int, tuple[ast.stmt, Loop]]

    def forward(
        self,
        node: ast.Call,
        module: Value,
        path: str | None,
        given: Given,
        direct: bool = True,
        method: Function | None = None,
    ) -> Value:
        """Record a forward; `method` is the module's own code for it, where that is in the file.

        What is asked for `return_tensors="pt"` is a tokenizer or another converter, whatever its name says; what is
        told `conf=0.25, imgsz=640` is a detector that turns gradients off by itself; and `ema_model(model)` averages.
        """
        if not _OF_OTHERS.isdisjoint(given.keywords) or (method is None and self._averages(node, given)):
            return UNKNOWN
        content = combine(given.all)
        if method is not None:
            self.ran.add(method)
        if self.enclosing_forward is not None:
            return self._part_of_forward(node, content, module, path)
        origin = self.trace.number("forward", id(node), self.way)
        evaluating = self.state.evaluating.get(self._identity(module, path))
        grad = Graph.NO if method is not None and _records_nothing(method) else self.state.grad
        self.trace.forwards[origin] = Forward(
            node=node,
            site=self._site_of_forward(method),
            order=self.trace.next_order(),
            origin=origin,
            path=path,
            given=(*node.args, *(keyword.value for keyword in node.keywords)),
            evaluating=evaluating is True,
            training=evaluating is False,
            made_for_evaluation=self.left_by_constructor.get(self._identity(module, path), False),
            carried=content.carried_from,
            direct=direct,
            discarded=grad is Graph.YES and self._is_discarded(node),
            code=method,
            differentiates=self._differentiates(node.func, module),
        )
        self._carry_into(origin, content)
        if grad is Graph.NO or (not content.graph and self.is_of_frozen(node.func, module, path)):
            self.trace.forwards[origin].graphless = True
            return PLAIN_TENSOR
        whole = Value(Kind.TENSOR, grad, content.origins | {origin}, carried_from=content.carried_from)
        if method is None:
            return whole
        returned = self._inside(node, method, module, given, origin)
        whole = whole._replace(carried_from=self.trace.forwards[origin].carried)
        if (self.parts_record or self.unseen_parts_record) == {Graph.NO}:
            self.trace.forwards[origin].graphless = True
            return PLAIN_TENSOR
        return _with_structure(returned, whole)

    def _site_of_forward(self, method: Function | None) -> Site:
        """Where we are; autocast that the module's own code brings along counts as well."""
        site = self.site()
        if method is None or site.autocast is not None:
            return site
        autocast = None
        for effects in method.effects:
            autocast = autocast_under(effects.ref, autocast)
        for statement in method.nodes:
            if isinstance(statement, ast.With) and any(_is_autocast(item.context_expr) for item in statement.items):
                autocast = autocast or "unknown"
        return site._replace(autocast=autocast)

    def _averages(self, node: ast.Call, given: Given) -> bool:
        """Whether a call takes what is named like a network alone, and nothing of what it gives is used."""
        alone = len(node.args) == len(given.all) == 1 and looks_like_module(path_of(node.args[0]) or "")
        return alone and self._is_discarded(node)

    def _is_discarded(self, node: ast.Call) -> bool:
        statement = self.statement
        if isinstance(statement, ast.Assign) and statement.value is node:
            return all(path_of(target) == "_" for target in statement.targets)
        return isinstance(statement, ast.Expr) and statement.value is node

    def _part_of_forward(self, node: ast.Call, content: Value, module: Value, path: str | None) -> Value:
        assert self.enclosing_forward is not None
        owner = self.frame.function.owner if self.frame.function is not None else None
        frozen = owner is not None and not owner.has_own_parameters and path is not None and not content.graph
        frozen = frozen and self.is_of_frozen(node.func, module, path)
        grad = Graph.NO if frozen else self.state.grad
        if not (path or "").endswith(("tokenizer", "processor")):
            self.parts_record.add(grad)
        if grad is Graph.NO:
            return PLAIN_TENSOR
        self._carry_into(self.enclosing_forward, content)
        origins = content.origins | {self.enclosing_forward}
        return Value(Kind.TENSOR, grad, origins, carried_from=content.carried_from)

    def _carry_into(self, origin: int, content: Value) -> None:
        """Note what goes into a forward, or a part of it, from the round before: `self.lstm(x, self.hidden)`."""
        forward = self.trace.forwards.get(origin)
        if forward is None:
            return
        forward.carried |= content.carried_from
        for number in content.carried_from:
            self.trace.carries.setdefault(number, Carry(*self._carrying[number], origin))

    def _inside(
        self,
        node: ast.Call,
        method: Function,
        module: Value,
        given: Given,
        origin: int,
    ) -> Value:
        """Follow a module's own code for what it returns and keeps; its calls are part of the one forward."""
        outer = self.enclosing_forward, self.enclosing_depth
        self.enclosing_forward, self.enclosing_depth = origin, len(self.loops)
        self.parts_record, self.unseen_parts_record = set(), set()
        returned = self._follow_function(node, method, module, given)
        self.enclosing_forward, self.enclosing_depth = outer
        return returned

    def _own(self, module: Value, name: str) -> Function | None:
        """A module's own method, where its class is in the file and it does not train by itself."""
        instance = self.instance_of(module)
        method = instance.cls.find(name) if instance is not None else None
        if method is None or method.is_left_open:
            return None
        return method if self._is_part_of_forward(method) else None

    def _differentiates(self, called: ast.expr, module: Value) -> bool:
        """Whether what is called is a network, and no part of one, that runs a backward for what it gives."""
        instance = self.instance_of(module)
        if instance is None or "forward" not in instance.cls.training_methods:
            return False
        whole = not isinstance(called, ast.Attribute) or called.attr in ("forward", "__call__")
        return whole or self.evaluate(called).kind is Kind.MODULE

    def _training_forward(self, module: Value) -> Function | None:
        """The forward of a module that trains by itself on what it is given: a meta-learner, adaptation in a test."""
        instance = self.instance_of(module)
        if instance is None or not self.trains_as_it_runs(instance.cls):
            return None
        return instance.cls.find("forward")

    def _of_criterion(self, node: ast.Call, criterion: Value, given: Given) -> Value:
        """What a criterion gives: a loss, or several things where its own code shows which of them carry no graph."""
        loss = self._through_loss(given.all)._replace(divisors=criterion.divisors)
        method = self._own(criterion, "forward")
        if isinstance(criterion.ref, tuple) and str(criterion.ref[0]).startswith("torch."):
            self.trace.judged.add(loss.origins)
        if method is None or not loss.graph or not _returns_several(method):
            return loss
        number = self.trace.number("criterion", id(node), self.way)
        returned = self._inside(node, method, criterion, given, number)
        if returned.items is None:
            return loss
        items = (
            item if item.kind is Kind.CONTAINER else _with_structure(item, loss)  # a dict knows what is in it
            for item in returned.items
        )
        return Value(Kind.SEQUENCE, items=tuple(items))

    def _through_loss(self, values: list[Value]) -> Value:
        content = combine(values)
        graph = content.graph if self.state.grad is not Graph.NO else Graph.NO
        return Value(
            Kind.TENSOR,
            graph,
            content.origins if graph else NO_ORIGINS,
            is_tensor=True,
            carried_from=content.carried_from,
        )


def _is_autocast(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_of(path_of(node.func)) == "autocast"


def _records_nothing(method: Function) -> bool:
    """Whether a decorator turns gradients off around all of it."""
    return any(effects.ref == frozenset({"no_grad"}) for effects in method.effects)


def _returns_several(method: Function) -> bool:
    """Whether all that it returns are tuples."""
    returned = [node.value for node in method.nodes if isinstance(node, ast.Return)]
    return bool(returned) and all(isinstance(value, ast.Tuple) for value in returned)


def _with_structure(returned: Value, whole: Value) -> Value:
    """The result of a forward, item by item where its own code shows that some carry no graph."""
    if returned.items is not None:
        return Value(Kind.SEQUENCE, items=tuple(_with_structure(item, whole) for item in returned.items))
    if returned.kind is Kind.NUMBER or (returned.kind is Kind.TENSOR and returned.graph is Graph.NO):
        return returned
    if returned.kind in (Kind.UNKNOWN, Kind.CONTAINER) and not returned.graph:
        return whole.perhaps()
    return whole._replace(is_tensor=returned.is_tensor or returned.kind is Kind.TENSOR)
