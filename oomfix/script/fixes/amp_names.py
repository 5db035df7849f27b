"""Where a file imports and uses `torch.cuda.amp` and `torch.cpu.amp`, under whatever name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern
from oomfix.script.syntax.scopes import Scopes, Variable

if TYPE_CHECKING:
    from oomfix.source import Source

APIS = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
"""What `torch.amp` replaces, with a device type."""

_API = Pattern(r"torch\.(cuda|cpu)\.amp(?:\.autocast_mode|\.grad_scaler)?\.(autocast|GradScaler|custom_fwd|custom_bwd)")
_MODULE = Pattern(r"torch\.(cuda|cpu)\.amp(\.autocast_mode|\.grad_scaler)?")
_REPLACED = Pattern(rf"{_API.pattern}|{_MODULE.pattern}")
_NEW = Pattern(r"torch\.(autocast|amp(\.(autocast_mode|grad_scaler))?(\.(autocast|GradScaler|custom_fwd|custom_bwd))?)")
_NEW_TEXT = Pattern(r"\btorch\.(amp|autocast)\b|from torch import [^\n]*\b(amp|autocast)\b")
_VERSION_TEST = Pattern(r"version|hasattr|getattr|torch_|inspect|new_api", re.IGNORECASE)
_STARRED = {"": APIS, ".autocast_mode": ("autocast", "custom_fwd", "custom_bwd"), ".grad_scaler": ("GradScaler",)}


class Role(Enum):
    """What a file does with a deprecated name."""

    CALL = auto()
    DECORATOR = auto()
    PARTIAL = auto()
    """`functools.partial(autocast, ...)`."""
    CLASS = auto()
    """It stands for the class: `isinstance(x, GradScaler)`, an annotation."""
    ALIAS = auto()
    """`ac = torch.cuda.amp.autocast`: its uses are found under the new name."""
    OTHER = auto()
    """Anything else: what becomes of it is out of sight."""


@dataclass(eq=False)
class AmpUse:
    """One use of a deprecated function, class or module.

    Attributes:
        node: the name or attribute, `amp.autocast`.
        whole: the call of it, where it is called or goes into a `partial`; else `node`.
        api: one of `APIS`; None for a module.
        device: "cuda" or "cpu".
        root: the name that `node` starts with, and `variable` what it refers to (None behind a star import).
        root_path: what `root` is, `torch.cuda.amp`.
        path: what `node` is, `torch.cuda.amp.autocast`.
        holder: the use that put it into an attribute of an object (`self.autocast = torch.cuda.amp.autocast`,
            `cfg.autocast`) or into a partial, where `node` reads that attribute or the name of the partial.
    """

    node: ast.expr
    whole: ast.expr
    api: str | None
    device: str
    root: ast.Name
    root_path: str
    path: str
    variable: Variable | None
    role: Role
    holder: AmpUse | None = None

    @property
    def place(self) -> ast.expr | ast.stmt:
        """The node that a report points at."""
        return self.whole

    @property
    def through_import(self) -> bool:
        """Whether it hangs on a name that itself means something deprecated."""
        return self.holder is None and _REPLACED.fullmatch(self.root_path) is not None


@dataclass(eq=False)
class AmpImport:
    """An import statement that brings deprecated names in: `names` (as in the statement) with their paths."""

    statement: ast.Import | ast.ImportFrom
    names: list[tuple[ast.alias, str]]

    @property
    def place(self) -> ast.expr | ast.stmt:
        """The node that a report points at."""
        return self.statement

    @property
    def starred(self) -> bool:
        """`from torch.cuda.amp import *`."""
        return self.names[0][0].name == "*"


class AmpNames:
    """The deprecated names of a file.

    Attributes:
        imports: the statements that import them.
        uses: what is done with them.
        patched: whether the file assigns to an attribute of the deprecated modules.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.scopes = Scopes(source.tree)
        self.imports = [found for node in walk(source.tree) if (found := _import_of(node)) is not None]
        self.uses: list[AmpUse] = []
        self.patched = False
        self._resolving: set[Variable] = set()
        for variable in self.scopes.variables():
            path = next((path for path in self.origins(variable) if path is not None and _leads_to_amp(path)), None)
            if path is not None:
                for load in variable.loads:
                    self._follow(load, path, variable)
        for name, path in self._starred_paths.items():
            for load in self.scopes.unbound.get(name, ()):
                self._follow(load, path, None)

    @cached_property
    def stars(self) -> list[AmpImport]:
        """The star imports of deprecated modules."""
        return [found for found in self.imports if found.starred]

    @cached_property
    def _starred_paths(self) -> dict[str, str]:
        """Name -> path of what star imports bring in; torch itself can come from any other one, under any name."""
        paths = {"torch": "torch"}
        for name, loads in self.scopes.unbound.items():
            if any(self._asks_for_amp(load) for load in loads):
                paths[name] = "torch"
        for found in self.stars:
            module = found.names[0][1]
            match = _MODULE.fullmatch(module)
            for name in _STARRED[match[2] or ""] if match else ():
                paths[name] = f"{module}.{name}"
        return paths

    def _asks_for_amp(self, load: ast.Name) -> bool:
        """`T.cuda.amp`, of a `T` that nothing in sight binds: only torch has that."""
        device = self.scopes.parent(load)
        amp = self.scopes.parent(device) if isinstance(device, ast.Attribute) else None
        return (
            isinstance(device, ast.Attribute)
            and device.attr in ("cuda", "cpu")
            and isinstance(amp, ast.Attribute)
            and amp.attr == "amp"
        )

    def origins(self, variable: Variable) -> list[str | None]:
        """What each binding of a variable makes it: the path of something imported, or None."""
        return [path for _, path in self._bound(variable)]

    def _bound(self, variable: Variable) -> list[tuple[ast.AST, str | None]]:
        """What is bound to a variable, each side of a choice by itself, and the path of it if it is imported."""
        if variable in self._resolving:
            return [(variable.bindings[0], None)]
        self._resolving.add(variable)
        bound = [found for binding in variable.bindings for found in self._bound_by(binding)]
        self._resolving.discard(variable)
        return bound

    def only_origin(self, variable: Variable) -> str | None:
        """What a variable is, where all of its bindings agree."""
        origins = self.origins(variable)
        meanings = {None if path is None else (renamed(path) or path, path.startswith("torch.cpu")) for path in origins}
        return origins[0] if len(meanings) == 1 else None

    def _bound_by(self, binding: ast.AST) -> list[tuple[ast.AST, str | None]]:
        parent = self.scopes.parent(binding)
        if isinstance(binding, ast.alias):
            if isinstance(parent, ast.ImportFrom):
                return [(binding, None if parent.level else f"{parent.module}.{binding.name}")]
            return [(binding, binding.name if binding.asname else binding.name.split(".")[0])]
        if isinstance(binding, ast.Name) and isinstance(parent, ast.Assign) and parent.targets == [binding]:
            return [(side, self.path_of(side)) for side in _sides(parent.value)]
        return [(binding, None)]

    def assignment_of(self, node: ast.expr) -> ast.Assign | None:
        """The assignment to one target of a node, or of a choice of which it is one side."""
        parent = self.scopes.parent(node)
        while isinstance(parent, ast.IfExp) and node is not parent.test:
            node, parent = parent, self.scopes.parent(parent)
        single = isinstance(parent, ast.Assign) and parent.value is node and len(parent.targets) == 1
        return parent if isinstance(parent, ast.Assign) and single else None

    def path_of(self, node: ast.expr) -> str | None:
        """What an expression is, if it is something imported."""
        if isinstance(node, ast.Attribute):
            base = self.path_of(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Name):
            variable = self.scopes.variable(node)
            if variable is None:
                return self._starred_paths.get(node.id)
            return next((path for path in self.origins(variable) if path is not None), None)
        return None

    def _follow(self, load: ast.Name, root_path: str, variable: Variable | None) -> None:
        """Note the use that a read of a name is, with the attributes behind it."""
        node, path = self._whole_path(load, root_path)
        if not _REPLACED.match(path):
            return
        api = _API.fullmatch(path)
        role = self._role(node, api is not None) if _REPLACED.fullmatch(path) else Role.OTHER
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            self.patched = True
        device = "cpu" if path.startswith("torch.cpu") else "cuda"
        parent = self.scopes.parent(node)
        whole = parent if role in (Role.CALL, Role.PARTIAL) and isinstance(parent, ast.Call) else node
        use = AmpUse(node, whole, api[2] if api else None, device, load, root_path, path, variable, role)
        if use.through_import or api or role is Role.ALIAS:
            self.uses.append(use)
        if role in (Role.OTHER, Role.PARTIAL):
            self._follow_held(use)

    def _follow_held(self, holder: AmpUse) -> None:
        """`cfg.cast = torch.cuda.amp.autocast`, `cast = partial(torch.cuda.amp.autocast)`: calls of what holds it."""
        statement = self.assignment_of(holder.whole)
        target = statement.targets[0] if statement is not None else None
        reads: list[ast.expr] = []
        if isinstance(target, ast.Name) and holder.role is Role.PARTIAL:
            variable = self.scopes.bound_by(target)
            reads = [] if _any_new(self.origins(variable)) else [*variable.loads]
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            reads = self._reads_of(target)
        for read in reads:
            node, path = self._whole_path(read, holder.path)
            api = _API.fullmatch(path)
            call = self.scopes.parent(node)
            if api and isinstance(call, ast.Call) and call.func is node:
                self.uses.append(
                    AmpUse(
                        node, call, api[2], holder.device, holder.root, holder.root_path, path, None, Role.CALL, holder
                    )
                )

    def _reads_of(self, attribute: ast.Attribute) -> list[ast.expr]:
        """Where an attribute of an object is read; nowhere where it may hold the new function, or others."""
        same = self._of_the_same_object(attribute)
        for node in same:
            if not isinstance(node.ctx, ast.Load):
                statement = self.scopes.parent(node)
                sides = _sides(statement.value) if isinstance(statement, ast.Assign) else []
                paths = [self.path_of(side) for side in sides]
                old = any(path is not None and _REPLACED.match(path) for path in paths)
                if _any_new(paths) or not (old or (paths and None not in paths)):
                    return []
        return [node for node in same if isinstance(node.ctx, ast.Load)]

    def _of_the_same_object(self, attribute: ast.Attribute) -> list[ast.Attribute]:
        """Where an attribute of `self` stands in its class, and that of another name that is bound once, anywhere."""
        if _is_own(attribute):
            owner = next((node for node, _ in self.scopes.ancestors(attribute) if isinstance(node, ast.ClassDef)), None)
            nodes = () if owner is None else walk(owner)
            return [node for node in nodes if _is_own(node) and node.attr == attribute.attr]
        assert isinstance(attribute.value, ast.Name)
        variable = self.scopes.variable(attribute.value)
        loads = self.scopes.unbound.get(attribute.value.id, []) if variable is None else variable.loads
        parents = [self.scopes.parent(load) for load in loads if variable is None or len(variable.bindings) == 1]
        return [node for node in parents if isinstance(node, ast.Attribute) and node.attr == attribute.attr]

    def _whole_path(self, node: ast.expr, path: str) -> tuple[ast.expr, str]:
        """A read of something imported, with the attributes behind it up to a deprecated function."""
        while not _API.fullmatch(path):
            parent = self.scopes.parent(node)
            if not isinstance(parent, ast.Attribute):
                break
            node, path = parent, f"{path}.{parent.attr}"
        return node, path

    def _role(self, node: ast.expr, is_api: bool) -> Role:
        parent = self.scopes.parent(node)
        assignment = self.assignment_of(node)
        if assignment is not None and self._is_alias(assignment):
            return Role.ALIAS
        if not is_api:
            return Role.OTHER
        if isinstance(parent, ast.Call) and parent.func is node:
            return Role.CALL
        if node in getattr(parent, "decorator_list", ()):
            return Role.DECORATOR
        if (
            isinstance(parent, ast.Call)
            and parent.args[:1] == [node]
            and self.path_of(parent.func) == "functools.partial"
        ):
            return Role.PARTIAL
        return Role.CLASS if self._stands_for_class(node) else Role.OTHER

    def _is_alias(self, statement: ast.Assign) -> bool:
        target = statement.targets[0]
        return isinstance(target, ast.Name) and not self.scopes.bound_by(target).scope.is_class

    def _stands_for_class(self, node: ast.expr) -> bool:
        for parent, child in self.scopes.ancestors(node):
            if isinstance(parent, ast.Subscript | ast.Tuple | ast.List | ast.BinOp):
                continue
            if isinstance(parent, ast.Call):
                checks = isinstance(parent.func, ast.Name) and parent.func.id in ("isinstance", "issubclass")
                return checks and parent.args[1:] == [child]
            return child is getattr(parent, "annotation", None) or child is getattr(parent, "returns", None)
        return False

    def is_version_fallback(self, node: ast.AST) -> bool:
        """Whether a node runs only where an older torch is installed: the new names stand in the other branch."""
        for parent, child in self.scopes.ancestors(node):
            if isinstance(parent, ast.Try) and isinstance(child, ast.ExceptHandler):
                if self._speaks_of_new_names(parent.body):
                    return True
            elif isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                parts = (_listed(parent.body), _listed(parent.orelse), [parent.test])
                others = [part for other in parts if child not in other for part in other]
                if _VERSION_TEST.search(ast.unparse(parent.test)) and self._speaks_of_new_names(others):
                    return True
        return False

    def has_newer_fallback(self, node: ast.AST) -> bool:
        """Whether a node is in a `try` whose handlers turn to the new names."""
        return any(
            isinstance(parent, ast.Try)
            and child in parent.body
            and any(self._speaks_of_new_names(handler.body) for handler in parent.handlers)
            for parent, child in self.scopes.ancestors(node)
        )

    def _speaks_of_new_names(self, nodes: list[ast.stmt] | list[ast.expr] | list[ast.stmt | ast.expr]) -> bool:
        return any(_NEW_TEXT.search(ast.unparse(node)) for node in nodes)

    def prefers_new(self, use: AmpUse) -> bool:
        """Whether the name used is bound to the new function, and to the old one only for an older torch."""
        if use.variable is None:
            return False
        bound = self._bound(use.variable)
        old = [binding for binding, path in bound if path is not None and _REPLACED.fullmatch(path)]
        return _any_new(path for _, path in bound) and all(self.is_version_fallback(binding) for binding in old)


