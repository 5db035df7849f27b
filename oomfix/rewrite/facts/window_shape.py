"""What an accumulation window looks like: its batches, its size, and when it closes."""

from __future__ import annotations

import ast
import re
from collections.abc import Set
from dataclasses import dataclass

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import names_bound, names_read, nodes_of_scope_body
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import Nodes, walk
from oomfix.script.syntax.patterns import Pattern

_SHOWING_PROGRESS = ("tqdm", "track")
_WITHOUT_LENGTH = frozenset("zip iter map islice chain cycle enumerate filter count repeat".split())
_GENERATOR = Pattern(r"(^|_)(gen|generator|iter|iterator|stream)(_|\d|$)|_iter\w*$", re.IGNORECASE)
_PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.expr_context, ast.BinOp, ast.FloorDiv, ast.Mult)
"""What gives the same number each time it is asked for, unless a name in it is bound anew."""


class CannotFold(Exception):
    """The window stays the script's; the message is a clause that completes "its window stays, because ..."."""


@dataclass(frozen=True)
class BatchCount:
    """How a loop counts its batches: `for i, (x, y) in enumerate(loader)`.

    Attributes:
        loop: the loop.
        batches: the expression that gives the batches, to be wrapped.
        index: the name of the count.
        start: its first value.
        place: the statement that counts: the loop, or the assignment of what it goes through.
        blocks: where nodes stand.
    """

    loop: ast.For
    batches: ast.expr
    index: str
    start: int
    place: ast.stmt
    blocks: Blocks

    def closing_size(self, test: ast.expr, *, negated: bool) -> ast.expr | None:
        """k, where a test is true exactly at batches k, 2k, ... of the loop; with `negated`, at all others."""
        rest: int | None = 0
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and not negated:
            remainder = test.operand
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            if not isinstance(test.ops[0], ast.NotEq if negated else ast.Eq):
                return None
            remainder, rest = test.left, None
        elif negated:
            remainder = test
        else:
            return None
        if not isinstance(remainder, ast.BinOp) or not isinstance(remainder.op, ast.Mod):
            return None
        size = remainder.right
        if rest is None and isinstance(test, ast.Compare):
            rest = _rest(test.comparators[0], size)
        shift = _shift(remainder.left, self.index)
        return size if shift is not None and rest is not None and self.start + shift - rest == 1 else None

    def is_last(self, test: ast.expr, *, negated: bool) -> bool:
        """Whether a test asks for the last batch, `i + 1 == len(loader)`; with `negated`, for all others."""
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return False
        if not isinstance(test.ops[0], ast.NotEq if negated else ast.Eq):
            return False
        shift, number, less = _shift(test.left, self.index), test.comparators[0], 0
        if isinstance(number, ast.BinOp) and isinstance(number.op, ast.Sub) and isinstance(number.right, ast.Constant):
            less = number.right.value if isinstance(number.right.value, int) else 0
            number = number.left
        if isinstance(number, ast.Name):
            made = _only_assignment(number.id, self.loop, self.blocks)
            number = number if made is None else made.value
        if not isinstance(number, ast.Call) or last_name(number) != "len" or len(number.args) != 1:
            return False
        # the last batch has the index start + len - 1
        is_end = shift is not None and self.start - 1 + shift == -less
        return is_end and ast.dump(number.args[0]) in self._counted()

    def _counted(self) -> set[str]:
        """What the batches come from, any of which has their length: `loader` for `tqdm(loader)`."""
        name = path_of(self.batches)
        made = _only_assignment(name, self.loop, self.blocks) if name is not None else None
        sources = [self.batches, *([] if made is None else [made.value])]
        nodes = walk(*sources)
        return {ast.dump(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}


@dataclass(frozen=True)
class WindowShape:
    """A window that closes at every k-th batch of a loop.

    Attributes:
        count: of the batches.
        size: k.
        closes_on_last: the script steps on the last batch too.
        skips: the decision is `if ...: continue`, ahead of the step.
        test: what decides, where it is written: in the `if`, or in the name that the `if` asks.
    """

    count: BatchCount
    size: ast.expr
    closes_on_last: bool
    skips: bool
    test: ast.expr

    def follows(self, test: ast.expr) -> bool | None:
        """Whether a test is true exactly where the window closes (True), or exactly elsewhere (False); None: neither.

        The last batch counts as the end of a window, whether or not the test asks for it.
        """
        for negated in (False, True):
            sizes, others = _split(test, self.count, negated=negated)
            if len(sizes) == 1 and ast.dump(sizes[0]) == ast.dump(self.size):
                if all(self.count.is_last(one, negated=negated) for one in others):
                    return not negated
        return None


def shape_of(loop: ast.For, decision: ast.If, blocks: Blocks, quotients: Set[str]) -> WindowShape:
    """The shape of a window.

    Args:
        loop: the loop over batches.
        decision: the test that closes the window.
        blocks: where nodes stand.
        quotients: see `bound_to_quotients`.

    Raises:
        CannotFold: it is not seen to close at every k-th batch, counted from the first of the loop.
    """
    count = _count(loop, blocks)
    test, skips = decision.test, _only_continues(decision)
    if isinstance(test, ast.Name):
        test = flag_of(test, loop, blocks) or test
    sizes, others = _split(test, count, negated=skips)
    if len(sizes) != 1:
        raise CannotFold(f"`{ast.unparse(test)}` is not seen to be true at every k-th batch of the loop, from the k-th")
    for part in others:
        if not count.is_last(part, negated=skips):
            raise CannotFold(f"the window also waits for `{ast.unparse(part)}`")
    _check_size(sizes[0], count, quotients)
    if count.index in names_bound(*loop.body):
        raise CannotFold(f"`{count.index}` is changed inside of the loop")
    return WindowShape(count, sizes[0], bool(others), skips, test)


def flag_of(name: ast.Name, loop: ast.For, blocks: Blocks) -> ast.expr | None:
    """What a name stands for that each round of a loop binds once, such as `update = (i + 1) % k == 0`."""
    made = _only_assignment(name.id, loop, blocks)
    in_body = made is not None and blocks.block_of(made) is loop.body
    return made.value if made is not None and in_body and made.lineno < name.lineno else None


def _split(test: ast.expr, count: BatchCount, *, negated: bool) -> tuple[list[ast.expr], list[ast.expr]]:
    """The sizes of windows that the parts of a test close (with `negated`: leave open), and its other parts."""
    joined = ast.And if negated else ast.Or
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, joined) else [test]
    sizes = [(part, count.closing_size(part, negated=negated)) for part in parts]
    return [size for _, size in sizes if size is not None], [part for part, size in sizes if size is None]


