"""What the uses of a name say about it, for names whose binding is out of sight.

A parameter `net` that is asked for its `.parameters()` and called is a module, whatever file made it; a name on which
`.backward()` is called holds a graph, and so does what the same unseen helper returns elsewhere. Uses come first;
the name itself (`named_like`) is only asked when nothing else speaks.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from oomfix.script.facts.loss_terms import additive_terms, called_terms, summed_terms
from oomfix.script.facts.named_like import (
    abbreviates_loss,
    looks_like_loss,
    looks_like_metric,
    looks_like_module,
    looks_like_network_with_loss,
    looks_like_part,
    looks_like_scaler,
    runs_one_way,
)
from oomfix.script.facts.torch_facts import kind_of_call
from oomfix.script.facts.values import Kind
from oomfix.script.syntax.names import MOVES, last_of, owner_of, path_of, path_of_each, without_moves
from oomfix.script.syntax.nodes import Scope, evaluates_what_it_is_given, only_argument
from oomfix.script.syntax.parameters import bind_call
from oomfix.script.syntax.patterns import Pattern

_MODULE_METHODS = frozenset(
    "parameters named_parameters modules named_modules children named_children buffers eval train requires_grad_ "
    "forward get_parameter_groups".split()
)

_OF_RECURRENT = frozenset({"init_hidden", "initHidden"})

_TENSOR_METHODS = ("detach", "clamp", "clamp_", "copy_", "backward", "grad.zero_", "data.clamp_", "data.copy_")

_CALLING = frozenset({"partial", "checkpoint", "vmap", "map", "functional_call", "data_parallel"})
"""Functions that call what they are given first, or give something that does."""

_DISTRIBUTED = frozenset({"DDP", "DistributedDataParallel"})
_SAYING_NOTHING = (ast.Constant, ast.keyword, ast.arg)
_OTHER_ASSIGNMENTS = (ast.AugAssign, ast.AnnAssign)

_WORD = Pattern(r"\w+")
_NUMBERS = frozenset({"float", "int"})
_HOLDING_NUMBERS = frozenset(
    "dict Dict Mapping defaultdict list List tuple Tuple Optional Union None str typing".split()
)


@dataclass(eq=False)
class Hints:
    """Evidence from one walk over the file, by the path as it is written."""

    modules: set[str] = field(default_factory=set)
    losses: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    asked_by_name: set[str] = field(default_factory=set)
    """What is called with texts alone: `data("train_mask", "val_mask")` of a graph gives its parts."""
    assigned: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    """What is moved to a device, or whose gradients are zeroed: a network, where it is called."""
    optimizers: set[str] = field(default_factory=set)
    """What is asked whether it is an optimizer: on the other way of the branch it may be a function, and is called."""
    backwarded: set[tuple[Scope, str]] = field(default_factory=set)
    """Paths on which a backward runs, and the names summed into them, with the function they belong to."""
    terms: set[tuple[Scope, str]] = field(default_factory=set)
    """Those of them that are summed with others, each as it stands or weighted."""
    last_backward: dict[tuple[Scope, str], int] = field(default_factory=dict)
    """The line of the last backward on each of these paths, or on what it is summed into."""
    names: defaultdict[str, set[Scope]] = field(default_factory=lambda: defaultdict(set))
    """The functions in which a name is written."""
    attributes: defaultdict[str, set[Scope]] = field(default_factory=lambda: defaultdict(set))
    """The functions in which an attribute of a name is written: `train` in `trainer.train()`."""
    attributes_of_parts: set[str] = field(default_factory=set)
    """Names of attributes of attributes: `train` in `self.model.train()`."""
    statements: int = 0
    elifs: set[ast.stmt] = field(default_factory=set)
    """Each `elif`."""
    thaws: bool = False
    """Somewhere `requires_grad` is set to something else than False."""
    thawed: set[str] = field(default_factory=set)
    """The paths of what it is set so for."""
    made_by: dict[str, set[str]] = field(default_factory=dict)
    """The paths that the calls of one class or function are assigned to, moved to a device or not."""
    told_apart: dict[tuple[Scope, str], set[str]] = field(default_factory=dict)
    """The texts that a name is compared with in a function: `phase == "train"`."""
    labels: set[str] = field(default_factory=set)
    """Constants that tell cases apart: `TRAIN` and `EVAL` in `mode == TRAIN` and `run(mode=EVAL)`."""
    leaves: set[str] = field(default_factory=set)
    """Tensors that gradients are asked for: `image` in `image.requires_grad_()`."""
    optimized: set[str] = field(default_factory=set)
    """Tensors that an optimizer is given one by one: `Adam([image])`."""
    filled: set[str] = field(default_factory=set)
    """What is given a state, as no result of a network is: `net` in `net.load_state_dict(state)`."""
    distributed: set[str] = field(default_factory=set)
    """What `DistributedDataParallel` is put around, which refuses what has no parameters to train."""
    numbers: set[tuple[Scope, str]] = field(default_factory=set)
    """Names that a function declares as numbers, or what holds them: `parts: dict[str, float] = {}`."""
    named_modules: set[str] = field(default_factory=set)
    """Attributes that hold what a name says is a network: `self.gen = generator`."""
    named_losses: set[str] = field(default_factory=set)
    """Attributes that hold what a name says is a criterion: `self.encoder_term = l2_loss`."""
    graph_callees: dict[str, set[int | None]] = field(default_factory=dict)
    """Called paths whose result (or whose n-th result) is backpropagated somewhere in the file."""

    def is_loss(self, path: str) -> bool:
        """Whether a called path is usually a criterion.

        A mere abbreviation says less than its uses (`self.ctc`), and so does a network that is named after its loss.
        """
        last = last_of(path)
        used_as_network = path in self.modules and (abbreviates_loss(last) or looks_like_network_with_loss(last))
        named = looks_like_loss(path) and not used_as_network
        return named or (path in self.named_losses and path not in self.modules)

    @cached_property
    def owners_of_parts(self) -> set[str]:
        """The paths of which something is called that is named like a layer: `ac` in `ac.pi(state)`."""
        owners = (called.rpartition(".") for called in self.called)
        return {owner for owner, _, part in owners if owner and looks_like_part(part)}

    @cached_property
    def steps(self) -> bool:
        """Whether anything in the file makes a step: an optimizer, or code that writes to weights (`p.data = ...`)."""
        by_hand = any(path.endswith(".data") for path in self.assigned)
        return by_hand or any(path.endswith(".step") for path in self.called)

    def is_autoencoder(self, path: str) -> bool:
        """Whether what is named like a network both encodes and decodes in the file, as no encoder does."""
        does_both = {f"{path}.encode", f"{path}.decode"} <= self.called
        return does_both and looks_like_module(path) and not runs_one_way(path)

    def is_used_as_tensor(self, path: str) -> bool:
        """Whether an optimizer or methods of tensors say that something is one, and it is never called."""
        asked = path in self.optimized or any(f"{path}.{method}" in self.called for method in _TENSOR_METHODS)
        return asked and path not in self.called

    def is_module(self, path: str) -> bool:
        """Whether the uses of a called path say that it is a network."""
        if path in self.losses or path in self.optimizers:
            return False
        run = path in self.called and path not in self.asked_by_name
        moved = path in self.moved and (run or path in self.owners_of_parts) and not looks_like_metric(path)
        each = f"{path.rpartition('[')[0]}[*]" if path.endswith("']") else path
        return moved or path in self.modules or each in self.modules


_Assignment = tuple[Scope, ast.expr, ast.expr]
"""The function that it stands in, its target and its value."""
_Loop = ast.For | ast.comprehension


def read_hints(nodes: list[tuple[ast.AST, Scope]]) -> Hints:
    """Collect the evidence of a file from its nodes."""
    hints = Hints()
    assignments, loops = _read_nodes(nodes, hints)
    _spread(assignments, hints)
    hints.called |= {path for _, target, value in assignments for path in _called_by_another_name(target, value, hints)}
    hints.leaves = {path for path in hints.leaves if hints.is_used_as_tensor(path)}
    hints.modules -= hints.leaves
    hints.modules |= hints.named_modules & hints.called
    hints.modules |= hints.called & _gone_through(loops, assignments, hints)
    hints.modules |= set(_entries_gone_through(loops, hints))
    hints.modules |= _used_elsewhere(hints)
    for alike in hints.made_by.values():
        if alike & hints.modules and len(alike) > 1:
            hints.modules |= alike & hints.called
    return hints


def _read_nodes(nodes: list[tuple[ast.AST, Scope]], hints: Hints) -> tuple[list[_Assignment], list[_Loop]]:
    """Note what each node says for itself; the assignments and the loops among them."""
    assignments: list[_Assignment] = []
    loops: list[_Loop] = []
    labelled: set[str] = set()
    for node, scope in nodes:
        # in the order of how many there are: every node of a file is asked
        if isinstance(node, ast.Name):
            hints.names[node.id].add(scope)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Attribute):
                hints.attributes_of_parts.add(node.attr)
            else:
                hints.attributes[node.attr].add(scope)
        elif isinstance(node, _SAYING_NOTHING):
            continue
        elif isinstance(node, ast.comprehension):
            loops.append(node)
        elif isinstance(node, ast.Call):
            _read_call(node, scope, hints)
        elif isinstance(node, ast.Compare):
            _read_labels(node, labelled, hints)
            if isinstance(node.left, ast.Name) and (texts := _compared_texts(node)):
                hints.told_apart.setdefault((scope, node.left.id), set()).update(texts)
        elif isinstance(node, ast.stmt):
            hints.statements += 1
            if isinstance(node, ast.Assign):
                assignments.extend((scope, target, node.value) for target in node.targets)
                _read_assignment(node, hints)
            elif isinstance(node, ast.Expr):
                hints.modules.update(_moved_as_a_whole(node.value))
            elif isinstance(node, ast.If) and len(node.orelse) == 1:
                hints.elifs.add(node.orelse[0])
            elif isinstance(node, ast.For):
                loops.append(node)
            elif isinstance(node, _OTHER_ASSIGNMENTS):
                _read_declaration(node, scope, hints)
                if node.value is not None:
                    assignments.append((scope, node.target, node.value))
    if labelled:
        hints.labels.update(_given_for(labelled, nodes))
    return assignments, loops


def _moved_as_a_whole(node: ast.expr) -> Iterator[str]:
    """`net` of the statement `net.to(device)`, which moves what it stands for: of a tensor it would do nothing."""
    match node:
        case ast.Call(ast.Attribute(moved, method)) if method in MOVES:
            if looks_like_module(path := path_of(moved) or ""):
                yield path


def _read_assignment(node: ast.Assign, hints: Hints) -> None:
    paths = {path for path in map(path_of, node.targets) if path is not None}
    hints.assigned |= paths
    if _thaws(node):
        hints.thaws = True
        thawed = {path.removesuffix(".requires_grad") for path in paths if path.endswith(".requires_grad")}
        hints.thawed |= thawed
        hints.leaves |= thawed
    if isinstance(node.value, ast.Name) and node.value.id.islower():
        attributes = {path for path in paths if path.startswith("self.")}
        if looks_like_module(node.value.id):
            hints.named_modules |= attributes
        elif node.value.id.endswith(("loss", "criterion")):
            hints.named_losses |= attributes
    for maker, path in assigned_calls(node):
        hints.made_by.setdefault(maker, set()).add(path)


def _read_declaration(node: ast.AugAssign | ast.AnnAssign, scope: Scope, hints: Hints) -> None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        words = set(_WORD.findall(ast.unparse(node.annotation)))
        if words & _NUMBERS and words <= _NUMBERS | _HOLDING_NUMBERS:
            hints.numbers.add((scope, node.target.id))


def _thaws(statement: ast.Assign) -> bool:
    """`parameter.requires_grad = True`, or what a flag says."""
    set_here = any(isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in statement.targets)
    return set_here and not _is_false(statement.value)


def _is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _called_by_another_name(target: ast.expr, value: ast.expr, hints: Hints) -> Iterator[str]:
    """`model` of `run = model`, `run, step = model, optimizer` and `run = wrap(model) if fast else model`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            yield from _called_by_another_name(one, other, hints)
    elif isinstance(value, ast.Name | ast.IfExp) and path_of(target) in hints.called:
        sides = (value,) if isinstance(value, ast.Name) else (value.body, value.orelse)
        yield from (side.id for side in sides if isinstance(side, ast.Name))


