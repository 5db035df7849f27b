"""What can be done with each training loop, and why not more."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from oomfix.rewrite import effects
from oomfix.rewrite.amp import Amp
from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.effects import last_name
from oomfix.rewrite.liveness import FunctionNode
from oomfix.script import Script, TrainingLoop
from oomfix.script.names import path_of
from oomfix.script.trace import Backward, Step

Form = Literal["micro-batched", "in-place", "none"]

_FRAMEWORKS = {
    "accelerate": "Accelerate runs the backward and does its own accumulation and precision",
    "fabric": "Fabric runs the backward and does its own precision",
    "deepspeed": "DeepSpeed runs the backward and does its own accumulation and precision",
    "apex": "apex does the mixed precision; move it to torch.amp first",
    "oomfix": "it already trains through oomfix.runtime",
}
_TWO_STEPS = frozenset({"first_step", "second_step", "ascent_step", "descent_step"})


@dataclass
class Verdict:
    """What becomes of a loop.

    Attributes:
        loop: the loop.
        form: the strongest form that is safe.
        reason: why not more; None for a loop that is micro-batched.
        backwards: the calls that run its backwards, one per place in the file.
        liftable: those whose slice may be tried as a function.
        steps: the calls that step its optimizers, with the optimizer's path.
        notes: what else the summary has to say.
    """

    loop: TrainingLoop
    form: Form = "in-place"
    reason: str | None = None
    backwards: list[Backward] = field(default_factory=list)
    liftable: list[ast.Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def leave(self, reason: str) -> None:
        """Leave the loop alone."""
        self.form, self.reason = "none", reason


class Judge:
    """Decides what can be done with each training loop of a script.

    Args:
        script: the script.
        blocks: where its nodes stand.
        amp: what it does about precision.
    """

    def __init__(self, script: Script, blocks: Blocks, amp: Amp) -> None:
        self._script = script
        self._blocks = blocks
        self._amp = amp

    def verdicts(self) -> list[Verdict]:
        """One verdict per training loop, by line."""
        verdicts = [self._judge(loop) for loop in self._script.loops]
        self._leave_scaled_together(verdicts)
        self._leave_shared(verdicts)
        return verdicts

    def _judge(self, loop: TrainingLoop) -> Verdict:
        backwards = list({id(event.node): event for event in loop.backwards if not event.is_grad_call}.values())
        steps = list({id(event.node): event for event in (*loop.steps, *loop.later_steps)}.values())
        verdict = Verdict(loop, backwards=backwards, steps=steps)
        reason = self._why_left_alone(verdict)
        if reason is not None:
            verdict.leave(reason)
            return verdict
        verdict.reason = self._why_not_lifted(verdict)
        if verdict.reason is None:
            verdict.liftable = [event.node for event in backwards]
        return verdict

    # -- left alone --------------------------------------------------------------------------------------------

    def _why_left_alone(self, verdict: Verdict) -> str | None:
        loop = verdict.loop
        if loop.framework is not None:
            return _FRAMEWORKS.get(loop.framework, f"{loop.framework} runs the training")
        for event in verdict.backwards:
            if (reason := self._why_backward_stays(event)) is not None:
                return reason
        if not verdict.steps:
            verdict.steps = list(self._steps_by_name(verdict))
        if not verdict.steps:
            return "no optimizer step is in sight, which would have to undo the loss scale"
        for step in verdict.steps:
            if (reason := self._why_step_stays(step)) is not None:
                return reason
        return (
            self._why_body_stays(verdict)
            or self._why_clipping_stays(verdict)
            or self._amp.why_left_alone(verdict.backwards)
        )

    def _why_backward_stays(self, event: Backward) -> str | None:
        node = event.node
        line = node.lineno
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "backward":
            return f"`{ast.unparse(node.func)}` in line {line} runs backward and step out of sight"
        qualified = self._script.imports.qualified(node.func)
        if qualified & {"torch.autograd.backward"}:
            return f"`torch.autograd.backward` in line {line} may differentiate several tensors"
        if any(not isinstance(parent, ast.Expr) for parent in [next(self._blocks.ancestors(node))]):
            return f"the backward in line {line} is part of an expression"
        if len(node.args) > 1 or any(keyword.arg is None for keyword in node.keywords):
            return f"the backward in line {line} has arguments that cannot be followed"
        root = self._amp.root_of(node)
        if (node.args or not event.origins) and (self._is_engine(root) or not self._is_loss(root)):
            return f"`{ast.unparse(node.func)}` in line {line} may be a method of another file's object"
        return None

    def _steps_by_name(self, verdict: Verdict) -> Iterator[Step]:
        """Steps of optimizers that come out of a container, such as `kwargs["optimizer"].step()`."""
        event = verdict.backwards[0]
        for body in self._bodies(verdict):
            for node in ast.walk(body):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                    receiver = ast.unparse(node.func.value)
                    if "optim" in receiver.lower() and "sched" not in receiver.lower():
                        yield Step(node, event.site, event.order, optimizer=receiver, scaled=False)

    def _is_engine(self, root: ast.expr) -> bool:
        """Whether what has the backward is called like a network somewhere: a training engine, no tensor."""
        path = path_of(root)
        return path is not None and any(
            isinstance(node, ast.Call) and path_of(node.func) == path for node in self._script.imports.nodes
        )

    def _is_loss(self, root: ast.expr) -> bool:
        """Whether a root that nothing is known of is a tensor: it is computed, or assigned in its function."""
        path = path_of(root)
        if path is None:
            return True
        for node in self._script.imports.nodes:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                    if any(path_of(element) == path for element in elements):
                        return not _makes_an_object(node.value)
        last = path.rsplit(".", 1)[-1].lower()
        return "loss" in last or "err" in last or "cost" in last

    def _why_step_stays(self, step: Step) -> str | None:
        node = step.node
        line = node.lineno
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
            return f"`{ast.unparse(node.func)}` in line {line} steps out of sight"
        if not isinstance(next(self._blocks.ancestors(node)), ast.Expr):
            return f"what the step in line {line} returns is used"
        if step.scaled and len(node.args) == 1 and not node.keywords:
            return None
        if node.args or node.keywords:
            return f"the step in line {line} takes a closure or a loss, and may run forward and backward again"
        return None

    def _why_body_stays(self, verdict: Verdict) -> str | None:
        for scope in self._bodies(verdict):
            for node in ast.walk(scope):
                if isinstance(node, ast.Call):
                    name = last_name(node)
                    if name in _TWO_STEPS:
                        return f"`{name}` in line {node.lineno} steps twice per batch (SAM)"
                    if name in ("register_hook", "register_full_backward_hook"):
                        return f"a hook made in line {node.lineno} would see scaled gradients"
                if isinstance(node, ast.stmt) and self._reads_between(node, verdict):
                    return f"line {node.lineno} clips or reads gradients between two backwards of one step"
                if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
                    if "autograd" in (path_of(node) or "") or self._is_function(node) or self._of_parameters(node):
                        continue
                    return f"line {node.lineno} reads `{ast.unparse(node)}`, a gradient that may be scaled"
        return None

    def _why_clipping_stays(self, verdict: Verdict) -> str | None:
        """Gradients are unscaled once per step: what looks at them has to be followed by the step at once."""
        for scope in self._bodies(verdict):
            for node in ast.walk(scope):
                if not isinstance(node, ast.Expr | ast.Assign) or not _clips_or_reads(node):
                    continue
                scope_of = self._blocks.scope_of
                steps = [step for step in verdict.steps if scope_of(step.node) is scope_of(node)]
                if steps and not any(self._follows(step, node, verdict) for step in steps):
                    return f"line {node.lineno} clips or reads gradients also where no step follows"
        return None

    def _follows(self, step: Step, reader: ast.stmt, verdict: Verdict) -> bool:
        """Whether a step runs whenever a statement does: no `if` skips it, no loop of backwards ends before it."""
        for loop in self._blocks.ancestors(reader):
            if loop is self._blocks.scope_of(reader):
                break
            if isinstance(loop, ast.For | ast.While):
                inside = {id(child) for child in ast.walk(loop)}
                if id(step.node) not in inside and any(id(event.node) in inside for event in verdict.backwards):
                    return False
        around = {id(condition) for condition in self._blocks.conditions_of(reader)}
        for condition in self._blocks.conditions_of(step.node):
            inside = {id(child) for child in ast.walk(condition)}
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
            inside = {id(node) for node in ast.walk(statement)}
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

    def _is_function(self, node: ast.Attribute) -> bool:
        """`torch.autograd.grad(...)` under an alias: called, not read."""
        parent = next(self._blocks.ancestors(node))
        return isinstance(parent, ast.Call) and parent.func is node

    def _of_parameters(self, node: ast.Attribute) -> bool:
        """Whether a gradient is read of each of a model's parameters, in a loop or comprehension."""
        base = node.value
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        if not isinstance(base, ast.Name):
            return False
        for parent in self._blocks.ancestors(node):
            generators = getattr(parent, "generators", [parent] if isinstance(parent, ast.For) else [])
            for generator in generators:
                names = {name.id for name in ast.walk(generator.target) if isinstance(name, ast.Name)}
                if base.id in names and "param" in ast.unparse(generator.iter).lower():
                    return True
        return False

    def _bodies(self, verdict: Verdict) -> Iterator[ast.AST]:
        """The loop, and the functions of the file that its backwards and steps are in."""
        yield verdict.loop.node
        seen: set[int] = set()
        for event in (*verdict.backwards, *verdict.steps):
            scope = self._blocks.scope_of(event.node)
            inside = any(parent is verdict.loop.node for parent in self._blocks.ancestors(event.node))
            if scope is not None and isinstance(scope, FunctionNode) and not inside and id(scope) not in seen:
                seen.add(id(scope))
                yield scope

    def _leave_scaled_together(self, verdicts: list[Verdict]) -> None:
        """A loss scaler belongs to all loops of a file or to none: the script's own cannot follow ours."""
        own = [v for v in verdicts if v.form == "none" and any(event.scaled for event in v.backwards)]
        for verdict in verdicts:
            if own and verdict.form != "none" and any(event.scaled for event in verdict.backwards):
                verdict.leave(f"its loss scaler is also that of the loop in line {own[0].loop.line}, which stays")

    def _leave_shared(self, verdicts: list[Verdict]) -> None:
        """A helper that serves several loops is rewritten for all of them or for none."""
        changed = True
        while changed:
            changed = False
            left = {id(e.node): v for v in verdicts if v.form == "none" for e in (*v.backwards, *v.steps)}
            for verdict in verdicts:
                shared = next((e for e in (*verdict.backwards, *verdict.steps) if id(e.node) in left), None)
                if verdict.form != "none" and shared is not None:
                    other = left[id(shared.node)]
                    verdict.leave(
                        f"it shares line {shared.node.lineno} with the loop in line {other.loop.line}: {other.reason}"
                    )
                    changed = True

    # -- in place ----------------------------------------------------------------------------------------------

    def _why_not_lifted(self, verdict: Verdict) -> str | None:
        backwards = verdict.backwards
        for index, one in enumerate(backwards):
            for other in backwards[index + 1 :]:
                if not self._blocks.exclude_each_other(one.node, other.node):
                    return f"it has {len(backwards)} backwards (lines {_lines(backwards)})"
        for event in backwards:
            line = event.node.lineno
            if any(other.carried for other in verdict.loop.backwards if other.node is event.node):
                return f"what the backward in line {line} goes through is carried over from the iteration before"
            if self._retains(event):
                return f"the backward in line {line} keeps its graph for another one, or starts from a gradient"
            if (reason := self._why_statement_stays(event, verdict)) is not None:
                return reason
        return None

    def _retains(self, event: Backward) -> bool:
        """Whether a backward has options: a kept graph that is needed, a gradient to start from."""
        if event.node.args:
            return True
        for keyword in event.node.keywords:
            if keyword.arg == "retain_graph" and isinstance(keyword.value, ast.Constant) and not keyword.value.value:
                continue
            if keyword.arg != "retain_graph":
                return True
            if isinstance(keyword.value, ast.Constant):
                if not self._script.is_needed_later(event):
                    continue
            return True
        return False

    def _why_statement_stays(self, event: Backward, verdict: Verdict) -> str | None:
        line = event.node.lineno
        scope = self._blocks.scope_of(event.node)
        if scope is None:
            return f"the backward in line {line} is in a class body"
        around = self._blocks.loop_of(event.node)
        if around is not None and around is not verdict.loop.node:
            return f"the backward in line {line} runs once for each part of an iteration"
        for parent in self._blocks.ancestors(event.node):
            if parent is scope:
                break
            if isinstance(parent, ast.With | ast.AsyncWith) and self._amp.is_autocast(parent):
                return f"the backward in line {line} is inside of autocast"
        return None


def _lines(events: list[Backward]) -> str:
    return ", ".join(str(line) for line in sorted(event.node.lineno for event in events))


def _makes_an_object(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value)[:1].isupper()


def _clips_or_reads(statement: ast.stmt) -> bool:
    unscales = any(last_name(call) == "unscale_" for call in effects.calls_in(statement))
    return unscales or (reads_gradients(statement) and not effects.is_zero_grad(statement))


def reads_gradients(node: ast.AST) -> bool:
    """Whether a node clips or reads gradients."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and last_name(child).startswith(("clip_grad", "clip_gradient", "clip_coef")):
            return True
        if isinstance(child, ast.Attribute) and child.attr == "grad" and isinstance(child.ctx, ast.Load):
            return True
    return False
