"""The division of a loss by the size of its window, taken out of what is differentiated and kept in what is logged."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.effects import switches_mode
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import Liveness, names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import may_reset_gradients, trains
from oomfix.rewrite.facts.amp import differentiated
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.window_shape import CannotFold
from oomfix.rewrite.text.removal import without
from oomfix.script.facts.trace import Backward
from oomfix.script.syntax.edits import Edit, bounds, remove_statement
from oomfix.script.syntax.names import path_of

_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


class Divisions:
    """Finds where losses are divided by the size of a window, and undoes it.

    Args:
        reading: the script.
    """

    def __init__(self, reading: Reading) -> None:
        self._source = reading.source
        self._blocks, self._layout = reading.blocks, reading.layout

    def undone(self, event: Backward, size: ast.expr) -> list[Edit]:
        """The edits that make a backward differentiate the undivided loss; what reads the divided one still does.

        Raises:
            CannotFold: the division is not in sight, or cannot be moved behind the backward.
        """
        root = differentiated(event.node)
        if (loss := _undivided(root, size)) is not None:
            return [self._replaced(root, loss, event.node)]
        name = root.id if isinstance(root, ast.Name) else None
        place = self._division(event, name, size) if name is not None else None
        if name is None or place is None:
            raise CannotFold(
                f"the division of the loss of line {event.node.lineno} by `{ast.unparse(size)}` is not in sight"
            )
        return list(self._moved(event, place, name, size))

    def _replaced(self, root: ast.expr, loss: ast.expr, call: ast.Call) -> Edit:
        text = self._source.segment(loss)
        function = call.func
        assert isinstance(function, ast.Attribute)
        if function.value is not root:
            return Edit(*bounds(self._source, root), text)
        text = text if isinstance(loss, _SIMPLE) else f"({text})"
        start = bounds(self._source, call)[0]
        dot = self._source.text.index(f".{function.attr}", bounds(self._source, root)[1])
        return Edit(start, dot, text)

    # -- the statement that divides --------------------------------------------------------------------------------

    def _division(self, event: Backward, loss: str, size: ast.expr) -> tuple[ast.stmt, ast.stmt] | None:
        """The last statement that binds the loss, and the statement of its block that runs the backward."""
        runs: ast.stmt = self._blocks.statement_of(event.node)
        while True:
            block = self._blocks.block_of(runs)
            for statement in reversed(block[: block.index(runs)]):
                if loss in names_bound(statement):
                    inner = statement
                    while isinstance(inner, ast.With) and loss in names_bound(inner.body[-1]):
                        inner = inner.body[-1]
                    return (inner, runs) if _divides(inner, loss, size) else None
            parent = next(self._blocks.ancestors(runs))
            if not isinstance(parent, ast.If | ast.With | ast.Try):
                return None
            runs = parent

    def _moved(self, event: Backward, place: tuple[ast.stmt, ast.stmt], loss: str, size: ast.expr) -> Iterator[Edit]:
        """Take a division out of its place, and put it behind the backward where something reads the loss later."""
        division, runs = place
        block = self._blocks.block_of(runs)
        around = self._in_block(division, block)
        between = block[block.index(around) + 1 : block.index(runs)]
        scope = self._blocks.scope_of(runs)
        assert scope is not None
        is_read = loss in names_read(*between)
        is_read_later = loss in Liveness(scope, self._source.tree).after(runs)
        if isinstance(runs, ast.If | ast.With | ast.Try) and (is_read or is_read_later):
            raise CannotFold(f"the loss is divided in line {division.lineno}, for a backward inside of another block")
        computes = _computes(division, size)
        if isinstance(computes, ast.Name) and computes.id not in names_bound(*between):
            yield self._replaced(differentiated(event.node), computes, event.node)
            if not (is_read or is_read_later):
                yield without(self._layout, division, self._blocks.block_of(division))
            return
        if computes is not None:
            assert isinstance(division, ast.Assign)
            yield Edit(*bounds(self._source, division.value), self._source.segment(computes))
        elif is_read or is_read_later:
            yield from self._without(division)
        else:
            self._text_of(division)
            yield without(self._layout, division, self._blocks.block_of(division))
        if not (is_read or is_read_later):
            return
        again = f"{loss} = {loss} / {self._source.segment(size)}"
        text = again if computes is not None else self._text_of(division)
        if not is_read:
            yield self._behind(runs, text)
            return
        for statement in between:
            self._check_passed(statement, loss)
        yield self._behind(around, self._text_of(runs), text)
        yield from self._without(runs)

    def _in_block(self, statement: ast.stmt, block: list[ast.stmt]) -> ast.stmt:
        while statement not in block:
            statement = next(parent for parent in self._blocks.ancestors(statement) if isinstance(parent, ast.stmt))
        return statement

    def _without(self, statement: ast.stmt) -> tuple[Edit, ...]:
        edits = remove_statement(self._source, statement, self._blocks.block_of(statement))
        if not edits:
            raise CannotFold(f"line {statement.lineno} holds more than one statement")
        return edits

    def _text_of(self, division: ast.stmt) -> str:
        lines = self._layout.own_lines(division)
        if lines is None:
            raise CannotFold(f"line {division.lineno} holds more than one statement")
        return self._layout.newline.join(self._layout.moved(lines, self._layout.margin(division), ""))

    def _behind(self, statement: ast.stmt, *texts: str) -> Edit:
        """Statements put behind another one, at its margin."""
        lines = self._layout.own_lines(statement)
        if lines is None:
            raise CannotFold(f"line {statement.lineno} holds more than one statement")
        margin, newline = self._layout.margin(statement), self._layout.newline
        end = self._layout.span(lines)[1]
        written = [f"{margin}{line}" for text in texts for line in text.splitlines()]
        if end == len(self._source.text):
            return Edit(end, end, "".join(newline + line for line in written))
        return self._layout.inserted(self._layout.whole(lines)[1], written)

    def _check_passed(self, statement: ast.stmt, loss: str) -> None:
        """Whether a backward may run ahead of a statement between the division and it."""
        line = statement.lineno
        if (keyword := leaves(statement)) is not None:
            raise CannotFold(f"`{keyword}` in line {line} stands between the division of the loss and its backward")
        if trains(statement) or may_reset_gradients(statement) or switches_mode(statement):
            raise CannotFold(f"line {line}, between the division of the loss and its backward, may change gradients")
        if loss in names_bound(statement):
            raise CannotFold(f"line {line} changes the loss behind its division")


def _undivided(node: ast.expr, size: ast.expr) -> ast.expr | None:
    """`loss` for `loss / k`, `loss.div(k)`, `loss * (1 / k)`, `loss / k if k > 1 else loss`; else None."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_size(node.right, size):
        return node.left
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for loss, factor in ((node.left, node.right), (node.right, node.left)):
            if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Div) and _is_size(factor.right, size):
                if isinstance(factor.left, ast.Constant) and factor.left.value == 1:
                    return loss
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("div", "true_divide"):
        return node.func.value if len(node.args) == 1 and _is_size(node.args[0], size) and not node.keywords else None
    if isinstance(node, ast.IfExp) and _asks_for_several(node.test, size):
        divided = _undivided(node.body, size)
        return divided if divided is not None and ast.dump(divided) == ast.dump(node.orelse) else None
    return None


