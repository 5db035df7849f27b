"""What a statement does besides binding names: which objects it may change, and what else it touches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from oomfix.rewrite.liveness import COMPREHENSIONS, FunctionNode, names_bound_by_target, nodes_of_scope
from oomfix.script.named_like import looks_like_optimizer
from oomfix.script.names import last_name, last_of, path_of
from oomfix.script.nodes import arguments_of, walk

CLIPPING = re.compile(r"^clip_(grad|coef)|clip_?g?norm|grad\w*_?(clip|norm)|clip\w*_?grad", re.IGNORECASE)
"""What clips gradients, or asks for their norm: `clip_grad_norm_`, `gradient_clipping`, `clip_gnorm`."""

CHANGING = frozenset(
    "append extend insert pop popitem remove clear update add discard setdefault sort reverse appendleft popleft "
    "write writelines put load_state_dict register_buffer".split()
)
"""Methods that change their receiver, when nothing takes what they return (`tensor.add` gives another tensor)."""

_TAKING = frozenset({"pop", "popitem", "popleft", "setdefault"})
"""Methods that change their receiver and return something."""

_READING = re.compile(
    r"^(print|pprint|len|display|input|set_trace|sleep|synchronize|breakpoint|exit|_exit|quit|isnan|isfinite|isinf|"
    r"visuali[sz]e\w*|plot\w*|save_images?)$"
)
_OUTPUT_RECEIVERS = re.compile(
    r"(^|[._])(plt|wandb|writer|logger|logging|log|tb|pbar|bar|progress\w*|tqdm\w*|vis|viz|mlflow|neptune|run|board|"
    r"tensorboard|summary\w*|sys|os|time|timer\w*|torch|cuda|console|iterator)(\[|$|\.|_)",
    re.IGNORECASE,
)
_LIBRARIES = frozenset({"torch", "np", "numpy", "F", "nn", "math", "random", "tf", "jnp"})
_HARMLESS = re.compile(
    r"log|print|write|update|append|extend|^add|record|plot|show|save|dump|display|visuali[sz]|^draw|render|"
    r"set_desc|set_postfix|tick|tic|toc|stop|lr|learning_rate|warmup|sched|anneal|start|push|count|meter|"
    r"measure|synchronize|info|debug|warning|error|report|track|store|collect|exit|sleep|insert|put|flush|assert",
    re.IGNORECASE,
)
_RECORDS = re.compile(r"hist(ory)?(_|$)|averager?(_|$)|meters?(_|$)|metrics?(_|$)|losses(_|$)", re.IGNORECASE)
"""Objects that are told numbers: `train_loss_hist.send(value)`."""
_ABOUT_RATES = re.compile(r"lr|learning_?rate|warm_?up|sched|anneal|log|print|report|track", re.IGNORECASE)
"""What functions that are given an optimizer say in their names when they look at nothing but its learning rate."""

_MEASURING = re.compile(
    r"(^|[._])(record_function|nullcontext|(set_)?detect_anomaly|nvtx\.range|timers?|timeit|time_it|timed|timing|stopwatch|"
    r"measure|profile|profiler)$",
    re.IGNORECASE,
)
_COLLECTIVES = frozenset(
    "all_reduce reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter all_to_all broadcast "
    "barrier".split()
)
_PROCESSES = re.compile(r"(^|[._])i?dist(ributed)?(\.|$)")
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform uniform_ bernoulli "
    "bernoulli_ multinomial exponential_ dropout shuffle choice choices sample rsample random randrange permutation "
    "beta manual_seed seed gumbel_softmax poisson".split()
)
_FETCHING = frozenset("next __next__ next_batch get_next get_next_batch get_batch fetch_batch sample_batch".split())
_MODE_METHODS = frozenset("train eval requires_grad_ load_state_dict freeze unfreeze".split())
_MODE_FUNCTIONS = frozenset(
    "manual_seed seed set_state set_grad_enabled freeze unfreeze set_requires_grad toggle_grad requires_grad".split()
)
_STEPPING = frozenset("step backward".split())


def last_called(context: ast.expr) -> str:
    """The last name of what makes a context: `timer` of `self.timer["step"]("forward")`."""
    while isinstance(context, ast.Call | ast.Subscript):
        context = context.func if isinstance(context, ast.Call) else context.value
    return last_of(path_of(context))


def measures(context: ast.expr) -> bool:
    """Whether a context only measures what runs in it: `record_function("backward")`, `timer("backward")`."""
    if isinstance(context, ast.IfExp):
        return measures(context.body) and measures(context.orelse)
    if isinstance(context, ast.Subscript):
        return measures(context.value)
    path = path_of(context.func if isinstance(context, ast.Call) else context)
    return path is not None and bool(_MEASURING.search(path))


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that run when a node does, in its own scope."""
    return (child for child in nodes_of_scope(node) if isinstance(child, ast.Call))


def called_name(node: ast.expr) -> str:
    """The last name of what an expression calls; "" where it is no call."""
    return last_name(node) if isinstance(node, ast.Call) else ""


