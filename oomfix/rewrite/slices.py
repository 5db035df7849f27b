"""The backward slice of a loss within an iteration, and whether it can become a function of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from oomfix.rewrite import effects
from oomfix.rewrite.effects import Helpers, changed_paths, overlap, paths_read
from oomfix.rewrite.liveness import (
    Liveness,
    Scope,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope,
    nodes_of_scope_body,
)
from oomfix.script.names import path_of

_COUNTER = re.compile(
    r"^(i|j|k|n|t|it|idx|ii|step\w*|epoch\w*|iter\w*|iteration|batch_idx|batch_i|i_batch|\w*_idx|device)$"
)
_NOT_DATA = re.compile(
    r"(^|_)(model|net|network|encoder|decoder|criterion|criteria|loss_fn|loss_func|loss_function|loss_fct|optim\w*|"
    r"sched\w*|scaler|args|cfg|config|conf|opt|opts|hparams|params|device|logger|writer|epoch|epochs|loader|dataloader|"
    r"self|lr|gpu|tokenizer|vocab)$",
    re.IGNORECASE,
)
_PREPARATION = frozenset(
    "to cuda cpu float long half double int bool type type_as view reshape size dim permute transpose unsqueeze "
    "squeeze contiguous flatten Variable autograd tensor from_numpy as_tensor FloatTensor LongTensor len range list "
    "tuple dict zip enumerate get pop items keys values next iter max min requires_grad_ is_available device clone "
    "detach numpy repeat expand stack cat ones zeros ones_like zeros_like full randn rand "
    "randn_like arange normal_ t eq ne".split()
)


class CannotLift(Exception):
    """The slice has to stay where it is; the message is a clause that completes "in place, because ..."."""


class OutsideOfBlock(CannotLift):
    """Nothing in the block of the backward computes the loss."""


@dataclass(frozen=True)
class Site:
    """Where a backward stands: a statement in a block, in an iteration, in a scope."""

    statement: ast.Expr
    block: list[ast.stmt]
    header: int
    """The line above the block's first statement that belongs to something else (the block's own header)."""
    scope: Scope
    iteration: ast.For | ast.AsyncFor | ast.While | None
    """The loop around it in the same scope; None where the loop is in a caller."""
    root: ast.expr
    """What is differentiated, without the scaler around it."""
    bound_before: frozenset[str]
    """Names that are bound for certain when the block is entered."""
    branch: ast.If | None = None
    """The `if train:` around the backward, where the loss is computed outside of it; `block` is the one it is in."""

    @property
    def end(self) -> ast.stmt:
        """The statement of `block` that runs the backward."""
        return self.statement if self.branch is None else self.branch


@dataclass
class Lift:
    """A slice that can become a function. Statements are in program order.

    Attributes:
        lifted: the slice.
        copied: statements that stay, and are repeated at the start of the function: sizes of the batch.
        before: gradient resets found in between, to run before the function is called.
        after: what stood in between, to run after it.
        inputs: the parameters: what belongs to the batch, and what the slice reads before it binds it.
        loss: the name of the loss, None where it is an expression.
        outputs: the names read later, but for the loss.
        loss_is_read: whether the loss is read later.
        deletes: names to take out of a `del`, since they no longer exist where it stands.
        own: names bound only on some ways through the slice, and read on the same ones.
        rescaled: `loss = loss / k` at the end of the slice, done again behind what reads the loss before it.
    """

    site: Site
    lifted: list[ast.stmt]
    copied: list[ast.stmt] = field(default_factory=list)
    before: list[ast.stmt] = field(default_factory=list)
    after: list[ast.stmt] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    loss: str | None = None
    outputs: list[str] = field(default_factory=list)
    loss_is_read: bool = False
    deletes: dict[ast.Delete, set[str]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    rescaled: list[ast.stmt] = field(default_factory=list)


class Slicer:
    """Finds what a backward depends on.

    Args:
        tree: the module.
        helpers: its functions.
        runs_forward: whether a statement runs a network.
    """

    def __init__(self, tree: ast.Module, helpers: Helpers, runs_forward: Callable[[ast.AST], bool]) -> None:
        self._tree = tree
        self._helpers = helpers
        self._runs_forward = runs_forward
        self._liveness: dict[int, Liveness] = {}

    def lift(self, site: Site) -> Lift:
        """The slice of a backward as a function.

        Raises:
            CannotLift: moving it might change what the script does; says what stands in the way.
        """
        _refuse_frame_readers(site.scope)
        end = site.block.index(site.end)
        chosen = self._chosen(site, end)
        if chosen is None:
            raise OutsideOfBlock("the network runs outside of the block that runs its backward")
        try:
            return self._lift(site, chosen, end)
        except CannotLift:
            shorter = _without_scaling(site, chosen)
            if shorter is None:
                raise
            return self._lift(*shorter[:2], end, shorter[2])

    def _lift(self, site: Site, chosen: list[int], end: int, rescaled: Sequence[ast.stmt] = ()) -> Lift:
        lifted = [site.block[index] for index in chosen]
        loss = site.root.id if isinstance(site.root, ast.Name) else None
        lift = Lift(site, lifted, loss=loss, rescaled=list(rescaled))
        for statement in lifted:
            self._check_lifted(statement, lift)
        self._check_changes(lift)
        self._check_branch(lift)
        liveness = self._liveness_of(site.scope)
        self._place_others(lift, chosen, end)
        self._find_outputs(lift, liveness)
        self._find_inputs(lift, liveness)
        self._copy_sizes(lift, liveness, chosen[0] if chosen else end)
        return lift

    # -- which statements --------------------------------------------------------------------------------------

    def _chosen(self, site: Site, end: int) -> list[int] | None:
        """The indices in the block of what has to be in the function; None where nothing there runs a network."""
        chain = self._dependences(site, end)
        start = next((index for index in chain if self._runs_forward(site.block[index])), None)
        if start is None and not any(self._runs_forward(statement) for statement in site.scope.body):
            # nothing is known of the network: it is what the loss is computed from first
            start = next((index for index in chain if _calls_out(site.block[index])), None)
        if start is None and not self._runs_forward(site.root):
            return None
        first = end if start is None else start
        chosen = [index for index in chain if index >= first]
        while (more := self._started_before(site, chosen, chain)) is not None:
            chosen = sorted([*chosen, more])
        return chosen

    def _dependences(self, site: Site, end: int) -> list[int]:
        names, paths = names_read(site.root), paths_read(site.root)
        chain = []
        for index in range(end - 1, -1, -1):
            statement = site.block[index]
            if effects.is_zero_grad(statement) or _only_switches(statement):
                continue
            if not (names_bound(statement) & names or overlap(changed_paths(statement), paths)):
                continue
            chain.append(index)
            bound = definitely_bound([statement]) - names_read(statement)
            names = (names - bound) | names_read(statement)
            paths = {path for path in paths if path.split(".")[0] not in bound} | paths_read(statement)
        return sorted(chain)

    def _started_before(self, site: Site, chosen: list[int], chain: list[int]) -> int | None:
        """A statement that starts what the slice goes on with: `loss = 0`, `losses = []`."""
        statements = [site.block[index] for index in chosen]
        changed = {path.split(".")[0] for statement in statements for path in changed_paths(statement)}
        bound = {name for statement in statements for name in names_bound(statement)}
        wanted = changed | {name for name in bound if _read_before_bound(name, statements)}
        wanted -= definitely_bound(statements) - {n for n in bound if _read_before_bound(n, statements)}
        for index in reversed(chain):
            if index not in chosen and index < (chosen[0] if chosen else 0):
                statement = site.block[index]
                if names_bound(statement) & wanted and _is_start(statement):
                    return index
        return None

    # -- may it be lifted --------------------------------------------------------------------------------------

    def _check_lifted(self, statement: ast.stmt, lift: Lift) -> None:
        line = statement.lineno
        if (keyword := effects.leaves(statement)) is not None:
            raise CannotLift(f"`{keyword}` in line {line} leaves the part that the loss is computed in")
        if effects.trains(statement):
            raise CannotLift(f"line {line} runs a step or another backward on the way to the loss")
        if effects.switches_mode(statement):
            raise CannotLift(f"line {line} switches layers or gradients on the way to the loss")
        for node in nodes_of_scope(statement):
            if isinstance(node, ast.Delete | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.ClassDef):
                raise CannotLift(f"line {node.lineno} holds `{type(node).__name__.lower()}` on the way to the loss")
            if isinstance(node, ast.Call) and effects.last_name(node) == "zero_grad":
                raise CannotLift(f"gradients are reset inside of the part that the loss is computed in, line {line}")
        declared = _declared_names(lift.site.scope)
        if shared := names_bound(statement) & declared:
            raise CannotLift(f"line {line} writes {sorted(shared)[0]}, which belongs to a scope around it")
        if (found := self._helpers.lasting_effect(statement)) is not None:
            raise CannotLift(f"{found}, and would do so for every part of a batch")

    def _check_changes(self, lift: Lift) -> None:
        """Objects may be changed only where the slice itself made them."""
        made: set[str] = set()
        for statement in lift.lifted:
            made |= names_bound(statement)
            for path in changed_paths(statement):
                if path.split(".")[0] not in made:
                    raise CannotLift(f"line {statement.lineno} changes {path}, which was made outside of the slice")
        if self._runs_forward(lift.site.root) and (found := self._helpers.lasting_effect(lift.site.root)):
            raise CannotLift(f"{found}, and would do so for every part of a batch")

    def _check_branch(self, lift: Lift) -> None:
        """Whether the `if` around a backward may be asked before the loss is known, and leaves it as it is."""
        branch = lift.site.branch
        if branch is None:
            return
        bound = {name for statement in lift.lifted for name in names_bound(statement)}
        if bound & names_read(branch.test):
            raise CannotLift(f"the test in line {branch.lineno} depends on the loss")
        for statement in branch.body[: branch.body.index(lift.site.statement)]:
            others = names_bound(statement) | names_read(statement)
            if not effects.is_zero_grad(statement) and (others & bound or effects.leaves(statement)):
                raise CannotLift(f"line {statement.lineno} stands between forward and backward")

    def _place_others(self, lift: Lift, chosen: list[int], end: int) -> None:
        """Where the statements between the slice's go: those that cannot be passed by stand in the way."""
        block = lift.site.block
        first_forward = next(
            (index for index in chosen if self._runs_forward(block[index])), chosen[-1] if chosen else end
        )
        for index in range(chosen[0] if chosen else end, end):
            if index in chosen:
                continue
            statement = block[index]
            if effects.is_zero_grad(statement):
                lift.before.append(statement)
            elif index < first_forward:
                self._check_passing(statement, [block[other] for other in chosen if other < index])
                lift.before.append(statement)
            else:
                passed = [block[other] for other in chosen if other > index]
                if statement in lift.rescaled:
                    lift.after.append(statement)
                    continue
                self._check_delay(statement)
                branch = lift.site.branch
                self._check_passing(statement, passed + ([] if branch is None else [branch]))
                lift.after.append(statement)

    def _check_delay(self, statement: ast.stmt) -> None:
        line = statement.lineno
        if (keyword := effects.leaves(statement)) is not None:
            raise CannotLift(f"`{keyword}` in line {line} stands between forward and backward")
        if effects.switches_mode(statement):
            raise CannotLift(f"line {line} switches layers or gradients between forward and backward")
        if effects.draws_random_numbers(statement):
            raise CannotLift(f"line {line} draws random numbers between forward and backward")
        if effects.may_reset_gradients(statement):
            raise CannotLift(f"line {line}, between forward and backward, may reset gradients or change the model")
        if self._runs_forward(statement):
            raise CannotLift(f"line {line} runs a forward that this loss does not depend on")
        for call in effects.calls_in(statement):
            path = (path_of(call.func) or "").lower()
            if effects.last_name(call) in ("step", "backward", "grad") and "sched" not in path:
                raise CannotLift(f"line {line} runs `{path or 'a step'}` between forward and backward")

    def _check_passing(self, statement: ast.stmt, others: list[ast.stmt]) -> None:
        """Whether a statement means the same on the other side of others."""
        bound, read = names_bound(statement), names_read(statement)
        changed, paths = changed_paths(statement), paths_read(statement)
        for other in others:
            if bound & (names_bound(other) | names_read(other)) or read & names_bound(other):
                raise CannotLift(f"line {statement.lineno} depends on its place between the steps to the loss")
            if overlap(changed, paths_read(other)) or overlap(changed_paths(other), paths):
                raise CannotLift(f"line {statement.lineno} may change what the loss is computed from")

    # -- inputs and outputs ------------------------------------------------------------------------------------

    def _liveness_of(self, scope: Scope) -> Liveness:
        if id(scope) not in self._liveness:
            self._liveness[id(scope)] = Liveness(scope, self._tree)
        return self._liveness[id(scope)]

    def _find_outputs(self, lift: Lift, liveness: Liveness) -> None:
        live = set(liveness.after(lift.site.statement))
        if lift.site.branch is not None:
            live |= liveness.before(lift.site.branch.orelse, liveness.after(lift.site.branch))
        while lift.after and lift.after[-1] in lift.rescaled and not names_bound(lift.after[-1]) & live:
            lift.after.pop()
        live = liveness.before(lift.after, live) if lift.after else live
        bound = _in_order(lift.lifted)
        live |= self._find_deletes(lift, set(bound) - live)
        certain = definitely_bound(lift.lifted)
        others = liveness.always | _read_outside(lift)
        for name in bound:
            if name not in live:
                continue
            if name not in certain:
                if name not in others and self._bound_where_read(name, lift.lifted, liveness):
                    lift.own.add(name)
                    continue
                raise CannotLift(f"{name} is read later, and only bound on some ways through the slice")
            if name == lift.loss:
                lift.loss_is_read = True
            else:
                lift.outputs.append(name)
        if lift.loss in liveness.always & set(bound):
            lift.loss_is_read = True

    def _find_deletes(self, lift: Lift, unread: set[str]) -> set[str]:
        """Note the `del` of names that nothing else reads; returns the names that have to stay for their `del`."""
        loop, scope = lift.site.iteration, lift.site.scope
        inside = {id(node) for statement in (loop or scope).body for node in nodes_of_scope(statement)}
        moved = {id(node) for statement in (*lift.lifted, *lift.after) for node in nodes_of_scope(statement)}
        rebound = {
            node.id
            for statement in (loop or scope).body
            for node in nodes_of_scope(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in moved
        }
        kept: set[str] = set()
        for node in nodes_of_scope_body(scope):
            if isinstance(node, ast.Delete):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)} & unread
                if id(node) in inside and id(node) not in moved:
                    kept |= names & rebound
                    lift.deletes[node] = names - rebound
                else:
                    kept |= names
        for statement, names in lift.deletes.items():
            lift.deletes[statement] = names - kept
        return kept

    def _bound_where_read(self, name: str, statements: list[ast.stmt], liveness: Liveness) -> bool:
        """Whether a name is read only under a test that also stood over its binding in an earlier statement.

        `if teacher is not None: soft = ...` and, further down, `if teacher is not None: loss = ... soft ...`.
        """
        tests: set[str] = set()
        tested: set[str] = set()
        for statement in statements:
            if name in names_bound(statement) or name in names_read(statement):
                if not isinstance(statement, ast.If) or (tests and ast.unparse(statement.test) not in tests):
                    return False
                if not tests and name not in definitely_bound(statement.body) - liveness.before(statement.body, set()):
                    return False
                if name in names_read(statement.test) or any(name in names_read(child) for child in statement.orelse):
                    return False
                tests.add(ast.unparse(statement.test))
                tested |= names_read(statement.test)
        return not tested & {bound for statement in statements for bound in names_bound(statement)}

    def _find_inputs(self, lift: Lift, liveness: Liveness) -> None:
        read = liveness.before(lift.lifted, names_read(lift.site.root) | set(lift.outputs))
        rebound = {name for statement in lift.lifted for name in names_bound(statement)}
        candidates, called = _bound_by_iteration(lift.site), _called_names(lift)
        data = {name for name in read & candidates if name not in called and not self._is_number(name, lift.site)}
        if not data:
            data = _given_to_calls(lift) & read - called
            data = {name for name in data if not _NOT_DATA.search(name) and not _COUNTER.match(name)}
            data &= _bound_anywhere(lift.site.scope)
        first = lift.site.block.index(lift.lifted[0] if lift.lifted else lift.site.end)
        bound = lift.site.bound_before | definitely_bound([*lift.site.block[:first], *lift.before])
        if unsure := (read & rebound) - lift.own - bound:
            raise CannotLift(f"{sorted(unsure)[0]} may have no value yet where the slice reads it")
        # what is passed is read at once, even where the slice would not have come to it
        wanted = ((data & bound) | (read & rebound)) - lift.own
        lift.inputs = [name for name in _reading_order(lift) if name in wanted]

    def _is_number(self, name: str, site: Site) -> bool:
        """Whether all that the iteration binds to a name are counters and numbers."""
        if _COUNTER.match(name):
            return True
        loop = site.iteration
        if loop is None:
            return bool(_NOT_DATA.search(name))
        values = [
            node.value
            for statement in loop.body
            for node in nodes_of_scope(statement)
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        ]
        return bool(values) and all(_is_scalar(value) for value in values)

    def _copy_sizes(self, lift: Lift, liveness: Liveness, first: int) -> None:
        """Sizes of the batch that the slice reads are asked again inside, of the part that is there."""
        read = liveness.before(lift.lifted, names_read(lift.site.root))
        for statement in lift.site.block[:first]:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                names = names_bound_by_target(statement.targets[0])
                owner = _sized(statement.value)
                if names & read and owner in lift.inputs and not names & set(lift.inputs):
                    lift.copied.append(statement)
                elif owner in names and owner in lift.inputs:
                    lift.copied.clear()


