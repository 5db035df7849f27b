"""Which objects a statement may change, by their access paths, and which it reads."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.dataflow.calls import called_name, calls_in
from oomfix.rewrite.dataflow.collectives import is_collective
from oomfix.rewrite.dataflow.liveness import COMPREHENSIONS, names_bound_by_target, nodes_of_scope
from oomfix.script.facts.named_like import looks_like_module
from oomfix.script.syntax.names import last_name, path_of, root_of
from oomfix.script.syntax.nodes import arguments_of, walk
from oomfix.script.syntax.patterns import Pattern

CHANGING = frozenset(
    "append extend insert pop popitem remove clear update add discard setdefault sort reverse appendleft popleft "
    "write writelines put load_state_dict register_buffer".split()
)
"""Methods that change their receiver, when nothing takes what they return (`tensor.add` gives another tensor)."""

_GIVING_NUMBERS = frozenset("item tolist numel dim size".split())
"""Methods of tensors that give numbers: whoever is given those cannot change the tensor."""

_TAKING = frozenset({"pop", "popitem", "popleft", "setdefault"})
"""Methods that change their receiver and return something."""

_READING = Pattern(
    r"^(print|pprint|len|display|input|set_trace|sleep|synchronize|breakpoint|exit|_exit|quit|isnan|isfinite|isinf|"
    r"visuali[sz]e\w*|plot\w*|save_images?)$"
)

OUTPUT_RECEIVERS = Pattern(
    r"(^|[._])(plt|wandb|writer|logger|logging|log|tb|pbar|bar|progress\w*|tqdm\w*|vis|viz|mlflow|neptune|run|board|"
    r"tensorboard|summary\w*|sys|os|time|timer\w*|torch|cuda|console|iterator)(\[|$|\.|_)",
    re.IGNORECASE,
)

_LIBRARIES = frozenset({"torch", "np", "numpy", "F", "nn", "math", "random", "tf", "jnp"})


def changed_paths(statement: ast.stmt, *, but_for_gradients: bool = False) -> set[str]:
    """The access paths of objects that a statement may change: stores into attributes and items, and method calls.

    A call whose result is thrown away is there for its effect: its receiver may change, and where it is a plain
    function, the objects given to it. Printing and logging change nothing that matters.

    Args:
        statement: the statement.
        but_for_gradients: whether resets of gradients are no change: no forward reads those.
    """
    found: set[str] = set()
    for node in nodes_of_scope(statement):
        if but_for_gradients and isinstance(node, ast.Expr) and called_name(node.value) == "zero_grad":
            continue
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.add(object_changed(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            changes = works_in_place(name) and not switches_what_is_new(node)
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
            if names_bound_by_target(one.target) & set(map(root_of, found)):
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
        return set() if OUTPUT_RECEIVERS.search(receiver) and last_name(call) != "zero_grad" else {receiver}
    if _READING.match(last_name(call)):
        return set()
    objects = (argument for argument in arguments_of(call) if called_name(argument) not in _GIVING_NUMBERS)
    return {object_changed(argument) for argument in objects} - {""}


def object_changed(node: ast.expr) -> str:
    """The access path of the object that is changed: `losses` for `losses["a"]`, `self.meter` for `self.meter.sum`."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Attribute):
        return path_of(node.value if isinstance(node.ctx, ast.Store) else node) or ""
    if isinstance(node, ast.Call):
        return object_changed(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return node.id if isinstance(node, ast.Name) else ""


def paths_read(*nodes: ast.AST) -> set[str]:
    """The access paths of names that nodes read, as long as they go: `self.model`, `x`."""
    found: set[str] = set()
    covered: set[int] = set()
    for child in walk(*nodes):
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
    return any(is_within(one, other) or is_within(other, one) for one in changed for other in read)


def is_within(part: str, whole: str) -> bool:
    """Whether a path is that of an object, or leads on from it: `batch['y'].data` and `batch.y` for `batch`."""
    return part == whole or part.startswith((f"{whole}.", f"{whole}["))


def works_in_place(method: str) -> bool:
    """Whether a method is named like one that changes its tensor: `mul_`, and not `self.model_` of a fitted object."""
    return method.endswith("_") and not method.endswith("__") and not looks_like_module(method.rstrip("_"))


def switches_what_is_new(call: ast.Call) -> bool:
    """`x.detach().requires_grad_()`, `(a * x + b * y).requires_grad_()`: what was there before stays as it is."""
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr != "requires_grad_":
        return False
    return isinstance(method.value, ast.BinOp) or called_name(method.value) in ("clone", "detach")
