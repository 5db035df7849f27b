"""Scopes: which variable each name of a file refers to, by Python's own rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oomfix.script.syntax.nodes import children
from oomfix.script.syntax.parameters import named_parameters

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OPENING = (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)
"""What has a scope of its own."""
_NAMING = (
    ast.Name,
    ast.alias,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
    ast.MatchMapping,
    ast.Global,
    ast.Nonlocal,
)
"""What binds, reads or declares a name."""
_OUTSIDE = ("decorator_list", "args", "returns", "bases", "keywords")
"""The parts of a definition that are evaluated where the definition stands."""


@dataclass(eq=False)
class Variable:
    """A name of one scope.

    Attributes:
        bindings: what binds it: `ast.alias`, `ast.Name` (assigned or deleted), `ast.arg`, a definition, a handler...
        loads: where it is read, from whatever scope.
    """

    name: str
    scope: Scope
    bindings: list[ast.AST] = field(default_factory=list)
    loads: list[ast.Name] = field(default_factory=list)


@dataclass(eq=False)
class Scope:
    """A module, function, class or comprehension, and the variables that are its own."""

    node: ast.AST
    parent: Scope | None
    variables: dict[str, Variable] = field(default_factory=dict)
    global_names: set[str] = field(default_factory=set)
    nonlocal_names: set[str] = field(default_factory=set)

    @property
    def is_class(self) -> bool:
        """Whether functions inside see past this scope."""
        return isinstance(self.node, ast.ClassDef)

    def enclosing(self) -> Iterator[Scope]:
        """The scopes in which a name read here is looked up, nearest first."""
        yield self
        scope = self.parent
        while scope is not None:
            if not scope.is_class:
                yield scope
            scope = scope.parent


class Scopes:
    """Every variable of a module.

    Attributes:
        module: the outermost scope.
        unbound: reads of names that nothing in the file binds: builtins, and what star imports bring.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, None)
        self.unbound: dict[str, list[ast.Name]] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._scope_of_load: dict[ast.Name, Scope] = {}
        self._bindings: list[tuple[Scope, str, ast.AST]] = []
        self._scopes = [self.module]
        self._bound_by: dict[ast.AST, Variable] = {}
        self._walk(tree)
        for scope, name, node in self._bindings:
            home = self._home(scope, name)
            variable = home.variables.setdefault(name, Variable(name, home))
            variable.bindings.append(node)
            self._bound_by.setdefault(node, variable)
        for load in self._scope_of_load:
            read = self.variable(load)
            (self.unbound.setdefault(load.id, []) if read is None else read.loads).append(load)

    def variables(self) -> Iterator[Variable]:
        """Every variable, scope by scope."""
        for scope in self._scopes:
            yield from scope.variables.values()

    def variable(self, name: ast.Name) -> Variable | None:
        """What a name that is read refers to; None when nothing in the file binds it."""
        return self.lookup(name.id, self._scope_of_load[name])

    def lookup(self, name: str, scope: Scope) -> Variable | None:
        """What a name would refer to in a scope; None when nothing in the file binds it there."""
        if name in scope.global_names:
            return self.module.variables.get(name)
        return next((outer.variables[name] for outer in scope.enclosing() if name in outer.variables), None)

    def scope_of(self, name: ast.Name) -> Scope:
        """The scope in which a name is read."""
        return self._scope_of_load[name]

    def bound_by(self, node: ast.AST) -> Variable:
        """The variable that a binding (see `Variable.bindings`) belongs to."""
        return self._bound_by[node]

    def assigned(self, binding: ast.AST) -> tuple[ast.expr, int | None] | None:
        """What an assignment binds a name to, and the place in it where several are unpacked that stand elsewhere.

        None for any other binding, and where a tuple is unpacked within another.
        """
        statement = self.parent(binding)
        if isinstance(statement, ast.Assign):
            return statement.value, None
        around = self.parent(statement)
        if not isinstance(statement, ast.Tuple) or not isinstance(around, ast.Assign):
            return None
        value, place = around.value, statement.elts.index(binding)  # type: ignore[arg-type]
        if isinstance(value, ast.Tuple) and len(value.elts) == len(statement.elts):
            return value.elts[place], None
        return value, place

    def parent(self, node: ast.AST) -> ast.AST:
        """The node directly above; the module's is the module."""
        return self._parents.get(node, self.module.node)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """`(ancestor, its child on the way to the node)`, nearest first."""
        while node in self._parents:
            yield self._parents[node], node
            node = self._parents[node]

    def _home(self, scope: Scope, name: str) -> Scope:
        """The scope that a binding of a name in another scope belongs to."""
        if name in scope.global_names:
            return self.module
        while scope.parent is not None and name in scope.nonlocal_names:
            scope = scope.parent
        return scope

    def _walk(self, tree: ast.Module) -> None:
        stack: list[tuple[ast.AST, Scope]] = [(tree, self.module)]
        while stack:
            node, scope = stack.pop()
            if isinstance(node, _NAMING):
                self._note(node, scope)
            below = children(node)
            self._parents.update(dict.fromkeys(below, node))
            if isinstance(node, _OPENING):
                outside, inner = self._evaluated_outside(node), self._inner(node, scope)
                stack += [(child, scope if child in outside else inner) for child in below]
            elif isinstance(node, ast.comprehension) and self._is_first_generator(node):
                # its iterable is evaluated outside of the comprehension
                stack += [(child, (scope.parent or scope) if child is node.iter else scope) for child in below]
            else:
                stack += [(child, scope) for child in below]

    def _evaluated_outside(self, node: ast.AST) -> list[ast.AST]:
        """The parts of a definition that are evaluated where the definition stands."""
        parts: list[Any] = [getattr(node, name, None) for name in _OUTSIDE]
        return [child for part in parts for child in (part if isinstance(part, list) else [part])]

    def _is_first_generator(self, clause: ast.comprehension) -> bool:
        """Whether a clause is the first of its comprehension."""
        return getattr(self.parent(clause), "generators", [None])[0] is clause

    def _inner(self, node: ast.AST, scope: Scope) -> Scope:
        """The scope that a node opens, with the arguments it binds."""
        inner = Scope(node, scope)
        self._scopes.append(inner)
        if isinstance(node, _FUNCTIONS):
            for argument in (*named_parameters(node.args), node.args.vararg, node.args.kwarg):
                if argument is not None:
                    self._bindings.append((inner, argument.arg, argument))
        return inner

    def _note(self, node: ast.AST, scope: Scope) -> None:
        """Write down what a node binds or reads in the scope where it stands."""
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self._scope_of_load[node] = scope
            else:
                self._bindings.append((self._walrus_scope(node, scope), node.id, node))
        elif isinstance(node, ast.alias):
            if node.name != "*":
                self._bindings.append((scope, node.asname or self._imported_name(node), node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._bindings.append((scope, node.name, node))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            if node.name is not None:
                self._bindings.append((scope, node.name, node))
        elif isinstance(node, ast.MatchMapping):
            if node.rest is not None:
                self._bindings.append((scope, node.rest, node))
        elif isinstance(node, ast.Global):
            scope.global_names.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            scope.nonlocal_names.update(node.names)

    def _imported_name(self, alias: ast.alias) -> str:
        return alias.name.split(".")[0] if isinstance(self.parent(alias), ast.Import) else alias.name

    def _walrus_scope(self, name: ast.Name, scope: Scope) -> Scope:
        """`:=` in a comprehension binds in the function around it."""
        if isinstance(self.parent(name), ast.NamedExpr):
            while isinstance(scope.node, _COMPREHENSIONS) and scope.parent is not None:
                scope = scope.parent
        return scope
