"""What one round of a loop hands to the next through names."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from oomfix.script.facts.trace import Loop
from oomfix.script.syntax.names import path_of, unpacked
from oomfix.script.syntax.nodes import blocks, children, encloses, walk

_COPIES = ast.Name | ast.Attribute | ast.Subscript
_PARTS_OF_A_STEP = 4
"""An environment of gym answers with an observation, a reward, whether it is over, and what else there is to say."""


def carries_over(loop: Loop, read: Collection[str]) -> bool:
    """Whether a round reads what the round before has copied into a name (`prev = out`).

    What an environment has answered with (`state = next_state`) is an array.

    Args:
        loop: the loop.
        read: the attributes that something in the file reads: `self.best = reward` is carried only where one does.
    """
    answered = _answered(loop)
    copied = {
        name
        for node in walk(loop)
        if isinstance(node, ast.Assign) and isinstance(node.value, _COPIES)
        if not (isinstance(node.value, ast.Name) and node.value.id in answered)
        for target in node.targets
        for part in unpacked(target)
        if not (isinstance(part, ast.Attribute) and part.attr not in read)
        for name in _names(part)
    }
    return bool(copied) and bool(copied & read_first(loop))


def _answered(loop: Loop) -> set[str]:
    """The names that a round binds to what `env.step(action)` answers with, as gym has it, and to nothing else."""
    assigned = [node for node in walk(loop) if isinstance(node, ast.Assign)]
    steps = [node for node in assigned if _asks_environment(node)]
    others = {name for node in assigned if node not in steps for target in node.targets for name in _names(target)}
    return {name for node in steps for name in _names(node.targets[0])} - others


def _asks_environment(node: ast.Assign) -> bool:
    match node:
        case ast.Assign([ast.Tuple(parts)], ast.Call(ast.Attribute(environment, "step"), [_])):
            return len(parts) >= _PARTS_OF_A_STEP and "env" in (path_of(environment) or "").lower()
    return False


def feeds_itself(loop: Loop) -> bool:
    """Whether a round gives a call what that call has returned in the round before (`out, state = step(x, state)`)."""
    return bool(fed_back(loop))


def fed_back(loop: Loop) -> set[str]:
    """The names of what a call of a round gets and returns, and that come from the round before."""
    fed = {
        name
        for node in walk(loop)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        for argument in node.value.args
        for name in set(_names(target)) & _handed(argument)
    }
    return fed & read_first(loop) if fed else fed


def _handed(argument: ast.expr) -> set[str]:
    """The names that an argument hands over as they are, also in a tuple."""
    parts = argument.elts if isinstance(argument, ast.Tuple | ast.List) else [argument]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def read_first(loop: Loop) -> set[str]:
    """The names that a round reads before it has bound them for certain: they come from before it."""
    reading = _Reading({name for node in walk(loop) if isinstance(node, ast.expr) for name in _stored(node)})
    reading.block(loop.body, set(_names(loop.target)) if isinstance(loop, ast.For | ast.AsyncFor) else set())
    return reading.early


def read_behind(statement: ast.stmt, loop: Loop) -> set[str]:
    """The names that the rest of a round, behind a statement of it, reads before it has bound them for certain."""
    reading = _Reading({name for node in walk(loop) if isinstance(node, ast.expr) for name in _stored(node)})
    reading.block(_behind(statement, loop.body), set())
    return reading.early


def _behind(statement: ast.stmt, block: list[ast.stmt]) -> list[ast.stmt]:
    """What may run after a statement that stands somewhere in a block; loops around it start over."""
    for place, other in enumerate(block):
        for inner in blocks(walk(other)):
            if any(one is statement or encloses(one, statement) for one in inner):
                again = inner if isinstance(other, ast.For | ast.AsyncFor | ast.While) else []
                return [*_behind(statement, inner), *again, *block[place + 1 :]]
        if other is statement:
            return block[place + 1 :]
    return []


class _Reading:
    """Finds the names that a block reads before it has bound them for certain."""

    def __init__(self, changing: set[str]) -> None:
        self.early: set[str] = set()
        self._changing = changing
        """The names that the round binds: what is asked of them may come out otherwise the next time."""
        self._bound_under: dict[str, set[str]] = {}
        """Tests that come out the same all round, as written, and the names that are bound where they hold."""

    def block(self, statements: list[ast.stmt], bound: set[str]) -> set[str]:
        """Read statements in order, with `bound` already bound; returns what is bound after them."""
        for statement in statements:
            bound = self._statement(statement, bound)
        return bound

    def _statement(self, node: ast.stmt, bound: set[str]) -> set[str]:
        match node:
            case ast.If():
                self._expressions([node.test], bound)
                return self._branches(node, bound)
            case ast.For() | ast.AsyncFor():
                self._expressions([node.iter], bound)
                self.block(node.body, bound | set(_names(node.target)))
                self.block(node.orelse, set(bound))
                return bound
            case ast.While():
                self._expressions([node.test], bound)
                self.block(node.body, set(bound))
                self.block(node.orelse, set(bound))
                return bound
            case ast.With() | ast.AsyncWith():
                self._expressions([item.context_expr for item in node.items], bound)
                targets = (item.optional_vars for item in node.items if item.optional_vars is not None)
                return self.block(node.body, bound | {name for target in targets for name in _names(target)})
            case ast.Try():
                ends = [self.block(node.body + node.orelse, set(bound))]
                ends += [self.block(handler.body, set(bound)) for handler in node.handlers]
                return self.block(node.finalbody, set.intersection(*ends))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = {argument.arg for argument in walk(node.args) if isinstance(argument, ast.arg)}
                self.block(node.body, bound | arguments)
                return bound | {node.name}
        self._expressions(_parts(node), bound)
        return bound | {name for child in walk(node) if isinstance(child, ast.expr) for name in _stored(child)}

    def _branches(self, node: ast.If, bound: set[str]) -> set[str]:
        """`if mode == "both":`, twice: what the first block has bound is bound in the second."""
        test = ast.unparse(node.test)
        body = self.block(node.body, bound | self._bound_under.get(test, set()))
        if not any(
            isinstance(part, ast.Call) or (isinstance(part, ast.Name) and part.id in self._changing)
            for part in walk(node.test)
        ):
            self._bound_under[test] = body
        return body & self.block(node.orelse, set(bound))

    def _expressions(self, nodes: Iterable[ast.AST], bound: set[str]) -> None:
        for node in nodes:
            own = {name for part in walk(node) for name in _bound_within(part)}
            for part in walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id not in bound | own:
                    self.early.add(part.id)


def _parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What a simple statement reads; an augmented assignment reads its target too."""
    yield from children(node)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield ast.Name(node.target.id, ast.Load())


def _bound_within(node: ast.AST) -> Iterator[str]:
    """Names that a comprehension or a lambda binds for itself."""
    if isinstance(node, ast.comprehension):
        yield from _names(node.target)
    elif isinstance(node, ast.Lambda):
        yield from (argument.arg for argument in walk(node.args) if isinstance(argument, ast.arg))


def _stored(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def _names(target: ast.expr) -> Iterator[str]:
    """The names that a target binds or writes into."""
    for node in walk(target):
        if isinstance(node, ast.Name) and not _is_index(node, target):
            yield node.id


def _is_index(name: ast.Name, target: ast.expr) -> bool:
    """Whether a name only says where: `i` in `kept[i]`."""
    return any(isinstance(node, ast.Subscript) and name in walk(node.slice) for node in walk(target))
