"""Whether what an expression gives certainly lies in host memory: all that leads to it is in sight, and stays there."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from oomfix.rewrite.effects import last_name
from oomfix.rewrite.liveness import FunctionNode, nodes_of_scope_body
from oomfix.rewrite.origins import Origin, Origins, parameter_for
from oomfix.script.imports import Imports
from oomfix.script.names import imported, path_of
from oomfix.script.nodes import children, walk
from oomfix.script.scopes import Variable

_LIBRARIES = frozenset(
    "torch torchvision numpy pandas sklearn scipy PIL cv2 skimage imageio albumentations h5py nibabel math random os "
    "sys glob pathlib shutil json csv re string time datetime typing collections itertools functools copy logging "
    "warnings argparse tqdm transformers nltk abc dataclasses enum operator io zipfile tarfile gzip statistics "
    "__future__".split()
)
"""Packages that put nothing on a GPU unless they are told to, in words that stand in the call."""
_DEVICE = re.compile(r"cuda|device|gpu|dlpack|sparse|pin_memory", re.IGNORECASE)
"""Words of a GPU, and of tensors that cannot be page-locked."""
_ARBITRARY = frozenset("eval exec globals locals vars __import__ setattr".split())
_COMMAND_LINE = frozenset("parse_args parse_known_args".split())
_PLAIN_CALLS = frozenset("int float str bool len range max min abs round join format abspath dirname exists".split())
_PLAIN_ANNOTATIONS = frozenset("str int float bool Path argparse.Namespace Namespace".split())
_MOVES = frozenset({"to", "cuda"})
_FILES = frozenset("root train split download".split())
_MOST_ALIASES = 4

_Follow = list[Origin] | None


class HostData:
    """Tells whether data certainly lies in host memory.

    Args:
        origins: where the values of the file come from.
        imports: what its names refer to.
    """

    def __init__(self, origins: Origins, imports: Imports) -> None:
        self._origins = origins
        self._scopes = origins.scopes
        self._imports = imports
        self._entered: set[ast.AST] = set()

    def holds(self, node: ast.expr) -> bool:
        """Whether nothing that leads to an expression's value is out of sight, or may be on a GPU.

        That are the expressions that its names are bound to, the functions and classes that it calls, whole, and what
        is put into its objects anywhere in the file.
        """
        self._entered = set()
        waiting: list[Origin] = [node]
        seen: set[ast.AST] = set()
        while waiting:
            part = waiting.pop()
            if part in seen or self._reads_command_line(part):
                continue
            seen.add(part)
            self._entered.update(walk(part))
            for inner in self._nodes(part):
                follow = None if self._may_leave(inner) else self._behind(inner)
                if follow is None:
                    return False
                waiting += follow
        return True

    def _nodes(self, part: Origin) -> Iterator[ast.AST]:
        """A node and those below it, but for the folder, and the choice of files, of a data set of torchvision."""
        found: list[ast.AST] = [part]
        for node in found:
            yield node
            below = children(node)
            if isinstance(node, ast.Call) and self._is_of_torchvision(node):
                below = [node.func, *node.args[1:], *(one for one in node.keywords if one.arg not in _FILES)]
            found += below

    def _is_of_torchvision(self, call: ast.Call) -> bool:
        return any(name.startswith("torchvision.datasets.") for name in self._imports.qualified(call.func))

    def _reads_command_line(self, part: Origin) -> bool:
        """Whether an expression, or a function, gives what the command line says: numbers and texts."""
        if not isinstance(part, FunctionNode):
            return isinstance(part, ast.Call) and last_name(part) in _COMMAND_LINE
        returned = [node.value for node in nodes_of_scope_body(part) if isinstance(node, ast.Return)]
        return bool(returned) and all(value is not None and self._is_plain(value) for value in returned)

    def _may_leave(self, node: ast.AST) -> bool:
        """Whether a node speaks of a GPU, or gives what is not seen."""
        match node:
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.arg(arg=word):
                if _DEVICE.search(word):
                    return True
            case ast.keyword(arg=str(word)):
                return bool(_DEVICE.search(word))
            case ast.Constant(value=str(word)):
                return "cuda" in word and not isinstance(self._scopes.parent(node), ast.Expr)
            case ast.Global() | ast.Nonlocal():
                return True
            case ast.Call():
                return self._is_move(node) or self._loads(node)
        return False

    def _is_move(self, call: ast.Call) -> bool:
        """Whether a call is `.to(...)` with something else than a type."""
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "to":
            return False
        types = [path_of(argument) or "" for argument in call.args]
        return bool(call.keywords) or not types or not all(path.startswith("torch.") for path in types)

    def _loads(self, call: ast.Call) -> bool:
        """Whether a call reads tensors that come back where they were saved, or anything from a hub."""
        names = self._imports.qualified(call.func)
        if any(name.startswith("torch.hub.") for name in names):
            return True
        places = [keyword.value for keyword in call.keywords if keyword.arg == "map_location"]
        return "torch.load" in names and not any(
            isinstance(place, ast.Constant) and place.value == "cpu" for place in places
        )

    # -- what stands behind a name -----------------------------------------------------------------------------

    def _behind(self, node: ast.AST) -> _Follow:
        """What else leads to a node's value; None where that is out of sight."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._origins.class_of(node.value)
            return [] if owner is None or owner in self._entered else self._origins.of_attribute(node)
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            return []
        variable = self._scopes.variable(node)
        if variable is None:
            return [] if hasattr(builtins, node.id) and node.id not in _ARBITRARY else None
        if variable.scope.node in self._entered:
            return []
        if (owner := self._origins.class_of(node)) is not None:
            whole = not isinstance(self._scopes.parent(node), ast.Attribute)
            return None if whole and owner not in self._entered else []
        return self._behind_variable(variable)

    def _behind_variable(self, variable: Variable) -> _Follow:
        if all(isinstance(one, ast.arg) and _is_plain_type(one.annotation) for one in variable.bindings):
            return []
        found = self._origins.of_variable(variable)
        if found is None or any(isinstance(one, ast.alias) and not self._is_library(one) for one in found):
            return None
        follow: list[Origin] = [one for one in found if not isinstance(one, ast.alias)]
        if not any(isinstance(one, ast.expr) and not self._is_plain(one) for one in found):
            return follow
        for change in self._put_into(variable):
            if change is None:
                return None
            follow.append(change)
        return follow

    def _is_library(self, alias: ast.alias) -> bool:
        statement = self._scopes.parent(alias)
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            return False
        name = alias.asname or alias.name.split(".")[0]
        found = {qualified for local, qualified in imported(statement) if local in (name, alias.name)}
        return bool(found) and all(qualified.split(".")[0] in _LIBRARIES for qualified in found)

    def _is_plain(self, node: Origin, depth: int = _MOST_ALIASES) -> bool:
        """Whether a value is a number, a text, or what the command line gives: nothing can be put into it."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Compare():
                return True
            case ast.Call():
                return last_name(node) in _PLAIN_CALLS | _COMMAND_LINE
            case ast.BinOp():
                return self._is_plain(node.left, depth) and self._is_plain(node.right, depth)
            case ast.Attribute():
                return self._is_plain(node.value, depth)
            case ast.Name():
                variable = self._scopes.variable(node) if isinstance(node.ctx, ast.Load) and depth else None
                found = None if variable is None else self._origins.of_variable(variable)
                return bool(found) and all(self._is_plain(one, depth - 1) for one in found or ())
        return False

    # -- what is put into an object ----------------------------------------------------------------------------

    def _put_into(self, variable: Variable, depth: int = _MOST_ALIASES) -> Iterator[ast.expr | ast.ClassDef | None]:
        """What is put into the object of a variable after it was made; None where something may be, out of sight."""
        for load in variable.loads:
            if load not in self._entered:
                yield from self._put_at(load, depth)

    def _put_at(self, load: ast.Name, depth: int) -> Iterator[ast.expr | ast.ClassDef | None]:
        node: ast.expr = load
        parent: ast.AST = load
        for parent, child in self._scopes.ancestors(load):
            if not isinstance(parent, ast.Attribute | ast.Subscript) or parent.value is not child:
                break
            node = parent
        match parent:
            case ast.Assign() | ast.AugAssign() if parent.value is not node:
                yield parent.value
            case ast.Assign(targets=[ast.Name() as name]) if node is load:
                yield from self._put_into(self._scopes.bound_by(name), depth - 1) if depth else [None]
            case ast.Call() if parent.func is node:
                method = isinstance(node, ast.Attribute) and node.attr in _MOVES
                yield from [None] if method else [*parent.args, *(keyword.value for keyword in parent.keywords)]
            case ast.Call():
                yield from self._put_by(parent, node, depth)
            case ast.keyword():
                call = self._scopes.parent(parent)
                if isinstance(call, ast.Call):
                    yield from self._put_by(call, node, depth)
            case _ if not isinstance(getattr(node, "ctx", None), ast.Load):
                yield None

    def _put_by(self, call: ast.Call, given: ast.expr, depth: int) -> Iterator[ast.expr | ast.ClassDef | None]:
        """What a call puts into an object that it is given."""
        function = self._origins.function_of(call)
        if function is not None:
            name = parameter_for(call, given, function)
            if name is None or not depth:
                yield None
            else:
                yield from self._put_into(self._scopes.bound_by(name), depth - 1)
            return
        root: ast.expr = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        variable = self._scopes.variable(root) if isinstance(root, ast.Name) else None
        if isinstance(root, ast.Name) and variable is None:
            yield from [] if root.id not in _ARBITRARY else [None]
            return
        for binding in [] if variable is None else variable.bindings:
            if isinstance(binding, ast.ClassDef):
                yield binding
            elif isinstance(binding, ast.alias) and not self._is_library(binding):
                yield None


def _is_plain_type(annotation: ast.expr | None) -> bool:
    return annotation is not None and path_of(annotation) in _PLAIN_ANNOTATIONS
