"""The script's own mixed precision: autocast and the loss scaler, folded into the runtime's."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from operator import or_

from oomfix.rewrite.dataflow.bindings import bindings
from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.rewrite.text.layout import Layout
from oomfix.rewrite.text.removal import without
from oomfix.script import Script
from oomfix.script.facts.trace import Backward, Step
from oomfix.script.syntax.edits import Edit, bounds, quote_of
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk

_WITH_DEVICE = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
_OF_CUDA = ("torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast")
_SCALERS = (
    "torch.cuda.amp.GradScaler",
    "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
)
_SLOTS = {"device": ("device_type", "dtype", "enabled"), "cuda": ("enabled", "dtype")}


def differentiated(backward: ast.Call) -> ast.expr:
    """What a backward differentiates, without the scaler around it."""
    assert isinstance(backward.func, ast.Attribute)
    return without_scaler(backward.func.value)


def without_scaler(root: ast.expr) -> ast.expr:
    """`loss` for `scaler.scale(loss)`; anything else as it is."""
    if isinstance(root, ast.Call) and last_name(root) == "scale" and len(root.args) == 1 and not root.keywords:
        return root.args[0]
    return root


def _ways(value: ast.expr) -> list[ast.expr]:
    """What a conditional expression may give."""
    return [*_ways(value.body), *_ways(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _is_constant(value: ast.expr, kind: type) -> bool:
    """Whether an expression gives a constant of some kind, whatever it chooses."""
    return all(isinstance(way, ast.Constant) and isinstance(way.value, kind) for way in _ways(value))


class Amp:
    """What a script does about precision, and the edits that hand it over.

    Args:
        script: the script.
        blocks: where its nodes stand.
    """

    def __init__(self, script: Script, blocks: Blocks) -> None:
        self._script = script
        self._blocks = blocks
        self._autocasts = list(script.imports.calls(*_WITH_DEVICE, *_OF_CUDA))
        self._nodes = {id(call) for call in self._autocasts}

    def is_autocast(self, node: ast.With | ast.AsyncWith) -> bool:
        """Whether a `with` switches autocast on."""
        return any(id(item.context_expr) in self._nodes for item in node.items)

    def holds_autocast(self, node: ast.With) -> bool:
        """Whether a `with` is about a name for autocast alone: `context = autocast() if amp else nullcontext()`."""
        paths = {path_of(item.context_expr) for item in node.items}
        pairs = [pair for assign in self._script.imports.nodes.of(ast.Assign) for pair in bindings(assign)]
        held = [value for target, value in pairs if path_of(target) in paths - {None}]
        ways = [way for value in held for way in _ways(value)]
        switches = [id(way) in self._nodes for way in ways]
        nothing = [isinstance(way, ast.Call) and last_name(way) == "nullcontext" for way in ways]
        return any(switches) and all(map(or_, switches, nothing))

    def why_left_alone(self, backwards: Iterable[Backward]) -> str | None:
        """Why a loop's precision cannot be handed over, or None."""
        backwards = list(backwards)
        for event in backwards:
            root = differentiated(event.node)
            if event.scaled and root is event.node.func.value:  # type: ignore[attr-defined]
                return f"the loss of line {event.node.lineno} is scaled somewhere else"
        if not any(event.scaled for event in backwards):
            return None
        if not self._autocasts:
            return "gradients are scaled, but autocast is out of sight"
        return self._kept_flag or self._kept_autocast

    @cached_property
    def _kept_flag(self) -> str | None:
        """Why a loss scaler that is asked whether it is enabled has to stay, or None."""
        scalers = self._scalers_made
        asked = next(self._calls_on(scalers, "is_enabled"), None)
        if asked is None:
            return None
        for node in self._script.imports.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                if path_of(node) in scalers and not self._is_followed(node):
                    hands_on = f"and line {node.lineno} hands it on"
                    return f"line {asked.lineno} asks the loss scaler whether it is enabled, {hands_on}"
        return None

    def _is_followed(self, scaler: ast.expr) -> bool:
        """Whether a scaler is asked something here, or given to a function of the file."""
        parent = next(self._blocks.ancestors(scaler))
        if isinstance(parent, ast.keyword):
            parent = next(self._blocks.ancestors(parent))
        if isinstance(parent, ast.Call):
            return last_name(parent) in self._functions
        return isinstance(parent, ast.Attribute | ast.Compare | ast.BoolOp | ast.If | ast.IfExp)

    @cached_property
    def _scalers_made(self) -> set[str]:
        """What the script calls its loss scalers where it makes them, and where it scales with them."""
        found = set(map(_scaler_of_backward, self._script.backwards))
        for call in self._script.imports.calls(*_SCALERS):
            statement = self._blocks.statement_of(call)
            found.update(map(path_of, statement.targets if isinstance(statement, ast.Assign) else ()))
        return {path for path in found if path is not None}

    @cached_property
    def _kept_autocast(self) -> str | None:
        """Why an autocast of the file has to stay, or None."""
        for call in self._autocasts:
            if self._replacement(call) is None:
                return f"autocast in line {call.lineno} cannot be handed over: `{ast.unparse(call)}`"
        return None

    def edits(self, name: str, layout: Layout, backwards: list[Backward], steps: list[Step]) -> list[Edit]:
        """Hand precision over to the manager called `name`, in a file whose scaled loops are all rewritten.

        Args:
            layout: the file's text.
            backwards, steps: of all rewritten loops.
        """
        edits: list[Edit] = []
        for call in self._autocasts:
            replacement = self._replacement(call)
            if replacement is not None and self._is_of_cuda(call):
                edits.append(Edit(*bounds(self._script.source, call), f"{name}.autocast({replacement})"))
            elif replacement is not None:
                # its arguments stay on the lines they are on
                edits.append(Edit(*bounds(self._script.source, call.func), f"{name}.autocast"))
        scalers = {path for path in map(self._scaler_of_step, steps) if path is not None}
        # who compares the scale of before a step with that behind it asks whether the step was made
        updates = any(self._calls_on(scalers, "get_scale"))
        for call in () if updates else self._calls_on(scalers, "update"):
            edits += self._without(call, layout)
        for call in self._calls_on(scalers, "unscale_"):
            if call.args:
                optimizer = self._script.source.segment(call.args[0])
                edits.append(Edit(*bounds(self._script.source, call), f"{name}.unscale_({optimizer})"))
        if any(event.scaled for event in backwards):
            trained = [event.node for event in (*backwards, *steps)]
            made = self._script.imports.calls(*_SCALERS)
            held: list[ast.expr] = [call for call in made if not self._serves_others(call, trained)]
            if any(self._calls_on(self._scalers_made, "is_enabled")):
                # whether the script wants mixed precision stands in its own, whatever the manager's scales
                methods = ["state_dict", "load_state_dict", "get_scale", *(["update"] if updates else [])]
                calls = (call.func for method in methods for call in self._calls_on(self._scalers_made, method))
                held = [function.value for function in calls if isinstance(function, ast.Attribute)]
            edits += [Edit(*bounds(self._script.source, node), f"{name}.scaler") for node in held]
        return edits

    def _serves_others(self, scaler: ast.Call, trained: list[ast.Call]) -> bool:
        """Whether a loss scaler is made in a function that trains nothing of the file with it, for another object."""
        scope, statement = self._blocks.scope_of(scaler), self._blocks.statement_of(scaler)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(scope, FunctionNode) or not isinstance(target, ast.Name):
            return False
        inside = {id(node) for node in walk(scope)}
        if any(id(call) in inside for call in trained):
            return False
        users = [node for node in walk(scope) if isinstance(node, ast.Call) and last_name(node) not in self._functions]
        taken = [name for name in walk(*users) if isinstance(name, ast.Name)]
        used = [name for name in walk(scope) if isinstance(name, ast.Name) and name.id == target.id]
        return all(name in taken or name is target for name in used)

    @cached_property
    def _functions(self) -> set[str]:
        """The names of the functions of the file."""
        return {node.name for node in self._script.imports.nodes.functions}

    def unscaled(self, steps: list[Step]) -> list[ast.Call]:
        """The calls by which the script unscales by itself."""
        scalers = {path for path in map(self._scaler_of_step, steps) if path is not None}
        return list(self._calls_on(scalers, "unscale_"))

    def _scaler_of_step(self, step: Step) -> str | None:
        function = step.node.func
        return path_of(function.value) if step.scaled and isinstance(function, ast.Attribute) else None

    def _calls_on(self, scalers: set[str], method: str) -> Iterator[ast.Call]:
        for call in self._script.calls_of_method(method):
            if isinstance(call.func, ast.Attribute) and path_of(call.func.value) in scalers:
                yield call

    def _without(self, call: ast.Call, layout: Layout) -> tuple[Edit, ...]:
        statement = self._blocks.statement_of(call)
        if not isinstance(statement, ast.Expr) or statement.value is not call:
            return ()
        return (without(layout, statement, self._blocks.block_of(statement)),)

    def _is_of_cuda(self, call: ast.Call) -> bool:
        """Whether a call means `torch.cuda.amp.autocast`, where the file imports it alone or next to the general one.

        `autocast(device_type="cuda")` and `autocast("cuda" if on_gpu else "cpu")` are written for the latter.
        """
        names_device = any(keyword.arg == "device_type" for keyword in call.keywords) or any(
            _is_constant(argument, str) for argument in call.args[:1]
        )
        return not names_device and bool(self._script.imports.qualified(call.func) & set(_OF_CUDA))

    def _may_name_device(self, call: ast.Call) -> bool:
        """Whether the first argument of one of cuda may be a device after all: of `autocast(place)` of two modules."""
        both = bool(self._script.imports.qualified(call.func) & set(_WITH_DEVICE))
        return both and any(not _is_constant(argument, bool) for argument in call.args[:1])

    def _replacement(self, call: ast.Call) -> str | None:
        """The arguments for the manager's autocast; None where it has no such option, or is a decorator."""
        if any(
            isinstance(parent, FunctionNode) and call in parent.decorator_list
            for parent in list(self._blocks.ancestors(call))[:1]
        ):
            return None
        of_cuda = self._is_of_cuda(call)
        if of_cuda and self._may_name_device(call):
            return None
        slots = _SLOTS["cuda" if of_cuda else "device"]
        if len(call.args) > len(slots) or any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        if any(keyword.arg not in ("device_type", "dtype", "enabled") for keyword in call.keywords):
            return None
        segment = self._script.source.segment
        if not of_cuda:
            given = [segment(argument) for argument in call.args]
        else:
            quote = quote_of(self._script.source)
            given = [
                f"{quote}cuda{quote}",
                *(f"{slot}={segment(value)}" for slot, value in zip(slots, call.args, strict=False)),
            ]
        return ", ".join([*given, *(f"{keyword.arg}={segment(keyword.value)}" for keyword in call.keywords)])


def _scaler_of_backward(backward: Backward) -> str | None:
    function = backward.node.func
    scale = function.value if isinstance(function, ast.Attribute) else None
    called = scale.func if backward.scaled and isinstance(scale, ast.Call) else None
    return path_of(called.value) if isinstance(called, ast.Attribute) else None
