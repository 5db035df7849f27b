"""From `torch.cuda.amp` and `torch.cpu.amp` to `torch.amp`: the edits of imports and uses that only work together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from oomfix.script.fixes.amp_imports import CannotRewrite, insert_before, rewrite_import
from oomfix.script.fixes.amp_names import APIS, AmpImport, AmpNames, AmpUse, Role, renamed
from oomfix.script.syntax.edits import Edit, add_keyword, bounds, prepend_argument, quote_of
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.scopes import Variable

if TYPE_CHECKING:
    from oomfix.source import Source

EXISTS_FROM = {"autocast": (1, 10), "GradScaler": (2, 3), "custom_fwd": (2, 4), "custom_bwd": (2, 4)}
"""The first torch with each of them in `torch.amp`."""

_OLD_PARAMETERS = {"autocast": ("enabled", "dtype", "cache_enabled"), "GradScaler": ()}
"""Positional parameters that stand elsewhere in the new signature; GradScaler's only move up behind the device."""

_DEFAULT_DTYPES = {"cuda": ("float16", "half"), "cpu": ("bfloat16",)}
_NEW_STAR_NAMES = ("is_autocast_available", "autocast_decorator")

_Item = AmpImport | AmpUse | Variable | str
_STAR = "the names behind a star import"


@dataclass(eq=False)
class AmpRewrite:
    """What makes a group of imports and uses call `torch.amp`: all of its edits, or the reason why there are none."""

    edits: tuple[Edit, ...]
    reason: str | None


