"""What a round computes from tensors that are trained themselves, and hands to the next round with its graph."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from oomfix.script.analyses.rounds import read_first
from oomfix.script.facts.leaves import leaves_of
from oomfix.script.facts.torch_facts import kind_of_call
from oomfix.script.facts.trace import Loop
from oomfix.script.facts.values import Kind
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of, children

_WITHOUT_GRAPH = frozenset("item detach tolist numpy float int len print".split())
_NUMBERS = frozenset("data shape grad device dtype requires_grad".split())
_OFF = frozenset({"no_grad", "inference_mode"})
_PUTTING_IN = frozenset({"append", "extend", "insert", "update"})


def carried_from_leaves(loop: Loop, nodes: Iterable[ast.AST]) -> set[str]:
    """The names by which a round hands on what it has computed from a leaf: `x = x + delta`, of `Adam([delta])`.

    Args:
        loop: whose rounds are asked for.
        nodes: of the function that it stands in, which say what its leaves are.
    """
    leaves = {leaf for node in nodes for leaf in (*leaves_of(node), *_optimized(node))}
    if not leaves:
        return set()
    following = _Following(leaves)
    for _ in range(2):
        following.block(loop.body, certain=True)
    found = following.graphs - leaves
    return found & read_first(loop) if found else set()


def _optimized(node: ast.AST) -> Iterator[str]:
    """What a call gives to an optimizer one by one: `delta` in `Adam([delta])`."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List):
        if kind_of_call(path_of(node.func) or "") is Kind.OPTIMIZER:
            yield from (path for path in map(path_of, node.args[0].elts) if path is not None)


class _Following:
    """Follows the statements of a round in order, and keeps which paths carry a leaf's graph.

    Attributes:
        graphs: these paths, the leaves among them.
    """

    def __init__(self, leaves: set[str]) -> None:
        self._leaves = leaves
        self.graphs = set(leaves)

    def block(self, statements: list[ast.stmt], *, certain: bool) -> None:
        """Follow statements; `certain`: all of them run in each round."""
        for statement in statements:
            self._statement(statement, certain)

    def _statement(self, node: ast.stmt, certain: bool) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return
            case ast.Assign():
                self._bind(node.targets, self._reads(node.value), certain)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind([target], self._reads(value), certain)
            case ast.AugAssign():
                self._bind([node.target], self._reads(node.value), certain=False)
            case ast.Expr(ast.Call(ast.Attribute()) as call):
                self._change(call)
            case ast.With() | ast.AsyncWith():
                if not any(_turns_off(item.context_expr) for item in node.items):
                    self.block(node.body, certain=certain)
            case _:
                for block in _blocks_of(node):
                    self.block(block, certain=False)

    def _bind(self, targets: list[ast.expr], graph: bool, certain: bool) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self._bind(target.elts, graph, certain)
            elif isinstance(target, ast.Starred | ast.Subscript):
                # an entry that has no graph leaves those of the others
                self._bind([target.value], graph, certain=False)
            elif (path := path_of(target)) is not None and path.rpartition(".")[2] not in _NUMBERS:
                if graph:
                    self.graphs.add(path)
                elif certain and path not in self._leaves:
                    self.graphs.discard(path)

    def _change(self, call: ast.Call) -> None:
        """`parts.append(x)`, `x.add_(delta)`."""
        assert isinstance(call.func, ast.Attribute)
        path, method = path_of(call.func.value), call.func.attr
        if path is None or path in self._leaves:
            return
        if method == "detach_":
            self.graphs.discard(path)
        elif (method in _PUTTING_IN or method.endswith("_")) and any(map(self._reads, arguments_of(call))):
            self.graphs.add(path)

    def _reads(self, node: ast.AST) -> bool:
        """Whether a value is computed from something that carries a graph."""
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and last_name(node) in _WITHOUT_GRAPH):
            return False
        if isinstance(node, ast.Attribute) and node.attr in _NUMBERS:
            return False
        if isinstance(node, ast.Name | ast.Attribute) and path_of(node) in self.graphs:
            return True
        return any(map(self._reads, children(node)))


def _turns_off(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and last_name(context) in _OFF


def _blocks_of(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for holder in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(holder, name, None), list):
                yield block
