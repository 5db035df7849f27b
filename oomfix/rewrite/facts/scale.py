"""Where a loss scale would be seen: what reads, clips or changes gradients before they can be unscaled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import FunctionNode, nodes_of_scope_body
from oomfix.rewrite.dataflow.on_gradients import CLIPPING, is_zero_grad
from oomfix.rewrite.dataflow.optimizer_loops import loop_over_optimizers, may_run_ahead
from oomfix.rewrite.facts.handed_networks import HandedNetworks
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.script.facts.trace import Step
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of, walk

_TWO_STEPS = frozenset({"first_step", "second_step", "ascent_step", "descent_step"})
_WITHOUT_NUMBERS = frozenset("shape size dtype device dim ndim numel is_sparse is_cuda layout".split())
_BLIND_TO_SCALE = frozenset({"zero_", "detach_", "requires_grad_"}) | _WITHOUT_NUMBERS


class ScaleWatch:
    """Says why the gradients of a loop must not be scaled.

    The manager unscales once per step, right before it: whoever looks at gradients at other times would see them
    65536 times too large in fp16.

    Args:
        reading: the script.
    """

    def __init__(self, reading: Reading) -> None:
        self._script = reading.script
        self._blocks = reading.blocks
        self._handed = HandedNetworks(reading)

    def why_seen(self, verdict: Verdict) -> str | None:
        """What would see scaled gradients, or None; `verdict.steps` are those the manager makes."""
        return (
            self._why_body_sees(verdict)
            or self._why_clipping_sees(verdict)
            or self._why_another_function_sees(verdict)
            or self._handed.why_seen(verdict)
        )

    def _why_body_sees(self, verdict: Verdict) -> str | None:
        optimizers = {step.optimizer for step in verdict.steps}
        for node in walk(*bodies(verdict, self._blocks)):
            if isinstance(node, ast.Call):
                name = last_name(node)
                if (path := path_of(node.func)) in optimizers:
                    return f"line {node.lineno} calls `{path}`, a function that steps where it is no optimizer"
                if name in _TWO_STEPS:
                    return f"`{name}` in line {node.lineno} steps twice per batch (SAM)"
                if name in ("register_hook", "register_full_backward_hook"):
                    return f"a hook made in line {node.lineno} would see scaled gradients"
            if isinstance(node, ast.stmt) and self._reads_between(node, verdict):
                return f"line {node.lineno} clips or reads gradients between two backwards of one step"
            if self._reads_one(node) and (not self._of_parameters(node) or self._is_handed_over(node)):
                assert isinstance(node, ast.expr)
                return f"line {node.lineno} reads `{ast.unparse(node)}`, a gradient that may be scaled"
        return None

    def _why_another_function_sees(self, verdict: Verdict) -> str | None:
        if all(event.scaled for event in verdict.backwards):
            return None
        if not self._gradients_read:
            return None
        seen = {id(node) for node in walk(*bodies(verdict, self._blocks))}
        for node in self._gradients_read:
            if id(node) not in seen:
                does = "reads" if isinstance(node.ctx, ast.Load) else "adds to"
                return f"line {node.lineno} {does} `{ast.unparse(node)}`, a gradient that may be scaled"
        return None

    @cached_property
    def _gradients_read(self) -> list[ast.Attribute]:
        """Where the file reads the numbers of a gradient, or adds to them, but for functions that clip."""
        nodes = self._script.imports.nodes
        added = [target for one in nodes.of(ast.AugAssign) if (target := _added_to(one)) is not None]
        read = [node for node in nodes.of(ast.Attribute) if self._reads_one(node) and not self._clips(node)]
        return [*read, *added]

    def _clips(self, node: ast.AST) -> bool:
        """Whether a node stands in a function that clips, before whose calls gradients are unscaled."""
        scope = self._blocks.scope_of(node)
        return isinstance(scope, FunctionNode) and bool(CLIPPING.search(scope.name))

    def _reads_one(self, node: ast.AST) -> bool:
        """Whether a node reads the numbers of a gradient, other than to set them to zero."""
        if not isinstance(node, ast.Attribute) or node.attr != "grad" or not isinstance(node.ctx, ast.Load):
            return False
        if "autograd" in (path_of(node) or ""):
            return False
        parent = next(self._blocks.ancestors(node))
        if isinstance(parent, ast.Attribute) and parent.attr == "data":
            parent = next(self._blocks.ancestors(parent))
        if isinstance(parent, ast.Call):
            return parent.func is not node  # `torch.autograd.grad(...)` under an alias is called, not read
        if isinstance(parent, ast.Attribute):
            return parent.attr not in _BLIND_TO_SCALE
        return not isinstance(parent, ast.Compare | ast.BoolOp | ast.If)

    def _why_clipping_sees(self, verdict: Verdict) -> str | None:
        """What looks at gradients has to be followed by the step at once."""
        for node in walk(*bodies(verdict, self._blocks)):
            if not isinstance(node, ast.Expr | ast.Assign) or not _clips_or_reads(node):
                continue
            scope_of = self._blocks.scope_of
            steps = [step for step in verdict.steps if scope_of(step.node) is scope_of(node)]
            if not steps and self._unscales(scope_of(node)):
                continue
            if not any(self._follows(step, node, verdict) for step in steps):
                return f"line {node.lineno} clips or reads gradients also where no step follows"
            if (late := self._named_behind(node, steps)) is not None:
                return f"line {late} names an optimizer whose gradients line {node.lineno} clips or reads before"
        return None

    def _named_behind(self, reader: ast.stmt, steps: list[Step]) -> int | None:
        """The line behind a reader that binds the optimizer of a step to come: it cannot be unscaled ahead of it.

        `for optimizer in optimizers:` can mostly be gone through ahead of it as well.
        """
        for step in steps:
            loop = loop_over_optimizers(step, reader, self._blocks)
            if loop is not None and not may_run_ahead(loop, reader, self._blocks):
                return loop.lineno
        scope = self._blocks.scope_of(reader)
        if scope is None:
            return None
        behind = (node for node in nodes_of_scope_body(scope) if isinstance(node, ast.Assign))
        late = (
            node.lineno
            for node in behind
            for step in steps
            if reader.lineno < node.lineno <= step.node.lineno and _binds(node, step.optimizer)
        )
        return min(late, default=None)

    def _unscales(self, scope: ast.AST | None) -> bool:
        """Whether a scope holds an `unscale_` of the script's own, which then becomes the manager's."""
        return any(self._blocks.scope_of(call) is scope for call in self._script.calls_of_method("unscale_"))

    def _follows(self, step: Step, reader: ast.stmt, verdict: Verdict) -> bool:
        """Whether a step runs whenever a statement does: no `if` skips it, no loop of backwards ends before it."""
        for loop in self._blocks.ancestors(reader):
            if loop is self._blocks.scope_of(reader):
                break
            if isinstance(loop, ast.For | ast.While):
                inside = {id(child) for child in walk(loop)}
                if id(step.node) not in inside and any(id(event.node) in inside for event in verdict.backwards):
                    return False
        around = {id(condition) for condition in self._blocks.conditions_of(reader)}
        for condition in self._blocks.conditions_of(step.node):
            inside = {id(child) for child in walk(condition)}
            with_backward = any(id(event.node) in inside for event in verdict.backwards)
            elsewhere = any(id(other.node) in inside for other in verdict.steps if other is not step)
            if id(condition) not in around and not with_backward and not elsewhere:
                return False
        return True

    def _reads_between(self, statement: ast.stmt, verdict: Verdict) -> bool:
        """Whether gradients are looked at while some of them are still to come: they can be unscaled only once."""
        if isinstance(statement, ast.For | ast.While):
            if statement is verdict.loop.node:
                return False
            inside = {id(node) for node in walk(statement)}
            backwards = any(id(event.node) in inside for event in verdict.backwards)
            steps = any(id(step.node) in inside for step in verdict.steps)
            return backwards and not steps and any(_clips_or_reads(child) for child in statement.body)
        if not isinstance(statement, ast.Expr | ast.Assign) or not _clips_or_reads(statement):
            return False
        scope = self._blocks.scope_of(statement)
        later = [e.node.lineno for e in verdict.backwards if self._blocks.scope_of(e.node) is scope]
        later = [line for line in later if line > statement.lineno]
        earlier = any(e.node.lineno < statement.lineno for e in verdict.backwards)
        steps_between = any(statement.lineno < s.node.lineno < min(later, default=0) for s in verdict.steps)
        apart = any(
            self._blocks.exclude_each_other(statement, e.node) for e in verdict.backwards if e.node.lineno in later
        )
        return bool(later) and earlier and not steps_between and not apart

    def _is_handed_over(self, node: ast.AST) -> bool:
        """Whether a gradient becomes that of another tensor, perhaps of one that another optimizer holds."""
        statement = self._blocks.statement_of(node)
        if not isinstance(statement, ast.Assign):
            return False
        targets = [one for one in statement.targets if isinstance(one, ast.Attribute) and one.attr in ("grad", "_grad")]
        return any(_base_of(one) != _base_of(node) for one in targets)

    def _of_parameters(self, node: ast.AST) -> bool:
        """Whether a gradient is read of each of a model's parameters, in a loop or comprehension."""
        name = _base_of(node)
        for parent in self._blocks.ancestors(node):
            generators = getattr(parent, "generators", [parent] if isinstance(parent, ast.For) else [])
            for generator in generators:
                names = {name.id for name in walk(generator.target) if isinstance(name, ast.Name)}
                if name in names and "param" in ast.unparse(generator.iter).lower():
                    return True
        return False