def _gone_through(loops: list[_Loop], assignments: list[_Assignment], hints: Hints) -> set[str | None]:
    """What stands in the lists whose elements are networks: `for net in [encoder, head]: net.train()`."""
    over_networks = [loop.iter for loop in loops if path_of(loop.target) in hints.modules]
    names = {path for node in over_networks if (path := path_of(node)) is not None}
    named = [value for _, target, value in assignments if path_of(target) in names]
    lists = (node for node in (*over_networks, *named) if isinstance(node, ast.List | ast.Tuple))
    return {path_of(element) for node in lists for element in node.elts}


def _entries_gone_through(loops: list[_Loop], hints: Hints) -> Iterator[str]:
    """`self.heads[*]`, where `for name, head in self.heads.items()` goes over what is a network."""
    for loop in loops:
        match loop.iter, loop.target:
            case (ast.Call(ast.Attribute(held, "items")), ast.Tuple([_, each])) | (
                ast.Call(ast.Attribute(held, "values")),
                each,
            ):
                if path_of(each) in hints.modules and (path := path_of(held)) is not None:
                    yield f"{path}[*]"


def _used_elsewhere(hints: Hints) -> set[str]:
    """`self.pi`, made of a class and called by its object, where others ask for `agent.pi.parameters()`."""
    of_objects = {last_of(path) for path in hints.modules if path.count(".") > path.startswith("self.")}
    of_classes = {
        path for maker, paths in hints.made_by.items() if last_of(maker)[:1].isupper() for path in paths & hints.called
    }
    made_elsewhere = hints.called - hints.assigned  # what an object is asked for that no line of the file gives it
    asked = {path for path in of_classes | made_elsewhere if path.startswith("self.")}
    return {path for path in asked if path.removeprefix("self.") in of_objects}


