"""What the parameters of a file's functions are given, where all calls of them are seen."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.script import Script
from oomfix.script.syntax.parameters import bind_call, defaults_of, named_parameters, names_of_parameters


class GivenParameters:
    """Says what parameters are given, by their names: those of two functions that share one are taken together.

    Args:
        script: the script.

    Attributes:
        unseen: the names of parameters that something out of sight may be given to.
        given: for each of the others, what the calls of the file give it, or its default.
    """

    def __init__(self, script: Script) -> None:
        nodes = script.imports.nodes
        self.given: dict[str, list[ast.expr]] = {}
        self.unseen: set[str] = set()
        calls: dict[str, list[ast.Call]] = {}
        for call in nodes.of(ast.Call):
            if isinstance(call.func, ast.Name):
                calls.setdefault(call.func.id, []).append(call)
        mentions = Counter(node.id for node in nodes.of(ast.Name))
        mentions.update(node.attr for node in nodes.of(ast.Attribute))
        times = Counter(function.name for function in nodes.functions)
        outer = {one for one in script.source.tree.body if isinstance(one, FunctionNode)}
        for function in nodes.functions:
            own = calls.get(function.name, [])
            is_seen = function in outer and not function.decorator_list and times[function.name] == 1
            if is_seen and own and mentions[function.name] == len(own):
                self._take(function, own)
            else:
                self.unseen |= names_of_parameters(function.args)

    def _take(self, function: FunctionNode, calls: list[ast.Call]) -> None:
        others = {one.arg for one in (function.args.vararg, function.args.kwarg) if one is not None}
        self.unseen |= others
        for call in calls:
            bound = bind_call(call, function.args)
            if not bound.fits or bound.perhaps:
                self.unseen |= names_of_parameters(function.args)
                return
            taken = dict(_of_one_call(function, bound.given))
            for name in taken.keys() - others:
                self.given.setdefault(name, []).append(taken[name])


def _of_one_call(function: FunctionNode, given: list[tuple[ast.arg, ast.expr]]) -> Iterator[tuple[str, ast.expr]]:
    defaults = defaults_of(function.args)
    yield from ((one.arg, defaults[one]) for one in named_parameters(function.args) if one in defaults)
    yield from ((one.arg, argument) for one, argument in given)
