"""Names that a slice binds under tests of settings, `if args.mixup: ...`, which come out the same in each iteration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.liveness import names_bound, names_read, nodes_of_scope_body
from oomfix.rewrite.facts.lift import Lift
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import children, walk
from oomfix.script.syntax.patterns import Pattern

_SETTINGS = Pattern(r"(args?|opts?|options?|cfg|conf|config|hparams|hyper_?params|params|flags|settings)$", re.I)
_SETTING = frozenset({"setattr", "update", "pop", "setdefault", "merge_from_file", "merge_from_list", "vars"})
_MAYBE = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr)
_RUNNING_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)


class _Use(NamedTuple):
    """Where a slice binds or reads a name.

    Attributes:
        place: line and column.
        tests: those of the `if` around it.
        binds: it binds the name.
        reads: it reads it first.
        is_plain: nothing else than these tests decides whether it does.
    """

    place: tuple[int, int]
    tests: tuple[ast.expr, ...]
    binds: bool
    reads: bool
    is_plain: bool


class _Loops:
    """What the loops around a backward do in their rounds.

    Args:
        loops: the loops.

    Attributes:
        bound: the names that they bind.
    """

    def __init__(self, loops: Sequence[ast.stmt]) -> None:
        self._loops = loops
        self.bound = names_bound(*loops)

    @cached_property
    def changed(self) -> set[str]:
        """The paths that they change."""
        return {path for loop in self._loops for path in changed_paths(loop)}


class ConstantTests:
    """Finds the names of slices that no iteration takes from the one before.

    Args:
        tree: the module.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    @cached_property
    def _later(self) -> list[ast.AST]:
        """What stands in functions and loops, which may run again when a loop has begun."""
        return list(walk(*_running_later(self._tree)))

    @cached_property
    def _changed(self) -> set[str | None]:
        """The settings that are changed there; None among them where it may be any."""
        places = (node for node in self._later if isinstance(node, ast.Attribute | ast.Subscript))
        stored = [node for node in places if not isinstance(node.ctx, ast.Load)]
        changed = {_last(node) for node in stored if _last(node) is not None or _is_setting(path_of(node.value))}
        calls = (node for node in self._later if isinstance(node, ast.Call) and last_name(node) in _SETTING)
        return changed | {None} if any(_is_setting(path) for call in calls for path in _given(call)) else changed

    @cached_property
    def _made_with_objects(self) -> set[str]:
        """The attributes that objects get when they are made, and that nothing in sight changes then."""
        nodes = list(walk(self._tree))
        if any(isinstance(node, ast.Call) and last_name(node) in ("setattr", "vars") for node in nodes):
            return set()
        makers = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        made = {node for maker in makers for node in walk(maker) if _stores_in_self(node)}
        stored = (node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load))
        changed = {node.attr for node in stored if node not in made}
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return (
            set() if "__dict__" in read else {node.attr for node in made if isinstance(node, ast.Attribute)} - changed
        )

    @cached_property
    def _global(self) -> set[str]:
        """The names that are declared there to be those of a scope around."""
        declared = (node for node in self._later if isinstance(node, ast.Global | ast.Nonlocal))
        return {name for node in declared for name in node.names}

    def own_names(self, lift: Lift, outside: set[str]) -> set[str]:
        """The names that a slice alone binds and reads, and where it reads them, each iteration has bound them itself.

        `if args.mixup: x, y_a, y_b = mixed(x, y)` and, further down, under whatever test, `loss = criterion(out, y_a)`:
        where this iteration has no value, none before had one, and the run ends. So it does where such tests alone
        decide, too, that a name is read ahead of its binding: in the first iteration.

        Args:
            lift: the slice.
            outside: the names that are read elsewhere.
        """
        bound = names_bound(*lift.lifted)
        found = bound - outside - lift.site.bound_before - {node.id for node in _stores_elsewhere(lift)}
        loops = _Loops(lift.site.loops)
        return {name for name in found if self._is_own(name, lift, loops)}

    def never_from_before(self, lift: Lift) -> set[str]:
        """The names that a slice binds and reads under such tests alone, and that nothing ahead of it binds.

        `if args.mixup: x, y_a = mixed(x, y)` and, further down, `if args.mixup: loss = criterion(out, y_a)`, with
        another `y_a` behind the backward: where the slice has no value of its own, its first run ends in an error.
        """
        if lift.all_names_are_read:
            return set()
        bound = names_bound(*lift.lifted) - lift.site.bound_before
        bound -= {node.id for node in _stores_elsewhere(lift) if node.lineno <= lift.site.statement.lineno}
        loops = _Loops(lift.site.loops)
        return {name for name in bound if self._is_own(name, lift, loops, throughout=True)} - self._global

    def _is_own(self, name: str, lift: Lift, loops: _Loops, *, throughout: bool = False) -> bool:
        uses = [use for part in (*lift.lifted, lift.site.root) for use in _uses(name, part, ())]
        binding = [use for use in uses if use.binds and not use.reads]
        last = max((use.place for use in binding), default=(0, 0))
        certain = uses if throughout else [*binding, *(use for use in uses if use.reads and use.place <= last)]
        return bool(binding) and all(
            use.is_plain and all(self._is_constant(test, loops) for test in use.tests) for use in certain
        )

    def _is_constant(self, test: ast.AST, loops: _Loops) -> bool:
        """Whether a test asks for names, settings and attributes that nothing changes while loops run."""
        match test:
            case ast.Constant():
                return True
            case ast.Compare(left=ast.Name() as left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant()]):
                return self._stays_bound(left.id, loops)
            case ast.Name():
                return self._stays_bound(test.id, loops) and test.id not in loops.changed
            case ast.Attribute(value=ast.Name(id="self")) if test.attr in self._made_with_objects:
                return True
            case ast.Attribute() | ast.Subscript():
                path = _setting(test)
                root = (path or "").split(".")[0]
                known = bool(path) and self._changed.isdisjoint((None, _last(test)))
                return known and self._stays_bound(root, loops)
            case ast.BoolOp() | ast.UnaryOp() | ast.Compare() | ast.Tuple() | ast.List() | ast.Set():
                return all(self._is_constant(one, loops) for one in children(test))
        return False

    def _stays_bound(self, name: str, loops: _Loops) -> bool:
        return name not in self._global and name not in loops.bound