def scoped(path: str, scope: Scope) -> tuple[Scope, str]:
    """A path with the function whose name it is; attributes of `self` belong to every method."""
    return (None if path.startswith("self.") else scope, path)


def _read_call(node: ast.Call, scope: Scope, hints: Hints) -> None:
    if (called := path_of_each(node.func)) is not None:
        _read_called(called, node, scope, hints)
    if isinstance(node.func, ast.Attribute):
        _read_method(node.func, node, scope, hints)


def _read_called(called: str, node: ast.Call, scope: Scope, hints: Hints) -> None:
    """What a call says by the path that is called, and what that is given."""
    hints.called.add(called)
    if node.args and all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in node.args):
        hints.asked_by_name.add(called)
    if last_of(called) in _CALLING and node.args and (handed := path_of(node.args[0])) is not None:
        hints.called.add(handed)
    if last_of(called) in _DISTRIBUTED and node.args and (wrapped := path_of(node.args[0])) is not None:
        hints.distributed.add(wrapped)
    if node.args and kind_of_call(called) is Kind.OPTIMIZER:
        _read_optimized(node.args[0], hints)
    if called == "isinstance" and len(node.args) == 2 and _are_optimizers(node.args[1]):
        hints.optimizers.add(path_of(node.args[0]) or "")
    if looks_like_scaler(called) and not last_of(called)[:1].isupper() and len(node.args) > 1:
        _note_backwarded(additive_terms(node.args[0]), scope, node.lineno, hints)