def _is_own(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """`self.something`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _any_new(paths: Iterable[str | None]) -> bool:
    return any(path is not None and _NEW.fullmatch(path) for path in paths)


def _sides(node: ast.expr) -> list[ast.expr]:
    """What an expression may give: both sides of `autocast if amp else suppress`, itself where it is no choice."""
    return [*_sides(node.body), *_sides(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def renamed(path: str) -> str | None:
    """The path in `torch.amp` of something in the deprecated modules; None for what has none there."""
    api = _API.fullmatch(path)
    if api:
        return f"torch.amp.{api[2]}"
    module = _MODULE.fullmatch(path)
    return f"torch.amp{module[2] or ''}" if module else None


def _listed(part: ast.expr | list[ast.stmt]) -> list[ast.stmt | ast.expr]:
    return [*part] if isinstance(part, list) else [part]


def _leads_to_amp(path: str) -> bool:
    return path in ("torch", "torch.cuda", "torch.cpu") or _REPLACED.fullmatch(path) is not None


def _import_of(node: ast.AST) -> AmpImport | None:
    """The deprecated names of an import statement, None for any other node."""
    if isinstance(node, ast.Import):
        names = [(alias, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        starred = node.names[0].name == "*"
        names = [(alias, f"{node.module}" if starred else f"{node.module}.{alias.name}") for alias in node.names]
    else:
        return None
    deprecated = [(alias, path) for alias, path in names if _REPLACED.fullmatch(path)]
    return AmpImport(node, deprecated) if deprecated else None
