"""Unit tests, by the shape in which pytest finds them without being imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator


def holds_unit_tests(module: ast.Module) -> bool:
    """Whether a file has functions `test_...`, or methods of classes `Test...`, that take nothing and assert."""
    return any(
        function.name.startswith("test_")
        and len(function.args.args) == taken
        and any(isinstance(statement, ast.Assert) for statement in function.body)
        for function, taken in _collected(module)
    )


def _collected(module: ast.Module) -> Iterator[tuple[ast.FunctionDef, int]]:
    """The functions that pytest looks at, with how many parameters one has that nothing is given to but its object."""
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement, 0
        elif isinstance(statement, ast.ClassDef) and re.match("Test([A-Z_]|$)", statement.name):
            methods = [method for method in statement.body if isinstance(method, ast.FunctionDef)]
            if all(method.name != "__init__" for method in methods):  # of which pytest makes no object
                yield from ((method, 1) for method in methods)