def _only_continues(decision: ast.If) -> bool:
    return len(decision.body) == 1 and isinstance(decision.body[0], ast.Continue) and not decision.orelse


# -- the loop's header -----------------------------------------------------------------------------------------------


def _count(loop: ast.For, blocks: Blocks) -> BatchCount:
    place: ast.stmt = loop
    source = loop.iter
    if isinstance(source, ast.Name):
        found = _only_assignment(source.id, loop, blocks)
        if found is not None and found.lineno < loop.lineno:
            place, source = found, found.value
    call = _without_progress(source)
    if not isinstance(call, ast.Call) or last_name(call) != "enumerate" or not call.args:
        raise CannotFold("the loop does not count its batches by `enumerate`")
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else None
    if not isinstance(target, ast.Name):
        raise CannotFold("the loop does not count its batches by a name of its own")
    given = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "start")]
    first = given[0].value if given and isinstance(given[0], ast.Constant) else 0 if not given else None
    if not isinstance(first, int):
        raise CannotFold(f"the count starts at `{ast.unparse(given[0])}`")
    batches = call.args[0]
    if not _has_length(batches, loop, blocks):
        raise CannotFold(f"`{ast.unparse(batches)}` has no length that could be seen, to tell the last batch by")
    return BatchCount(loop, batches, target.id, first, place, blocks)


def _without_progress(node: ast.expr) -> ast.expr:
    """`loader` for `tqdm(loader)`."""
    while isinstance(node, ast.Call) and last_name(node) in _SHOWING_PROGRESS and node.args:
        node = node.args[0]
    return node


