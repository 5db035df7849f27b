"""Names and paths: what an import binds, and how an access path such as `self.loss` is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MANY_NAMES = 1 << 12
"""More than most files have; what a name says is asked at every place it stands, and worth remembering."""

MOVES = frozenset("to cuda half float double bfloat16 cpu".split())
"""Methods that move what they belong to, to a device or a type."""


def path_of(node: ast.expr) -> str | None:
    """`self.loss`, `losses['g']`, `model`: the text of an access path; None for anything computed."""
    end = ""
    while True:
        if isinstance(node, ast.Name):
            return node.id + end
        if isinstance(node, ast.Attribute):
            end = f".{node.attr}{end}"
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            end = f"[{node.slice.value!r}]{end}"
        else:
            return None
        node = node.value


def path_of_each(node: ast.expr) -> str | None:
    """`self.encoders[*]` of `self.encoders[name]`, which speaks for each of them; any other path as it is."""
    path = path_of(node)
    if path is None and isinstance(node, ast.Subscript) and (holder := path_of_each(node.value)) is not None:
        return f"{holder}[*]"
    return path


def root_of(path: str) -> str:
    """`self` of `self.loss`, `losses` of `losses['g']`: the name that a path starts with."""
    return path if path.isidentifier() else path.split(".", 1)[0].split("[", 1)[0]


def last_of(path: str | None) -> str:
    """`loss` of `self.loss`: the name that a path ends with; empty where there is no path."""
    return (path or "").rsplit(".", 1)[-1]


def last_name(call: ast.Call) -> str:
    """`train` of `model.train()`, `print` of `print(x)`, `view` of `f(x).view(-1)`; empty for a computed function."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def owner_of(call: ast.Call) -> str | None:
    """`self.model` of `self.model.train()`: the path of what a called method belongs to; None for plain functions."""
    return path_of(call.func.value) if isinstance(call.func, ast.Attribute) else None


def left_by_methods(node: ast.expr) -> ast.Attribute:
    """The place of what methods out of sight leave on an object, whatever attribute they leave it in."""
    return ast.Attribute(node, "*", ast.Store())


USUAL_NAMES = {
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "optim": "torch.optim",
    "np": "numpy",
    "DataLoader": "torch.utils.data.DataLoader",
}
"""What names nearly always mean when a star import hides where they come from."""

STARRED = {
    "torch.cuda.amp": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    "torch.cpu.amp": ("autocast",),
    "torch.amp": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    "torch": ("no_grad", "enable_grad", "inference_mode", "autocast", "load", "nn", "cuda"),
    "torch.nn": ("functional", "Module", "CrossEntropyLoss", "MSELoss", "BCELoss", "DataParallel"),
}
"""What a star import of a known module binds, as far as it matters here."""


def imported(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """`(local name, qualified name)` of everything an import statement binds.

    `import torch.nn.functional as F` binds `F` to the whole path, `import torch.nn` binds `torch`. A relative import
    keeps its leading dots, so that it never looks like an installed package.
    """
    if isinstance(node, ast.Import):
        return [(alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2 for alias in node.names]
    module = "." * node.level + (node.module or "")
    if node.names[0].name == "*":
        known = [(name, f"{module}.{name}") for name in STARRED.get(module, ())]
        return [*USUAL_NAMES.items(), *known]
    return [(alias.asname or alias.name, f"{module}.{alias.name}") for alias in node.names]


def undistributed(path: str) -> str:
    """`net.encode` of `net.module.encode`: what `DistributedDataParallel` is put around is its `module`."""
    holder, wrapped, rest = path.partition(".module.")
    return f"{holder}.{rest}" if wrapped and holder != "self" else path


def without_moves(node: ast.expr) -> ast.expr:
    """`Net(size)` of `Net(size).to(device)`: what is moved where it is made."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
        node = node.func.value
    return node


def receivers(node: ast.expr) -> Iterator[ast.expr]:
    """What the methods of a chain are called on, and the last of it: `f(x).view(-1)`, `f(x)` in `f(x).view(-1)[0]`."""
    while True:
        yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        else:
            return


def unpacked(target: ast.expr) -> Iterator[ast.expr]:
    """`a`, `b` and `c` of `(a, (b, *c))`: the parts of a tuple or list, or the one that is none."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from unpacked(element)
    elif isinstance(target, ast.Starred):
        yield target.value
    else:
        yield target


def with_holders(value: ast.expr) -> Iterator[ast.expr]:
    """A value, and what it is an entry of: `state["model"]`, `state.get("model")`."""
    yield value
    if isinstance(value, ast.Subscript):
        yield from with_holders(value.value)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
        yield from with_holders(value.func.value)