def _stores_in_self(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return True
    return False


def _running_later(tree: ast.Module) -> Iterator[ast.stmt]:
    """The functions and loops of a module that stand in none."""
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        if isinstance(node, _RUNNING_LATER):
            yield node
        else:
            waiting += children(node)


def _last(node: ast.Attribute | ast.Subscript) -> str | None:
    """The name of a setting: `mixup` of `args.mixup` and `args["mixup"]`; None where it may be any."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) else None


def _is_setting(path: str | None) -> bool:
    """Whether a path, or what it is a part of, is named like settings."""
    return path is not None and any(map(_SETTINGS.search, path.split(".")))


def _setting(node: ast.expr) -> str | None:
    """The path of a setting, `self.config.mixup` for `self.config["mixup"]`; None for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        name = _last(node)
        if name is None:
            return None
        names.insert(0, name)
        node = node.value
    names[:0] = [node.id] if isinstance(node, ast.Name) else []
    return ".".join(names) if isinstance(node, ast.Name) and _is_setting(".".join(names[:-1])) else None


def _given(call: ast.Call) -> Iterator[str | None]:
    if isinstance(call.func, ast.Attribute):
        yield path_of(call.func.value)
    yield from (path_of(argument) for argument in call.args)


def _stores_elsewhere(lift: Lift) -> Iterator[ast.Name]:
    """Where the scope binds or deletes names outside of the slice."""
    inside = {id(node) for node in walk(*lift.lifted)}
    names = (node for node in nodes_of_scope_body(lift.site.scope) if isinstance(node, ast.Name))
    yield from (node for node in names if not isinstance(node.ctx, ast.Load) and id(node) not in inside)


def _uses(name: str, node: ast.AST, tests: tuple[ast.expr, ...]) -> Iterator[_Use]:
    """The uses of a name in a statement."""
    if isinstance(node, ast.If):
        yield from _uses(name, node.test, tests)
        for inner in (*node.body, *node.orelse):
            yield from _uses(name, inner, (*tests, node.test))
    elif isinstance(node, ast.With) and name not in names_bound(*node.items):
        for part in (*(item.context_expr for item in node.items), *node.body):
            yield from _uses(name, part, tests)
    elif isinstance(node, (*_SIMPLE, ast.expr)):
        binds, reads = name in names_bound(node), name in names_read(node)
        hidden = (inner for inner in walk(node) if isinstance(inner, _MAYBE))
        is_plain = not any(name in names_bound(one) | names_read(one) for one in hidden)
        if binds or reads:
            yield _Use((node.lineno, node.col_offset), tests, binds, reads, is_plain)
    else:
        found = (one for one in walk(node) if isinstance(one, ast.Name) and one.id == name)
        for one in found:
            is_read = isinstance(one.ctx, ast.Load)
            yield _Use((one.lineno, one.col_offset), tests, not is_read, is_read, False)