def _is_size(node: ast.expr, size: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "int"):
        return len(node.args) == 1 and _is_size(node.args[0], size)
    return ast.dump(node) == ast.dump(size)


def _asks_for_several(test: ast.expr, size: ast.expr) -> bool:
    """`k > 1`, `k != 1`: dividing by 1 changes nothing, so that the test may go."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not _is_size(test.left, size):
        return False
    one = test.comparators[0]
    return isinstance(test.ops[0], ast.Gt | ast.NotEq) and isinstance(one, ast.Constant) and one.value == 1


def _divides(statement: ast.stmt, loss: str, size: ast.expr) -> bool:
    if isinstance(statement, ast.If) and _asks_for_several(statement.test, size) and not statement.orelse:
        return (
            len(statement.body) == 1
            and _divides(statement.body[0], loss, size)
            and _computes(statement.body[0], size) is None
        )
    if isinstance(statement, ast.AugAssign):
        return (
            path_of(statement.target) == loss and isinstance(statement.op, ast.Div) and _is_size(statement.value, size)
        )
    if isinstance(statement, ast.Assign) and [path_of(target) for target in statement.targets] == [loss]:
        return _undivided(statement.value, size) is not None
    return False


def _computes(statement: ast.stmt, size: ast.expr) -> ast.expr | None:
    """What a statement divides, where that is not just the loss of before: `criterion(out, y)`."""
    if not isinstance(statement, ast.Assign):
        return None
    loss = _undivided(statement.value, size)
    return None if loss is None or path_of(loss) == path_of(statement.targets[0]) else loss