class AmpRewriter:
    """Rewrites the deprecated names of a file, group by group.

    A group is what would break if only part of it were edited: an import with every use of the names it binds.

    Args:
        target_torch: edits need nothing newer than this version; None for the latest.
    """

    def __init__(self, source: Source, names: AmpNames, target_torch: tuple[int, int] | None) -> None:
        self.source = source
        self.names = names
        self.target_torch = target_torch
        self._inserted: dict[ast.AST, Edit] = {}
        self._rewrites: dict[_Item, AmpRewrite] = {}
        for group in self._groups():
            rewrite = self._rewrite(group)
            self._rewrites.update(dict.fromkeys(group, rewrite))

    def rewrite_of(self, item: AmpImport | AmpUse) -> AmpRewrite:
        """The rewrite of the group that an import or a use belongs to."""
        return self._rewrites[item]

    # Groups

    def _groups(self) -> list[list[_Item]]:
        group_of: dict[_Item, list[_Item]] = {}
        for items in self._links():
            merged = list(dict.fromkeys(member for item in items for member in group_of.get(item, [item])))
            group_of.update(dict.fromkeys(merged, merged))
        return list({id(group): group for group in group_of.values()}.values())

    def _links(self) -> Iterable[list[_Item]]:
        """What belongs together."""
        scopes = self.names.scopes
        for use in self.names.uses:
            link: list[_Item] = [use]
            if use.through_import:
                link.append(use.variable or _STAR)
            if use.holder is not None:
                link.append(use.holder)
            if use.role is Role.ALIAS:
                assignment = self.names.assignment_of(use.node)
                assert assignment is not None
                link.append(scopes.bound_by(assignment.targets[0]))
            yield link
        for found in self.names.imports:
            if found.starred:
                yield [found, _STAR]
            else:
                named = isinstance(found.statement, ast.ImportFrom)
                yield [found, *(scopes.bound_by(alias) for alias, _ in found.names if named or alias.asname)]
        for api in APIS:
            uses: list[_Item] = [use for use in self.names.uses if use.api == api]
            if any(isinstance(use, AmpUse) and self._asks_for_class(use) for use in uses):
                # objects of the new class are none of the old one: isinstance would answer differently
                yield uses

    def _asks_for_class(self, use: AmpUse) -> bool:
        return use.role is Role.CLASS or isinstance(self.names.scopes.parent(use.node), ast.Compare)

    def _rewrite(self, group: list[_Item]) -> AmpRewrite:
        edits: list[Edit] = []
        try:
            for item in group:
                self._check(item)
                if isinstance(item, AmpImport):
                    edits += rewrite_import(self.source, item, self._block(item.statement))
                elif isinstance(item, AmpUse):
                    edits += self._edits_of_use(item)
        except CannotRewrite as reason:
            return AmpRewrite((), str(reason))
        return AmpRewrite(tuple({id(edit): edit for edit in edits}.values()), None)

    def _block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements among which a statement stands."""
        parent = self.names.scopes.parent(statement)
        lists = [value for _, value in ast.iter_fields(parent) if isinstance(value, list)]
        return next(block for block in lists if statement in block)

    # What must hold

    def _check(self, item: _Item) -> None:
        """Raises CannotRewrite where an item cannot be rewritten safely."""
        if self.names.patched:
            raise CannotRewrite("the file replaces parts of torch's own module")
        if isinstance(item, Variable):
            self._check_variable(item)
        elif isinstance(item, str):
            self._check_star()
        else:
            self._check_version(item)
            if self.names.is_version_fallback(item.place) or self.names.has_newer_fallback(item.place):
                raise CannotRewrite("the file chooses between the old and the new names by itself")

    def _check_version(self, item: AmpUse | AmpImport) -> None:
        apis = [item.api] if isinstance(item, AmpUse) else [path.rpartition(".")[2] for _, path in item.names]
        needed = max(EXISTS_FROM.get(api or "", (1, 10)) for api in apis)
        if self.target_torch is not None and self.target_torch < needed:
            raise CannotRewrite(f"the new name needs torch {needed[0]}.{needed[1]}")

    def _check_variable(self, variable: Variable) -> None:
        if self.names.only_origin(variable) is None:
            raise CannotRewrite(f"`{variable.name}` is bound to something else as well")
        if variable.scope.is_class:
            raise CannotRewrite(f"`{variable.name}` is an attribute of a class")
        if variable.scope is self.names.scopes.module and self._is_exported(variable):
            raise CannotRewrite(f"other files may import `{variable.name}` from this one")

    def _is_exported(self, variable: Variable) -> bool:
        if variable.name in self._public_names or self.source.path.endswith("__init__.py"):
            return True
        if variable.loads:
            return False
        marked = any(
            "F401" in self.source.lines[node.lineno - 1] or node.asname == node.name
            for node in variable.bindings
            if isinstance(node, ast.alias)
        )
        return marked or any(isinstance(node, ast.Name) for node in variable.bindings)

    @cached_property
    def _public_names(self) -> set[str]:
        """The strings in `__all__`."""
        return {
            text.value
            for statement in self.source.tree.body
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) and "__all__" in ast.unparse(statement)
            for text in walk(statement)
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
        }

    def _check_star(self) -> None:
        stars = [
            node for node in walk(self.source.tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        ]
        bound = self.names.scopes.module.variables
        if len(stars) > 1 or any(name in bound for name in (*APIS, *_NEW_STAR_NAMES)):
            raise CannotRewrite("a star import hides what its names are")
        if "amp_definitely_not_available" in self.names.scopes.unbound:
            raise CannotRewrite("`amp_definitely_not_available` is not in torch.amp")

    # Uses

    def _edits_of_use(self, use: AmpUse) -> tuple[Edit, ...]:
        if any(isinstance(parent, ast.JoinedStr) for parent, _ in self.names.scopes.ancestors(use.node)):
            raise CannotRewrite("a use stands inside an f-string")
        if use.holder is not None and use.holder.role is Role.PARTIAL:
            return ()  # the partial has what the new function wants
        if use.holder is not None:
            raise CannotRewrite(f"`{ast.unparse(use.node)}` holds it, which other files may set or read")
        if use.role is Role.OTHER:
            raise CannotRewrite(f"`{ast.unparse(use.node)}` is also used in a way that is not followed")
        edits = () if use.through_import else self._edits_of_path(use)
        if isinstance(use.whole, ast.Call):
            return (*edits, *self._edits_of_call(use, use.whole))
        if use.role is Role.DECORATOR:
            if use.api not in ("custom_fwd", "custom_bwd"):
                raise CannotRewrite(f"`@{ast.unparse(use.node)}` lacks its parentheses")
            end = bounds(self.source, use.node)[1]
            return (*edits, Edit(end, end, f"(device_type={self._device(use)})"))
        return edits

    def _device(self, use: AmpUse) -> str:
        quote = quote_of(self.source)
        return f"{quote}{use.device}{quote}"

    def _edits_of_path(self, use: AmpUse) -> tuple[Edit, ...]:
        """`torch.cuda.amp.autocast` -> `torch.amp.autocast`, by whatever name the file has for torch."""
        start, end = bounds(self.source, use.node)
        if not re.fullmatch(r"[\w.]+", self.source.text[start:end]):
            raise CannotRewrite(f"`{ast.unparse(use.node)}` is written over several lines")
        path = (renamed(use.path) or use.path).removeprefix("torch")
        torch = self._name_of_torch(use)
        if torch is not None:
            return (Edit(start, end, f"{torch}{path}"),)
        return (*self._import_torch(use), Edit(start, end, f"torch{path}"))

    def _name_of_torch(self, use: AmpUse) -> str | None:
        """What torch is called where a use stands."""
        if use.root_path == "torch":
            return use.root.id
        scopes = self.names.scopes
        torch = scopes.lookup("torch", scopes.scope_of(use.root))
        return "torch" if torch is not None and self.names.only_origin(torch) == "torch" else None

    def _import_torch(self, use: AmpUse) -> list[Edit]:
        """What makes `torch` a name where a use stands: an import beside that of its own root."""
        scopes = self.names.scopes
        taken = scopes.lookup("torch", scopes.scope_of(use.root)) is not None
        if taken or use.variable is None or self.names.only_origin(use.variable) is None:
            raise CannotRewrite("`torch` means something else here")
        statements = [scopes.parent(binding) for binding in use.variable.bindings]
        for statement in statements:
            if statement not in self._inserted:
                assert isinstance(statement, ast.stmt)
                self._inserted[statement] = insert_before(self.source, statement, "import torch")
        return [self._inserted[statement] for statement in statements]

    def _edits_of_call(self, use: AmpUse, call: ast.Call) -> tuple[Edit, ...]:
        """The device, as the new signature takes it; `call` is that of the use, or `partial(use, ...)`."""
        assert use.api is not None
        if any(keyword.arg in ("device_type", "device") for keyword in call.keywords):
            raise CannotRewrite("the call names a device already")
        if use.api in ("custom_fwd", "custom_bwd"):
            return add_keyword(self.source, call, f"device_type={self._device(use)}")
        arguments = f"{self._device(use)}{self._explicit_dtype(use, call)}"
        if use.role is Role.PARTIAL:
            edits = self._edits_of_partial(use, call, arguments)
        else:
            edits = prepend_argument(self.source, call, arguments, _OLD_PARAMETERS[use.api])
        if not edits:
            raise CannotRewrite("a starred argument hides what the positional ones are")
        return edits

    def _edits_of_partial(self, use: AmpUse, call: ast.Call, arguments: str) -> tuple[Edit, ...]:
        start, end = bounds(self.source, use.node)
        # the first positional argument is `enabled`: where that is given, none can follow
        if use.api == "autocast" and all(keyword.arg != "enabled" for keyword in call.keywords):
            raise CannotRewrite("positional arguments of the partial mean others in the new signature")
        if not re.fullmatch(r"\s*\(\s*", self.source.text[bounds(self.source, call.func)[1] : start]):
            raise CannotRewrite("the partial has parentheses or comments around its function")
        return (Edit(end, end, f", {arguments}"),)

    # Precision

    def _explicit_dtype(self, use: AmpUse, call: ast.Call) -> str:
        """The old default, where the new one (that of the autocast around it) may be another: `, dtype=torch.float16`.

        Raises:
            CannotRewrite: it has to be said, and cannot.
        """
        if use.api != "autocast" or self._autocast_dtypes <= {
            f"torch.{dtype}" for dtype in _DEFAULT_DTYPES[use.device]
        }:
            return ""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        enabled = call.args[0] if call.args and use.role is Role.CALL else given.get("enabled")
        if "dtype" in given or len(call.args) > 1:
            return ""
        if isinstance(enabled, ast.Constant) and enabled.value is False:
            return ""
        torch = self._name_of_torch(use)
        if None in given or torch is None:
            raise CannotRewrite("another autocast of the file has its own dtype, which the new call would take over")
        return f", dtype={torch}.{_DEFAULT_DTYPES[use.device][0]}"

    @cached_property
    def _autocast_dtypes(self) -> set[str]:
        """The dtypes that the file gives to autocast anywhere."""
        dtypes = {"set by call"} if "set_autocast" in self.source.text else set()
        for node in walk(self.source.tree):
            if isinstance(node, ast.Call) and last_name(node).endswith("autocast"):
                given = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "dtype")]
                dtypes |= {self.names.path_of(dtype) or ast.unparse(dtype) for dtype in given}
        return dtypes