def _read_method(function: ast.Attribute, node: ast.Call, scope: Scope, hints: Hints) -> None:
    """What a call of a method says of the object that it belongs to."""
    method = function.attr
    asked_as_module = method in _MODULE_METHODS and not evaluates_what_it_is_given(node)
    receiver = path_of_each(without_moves(function.value) if method in _MODULE_METHODS else function.value)
    if method == "requires_grad_" and not _is_false(only_argument(node)):
        hints.thaws = True
        if receiver is not None:
            hints.thawed.add(receiver)
            hints.leaves.add(receiver)
    if method in ("backward", "manual_backward"):
        root = node.args[0] if node.args and not _is_tensor_backward(node) else function.value
        _note_backwarded(additive_terms(root), scope, node.lineno, hints)
        hints.terms.update(_terms_of_sum(root, scope))
    elif receiver is None:
        return
    elif method == "__call__":
        hints.called.add(receiver)
    elif asked_as_module or (method in _OF_RECURRENT and receiver != "self"):
        hints.modules.add(receiver)
    elif method == "load_state_dict":
        hints.filled.add(receiver)
    elif method == "zero_grad" or (method in MOVES and not receiver.endswith("[*]")):
        hints.moved.add(receiver)  # of several, each of which is moved, all may be mere functions of what they hold


def _note_backwarded(terms: list[str], scope: Scope, line: int | None, hints: Hints) -> None:
    for path in terms:
        key = scoped(path, scope)
        hints.backwarded.add(key)
        if line is not None:
            hints.last_backward[key] = max(line, hints.last_backward.get(key, 0))


