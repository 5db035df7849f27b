"""Which names of a slice are parts of the batch, and so its parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cached_property

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.effects import draws_random_numbers
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    Scope,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope_body,
)
from oomfix.rewrite.facts.lift import Lift, Site
from oomfix.rewrite.slicing.plain_numbers import COUNTING, is_scalar, stands_for_number
from oomfix.script.facts.named_like import looks_like_loss, looks_like_module
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import arguments_of, walk
from oomfix.script.syntax.parameters import names_of_parameters
from oomfix.script.syntax.patterns import Pattern

_COUNTER = Pattern(
    r"^(i|j|k|n|t|it|idx|ii|step\w*|epoch\w*|iter\w*|iteration|batch_idx|batch_i|i_batch|\w*_idx|device)$"
)
_NOT_DATA = Pattern(
    r"(^|_)(model|net|network|encoder|decoder|criterion|criteria|loss_fn|loss_func|loss_function|loss_fct|optim\w*|"
    r"sched\w*|scaler|args|cfg|config|conf|opt|opts|hparams|params|device|logger|writer|epoch|epochs|loader|dataloader|"
    r"self|lr|gpu|tokenizer|vocab|batch_size|teacher_forcing(_ratio)?)$|"
    r"^(criterion|tokenizer)_",
    re.IGNORECASE,
)
_FLAG = Pattern(r"^(train|training|is_\w+|use_\w+|phase|mode|verbose|debug)$")
_METHODS_OF_OBJECTS = frozenset("parameters train eval zero_grad state_dict load_state_dict step".split())
MADE_BY_SIZE = frozenset("randn rand zeros ones empty".split())
"""Functions that are given the sizes of what they make."""
_COMPARING = Pattern(r"^(binary_)?cross_entropy(_with_logits)?$|^kl_div$")
_CUTTING = frozenset("split chunk tensor_split array_split".split())
_OF_BATCHES = Pattern(r"batch(es|_?sampler)?$", re.IGNORECASE)
_OF_TENSORS = frozenset("to cuda unsqueeze squeeze view reshape permute transpose flatten detach size shape".split())


class BatchNames:
    """Tells the parts of a batch from networks, settings and numbers.

    Args:
        tree: the module.
        runs_forward: whether a statement runs a network.
    """

    def __init__(self, tree: ast.Module, runs_forward: Callable[[ast.AST], bool]) -> None:
        self._tree = tree
        self._runs_forward = runs_forward
        self._variables: dict[int, set[str]] = {}

    def of(self, lift: Lift, read: set[str]) -> set[str]:
        """The parts of the batch among the names that a slice reads.

        They are what its iteration binds; what else is given to a network, or compared by a loss in steps on one batch;
        and where that is nothing, what is given to any call, reckoned with or read by columns. Numbers are no part of a
        batch: the slice sees them from where it stands.
        """
        site, called = lift.site, _called_names(lift)
        found = {n for n in read & bound_by_iteration(lift) if n not in called and not self._is_number(n, site)}
        if found & (given := _given_to_calls(lift)):
            fed = self._given_to_networks(lift) | _compared_by_losses(lift)
        else:
            fed = given | _reckoned_with(lift) | _read_by_columns(lift)
        others = {n for n in fed & read - called - found if not _NOT_DATA.search(n) and not self._is_number(n, site)}
        others -= self._objects | self._modules if others else set()
        inside = bound_anywhere(site.scope)
        return found | (others & inside) | (self._outside(lift) if others - inside else set()) & others

    def _given_to_networks(self, lift: Lift) -> set[str]:
        """Names given as they are, or as columns, to a network or to a function that runs one."""
        calls = (node for node in walk(*lift.lifted, lift.site.root) if isinstance(node, ast.Call))
        given = (one for call in calls if self._runs_forward(call) for one in (*call.args, *call.keywords))
        values = (one.value if isinstance(one, ast.keyword | ast.Starred) else one for one in given)
        return {value.id for value in map(_of_all_rows, values) if isinstance(value, ast.Name)}

    @cached_property
    def _objects(self) -> set[str]:
        """Names that the file calls, or calls the methods of as of networks and optimizers."""
        found: set[str] = set()
        for node in walk(self._tree):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr in _METHODS_OF_OBJECTS:
                function = function.value
            if isinstance(function, ast.Name):
                found.add(function.id)
        return found

    @cached_property
    def _modules(self) -> set[str]:
        """Names that `import` statements bind; what `from` brings may be data."""
        imports = (node for node in walk(self._tree) if isinstance(node, ast.Import))
        return {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}

    def _outside(self, lift: Lift) -> set[str]:
        """Variables of the module and of functions around that the slice reads whenever it runs."""
        scope = lift.site.scope
        if isinstance(scope, ast.Module):
            return set()
        variables = {name for outer in self._scopes_around(scope) for name in self._assigned(outer)}
        certain = set(names_read(lift.site.root))
        for statement in lift.lifted:
            certain |= names_read(statement) if isinstance(statement, ast.Assign | ast.Expr) else set()
        return variables.intersection(certain) - bound_anywhere(scope)

    def _scopes_around(self, function: FunctionNode) -> list[Scope]:
        first = function.lineno
        around = (f for f in self._functions if f is not function and f.lineno <= first <= (f.end_lineno or 0))
        return [self._tree, *around]

    @cached_property
    def _functions(self) -> list[FunctionNode]:
        return [node for node in walk(self._tree) if isinstance(node, FunctionNode)]

    def _assigned(self, scope: Scope) -> set[str]:
        """The names that a scope gives values to, other than by a definition or an import, or as a number alone."""
        if id(scope) not in self._variables:
            found = self._variables[id(scope)] = set()
            for node in nodes_of_scope_body(scope):
                if isinstance(node, ast.Assign):
                    numbers = is_scalar(node.value)
                    found |= {n for target in node.targets for n in ([] if numbers else names_bound_by_target(target))}
                elif isinstance(node, ast.AnnAssign | ast.For):
                    found |= names_bound_by_target(node.target)
        return self._variables[id(scope)]

    def _is_number(self, name: str, site: Site) -> bool:
        """Whether all that the iteration binds to a name are counters and numbers."""
        if _FLAG.match(name):
            return True
        counts = _COUNTER.match(name) and not _is_asked_like_a_tensor(name, site)
        misnamed = counts or (site.iteration is None and _NOT_DATA.search(name))
        if misnamed and not _is_of_samples(name, site):
            return True
        return stands_for_number(name, site.scope)


def _is_of_samples(name: str, site: Site) -> bool:
    """Whether a name for counters or networks stands for a number for each sample, or for data.

    They are drawn, `t = torch.randint(steps, (len(x),))`, cut out, `idx = order[i:i + 10]`, have columns, `t[:, c]`, or
    come with the batch, `for x, y, idx in loader`, `idx = batch["idx"]`, `x, y, idx = batch`. A `t` that comes with
    other things, `noisy, t = add_noise(x)`, is taken for the times of a diffusion.
    """
    for node in nodes_of_scope_body(site.scope):
        columns = _of_all_rows(node)
        if columns is not node and isinstance(columns, ast.Name) and columns.id == name:
            return True
        if isinstance(node, ast.Assign) and name in names_bound_by_target(*node.targets):
            value = _bound_to(name, node)
            if value is None and name == "t" and isinstance(node.value, ast.Call):
                return True
            if value is not None and (draws_random_numbers(value) or _is_cut_out(value)):
                return True
            if value is not None and _is_column(value, site.iteration):
                return True
            if isinstance(node.value, ast.Name) and _is_among_others(name, node.targets[0]):
                return True
    return isinstance(site.iteration, ast.For) and _comes_with_the_batch(name, site.iteration)


def _is_asked_like_a_tensor(name: str, site: Site) -> bool:
    """`n.unsqueeze(1)`, or `i` of `u, i = users.to(device), items.to(device)`: counters have no such methods."""
    for node in nodes_of_scope_body(site.scope):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            if node.attr in _OF_TENSORS:
                return True
        elif isinstance(node, ast.Assign):
            value = _bound_to(name, node)
            if value is not None and called_name(value) in ("to", "cuda"):
                return True
    return False


def _of_all_rows(value: ast.AST) -> ast.AST:
    """`x` for its columns `x[:, t]`, which have all of its rows."""
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Tuple) and value.slice.elts:
        first = value.slice.elts[0]
        if isinstance(first, ast.Slice) and not (first.lower or first.upper or first.step):
            return value.value
    return value


def _bound_to(name: str, node: ast.Assign) -> ast.expr | None:
    """What a name alone is bound to: by `idx = v`, or by `idx, y = v, w`."""
    if _binds_alone(node, name):
        return node.value
    target = node.targets[0] if len(node.targets) == 1 else None
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return None
    if len(target.elts) != len(node.value.elts):
        return None
    pairs = zip(target.elts, node.value.elts, strict=True)
    return next((value for one, value in pairs if isinstance(one, ast.Name) and one.id == name), None)


def _is_cut_out(value: ast.expr) -> bool:
    """`order[i:i + 10]`, `order[i:i + 10].to(device)`."""
    value = _receiver(value)
    if not isinstance(value, ast.Subscript):
        return False
    first = value.slice.elts[0] if isinstance(value.slice, ast.Tuple) and value.slice.elts else value.slice
    return isinstance(first, ast.Slice)


def _is_column(value: ast.expr, loop: ast.stmt | None) -> bool:
    """`batch["idx"].cuda()` of the batch that a loop goes through."""
    value = _receiver(value)
    if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Name) or not isinstance(loop, ast.For):
        return False
    key = value.slice.value if isinstance(value.slice, ast.Constant) else None
    return isinstance(key, str) and value.value.id in names_bound_by_target(loop.target)


def _comes_with_the_batch(name: str, loop: ast.For) -> bool:
    """`for x, y, idx in loader`, `for i, (x, idx) in enumerate(loader)`: the first of a pair may be a count.

    Alone, it is a batch where the loop goes through parts: `for idx in order.split(32)`, `for idx in batches(order)`.
    """
    target = loop.target
    if isinstance(target, ast.Name):
        cut = last_name(loop.iter) if isinstance(loop.iter, ast.Call) else ""
        return target.id == name and (cut in _CUTTING or bool(_OF_BATCHES.search(cut)))
    return not (isinstance(loop.iter, ast.Call) and last_name(loop.iter) == "zip") and _is_among_others(name, target)


def _is_among_others(name: str, target: ast.expr) -> bool:
    """Whether a name is bound with others, and is not the first of them."""
    if not isinstance(target, ast.Tuple):
        return False
    inner = (one for element in target.elts if isinstance(element, ast.Tuple) for one in names_bound_by_target(element))
    others = {element.id for element in target.elts[1:] if isinstance(element, ast.Name)}
    return name in others or name in inner


def _binds_alone(node: ast.Assign, name: str) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name


def bound_by_iteration(lift: Lift) -> set[str]:
    """What an iteration binds, but for what the slice alone binds anew: `old = old.view(-1, 1)`."""
    site, loop = lift.site, lift.site.iteration
    if loop is not None:
        target = names_bound_by_target(loop.target) if not isinstance(loop, ast.While) else set()
        return target.union(*(names_bound(statement) for statement in loop.body if statement not in lift.lifted))
    scope = site.scope
    return set() if isinstance(scope, ast.Module) else bound_anywhere(scope)


def bound_anywhere(scope: Scope) -> set[str]:
    """The names that a scope binds, those of its parameters included."""
    bound = names_bound(*scope.body)
    return bound if isinstance(scope, ast.Module) else bound | names_of_parameters(scope.args)


def _called_names(lift: Lift) -> set[str]:
    """Names that the slice calls, and those of functions and classes: no data."""
    found: set[str] = set()
    for node in walk(*lift.lifted, lift.site.root):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.add(node.func.id)
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if _NOT_DATA.search(node.func.value.id) or looks_like_module(node.func.value.id):
                    found.add(node.func.value.id)
    return found


def _given_to_calls(lift: Lift) -> set[str]:
    """Names given as they are, or as a part, to what the slice calls; `torch.randn(n, width)` is given sizes."""
    calls = [n for n in walk(*lift.lifted, lift.site.root) if isinstance(n, ast.Call)]
    made = {id(node) for call in calls if last_name(call) in MADE_BY_SIZE for node in walk(call)}
    arguments = (one for call in calls for one in arguments_of(call))
    given = (node for node in walk(*arguments) if id(node) not in made)
    return {node.id for node in given if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _compared_by_losses(lift: Lift) -> set[str]:
    """`labels` of `F.cross_entropy(scores, labels)` in steps on one batch: an attack moves its samples alone."""
    loop = lift.site.iteration
    if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and last_name(loop.iter) in COUNTING):
        return set()  # what its header gives is the batch
    calls = (n for n in walk(*lift.lifted, lift.site.root) if isinstance(n, ast.Call))
    losses = (call for call in calls if _COMPARING.search(name := last_name(call)) or _is_criterion(name))
    return {call.args[1].id for call in losses if len(call.args) > 1 and isinstance(call.args[1], ast.Name)}


def _is_criterion(name: str) -> bool:
    """Whether a called name is a loss, and not a class that makes one."""
    return looks_like_loss(name) and not name[:1].isupper()


def _reckoned_with(lift: Lift) -> set[str]:
    """Names that the slice reckons with: `ratios * advantages.view(-1, 1)`."""
    operations = (n for n in walk(*lift.lifted, lift.site.root) if isinstance(n, ast.BinOp))
    sides = (_receiver(side) for n in operations for side in (n.left, n.right))
    return {side.id for side in sides if isinstance(side, ast.Name)}


def _read_by_columns(lift: Lift) -> set[str]:
    """`y` of `target = y[:, task]`."""
    nodes = list(walk(*lift.lifted, lift.site.root))
    columns = [rows for node in nodes if (rows := _of_all_rows(node)) is not node]
    return {rows.id for rows in columns if isinstance(rows, ast.Name) and isinstance(rows.ctx, ast.Load)}


def _receiver(value: ast.expr) -> ast.expr:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return value


def asks_first_size(value: ast.expr) -> bool:
    """Whether an expression that asks for a size asks for the number of rows: `len(x)`, `x.size(0)`, `x.shape[0]`."""
    if isinstance(value, ast.Subscript):
        return is_zero(value.slice)
    return isinstance(value, ast.Call) and (isinstance(value.func, ast.Name) or any(map(is_zero, value.args)))


def is_zero(value: ast.expr) -> bool:
    """Whether an expression is the number 0."""
    return isinstance(value, ast.Constant) and value.value == 0
