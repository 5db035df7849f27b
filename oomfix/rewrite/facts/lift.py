"""A loss and the statements it depends on, and why they may have to stay where they are."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property

from oomfix.rewrite.dataflow.blocks import Loop, next_in_chain
from oomfix.rewrite.dataflow.liveness import Scope, nodes_of_scope_body


class CannotLift(Exception):
    """The slice has to stay where it is; the message is a clause that completes "in place, because ..."."""


class JoinedStatements(CannotLift):
    """A line holds more than one statement, so that one of them cannot be moved by its text.

    Attributes:
        line: that line.
    """

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} holds more than one statement")
        self.line = line


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
    iteration: Loop | None
    """The loop around it in the same scope; None where the loop is in a caller."""
    root: ast.expr
    """What is differentiated, without the scaler around it."""
    bound_before: frozenset[str]
    """Names that are bound for certain when the block is entered."""
    first: int = 0
    """The index in the block that the slice may begin at, behind what it takes from earlier losses without a graph."""
    stays_inside: bool = False
    """Whether the slice has to begin in the block, behind what the block around it takes from earlier losses."""
    branch: ast.If | ast.With | None = None
    """The `if train:` around the backward, or `with timer():`, where the loss is computed outside of it; `block` is the
    one it is in."""

    @cached_property
    def loops(self) -> list[Loop]:
        """The loops of its scope that the backward stands in, the outermost first."""
        line = self.end.lineno
        loops = (node for node in nodes_of_scope_body(self.scope) if isinstance(node, Loop))
        return [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or loop.lineno)]

    @property
    def end(self) -> ast.stmt:
        """The statement of `block` that runs the backward."""
        return self.statement if self.branch is None else self.branch

    @property
    def side(self) -> list[ast.stmt]:
        """The block of the branch that runs the backward."""
        return [] if self.branch is None else next(side for side in _sides(self.branch) if self.statement in side)

    @property
    def other_sides(self) -> list[list[ast.stmt]]:
        """The other blocks of `if train:`, one of them empty where it has no `else`; `with timer():` has none."""
        return [] if self.branch is None else [side for side in _sides(self.branch) if self.statement not in side]


@dataclass(eq=False)
class Lift:
    """A slice that can become a function. Statements are in program order.

    Attributes:
        lifted: the slice.
        copied: statements that are repeated at the start of the function: sizes of the batch.
        moved: those of them that nothing outside of the slice reads, and that do not stay.
        kept: of what stood in between, what takes out what is kept for this batch, by the batch's number.
        before: gradient resets found in between, to run before the function is called.
        resets: of `before`, what resets gradients and does nothing else.
        after: what stood in between, to run after it.
        reading: what stands ahead of the backward in its branch and reads the result, to run after it.
        inputs: the parameters: what belongs to the batch, and what the slice reads before it binds it.
        given_if: of inputs that are bound and read under a test alone, that test.
        loss: the name of the loss, None where it is an expression.
        outputs: the names read later, but for the loss.
        bound_if: of outputs that are bound under a test alone, that test.
        loss_is_read: whether the loss is read later.
        underscore_is_taken: `_` means something here, so that a loss which nobody reads needs another name.
        deletes: names to take out of a `del`, since they no longer exist where it stands.
        all_names_are_read: something reads names of the scope that it does not write down.
        state: what the slice leaves behind in objects, which the runtime can put back.
        one_sample: why the rows of the batch cannot be told apart, where that is seen.
        rescaled: `loss = loss / k` at the end of the slice, done again behind what reads the loss before it.
    """

    site: Site
    lifted: list[ast.stmt]
    copied: list[ast.stmt] = field(default_factory=list)
    moved: list[ast.stmt] = field(default_factory=list)
    kept: list[ast.stmt] = field(default_factory=list)
    before: list[ast.stmt] = field(default_factory=list)
    resets: list[ast.stmt] = field(default_factory=list)
    after: list[ast.stmt] = field(default_factory=list)
    reading: list[ast.stmt] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    given_if: dict[str, ast.expr] = field(default_factory=dict)
    loss: str | None = None
    outputs: list[str] = field(default_factory=list)
    bound_if: dict[str, ast.expr] = field(default_factory=dict)
    loss_is_read: bool = False
    underscore_is_taken: bool = False
    deletes: dict[ast.Delete, set[str]] = field(default_factory=dict)
    rescaled: list[ast.stmt] = field(default_factory=list)
    all_names_are_read: bool = False
    state: str | None = None
    one_sample: str | None = None


def _sides(branch: ast.If | ast.With) -> list[list[ast.stmt]]:
    found, current = [branch.body], branch
    while isinstance(current, ast.If) and (further := next_in_chain(current)) is not None:
        found.append(further.body)
        current = further
    return [*found, current.orelse] if isinstance(current, ast.If) else found
