"""Which `DataLoader` a loop goes over: through the names, dictionaries, parameters and functions of the file."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator
from functools import cached_property

from oomfix.rewrite.effects import last_name
from oomfix.rewrite.origins import Origin, Origins, part_of
from oomfix.script import Script

_LOADERS = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})
_HANDING_ON = frozenset("enumerate tqdm zip track".split())
"""What gives the batches of a loader one by one."""
_KEEPING = frozenset("list tuple set sorted cycle tee".split())


class Loaders:
    """The loaders of a script.

    Attributes:
        origins: where the values of the file come from.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.origins = Origins(script.source.tree)

    def of(self, loop: ast.For) -> list[ast.Call]:
        """The calls of `DataLoader` that make what a loop goes over."""
        return list(dict.fromkeys(self._behind(loop.iter, set())))

    @cached_property
    def kept(self) -> set[ast.Call]:
        """The calls that make a loader whose batches are all kept somewhere, as by `list(loader)`."""
        found: set[ast.Call] = set()
        for node in self._script.imports.nodes:
            if isinstance(node, ast.Call) and last_name(node) in _KEEPING:
                found.update(*(self._behind(argument, set()) for argument in node.args))
            elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
                found.update(*(self._behind(generator.iter, set()) for generator in node.generators))
        return found

    def _behind(self, node: Origin, seen: set[Hashable]) -> Iterator[ast.Call]:
        """The calls that make the loaders which a value is, or whose batches it gives."""
        if node in seen:
            return
        seen.add(node)
        if isinstance(node, ast.Call) and self._is_loader(node):
            yield node
            return
        values = self._entries(node.value, node.slice, seen) if isinstance(node, ast.Subscript) else self._values(node)
        for value in values:
            yield from self._behind(value, seen)

    def _values(self, node: Origin) -> list[Origin]:
        """The values that another one is, as far as they are known for certain."""
        match node:
            case ast.Call() if last_name(node) in _HANDING_ON:
                return list(node.args)
            case ast.Call():
                return self.origins.returned_by(node) or []
            case ast.Name(ctx=ast.Load()):
                variable = self.origins.scopes.variable(node)
                return [] if variable is None else self.origins.of_variable(variable) or []
            case ast.Attribute():
                return self.origins.of_attribute(node) or []
            case ast.IfExp():
                return [node.body, node.orelse]
        return []

    def _entries(self, node: Origin, key: ast.expr, seen: set[Hashable]) -> Iterator[Origin]:
        """What a container may hold under a key: `loaders["train"]`, `loaders[phase]`, `make_loaders()[0]`."""
        if isinstance(node, ast.Dict):
            known = key.value if isinstance(key, ast.Constant) else None
            for name, value in zip(node.keys, node.values, strict=True):
                if known is None or (isinstance(name, ast.Constant) and name.value == known):
                    yield value
        elif isinstance(node, ast.DictComp):
            yield node.value
        elif isinstance(node, ast.Tuple | ast.List):
            if isinstance(key, ast.Constant) and isinstance(key.value, int):
                yield part_of(node, [key.value])
        elif (node, key) not in seen:
            seen.add((node, key))
            for holder in self._values(node):
                yield from self._entries(holder, key, seen)

    def _is_loader(self, call: ast.Call) -> bool:
        """Whether a call makes a loader of torch, under a name that is imported in sight."""
        root: ast.expr = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        bound = isinstance(root, ast.Name) and self.origins.scopes.variable(root) is not None
        return bound and bool(self._script.imports.qualified(call.func) & _LOADERS)
