"""Which names a statement reads and binds, and which are live: read later before they are bound again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from oomfix.script.syntax.nodes import children, walk
from oomfix.script.syntax.parameters import names_of_parameters

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | FunctionNode

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OF_THEIR_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MOST_ROUNDS = 6


def names_read(*nodes: ast.AST | None) -> set[str]:
    """The names that evaluating nodes may read from around them; those of lambdas and inner functions included."""
    found: set[str] = set()
    for node in nodes:
        if node is not None:
            _read_into(node, found)
    return found


def _read_into(node: ast.AST, found: set[str]) -> None:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store):
            found.add(node.id)
        return
    if isinstance(node, ast.Lambda | FunctionNode):
        found |= free_names(node)
        return
    if isinstance(node, COMPREHENSIONS):
        inner: set[str] = set()
        for child in children(node):
            _read_into(child, inner)
        own = {name for generator in node.generators for name in names_bound_by_target(generator.target)}
        # the first iterable is evaluated outside, where its names mean something else
        found |= (inner - own) | names_read(node.generators[0].iter)
        return
    for child in children(node):
        _read_into(child, found)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)


def free_names(function: FunctionNode | ast.Lambda) -> set[str]:
    """The names that a function, its decorators and its defaults read from around it."""
    arguments = function.args
    own = names_of_parameters(arguments)
    outside = names_read(*arguments.defaults, *arguments.kw_defaults, *getattr(function, "decorator_list", ()))
    body = function.body if isinstance(function.body, list) else [function.body]
    own |= names_bound(*body) - names_declared(*body)
    return outside | (names_read(*body) - own)


def names_bound(*statements: ast.AST) -> set[str]:
    """The names that statements may bind or delete in their scope, in blocks under them too."""
    found: set[str] = set()
    for node in nodes_of_scope(*statements):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchStar | ast.MatchAs) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


def names_declared(*nodes: ast.AST) -> set[str]:
    """The names that nodes declare to be those of the module or of a function around."""
    declarations = (node for node in nodes_of_scope(*nodes) if isinstance(node, ast.Global | ast.Nonlocal))
    return {name for node in declarations for name in node.names}


def names_bound_by_target(*targets: ast.expr) -> set[str]:
    """The names in targets of assignments or loops."""
    return {node.id for node in walk(*targets) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def nodes_of_scope(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Nodes and everything under them that runs in the same scope: not the insides of functions and classes.

    The targets of comprehensions belong to the comprehension and are left out; walrus targets are not.
    """
    waiting = [*reversed(nodes)]
    while waiting:
        current = waiting.pop()
        yield current
        kind = type(current)
        if kind in COMPREHENSIONS:
            yield from _nodes_of_comprehension(current)
        elif kind not in _OF_THEIR_OWN and (below := children(current)):
            waiting += reversed(below)


def _nodes_of_comprehension(comprehension: ast.AST) -> Iterator[ast.AST]:
    for child in walk(comprehension):
        if isinstance(child, ast.NamedExpr):
            yield child
            yield child.target
        elif isinstance(child, ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.Attribute):
            yield child


def definitely_bound(statements: Iterable[ast.stmt]) -> set[str]:
    """The names that are bound whenever the statements have run to their end."""
    bound: set[str] = set()
    for statement in statements:
        match statement:
            case ast.Assign():
                bound |= names_bound_by_target(*statement.targets)
            case ast.AugAssign() | ast.AnnAssign() if statement.value is not None:
                bound |= names_bound_by_target(statement.target)
            case ast.With():
                for item in statement.items:
                    if item.optional_vars is not None:
                        bound |= names_bound_by_target(item.optional_vars)
                bound |= definitely_bound(statement.body)
            case ast.If():
                bound |= _bound_by_if(statement)
            case ast.Try():
                bound |= _bound_by_try(statement)
            case ast.Match():
                bound |= _bound_by_match(statement)
            case ast.FunctionDef() | ast.ClassDef():
                bound.add(statement.name)
            case ast.Import() | ast.ImportFrom():
                bound |= names_bound(statement)
    return bound


def _bound_by_if(statement: ast.If) -> set[str]:
    if _never_ends(statement.body):
        return definitely_bound(statement.orelse)
    if statement.orelse and _never_ends(statement.orelse):
        return definitely_bound(statement.body)
    return definitely_bound(statement.body) & definitely_bound(statement.orelse)


def _bound_by_match(statement: ast.Match) -> set[str]:
    if not _has_a_case_for_all(statement):
        return set()
    ended = [case for case in statement.cases if not _never_ends(case.body)]
    ways = [names_bound(case.pattern) | definitely_bound(case.body) for case in ended]
    return set.intersection(*ways) if ways else set()


def _has_a_case_for_all(statement: ast.Match) -> bool:
    """Whether the last case is `case _:`, or a name."""
    last = statement.cases[-1]
    return last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None


def _bound_by_try(statement: ast.Try) -> set[str]:
    bound = definitely_bound([*statement.body, *statement.orelse])
    for handler in statement.handlers:
        if not _never_ends(handler.body):
            bound &= definitely_bound(handler.body)
    return bound | definitely_bound(statement.finalbody)