def _only_assignment(name: str, loop: ast.AST, blocks: Blocks) -> ast.Assign | None:
    scope = blocks.scope_of(loop)
    if scope is None:
        return None
    nodes = list(nodes_of_scope_body(scope))
    stores = [node for node in nodes if isinstance(node, ast.Name) and node.id == name and _stores(node)]
    found = [
        node
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and path_of(node.targets[0]) == name
    ]
    return found[0] if len(stores) == len(found) == 1 else None


def _stores(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _has_length(batches: ast.expr, loop: ast.For, blocks: Blocks) -> bool:
    batches = _without_progress(batches)
    if isinstance(batches, ast.Call):
        return last_name(batches) == "DataLoader"
    path = path_of(batches)
    if path is None:
        return False
    made = _only_assignment(path, loop, blocks)
    if made is not None and isinstance(made.value, ast.Call) and path_of(made.value.func) is not None:
        name = last_name(made.value)
        return name not in _WITHOUT_LENGTH and (name not in _SHOWING_PROGRESS or _has_length(made.value, loop, blocks))
    return not _GENERATOR.search(path.rsplit(".", 1)[-1])


# -- the test --------------------------------------------------------------------------------------------------------


def _rest(node: ast.expr, size: ast.expr) -> int | None:
    """The remainder that is asked for; -1 stands for `k - 1`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and ast.dump(node.left) == ast.dump(size):
        return -1 if isinstance(node.right, ast.Constant) and node.right.value == 1 else None
    return None


def _shift(node: ast.expr, index: str) -> int | None:
    """c, for `index + c`."""
    if isinstance(node, ast.Name):
        return 0 if node.id == index else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        one, other = node.left, node.right
        if isinstance(one, ast.Constant) and isinstance(node.op, ast.Add):
            one, other = other, one
        if path_of(one) == index and isinstance(other, ast.Constant) and isinstance(other.value, int):
            return other.value if isinstance(node.op, ast.Add) else -other.value
    return None


def _check_size(size: ast.expr, count: BatchCount, quotients: Set[str]) -> None:
    """Whether k is the same number wherever it is asked for."""
    loop = count.loop
    if any(not isinstance(node, _PLAIN) for node in ast.walk(size)):
        raise CannotFold(f"`{ast.unparse(size)}` may be another number each time")
    names = names_read(size)
    changed = {path_of(node) for node in walk(loop) if isinstance(node, ast.Attribute) and _stores(node)}
    bound = names_bound(*loop.body)
    scope = count.blocks.scope_of(loop)
    if scope is not None:
        bound |= {
            node.id
            for node in nodes_of_scope_body(scope)
            if isinstance(node, ast.Name) and _stores(node) and count.place.lineno <= node.lineno < loop.lineno
        }
    if names & bound or path_of(size) in changed:
        raise CannotFold(f"`{ast.unparse(size)}` may be another number in the loop")
    if not quotients.isdisjoint(_paths_in(size)):
        raise CannotFold(f"`{ast.unparse(size)}` is a quotient, and may be no whole number")


def _paths_in(size: ast.expr) -> set[str]:
    nodes = (node for node in ast.walk(size) if isinstance(node, ast.expr))
    return {path for node in nodes if (path := path_of(node)) is not None}


def bound_to_quotients(nodes: Nodes) -> set[str]:
    """The paths that the file binds anywhere to what may be no whole number."""
    broken = [target for node in nodes.of(ast.Assign) if _may_be_broken(node.value) for target in node.targets]
    broken += [node.target for node in nodes.of(ast.AnnAssign) if _may_be_broken(node.value)]
    return {path for path in map(path_of, broken) if path is not None}


def _may_be_broken(value: ast.expr | None) -> bool:
    """Whether a number is a quotient that nothing rounds: `target / batch_size`."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Div) or _may_be_broken(value.left) or _may_be_broken(value.right)
    if isinstance(value, ast.IfExp):
        return _may_be_broken(value.body) or _may_be_broken(value.orelse)
    if isinstance(value, ast.Call) and last_name(value) in ("max", "min", "abs", "float"):
        return any(map(_may_be_broken, value.args))
    return False
