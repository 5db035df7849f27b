"""The functions of a file that a call may mean, by their name and the arguments they take, and the calls of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from oomfix.rewrite.dataflow.liveness import FunctionNode, nodes_of_scope
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import last_name, owner_of, path_of, root_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.parameters import Bound, bind_call, decorated_as, name_of_object

_SWITCHING = ("train", "eval")
_KEEPING_ARGUMENTS = frozenset({"staticmethod", "classmethod"})


class FunctionsCalled:
    """The functions and methods of a file.

    Args:
        imports: what the file imports, and all of its nodes.
    """

    def __init__(self, imports: Imports) -> None:
        self._imports, nodes = imports, imports.nodes
        self._functions: dict[str, list[FunctionNode]] = {}
        for function in nodes.functions:
            self._functions.setdefault(function.name, []).append(function)
        self._classes = {owner.name: owner for owner in nodes.of(ast.ClassDef)}
        self._owners = {
            statement: owner
            for owner in nodes.of(ast.ClassDef)
            for part in owner.body
            for statement in nodes_of_scope(part)
            if isinstance(statement, FunctionNode)
        }
        self._class_names = {"cls", *self._classes}
        self._class_names |= {
            target.id
            for node in nodes.of(ast.Assign)
            if path_of(node.value) in self._classes
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self._bound_anew = {node.id for node in nodes.of(ast.Name) if isinstance(node.ctx, ast.Store)}
        self._bound_anew |= {node.attr for node in nodes.of(ast.Attribute) if isinstance(node.ctx, ast.Store)}
        self._known: dict[ast.Call, list[FunctionNode]] = {}
        self._parameters = {one.arg for one in nodes.of(ast.arg)}
        self._handed_on = self._parameters | {one.arg or "" for one in nodes.of(ast.keyword)}
        self._handed_on |= {one.value for one in nodes.of(ast.Constant) if isinstance(one.value, str)}

    def by(self, call: ast.Call) -> list[FunctionNode]:
        """Those that a call may run: `scores.log()` does not mean a `log(self, row)` of the file.

        `model.train()` and `model.eval()` are none of the file: they switch a network, nearly always.
        """
        switches = isinstance(call.func, ast.Attribute) and call.func.attr in _SWITCHING
        return [] if switches else self._named(call)

    def entered_by(self, call: ast.Call) -> list[FunctionNode]:
        """As `by`, with methods called `train` and `eval`, and with what makes the objects of a class."""
        constructor = None if self._is_imported(call.func) else self._constructor_of(last_name(call))
        return self._named(call) + ([] if constructor is None else [constructor])

    def run_by(self, node: ast.AST) -> list[FunctionNode]:
        """Those that a node may run, the ones that these call too."""
        found: dict[FunctionNode, None] = {}
        waiting: list[ast.AST] = [node]
        for one in waiting:
            calls = (child for child in walk(one) if isinstance(child, ast.Call))
            new = [function for call in calls for function in self.by(call) if function not in found]
            found.update(dict.fromkeys(new))
            waiting += dict.fromkeys(new)
        return list(found)

    def of_path(self, path: str) -> list[FunctionNode]:
        """Those that `step` or `self.step` may stand for where it is handed on; what makes objects, for a class."""
        root, _, name = path.rpartition(".")
        if root:
            return [one for one in self._functions.get(name, ()) if root == "self" and one in self._owners]
        constructor = self._constructor_of(name)
        return [*self._functions.get(name, ()), *([] if constructor is None else [constructor])]

    def certain(self, call: ast.Call) -> FunctionNode | None:
        """The one function that a call by name, or of a method of `self`, can only mean."""
        name = last_name(call)
        named = self._functions.get(name, [])
        by_name = isinstance(call.func, ast.Name) or path_of(call.func) == f"self.{name}"
        if not by_name or len(named) != 1 or name in self._bound_anew or named[0].decorator_list:
            return None
        is_method = named[0] in self._owners
        return named[0] if is_method != isinstance(call.func, ast.Name) and self.by(call) == named else None

    def calls_of(self, function: FunctionNode) -> list[ast.Call]:
        """The calls of the file that may enter a function."""
        names = [function.name, *(self._made_by(function) if function.name == "__init__" else ())]
        calls = (call for name in names for call in self._calls.get(name, ()))
        return [call for call in calls if function in self.entered_by(call)]

    def bound(self, call: ast.Call, function: FunctionNode) -> Bound[ast.expr]:
        """Where the arguments of a call go in a function that it may mean."""
        ways = [bind_call(call, function.args, of_object=one) for one in self._takes_object(call, function)]
        return next((way for way in ways if way.fits), ways[0])

    # -- what may be meant -------------------------------------------------------------------------------------

    def _named(self, call: ast.Call) -> list[FunctionNode]:
        if call not in self._known:
            named = () if self._is_imported(call.func) else self._functions.get(last_name(call), ())
            found = [one for one in named if self._may_be(one, call) and not _asks_a_part(one, call)]
            self._known[call] = found
        return self._known[call]

    def _is_imported(self, function: ast.expr) -> bool:
        """Whether a path begins with a name that an import binds, and nothing else in the file."""
        root = root_of(path_of(function) or "")
        return root in self._imports.names and root not in self._bound_otherwise

    @cached_property
    def _bound_otherwise(self) -> set[str]:
        return self._bound_anew | self._parameters | self._functions.keys() | self._classes.keys()

    def _may_be(self, function: FunctionNode, call: ast.Call) -> bool:
        """Whether a function may be what a call of its name runs: in sight there, and with such parameters."""
        if function.name in self._bound_anew:  # `step = partial(step, model)`
            return True
        decorators = (node.id if isinstance(node, ast.Name) else "" for node in function.decorator_list)
        if any(name not in _KEEPING_ARGUMENTS for name in decorators):
            return True
        is_method, by_attribute = function in self._owners, isinstance(call.func, ast.Attribute)
        if is_method != by_attribute and function.name not in self._handed_on:
            return False
        return self.bound(call, function).fits

    def _takes_object(self, call: ast.Call, function: FunctionNode) -> tuple[bool, ...]:
        """Whether the first parameter takes an object that is not among the arguments; the likelier answer first."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if function not in self._owners:
            # `Net.loss = loss` of a function with a `self`
            return (True, False) if owner is not None and name_of_object(function.args) is not None else (False,)
        if decorated_as(function, "staticmethod"):
            return (False,)
        if decorated_as(function, "classmethod"):
            return (True,)
        if owner is None:  # handed on, `journal.log` or `Journal.log`
            return (True, False)
        return (False, True) if self._is_class(owner) else (True,)

    def _is_class(self, owner: ast.expr) -> bool:
        """`Trainer`, `type(self)`, `self.__class__`."""
        if isinstance(owner, ast.Call):
            return path_of(owner.func) == "type"
        return path_of(owner) in self._class_names or (isinstance(owner, ast.Attribute) and owner.attr == "__class__")

    # -- classes -----------------------------------------------------------------------------------------------

    def _constructor_of(self, name: str) -> FunctionNode | None:
        """What makes the objects of a class: its own `__init__`, or that of its first base in the file."""
        seen: list[ast.ClassDef] = []
        waiting = [self._classes.get(name)]
        for owner in waiting:
            if owner is not None and owner not in seen:
                seen.append(owner)
                for one in owner.body:
                    if isinstance(one, FunctionNode) and one.name == "__init__":
                        return one
                waiting += [self._classes.get(path_of(base) or "") for base in owner.bases]
        return None

    def _made_by(self, constructor: FunctionNode) -> Iterator[str]:
        """The classes whose objects a constructor makes."""
        return (name for name in self._classes if self._constructor_of(name) is constructor)

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        calls: dict[str, list[ast.Call]] = {}
        for call in self._imports.nodes.of(ast.Call):
            calls.setdefault(last_name(call), []).append(call)
        return calls


def _asks_a_part(method: FunctionNode, call: ast.Call) -> bool:
    """Whether a call in a method asks a part of its object for the same: `self.model.train_step(x)` in `train_step`."""
    receiver = owner_of(call)
    within = method.lineno <= call.lineno <= (method.end_lineno or method.lineno)
    return within and (receiver or "").startswith("self.")