def bodies(verdict: Verdict, blocks: Blocks) -> Iterator[ast.AST]:
    """The loop, and the functions of the file that its backwards and steps are in."""
    yield verdict.loop.node
    seen: set[int] = set()
    for event in (*verdict.backwards, *verdict.steps):
        scope = blocks.scope_of(event.node)
        inside = any(parent is verdict.loop.node for parent in blocks.ancestors(event.node))
        if scope is not None and isinstance(scope, FunctionNode) and not inside and id(scope) not in seen:
            seen.add(id(scope))
            yield scope


def _base_of(node: ast.AST) -> str | None:
    """The name that attributes and items are taken from."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _clips_or_reads(statement: ast.stmt) -> bool:
    unscales = any(last_name(call) == "unscale_" for call in calls_in(statement))
    return unscales or (reads_gradients(statement) and not is_zero_grad(statement))


def reads_gradients(node: ast.AST) -> bool:
    """Whether a node clips, reads or adds to gradients; their shape tells nothing of them."""
    described: set[int] = set()
    for child in walk(node):
        if isinstance(child, ast.Call) and CLIPPING.search(last_name(child)):
            return True
        if isinstance(child, ast.AugAssign) and _added_to(child) is not None:
            return True
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            if child.attr in _WITHOUT_NUMBERS:
                described.add(id(child.value))
            elif child.attr == "grad" and id(child) not in described and "autograd" not in (path_of(child) or ""):
                return True
    return False


def _added_to(statement: ast.AugAssign) -> ast.Attribute | None:
    """The gradient that a statement adds something to; one that it multiplies keeps its scale."""
    target = statement.target
    if isinstance(target, ast.Attribute) and target.attr == "grad" and isinstance(statement.op, ast.Add | ast.Sub):
        return target
    return None


def updates_by_hand(node: ast.AST) -> bool:
    """Whether a node changes parameters by their gradients itself: `w -= lr * w.grad`, `p.data.add_(p.grad, ...)`."""
    for child in walk(node):
        if isinstance(child, ast.AugAssign) and reads_gradients(child.value):
            return True
        if isinstance(child, ast.Call) and last_name(child).endswith("_") and not last_name(child).startswith("clip"):
            if any(reads_gradients(given) for given in arguments_of(child)):
                return True
    return False


def _binds(statement: ast.Assign, path: str) -> bool:
    """Whether an assignment gives a path another meaning: to the name, the attribute or what it is an attribute of."""
    parts = (part for part in walk(*statement.targets) if isinstance(part, ast.expr))
    bound = (path_of(part) for part in parts if isinstance(getattr(part, "ctx", None), ast.Store))
    return any(one is not None and f"{path}.".startswith(f"{one}.") for one in bound)
