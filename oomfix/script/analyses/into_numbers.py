"""What a tensor is computed for: numbers to look at only, or something that may go into training again."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from oomfix.script.analyses.rounds import read_first
from oomfix.script.facts.named_like import looks_like_loss
from oomfix.script.facts.torch_facts import REDUCING_BUILTINS
from oomfix.script.syntax.names import last_name, path_of, root_of, unpacked
from oomfix.script.syntax.nodes import blocks, children, encloses
from oomfix.script.syntax.patterns import Pattern

_READING = frozenset(("item", "tolist"))
_TO_NUMBERS = frozenset("float int bool str repr format round print".split())
_LOGGING = frozenset("add_scalar add_scalars log log_metric info debug warning".split())
_PICTURES = frozenset("plt ax axes axs fig sns".split())
_SHOWING = frozenset("save_image imshow imsave imwrite add_image add_images add_embedding add_histogram".split())
_SHOWN_BY = Pattern(r"^_*(plot|show|print|display|draw|save|visuali[sz]e|log)(_|$)", re.IGNORECASE)
_COMPUTING = frozenset("torch F nn np numpy math list tuple zip enumerate range".split()) | REDUCING_BUILTINS
_OF_TENSORS = frozenset("eq ne equal view_as expand_as type_as make_grid".split())
"""Methods of another tensor that this one is given to, and a function that puts pictures together."""
_SHAPES = frozenset("shape size dim ndim numel device dtype".split())
_OF_THE_GRAPH = frozenset("grad_fn grad requires_grad retain_grad register_hook".split())
_PASSING = (
    ast.Attribute
    | ast.BinOp
    | ast.BoolOp
    | ast.Call
    | ast.Compare
    | ast.Dict
    | ast.DictComp
    | ast.GeneratorExp
    | ast.IfExp
    | ast.List
    | ast.ListComp
    | ast.SetComp
    | ast.Starred
    | ast.Subscript
    | ast.Tuple
    | ast.UnaryOp
    | ast.keyword
)


def is_only_looked_at(
    made: Sequence[ast.expr], around: Sequence[Iterable[ast.AST]], goes_on: Callable[[ast.Call], bool]
) -> bool:
    """Whether all that is computed from a tensor becomes numbers, is printed, logged or drawn, and something is.

    Args:
        made: what gives the tensor, and the calls of the functions that return it, innermost first.
        around: where each of them may be used: the nodes of a function, or of the loop around it.
        goes_on: whether what a call is given goes nowhere but into what the call gives.
    """
    asked: _Uses | None = None
    for node, nodes in zip(reversed(made), reversed(around), strict=True):
        asked = _Uses(node, nodes, goes_on, asked)
    return asked is not None and asked.end(asked.made) and asked.is_looked_at


class _Uses:
    """What is done with a tensor, and with what is computed from it, among some nodes."""

    def __init__(
        self, made: ast.expr, nodes: Iterable[ast.AST], goes_on: Callable[[ast.Call], bool], asked: _Uses | None
    ) -> None:
        self.made = made
        self._looked_at = False
        self._asked = asked
        self._nodes = list(nodes)
        self._goes_on = goes_on
        self._around = {child: node for node in self._nodes for child in children(node)}
        self._seen: set[tuple[str, ast.AST]] = set()
        self._read_first: dict[ast.For | ast.While, set[str]] = {}

    @property
    def is_looked_at(self) -> bool:
        """Whether some value of it is read, and not its shape alone, here or where a function is asked for it."""
        return self._looked_at or (self._asked is not None and self._asked.is_looked_at)

    def end(self, node: ast.AST) -> bool:
        """Whether a value, given by an expression, ends in numbers wherever it goes."""
        while (around := self._around.get(node)) is not None:
            if self._is_read(node, around):
                self._looked_at = True
                return True
            match around:
                case ast.Attribute(attr=name) if name in _SHAPES:
                    return True
                case ast.Attribute(attr=name) if name in _OF_THE_GRAPH:
                    return False
                case ast.Call(func) if node is not func and self._shows(around):
                    self._looked_at = True
                    return True
                case ast.Call(func) if node is not func and not self._computes(around):
                    return False
                case ast.Assign(targets):
                    return all(self._bound_ends(target, around) for target in targets)
                case ast.AugAssign(target) | ast.AnnAssign(target) | ast.NamedExpr(target):
                    return self._bound_ends(target, around)
                case ast.Return() if self._asked is not None:
                    return self._asked.end(self._asked.made)
                case ast.For(target) | ast.comprehension(target):
                    return node is not around.iter or self._bound_ends(target, around)
                case _ if not isinstance(around, _PASSING):
                    return False
            node = around
        return False

    def _is_read(self, node: ast.AST, around: ast.AST) -> bool:
        """Whether what stands around a value makes a number, a text or a picture of it."""
        match around:
            case ast.Attribute(attr=name):
                return name in _READING
            case ast.Call(func) if node is not func:
                path = path_of(func) or ""
                method = isinstance(func, ast.Attribute) and root_of(path) not in _COMPUTING
                logged = (method and last_name(around) in _LOGGING) or last_name(around) in _SHOWING
                return path in _TO_NUMBERS or root_of(path) in _PICTURES or logged
        return isinstance(around, ast.FormattedValue | ast.If | ast.While | ast.Assert)

    def _shows(self, call: ast.Call) -> bool:
        """`plot_images(x, guesses)`, a function of the file as a statement of its own."""
        alone = isinstance(self._around.get(call), ast.Expr)
        return alone and bool(_SHOWN_BY.match(last_name(call) or "")) and self._goes_on(call)

    def _computes(self, call: ast.Call) -> bool:
        made = call.func.func if isinstance(call.func, ast.Call) else call.func  # `nn.CrossEntropyLoss()(out, y)`
        path = path_of(made) or ""
        known = root_of(path) in _COMPUTING or last_name(call) in _OF_TENSORS or looks_like_loss(path)
        return known or self._goes_on(call)

    def _bound_ends(self, target: ast.expr, binding: ast.AST) -> bool:
        """Whether what is bound to names ends in numbers; what is bound to anything else may be read elsewhere."""
        return all(isinstance(part, ast.Name) and self._name_ends(part.id, binding) for part in unpacked(target))

    def _name_ends(self, name: str, binding: ast.AST) -> bool:
        """Whether what a name is bound to ends in numbers wherever it is read before it is bound again."""
        if (name, binding) in self._seen:
            return True
        self._seen.add((name, binding))
        named = (node for node in self._nodes if isinstance(node, ast.Name) and node.id == name)
        reads = [node for node in named if isinstance(node.ctx, ast.Load)]
        if isinstance(binding, ast.Assign) and not self._is_read_next_round(name, binding):
            end = min((other.lineno for other in self._bound_again(name, binding)), default=None)
            reads = [node for node in reads if binding.lineno <= node.lineno <= (end or node.lineno)]
        return all(map(self.end, reads))

    def _is_read_next_round(self, name: str, binding: ast.Assign) -> bool:
        return any(encloses(loop, binding) and name in self._read_first_in(loop) for loop in self._loops)

    @cached_property
    def _loops(self) -> list[ast.For | ast.While]:
        return [node for node in self._nodes if isinstance(node, ast.For | ast.While)]

    def _read_first_in(self, loop: ast.For | ast.While) -> set[str]:
        if loop not in self._read_first:
            self._read_first[loop] = read_first(loop)
        return self._read_first[loop]

    def _bound_again(self, name: str, binding: ast.Assign) -> Iterator[ast.stmt]:
        """The later assignments of a name that are made whichever way is taken from where it is bound."""
        for block in blocks(self._nodes):
            if any(statement is binding or encloses(statement, binding) for statement in block):
                for statement in block:
                    if statement.lineno > binding.lineno and isinstance(statement, ast.Assign):
                        bound = (part for target in statement.targets for part in unpacked(target))
                        if any(isinstance(part, ast.Name) and part.id == name for part in bound):
                            yield statement
