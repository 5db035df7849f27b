"""What can be done with each training loop, and why not more."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property

from oomfix.rewrite.facts.amp import differentiated
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import ScaleWatch, bodies, updates_by_hand
from oomfix.rewrite.facts.unscaled_gradients import UnscaledGradients
from oomfix.rewrite.facts.verdict import Scaling, Verdict
from oomfix.rewrite.text.header import manager_in
from oomfix.script import TrainingLoop
from oomfix.script.facts.named_like import looks_like_optimizer
from oomfix.script.facts.torch_facts import OTHER_LIBRARIES
from oomfix.script.facts.trace import Backward, Step
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk

_SHARDING = {
    f"torch.distributed.fsdp.{module}FullyShardedDataParallel" for module in ("", "fully_sharded_data_parallel.")
}
_ENGINE_METHODS = ("step", "zero_grad", "parameters", "state_dict", "train", "eval")
_FRAMEWORKS = {
    "accelerate": "Accelerate runs the backward and does its own accumulation and precision",
    "fabric": "Fabric runs the backward and does its own precision",
    "deepspeed": "DeepSpeed runs the backward and does its own accumulation and precision",
    "apex": "apex does the mixed precision; move it to torch.amp first",
    "oomfix": "it already trains through oomfix.runtime",
}


class Judge:
    """Decides what can be done with each training loop of a script.

    Args:
        reading: the script.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading, self._script = reading, reading.script
        self._blocks, self._amp, self._layout = reading.blocks, reading.amp, reading.layout
        self._watch = ScaleWatch(reading)
        self._unscaled = UnscaledGradients(reading)
        self._manager = manager_in(reading.script)

    def verdicts(self) -> list[Verdict]:
        """One verdict per training loop, by line."""
        verdicts = [self._judge(loop) for loop in self._reading.loops]
        if any(verdict.form != "none" and verdict.handed_to is None for verdict in verdicts):
            # one manager serves the whole file, in one precision
            for verdict in verdicts:
                if verdict.form != "none" and verdict.handed_to is not None:
                    verdict.leave(verdict.handed_to)
        self.leave_shared(verdicts)
        return verdicts

    def _judge(self, loop: TrainingLoop) -> Verdict:
        backwards = list({id(event.node): event for event in loop.backwards if not event.is_grad_call}.values())
        steps = list({id(event.node): event for event in (*loop.steps, *loop.later_steps)}.values())
        verdict = Verdict(loop, backwards=backwards, steps=steps)
        verdict.handed_to = self._handed_to(loop, backwards)
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
        if self._trains_through_manager(loop):
            return _FRAMEWORKS["oomfix"]
        if verdict.handed_to is not None:
            verdict.sees_scale = verdict.handed_to
            return None
        if loop.framework is not None:
            return _FRAMEWORKS.get(loop.framework, f"{loop.framework} runs the training")
        if (library := self._other_library(verdict)) is not None:
            return f"{library} trains it, not torch"
        if self._sharded is not None:
            refused = "which the runtime refuses: only `fully_shard` is supported"
            return f"line {self._sharded} shards its network by FSDP1, {refused}"
        own = self._keep_optimizers_backwards(verdict)
        for event in verdict.backwards:
            if (reason := self._why_backward_stays(event)) is not None:
                return reason
        if not verdict.steps:
            verdict.steps = list(self._steps_by_name(verdict))
        if not verdict.steps and not self._updates_out_of_sight(verdict):
            return "no optimizer step and no update of parameters is in sight"
        verdict.sees_scale = (
            own
            or self._hand_over_steps(verdict)
            or self._watch.why_seen(verdict)
            or self._unscaled.why_stepped(verdict)
        )
        if verdict.scaled and verdict.sees_scale is None:
            verdict.sees_scale = self._amp.why_left_alone(verdict.backwards)
        return None

    def _handed_to(self, loop: TrainingLoop, backwards: list[Backward]) -> str | None:
        """What to say of who is given the loss of a loop and runs its backward, if `memory.loss` may compute it."""
        calls = (node for node in walk(loop.node) if isinstance(node, ast.Call))
        if len(backwards) != 1 or any(last_name(other) == "grad" for other in calls):
            return None
        call = backwards[0].node
        others = call.args[1:] if last_name(call) != "backward" else []
        steps_too = any(looks_like_optimizer(path_of(other) or "") for other in others[:1])
        if not steps_too and loop.framework != "accelerate":
            return None
        from oomfix.rewrite.facts.handed_losses import handed_loss  # few scripts have such a loop

        made = handed_loss(backwards[0], self._blocks)
        if made is None or self._layout.own_lines(made.made_by) is None:
            return None
        return f"`{ast.unparse(call.func)}` runs the backward and the step" if steps_too else _FRAMEWORKS["accelerate"]

    def _trains_through_manager(self, loop: TrainingLoop) -> bool:
        """Whether the loss that a framework is given comes from `memory.loss`."""
        calls = (node for node in walk(loop.node) if isinstance(node, ast.Call))
        return self._manager is not None and any(path_of(call.func) == f"{self._manager}.loss" for call in calls)

    def _other_library(self, verdict: Verdict) -> str | None:
        """The library, other than torch, that an optimizer of the loop is made by."""
        for step in verdict.steps:
            for value in self._bound.get(step.optimizer, ()):
                if isinstance(value, ast.Call):
                    roots = {name.split(".")[0] for name in self._script.imports.qualified(value.func)}
                    if found := roots & OTHER_LIBRARIES:
                        return min(found)
        return None

    def _keep_optimizers_backwards(self, verdict: Verdict) -> str | None:
        """Leave `optimizer.backward(loss)` of `if fp16: ... else: loss.backward()`; returns why none may be scaled."""
        for event in list(verdict.backwards):
            path = path_of(event.node.func) or ""
            others = [other for other in verdict.backwards if other is not event]
            if "optim" in path.lower() and any(self._blocks.exclude_each_other(event.node, o.node) for o in others):
                verdict.backwards.remove(event)
                return f"`{path}` in line {event.node.lineno} scales the loss by itself"
        return None

    def _hand_over_steps(self, verdict: Verdict) -> str | None:
        """Keep those steps that the manager can make; returns why another one cannot be."""
        if not verdict.steps:
            stepping = self._stepping(verdict)
            return "the step is out of sight" if stepping is None else f"`{stepping}` is not seen to be an optimizer"
        reasons = {id(step): self._why_step_stays(step) for step in verdict.steps}
        verdict.kept_steps = [step for step in verdict.steps if reasons[id(step)] is not None]
        verdict.steps = [step for step in verdict.steps if reasons[id(step)] is None]
        return reasons[id(verdict.kept_steps[0])] if verdict.kept_steps else None

    def _updates_out_of_sight(self, verdict: Verdict) -> bool:
        """Whether something may step: `optimizer.step_and_update_lr()`, `w -= lr * w.grad`, also in a function."""
        for scope in bodies(verdict, self._blocks):
            if updates_by_hand(scope):
                return True
            for node in walk(scope):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    if "step" in node.func.attr and ("optim" in owner.lower() or self._holds_an_optimizer(owner)):
                        return True
        return self._stepping(verdict) is not None or any(map(updates_by_hand, self._functions_named(verdict)))

    def _functions_named(self, verdict: Verdict) -> Iterator[ast.AST]:
        """The functions of the file that the loop calls by their names, such as `sgd(params, lr)`."""
        calls = (node for node in walk(verdict.loop.node) if isinstance(node, ast.Call))
        named = (call for call in calls if isinstance(call.func, ast.Name))
        yield from (function for call in named for function in self._reading.functions.by(call))

    def _stepping(self, verdict: Verdict) -> str | None:
        """What is asked both for `step()` and for `zero_grad()`, as optimizers are, though none is seen to be there."""
        for node in walk(*bodies(verdict, self._blocks)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                owner = ast.unparse(node.func.value)
                if f"{owner}.zero_grad" in self._called:
                    return owner
        return None

    def _holds_an_optimizer(self, path: str) -> bool:
        """Whether the gradients of an object's optimizer are reset, as `schedule.optimizer.zero_grad()` does."""
        return f"{path}.optimizer.zero_grad" in self._called

    def _why_backward_stays(self, event: Backward) -> str | None:
        node = event.node
        line = node.lineno
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "backward":
            return f"`{ast.unparse(node.func)}` in line {line} runs backward and step out of sight"
        qualified = self._script.imports.qualified(node.func)
        if qualified & {"torch.distributed.autograd.backward"}:
            return f"`torch.distributed.autograd` runs the backward of line {line} on several machines (RPC)"
        if qualified & {"torch.autograd.backward"}:
            return f"`torch.autograd.backward` in line {line} may differentiate several tensors"
        if len(node.args) > 1 or any(keyword.arg is None for keyword in node.keywords):
            return f"the backward in line {line} has arguments that cannot be followed"
        root = differentiated(node)
        if (node.args or not event.origins) and (self._is_engine(root) or not self._is_loss(root)):
            return self._engines_reason(node)
        if self._steps_itself(root):
            return self._engines_reason(node)
        return None

    def _steps_by_name(self, verdict: Verdict) -> Iterator[Step]:
        """Steps of optimizers that come out of a container, such as `kwargs["optimizer"].step()`."""
        event = verdict.backwards[0]
        for node in walk(*bodies(verdict, self._blocks)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                receiver = ast.unparse(node.func.value)
                path = self._container_of(node.func.value) or path_of(node.func.value)
                named = "optim" in receiver.lower() or looks_like_optimizer(path or "")
                if named and "sched" not in receiver.lower():
                    yield Step(node, event.site, event.order, optimizer=receiver, scaled=False)

    def _container_of(self, element: ast.expr) -> str | None:
        """The path of what a loop takes a name from: `opts` of `for o in opts`, `for o in opts.values()`."""
        for loop in self._blocks.ancestors(element) if isinstance(element, ast.Name) else ():
            if isinstance(loop, ast.For) and path_of(loop.target) == path_of(element):
                held = loop.iter
                if isinstance(held, ast.Call) and isinstance(held.func, ast.Attribute) and held.func.attr == "values":
                    held = held.func.value
                return path_of(held)
        return None

    def _engines_reason(self, node: ast.Call) -> str:
        if "deepspeed" in self._script.source.text.lower():
            return _FRAMEWORKS["deepspeed"]
        return f"`{ast.unparse(node.func)}` in line {node.lineno} is a method of another file's object"

    def _steps_itself(self, root: ast.expr) -> bool:
        """Whether what has the backward has methods of a trainer."""
        path = path_of(root)
        return path is not None and not self._called.isdisjoint(f"{path}.{method}" for method in _ENGINE_METHODS)

    def _is_engine(self, root: ast.expr) -> bool:
        """Whether what has the backward is called like a network somewhere: a training engine, no tensor."""
        return path_of(root) in self._called

    @cached_property
    def _sharded(self) -> int | None:
        """The first line that makes a `FullyShardedDataParallel`."""
        calls = self._script.imports.nodes.of(ast.Call)
        made = (call.lineno for call in calls if self._script.imports.qualified(call.func) & _SHARDING)
        return min(made, default=None)

    @cached_property
    def _forwards(self) -> set[int]:
        return {id(forward.node) for forward in self._script.trace.forwards.values()}

    @cached_property
    def _called(self) -> set[str]:
        """The paths of everything that is called."""
        called = (path_of(node.func) for node in self._script.imports.nodes.of(ast.Call))
        return {path for path in called if path is not None}

    @cached_property
    def _bound(self) -> dict[str, list[ast.expr | None]]:
        """What is bound to each path; None for what a loop goes through."""
        found: dict[str, list[ast.expr | None]] = {}
        for node in self._script.imports.nodes:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for element in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                        path = path_of(element)
                        if path is not None:
                            found.setdefault(path, []).append(None if isinstance(node, ast.For) else node.value)
        return found

    def _is_loss(self, root: ast.expr) -> bool:
        """Whether a root that nothing is known of is a tensor: it is computed, assigned, or one of several."""
        path = path_of(root)
        if path is None:
            return True
        values = self._bound.get(path, [])
        if any(value is None or id(value) in self._forwards or not _makes_an_object(value) for value in values):
            return True
        if values:
            return False
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
        if self._manager is not None and path_of(node.func.value) == self._manager:
            missing = f"`{self._manager}.backward`"
            return f"the step in line {line} is that of oomfix.runtime, and the backward is not: {missing}"
        if node.args or node.keywords:
            return f"the step in line {line} takes a closure or a loss, and may run forward and backward again"
        return None

    def leave_shared(self, verdicts: list[Verdict]) -> None:
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
        for event in verdict.backwards:
            line = event.node.lineno
            is_handed = verdict.handed_to is not None
            if not is_handed and not isinstance(next(self._blocks.ancestors(event.node)), ast.Expr):
                return f"the backward in line {line} is part of an expression"
            if any(self._carries_over(other, verdict) for other in verdict.loop.backwards if other.node is event.node):
                return f"what the backward in line {line} goes through is carried over from the iteration before"
            if not is_handed and self._retains(event):
                return f"the backward in line {line} keeps its graph for another one, or starts from a gradient"
            if (reason := self._why_statement_stays(event, verdict)) is not None:
                return reason
        return None

    def _carries_over(self, event: Backward, verdict: Verdict) -> bool:
        """Whether something of the iteration before is differentiated; what goes round within one is its own."""
        carries = self._script.trace.carries
        outer = {id(verdict.loop.node), *(id(loop) for loop in self._blocks.ancestors(verdict.loop.node))}
        return any(number not in carries or id(carries[number][1]) in outer for number in event.carried)

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


def _makes_an_object(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value)[:1].isupper()


def scaling_of(verdicts: Iterable[Verdict]) -> Scaling:
    """Who is to scale losses in a file with these loops.

    One manager serves the whole file: where one loop must not be scaled, none is. A script that scales by itself and
    is not understood keeps its precision, and only its batches are split.
    """
    verdicts = list(verdicts)
    rewritten = [verdict for verdict in verdicts if verdict.form != "none"]
    stays = any(verdict.form == "none" and verdict.scaled for verdict in verdicts)
    if any(verdict.scaled for verdict in rewritten) and (stays or any(verdict.sees_scale for verdict in rewritten)):
        return "script's"
    return "none" if any(verdict.sees_scale for verdict in rewritten) else "ours"