def _without_scaling(site: Site, chosen: list[int]) -> tuple[Site, list[int], list[ast.stmt]] | None:
    """The slice without the `loss = loss / k` at its end, which the returned expression does instead.

    `if k > 1: loss = loss / k` becomes `loss / k if k > 1 else loss`.
    """
    if len(chosen) < 2 or not isinstance(site.root, ast.Name):
        return None
    last = site.block[chosen[-1]]
    loss = site.root.id
    test = None
    statement = last
    if isinstance(last, ast.If) and len(last.body) == 1 and not last.orelse:
        test, statement = last.test, last.body[0]
    value: ast.expr
    if isinstance(statement, ast.Assign) and [path_of(target) for target in statement.targets] == [loss]:
        value = statement.value
    elif isinstance(statement, ast.AugAssign) and path_of(statement.target) == loss:
        value = ast.BinOp(ast.Name(loss, ast.Load()), statement.op, statement.value)
    else:
        return None
    if any(True for _ in effects.calls_in(last)) or loss not in names_read(value):
        return None
    if test is not None:
        value = ast.IfExp(test, value, ast.Name(loss, ast.Load()))
    root = ast.parse(ast.unparse(value), mode="eval").body
    return replace(site, root=root), chosen[:-1], [last]


def _refuse_frame_readers(scope: Scope) -> None:
    for node in nodes_of_scope_body(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("locals", "vars", "exec", "eval") and not (node.func.id == "vars" and node.args):
                raise CannotLift(f"`{node.func.id}()` in line {node.lineno} may read any local name")


def _only_switches(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and effects.switches_mode(statement)


def _declared_names(scope: Scope) -> set[str]:
    nodes = (node for node in nodes_of_scope_body(scope) if isinstance(node, ast.Global | ast.Nonlocal))
    return {name for node in nodes for name in node.names}


def _read_before_bound(name: str, statements: list[ast.stmt]) -> bool:
    for statement in statements:
        if name in names_read(statement):
            return True
        if name in definitely_bound([statement]):
            return False
    return False


def _read_outside(lift: Lift) -> set[str]:
    """The names that the scope reads outside of the slice."""
    inside = {id(statement) for statement in lift.lifted}
    found: set[str] = set()
    stack: list[ast.AST] = list(lift.site.scope.body)
    while stack:
        node = stack.pop()
        if id(node) in inside or node is lift.site.statement:
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            found.add(node.id)
        stack += ast.iter_child_nodes(node)
    return found


def _is_start(statement: ast.stmt) -> bool:
    """`loss = 0`, `a, b = [], {}`, `loss = torch.zeros(1, device=device)`."""
    if not isinstance(statement, ast.Assign):
        return False
    calls = list(effects.calls_in(statement.value))
    made = ("list", "dict", "zeros", "ones", "empty", "full", "tensor", "defaultdict", "OrderedDict")
    passing = ("to", "cuda", "float", "Variable", "is_available", "len", "size")
    if not all(effects.last_name(call) in (*made, *passing) for call in calls):
        return False
    return any(effects.last_name(call) in made for call in calls) or not names_read(statement.value)


def _calls_out(statement: ast.stmt) -> bool:
    return any(effects.last_name(call) not in _PREPARATION for call in effects.calls_in(statement))


def _in_order(statements: list[ast.stmt]) -> list[str]:
    """The names that statements bind, by the place of their first binding."""
    places: dict[str, tuple[int, int]] = {}
    for statement in statements:
        bound = names_bound(statement)
        for node in nodes_of_scope(statement):
            name = node.id if isinstance(node, ast.Name) else getattr(node, "name", None)
            if (
                name in bound
                and isinstance(node, ast.Name | ast.stmt)
                and not isinstance(getattr(node, "ctx", None), ast.Load)
            ):
                place = (node.lineno, node.col_offset)
                places[name] = min(places.get(name, place), place)
    return sorted(places, key=places.__getitem__)


def _reading_order(lift: Lift) -> list[str]:
    places: dict[str, tuple[int, int]] = {}
    for part in (*lift.lifted, lift.site.root):
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                places.setdefault(node.id, (node.lineno, node.col_offset))
                places[node.id] = min(places[node.id], (node.lineno, node.col_offset))
    return sorted(places, key=places.__getitem__)


def _bound_by_iteration(site: Site) -> set[str]:
    loop = site.iteration
    if loop is not None:
        target = names_bound_by_target(loop.target) if not isinstance(loop, ast.While) else set()
        return target.union(*(names_bound(statement) for statement in loop.body))
    scope = site.scope
    if isinstance(scope, ast.Module):
        return set()
    arguments = scope.args
    parameters = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return parameters.union(*(names_bound(statement) for statement in scope.body))


def _bound_anywhere(scope: Scope) -> set[str]:
    bound = {name for statement in scope.body for name in names_bound(statement)}
    if isinstance(scope, ast.Module):
        return bound
    return bound | {argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}


def _called_names(lift: Lift) -> set[str]:
    """Names that the slice calls, and those of functions and classes: no data."""
    found: set[str] = set()
    for part in (*lift.lifted, lift.site.root):
        for node in ast.walk(part):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    found.add(node.func.id)
                elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    if _NOT_DATA.search(node.func.value.id):
                        found.add(node.func.value.id)
    return found


def _given_to_calls(lift: Lift) -> set[str]:
    """Names given as they are, or as a part, to what the slice calls."""
    found: set[str] = set()
    for part in (*lift.lifted, lift.site.root):
        for call in (node for node in ast.walk(part) if isinstance(node, ast.Call)):
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                found |= names_read(argument)
    return found


def _is_scalar(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.Call):
        return effects.last_name(value) in ("len", "item", "size", "int", "float", "time", "perf_counter", "get_lr")
    if isinstance(value, ast.BinOp):
        return _is_scalar(value.left) and _is_scalar(value.right)
    return _sized(value) is not None


def _sized(value: ast.expr) -> str | None:
    """The name whose size an expression asks for: `len(x)`, `x.size(0)`, `x.shape[0]`, `x.shape`."""
    if isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.Attribute) and value.attr == "shape" and isinstance(value.value, ast.Name):
        return value.value.id
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id == "len" and len(value.args) == 1:
            return value.args[0].id if isinstance(value.args[0], ast.Name) else None
        if (
            isinstance(value.func, ast.Attribute)
            and value.func.attr == "size"
            and isinstance(value.func.value, ast.Name)
        ):
            return value.func.value.id
    return None