def changed_paths(statement: ast.stmt) -> set[str]:
    """The access paths of objects that a statement may change: stores into attributes and items, and method calls.

    A call whose result is thrown away is there for its effect: its receiver may change, and where it is a plain
    function, the objects given to it. Printing and logging change nothing that matters.
    """
    found: set[str] = set()
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.add(object_changed(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            changes = name.endswith("_") and not name.endswith("__") and not _switches_what_is_new(node)
            if name in _TAKING or changes:
                found.add(object_changed(node.func.value))
            found |= {object_changed(keyword.value) for keyword in node.keywords if keyword.arg == "out"}
        if isinstance(node, ast.Expr):
            found |= {
                object_changed(call.func.value)
                for call in calls_in(node)
                if isinstance(call.func, ast.Attribute) and call.func.attr in CHANGING
            }
            if isinstance(node.value, ast.Call):
                found |= _changed_by(node.value)
        elif isinstance(node, ast.Delete):
            found |= {object_changed(target) for target in node.targets if not isinstance(target, ast.Name)}
    return _with_holders(found, statement) - {""} - _LIBRARIES


def _with_holders(changed: set[str], statement: ast.stmt) -> set[str]:
    """What is changed, and what holds it: `for p in model.parameters(): p.data = w` changes the model."""
    found = set(changed)
    rounds = [node for node in nodes_of_scope(statement) if isinstance(node, (ast.For, *COMPREHENSIONS))]
    for node in reversed(rounds):  # inner loops first
        for one in [node] if isinstance(node, ast.For) else reversed(node.generators):
            if names_bound_by_target(one.target) & {path.split(".")[0] for path in found}:
                found |= _holders(one.iter)
    return found


def _holders(node: ast.expr) -> set[str]:
    """The access paths of what gives its elements: `model` and `teacher` in `zip(model.parameters(), teacher)`."""
    if isinstance(node, ast.Tuple | ast.List):
        return {path for element in node.elts for path in _holders(element)}
    if not isinstance(node, ast.Call):
        return {object_changed(node)}
    given = {path for argument in node.args for path in _holders(argument)} - {""}
    return given or {object_changed(node)}


def function_that_may_change(path: str, statement: ast.stmt) -> str:
    """The function that a statement calls for its effect and gives `path` to, among other things; "" for none."""
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            if path in _changed_by(node.value):
                return node.value.func.id
    return ""


def _changed_by(call: ast.Call) -> set[str]:
    if isinstance(call.func, ast.Attribute) and not is_collective(call):
        receiver = object_changed(call.func.value)
        return set() if _OUTPUT_RECEIVERS.search(receiver) and last_name(call) != "zero_grad" else {receiver}
    if _READING.match(last_name(call)):
        return set()
    return {object_changed(argument) for argument in arguments_of(call)} - {""}


def object_changed(node: ast.expr) -> str:
    """The access path of the object that is changed: `losses` for `losses["a"]`, `self.meter` for `self.meter.sum`."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Attribute):
        return path_of(node.value if isinstance(node.ctx, ast.Store) else node) or ""
    if isinstance(node, ast.Call):
        return object_changed(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return node.id if isinstance(node, ast.Name) else ""


def paths_read(node: ast.AST) -> set[str]:
    """The access paths of names that a node reads, as long as they go: `self.model`, `x`."""
    found: set[str] = set()
    covered: set[int] = set()
    for child in walk(node):
        if isinstance(child, ast.Attribute | ast.Name) and id(child) not in covered:
            path = path_of(child)
            if path is not None:
                found.add(path)
                inner: ast.AST = child
                while isinstance(inner, ast.Attribute):
                    inner = inner.value
                    covered.add(id(inner))
    return found


def overlap(changed: set[str], read: set[str]) -> bool:
    """Whether a change of one of the paths may be seen by reading one of the others."""
    return any(
        one == other or other.startswith(f"{one}.") or one.startswith(f"{other}.") for one in changed for other in read
    )


def is_remark(statement: ast.stmt) -> bool:
    """Whether a statement is a string that nothing reads, as some write their comments."""
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)


def is_zero_grad(statement: ast.stmt) -> bool:
    """Whether a statement only drops or zeroes gradients."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return last_name(statement.value) == "zero_grad"
    if isinstance(statement, ast.For) and not statement.orelse:
        return all(_drops_gradient(child) or is_zero_grad(child) for child in statement.body)
    if isinstance(statement, ast.If) and not statement.orelse:
        return all(is_zero_grad(child) for child in statement.body) and not any(calls_in(statement.test))
    return False


def only_calls(statement: ast.stmt, path: str) -> bool:
    """Whether a statement is a call of this path and nothing else: `memory.backward(loss)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and path_of(call.func) == path


def only_clips(statement: ast.stmt) -> bool:
    """Whether a statement clips gradients, and nothing takes their norm: ahead of a backward, those from before."""
    return isinstance(statement, ast.Expr) and bool(CLIPPING.search(called_name(statement.value)))


def _drops_gradient(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is None
        and all(isinstance(target, ast.Attribute) and target.attr == "grad" for target in statement.targets)
    )


def draws_random_numbers(node: ast.AST) -> bool:
    """Whether a node calls something known to draw random numbers, or to set a seed."""
    return any(map(is_drawing, calls_in(node)))


def is_drawing(call: ast.Call) -> bool:
    """Whether a call is known to draw random numbers, or to set a seed."""
    return last_name(call) in _RANDOM


def fetches(node: ast.AST) -> bool:
    """Whether a node fetches a batch, which is another one each time."""
    return any(last_name(call) in _FETCHING for call in calls_in(node))


def switches_mode(node: ast.AST) -> bool:
    """Whether a node switches layers or gradients on or off for what comes after it, as a context does not."""
    contexts = {id(child.context_expr) for child in nodes_of_scope(node) if isinstance(child, ast.withitem)}
    return any(
        last_name(call) in _MODE_FUNCTIONS or (isinstance(call.func, ast.Attribute) and call.func.attr in _MODE_METHODS)
        for call in calls_in(node)
        if id(call) not in contexts and not _switches_what_is_new(call)
    ) or any(
        isinstance(child, ast.Attribute) and child.attr == "requires_grad" and isinstance(child.ctx, ast.Store)
        for child in nodes_of_scope(node)
    )


def _switches_what_is_new(call: ast.Call) -> bool:
    """`x.detach().requires_grad_()`, `(a * x + b * y).requires_grad_()`: what was there before stays as it is."""
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr != "requires_grad_":
        return False
    return isinstance(method.value, ast.BinOp) or called_name(method.value) in ("clone", "detach")


def keeps_gradients(node: ast.AST) -> bool:
    """Whether a node asks for the gradient of something computed, which a backward then leaves there or gives away."""
    return any(last_name(call) in ("retain_grad", "register_hook") for call in calls_in(node))


def may_reset_gradients(statement: ast.stmt) -> bool:
    """Whether a statement resets gradients, or calls something that might: for its effect, or with an optimizer."""
    if any("grad" in last_name(call) and "no_grad" not in last_name(call) for call in calls_in(statement)):
        return True
    if any(_takes_optimizer(call) and not _ABOUT_RATES.search(last_name(call)) for call in calls_in(statement)):
        return True
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store):
            return True
        for call in _calls_for_effect(node):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            harmless = _HARMLESS.search(last_name(call)) or (
                owner is not None
                and (_OUTPUT_RECEIVERS.search(object_changed(owner)) or _RECORDS.search(last_of(path_of(owner))))
            )
            if not harmless and not _averages_a_result(call, statement):
                return True
    return False


def _takes_optimizer(call: ast.Call) -> bool:
    given = arguments_of(call)
    return any(looks_like_optimizer(path_of(argument) or "") for argument in given)


def _calls_for_effect(node: ast.AST) -> list[ast.Call]:
    """The calls of a statement whose results nobody takes: `f(x)`, `[p.data.clamp_(0, 1) for p in parameters]`."""
    value = node.value if isinstance(node, ast.Expr) else None
    if isinstance(value, COMPREHENSIONS):
        value = value.elt if isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp) else None
    return [value] if isinstance(value, ast.Call) else []


def is_collective(call: ast.Call) -> bool:
    """Whether a call is a collective operation, for which every process has to come as often.

    `dist.all_reduce(x)`, but not `einops.reduce(x)`.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _COLLECTIVES:
        return False
    return bool(_PROCESSES.search(path_of(call.func.value) or ""))


def _averages_a_result(call: ast.Call, statement: ast.stmt) -> bool:
    """`dist.all_reduce(accuracy)`, but not `for p in model.parameters(): dist.all_reduce(p)`."""
    if not is_collective(call):
        return False
    return not any(isinstance(node, ast.For | ast.While) for node in nodes_of_scope(statement)) and all(
        isinstance(argument, ast.Name) for argument in call.args
    )


def trains(node: ast.AST) -> bool:
    """Whether a node runs a backward or a step."""
    return any(last_name(call) in _STEPPING for call in calls_in(node))


def leaves(node: ast.stmt) -> str | None:
    """The keyword by which a statement may leave the block it stands in; None where it always runs to its end."""
    return _leaving(node, in_loop=False)


def _leaving(node: ast.AST, in_loop: bool) -> str | None:
    if isinstance(node, ast.Return):
        return "return"
    if isinstance(node, ast.Break | ast.Continue):
        return None if in_loop else type(node).__name__.lower()
    if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.AsyncFor | ast.AsyncWith):
        return "await" if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) else "yield"
    if isinstance(node, FunctionNode | ast.Lambda | ast.ClassDef):
        return None
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                inner = isinstance(node, ast.For | ast.While) and field == "body"
                if (found := _leaving(child, in_loop or inner)) is not None:
                    return found
    return None


def asks_if_not_finite(test: ast.expr) -> bool:
    """`torch.isnan(loss) or torch.isinf(loss)`, `not torch.isfinite(losses).all()`: true where one number is not."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.Or) and all(map(asks_if_not_finite, test.values))
    asked, over_all = {"isnan", "isinf"}, "any"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, asked, over_all = test.operand, {"isfinite"}, "all"
    while isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and last_name(test) in (over_all, "item"):
        test = test.func.value
    return called_name(test) in asked