def _terms_of_sum(node: ast.expr, scope: Scope) -> list[tuple[Scope, str]]:
    terms = summed_terms(node)
    return [scoped(path, scope) for path in terms] if len(terms) > 1 else []


def _read_optimized(given: ast.expr, hints: Hints) -> None:
    """What an optimizer is given: `[image]`, or what something named like a network calls its parameters."""
    match given:
        case ast.List(listed):
            hints.optimized.update(path for path in map(path_of, listed) if path is not None)
        case ast.Call(ast.Attribute(owner, method)) if method.endswith("_parameters"):
            if looks_like_module(network := path_of(owner) or ""):
                hints.modules.add(network)


def _are_optimizers(kinds: ast.expr) -> bool:
    """`torch.optim.Optimizer`, `(Optimizer, type(None))`: kinds one of which is that of optimizers."""
    several = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    return any(last_of(path_of(kind)) == "Optimizer" for kind in several)


def _compared_texts(test: ast.Compare) -> list[str]:
    """The texts that a comparison tells apart: `phase == "train"`, `phase in ("train", "val")`."""
    return [
        part.value for part in _compared_with(test) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def _compared_with(test: ast.Compare) -> list[ast.expr]:
    """The right side of a comparison, one by one where it lists several."""
    right = test.comparators[0]
    return right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]


def _read_labels(test: ast.Compare, labelled: set[str], hints: Hints) -> None:
    """`mode == TRAIN`: the constants that something is compared with, and the name of what they are for."""
    constants = {part.id for part in _compared_with(test) if isinstance(part, ast.Name) and part.id.isupper()}
    if constants and isinstance(test.left, ast.Name):
        hints.labels |= constants
        labelled.add(test.left.id)


def _given_for(parameters: set[str], nodes: list[tuple[ast.AST, Scope]]) -> Iterator[str]:
    """The constants that calls give for parameters of some names: `EVAL` in `run(loader, mode=EVAL)`.

    `MODE` for `mode` is a setting of the whole script, and no case.
    """
    functions = {node.name: node.args for node, _ in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for call in (node for node, _ in nodes if isinstance(node, ast.Call)):
        given = [(keyword.arg, keyword.value) for keyword in call.keywords]
        if (called := functions.get(path_of(call.func) or "")) is not None:
            given += [(parameter.arg, value) for parameter, value in bind_call(call, called).given]
        for name, value in given:
            if name in parameters and isinstance(value, ast.Name) and value.id.isupper() and value.id != name.upper():
                yield value.id


def assigned_calls(statement: ast.Assign) -> Iterator[tuple[str, str]]:
    """`q1, q2 = Critic().to(device), Critic().to(device)`: what is called, and the path that its result has."""
    for target in statement.targets:
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=False))
        for name, value in pairs:
            value = without_moves(value)
            path, maker = path_of(name), path_of(value.func) if isinstance(value, ast.Call) else None
            if path is not None and maker is not None and maker != "next":
                yield maker, path


def _is_tensor_backward(node: ast.Call) -> bool:
    """`loss.backward(gradient)` against `accelerator.backward(loss)`: by the receiver's name."""
    receiver = owner_of(node)
    return receiver is not None and looks_like_loss(receiver)


def _spread(assignments: list[_Assignment], hints: Hints) -> None:
    """Follow backpropagated names to the terms they are summed from and to the helpers that returned them."""
    for _ in range(3):
        before = len(hints.backwarded)
        for scope, target, value in assignments:
            path = path_of(target)
            if path is not None and (whole := scoped(path, scope)) in hints.backwarded:
                if isinstance(value, ast.BinOp | ast.UnaryOp):
                    _note_backwarded(additive_terms(value), scope, hints.last_backward.get(whole), hints)
                    hints.terms.update(_terms_of_sum(value, scope))
        if len(hints.backwarded) == before:
            break
    hints.backwarded |= {
        scoped(value.id, scope)
        for scope, target, value in assignments
        if isinstance(value, ast.Name) and scoped(path_of(target) or "", scope) in hints.backwarded
    }
    for scope, target, value in assignments:
        several = isinstance(target, ast.Tuple | ast.List)
        for index, single in enumerate(target.elts if isinstance(target, ast.Tuple | ast.List) else [target]):
            path = path_of(single)
            if path is not None and scoped(path, scope) in hints.backwarded:
                for callee in called_terms(value, path):
                    hints.graph_callees.setdefault(callee, set()).add(index if several else None)
