"""Whether a data set is one of torchvision's that nothing changes: its samples are then made on the CPU.

Of data sets that a script brings itself, that would only be seen by following all that they call.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable

from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.scopes import Scopes, Variable

_FILES = frozenset({"root", "train", "split", "download"})
_CONTAINERS = frozenset({"Compose", "RandomApply", "RandomChoice", "RandomOrder"})
"""Transforms that are made of others."""
_NAMES = frozenset({"classes", "class_to_idx"})
_DECIDING = frozenset("transform transforms target_transform targets labels samples imgs loader".split())
"""Attributes of a data set that say what its samples are."""
_ONLY_READING = ("torch.utils.data.", "torchvision.", "numpy.")
_CHANGING = frozenset({"setattr", "delattr", "vars", "exec", "eval"})


class TorchvisionData:
    """The data sets of a file that are torchvision's.

    Args:
        scopes: the variables of the file.
        imports: what its names refer to.
    """

    def __init__(self, scopes: Scopes, imports: Imports) -> None:
        self._scopes = scopes
        self._imports = imports
        self._asked: set[Variable] = set()
        self._are_changed = any(map(self._changes_samples, imports.nodes))

    def holds(self, node: ast.expr) -> bool:
        """Whether an expression gives such a data set, or a part of one, and its transforms are torchvision's too."""
        self._asked.clear()
        return not self._are_changed and self._is_data(node)

    def _is_data(self, node: ast.expr) -> bool:
        match node:
            case ast.Name():
                return self._is_bound_to(node, self._is_data)
            case ast.Call(args=[data, *_]) if self._name_in("torch.utils.data", node) in ("Subset", "random_split"):
                return self._is_data(data)
            case ast.Call() if self._name_in("torchvision.datasets", node)[:1].isupper():
                given = [*node.args[1:], *(one.value for one in node.keywords if one.arg not in _FILES)]
                unpacked = any(isinstance(one, ast.Starred) for one in node.args)
                return not unpacked and all(map(self._is_transform, given))
        return False

    def _is_transform(self, node: ast.expr) -> bool:
        """Whether an argument is a transform of torchvision, or several, or is written down: `None`, `True`."""
        match node:
            case ast.Constant():
                return True
            case ast.List() | ast.Tuple():
                return all(map(self._is_transform, node.elts))
            case ast.Name():
                return self._is_bound_to(node, self._is_transform)
            case ast.Call() if (name := self._name_in("torchvision.transforms", node))[:1].isupper():
                parts = [*node.args[:1], *(one.value for one in node.keywords if one.arg in (None, "transforms"))]
                return name != "Lambda" and (name not in _CONTAINERS or all(map(self._is_transform, parts)))
        return False

    def _name_in(self, package: str, call: ast.Call) -> str:
        """The name of the class or function of a package that is called; "" for any other."""
        root: ast.expr = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        variable = self._scopes.variable(root) if isinstance(root, ast.Name) else None
        names = self._imports.qualified(call.func)
        if variable is None or not names or not all(name.startswith(f"{package}.") for name in names):
            return ""
        # `transforms = transforms.Compose(...)`: the name stands for the module where a class is asked of it
        others = [self._assigned(binding) for binding in variable.bindings if not isinstance(binding, ast.alias)]
        return min(names).rsplit(".", 1)[-1] if all(map(self._is_torchvisions, others)) else ""

    def _is_torchvisions(self, value: ast.expr | None) -> bool:
        """Whether a value is what torchvision makes, or a name that is imported from it."""
        made = value.func if isinstance(value, ast.Call) else value
        return made is not None and any(name.startswith("torchvision.") for name in self._imports.qualified(made))

    # -- names -------------------------------------------------------------------------------------------------

    def _is_bound_to(self, name: ast.Name, is_wanted: Callable[[ast.expr], bool]) -> bool:
        """Whether all that a name is bound to is wanted, and nothing that it is given to can change it."""
        variable = self._scopes.variable(name)
        if variable is None or variable in self._asked:
            return variable is not None
        self._asked.add(variable)
        values = [self._assigned(binding) for binding in variable.bindings if not isinstance(binding, ast.alias)]
        return (
            bool(values)
            and all(value is not None and is_wanted(value) for value in values)
            and all(map(self._is_only_read, variable.loads))
        )

    def _assigned(self, binding: ast.AST) -> ast.expr | None:
        found = self._scopes.assigned(binding)
        return None if found is None else found[0]

    def _is_only_read(self, load: ast.Name) -> bool:
        """Whether a use of a data set or transform leaves it as it is: in `len(data)`, `data[0]`, `data.classes`."""
        node: ast.expr = load
        for parent, child in self._scopes.ancestors(load):
            if isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is child:
                node = parent
                if isinstance(parent, ast.Attribute) and parent.attr in _NAMES:
                    return True
            elif not isinstance(parent, ast.List | ast.Tuple | ast.keyword):
                break
        if isinstance(parent, ast.Call):
            return self._only_reads(parent.func)
        return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)

    def _only_reads(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name) and self._scopes.variable(function) is None:
            return hasattr(builtins, function.id) and function.id not in _CHANGING
        names = self._imports.qualified(function)
        return bool(names) and all(name.startswith(_ONLY_READING) for name in names)

    def _changes_samples(self, node: ast.AST) -> bool:
        """`loader.dataset.transform = flip`, `data.transform.transforms.append(flip)`, of any object but `self`."""
        match node:
            case ast.Attribute() | ast.Subscript() if not isinstance(node.ctx, ast.Load):
                if self._is_torchvisions(node):
                    return True
                changed: ast.expr = node
            case ast.Call(func=ast.Attribute(value=changed)):
                pass
            case ast.Call(func=ast.Name(id="setattr")):
                return True
            case _:
                return False
        while isinstance(changed, ast.Attribute | ast.Subscript):
            if isinstance(changed, ast.Attribute) and changed.attr in _DECIDING and not _is_self(changed.value):
                return not self._imports.qualified(changed)
            changed = changed.value
        return False


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