def _never_ends(block: list[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Raise | ast.Break | ast.Continue | ast.Return)


class Liveness:
    """Backward dataflow over one function or module.

    Args:
        scope: the function, or the module for a flat script.
        tree: the whole module; what its functions read of a flat script's names counts as read at any time.
    """

    def __init__(self, scope: Scope, tree: ast.Module) -> None:
        self.always = _captured(scope)
        if isinstance(scope, ast.Module):
            functions = [node for node in walk(tree) if isinstance(node, FunctionNode | ast.Lambda)]
            self.always |= {name for function in functions for name in free_names(function)}
        else:
            self.always |= names_declared(*scope.body)
        self._everything = names_read(*scope.body)
        self._after: dict[int, set[str]] = {}
        self._loops: list[tuple[set[str], set[str]]] = []
        self._handlers: list[set[str]] = []
        self._block(scope.body, set(self.always))

    def after(self, statement: ast.stmt) -> set[str]:
        """The names that may be read, once the statement has run, before they are bound again."""
        # a kind of block that is not known here: anything may be read behind it
        return self._after.get(id(statement), self._everything) | self.always

    def before(self, statements: list[ast.stmt], after: set[str]) -> set[str]:
        """The names read by a straight run of statements, or after it, before the run binds them."""
        kept = self._after, self._loops, self._handlers
        # whatever `break` and `continue` inside belong to, a run of statements that may be moved has none that leave it
        self._after, self._loops, self._handlers = {}, [(set(), set())], []
        live = self._block(statements, after)
        self._after, self._loops, self._handlers = kept
        return live

    def _block(self, statements: list[ast.stmt], live: set[str]) -> set[str]:
        for statement in reversed(statements):
            self._after[id(statement)] = self._after.get(id(statement), set()) | live
            live = self._statement(statement, live).union(*self._handlers)
        return live

    def _statement(self, node: ast.stmt, live: set[str]) -> set[str]:
        match node:
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound = names_bound_by_target(*targets) if node.value is not None else set()
                return (live - bound) | names_read(node.value, *targets)
            case ast.If():
                return names_read(node.test) | self._block(node.body, live) | self._block(node.orelse, live)
            case ast.For() | ast.AsyncFor():
                return self._for(node, live)
            case ast.While():
                return self._while(node, live)
            case ast.With() | ast.AsyncWith():
                live = self._block(node.body, live)
                for item in reversed(node.items):
                    bound = names_bound_by_target(item.optional_vars) if item.optional_vars else set()
                    live = (live - bound) | names_read(item.context_expr)
                return live
            case ast.Try():
                return self._try(node, live)
            case ast.Return():
                return names_read(node.value)
            case ast.Delete():
                # what is only deleted is not needed; whoever takes its binding away has to mend the `del`
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                return (live - names) | (names_read(node) - names)
            case ast.Raise():
                return names_read(node)
            case ast.Break():
                return set(self._loops[-1][0])
            case ast.Continue():
                return set(self._loops[-1][1])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return (live - {node.name}) | names_read(node)
            case ast.Match():
                passed = set() if _has_a_case_for_all(node) else live
                return passed.union(names_read(node.subject), *(self._case(case, live) for case in node.cases))
        return live | names_read(node)

    def _case(self, case: ast.match_case, live: set[str]) -> set[str]:
        behind = self._block(case.body, live) | names_read(case.guard)
        return (behind - names_bound(case.pattern)) | names_read(case.pattern)

    def _for(self, node: ast.For | ast.AsyncFor, live: set[str]) -> set[str]:
        ended = self._block(node.orelse, live)
        bound = names_bound_by_target(node.target)
        head: set[str] = set(ended)
        for _ in range(_MOST_ROUNDS):
            self._loops.append((live, head))
            body = self._block(node.body, head)
            self._loops.pop()
            larger = head | ((body | names_read(node.target)) - bound)
            if larger == head:
                break
            head = larger
        return head | names_read(node.iter)

    def _while(self, node: ast.While, live: set[str]) -> set[str]:
        head = self._block(node.orelse, live) | names_read(node.test)
        for _ in range(_MOST_ROUNDS):
            self._loops.append((live, head))
            larger = head | self._block(node.body, head)
            self._loops.pop()
            if larger == head:
                break
            head = larger
        return head

    def _try(self, node: ast.Try, live: set[str]) -> set[str]:
        finished = self._block(node.finalbody, live)
        handled: set[str] = names_read(*node.finalbody)
        for handler in node.handlers:
            handled |= names_read(handler.type) | (self._block(handler.body, finished) - {handler.name or ""})
        otherwise = self._block(node.orelse, finished)
        self._handlers.append(handled)
        body = self._block(node.body, otherwise)
        self._handlers.pop()
        return body | handled


def nodes_of_scope_body(scope: Scope) -> Iterator[ast.AST]:
    """Every node that runs in a function's or module's own scope."""
    return nodes_of_scope(*scope.body)


def _captured(scope: Scope) -> set[str]:
    """What inner functions, lambdas and classes of the scope read from it: they may run at any time."""
    found: set[str] = set()
    for node in nodes_of_scope_body(scope):
        if isinstance(node, FunctionNode | ast.Lambda):
            found |= free_names(node)
        elif isinstance(node, ast.ClassDef):
            found |= names_read(node)
    return found
