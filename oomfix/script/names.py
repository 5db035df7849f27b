"""Names and paths: what an import binds, and how an access path such as `self.loss` is written."""

from __future__ import annotations

import ast


def path_of(node: ast.expr) -> str | None:
    """`self.loss`, `losses['g']`, `model`: the text of an access path; None for anything computed."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = path_of(node.value)
        return None if base is None else f"{base}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = path_of(node.value)
        return None if base is None else f"{base}[{node.slice.value!r}]"
    return None


def imported(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """`(local name, qualified name)` of everything an import statement binds.

    `import torch.nn.functional as F` binds `F` to the whole path, `import torch.nn` binds `torch`. A relative import
    keeps its leading dots, so that it never looks like an installed package.
    """
    if isinstance(node, ast.Import):
        return [
            (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
            for alias in node.names
        ]
    module = "." * node.level + (node.module or "")
    return [(alias.asname or alias.name, f"{module}.{alias.name}") for alias in node.names]
