"""Scopes: a name that is read refers to the variable that Python would take."""

from __future__ import annotations

import ast

import pytest

from oomfix.script.syntax.scopes import Scopes


def scopes_with_reads(code: str) -> tuple[Scopes, list[ast.Name]]:
    """The scopes of a code and its reads of `x`, by line."""
    tree = ast.parse(code)
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "x"]
    reads = [node for node in reads if isinstance(node.ctx, ast.Load)]
    return Scopes(tree), sorted(reads, key=lambda node: (node.lineno, node.col_offset))


# where `x` is read once, and the line of the binding that it means
ONE_READ = {
    "module": ("x = 1\ndef f():\n    return x\n", 1),
    "parameter": ("x = 1\ndef f(x):\n    return x\n", 2),
    "default of a parameter": ("x = 1\ndef f(x=x):\n    pass\n", 1),
    "decorator": ("x = 1\n@x\ndef f(x):\n    pass\n", 1),
    "annotation": ("x = 1\ndef f(y: x):\n    x = 2\n", 1),
    "lambda": ("x = 1\nf = lambda x: x\n", 2),
    "local that is bound later": ("x = 1\ndef f():\n    print(x)\n    x = 2\n", 4),
    "enclosing function": ("x = 1\ndef f():\n    x = 2\n    def g():\n        return x\n", 3),
    "class body": ("x = 1\nclass A:\n    x = 2\n    y = x\n", 3),
    "method, which does not see its class": ("x = 1\nclass A:\n    x = 2\n    def f(self):\n        return x\n", 1),
    "base class": ("x = 1\nclass A(x):\n    x = 2\n", 1),
    "comprehension": ("x = 1\n[x\n for x in y]\n", 3),
    "first iterable of a comprehension": ("x = 1\n[y for x in x]\n", 1),
    "second iterable of a comprehension": ("x = 1\n[y for z in w\n for x in x]\n", 3),
    "walrus in a comprehension": ("def f():\n    [(x := y) for y in z]\n    return x\n", 2),
    "global": ("x = 1\ndef f():\n    x = 2\n    def g():\n        global x\n        print(x)\n", 1),
    "nonlocal": ("x = 1\ndef f():\n    x = 2\n    def g():\n        nonlocal x\n        print(x)\n", 3),
    "exception": ("try: pass\nexcept E as x:\n    print(x)\n", 2),
    "pattern": ("match y:\n    case [1, *x]:\n        print(x)\n", 2),
    "import": ("import x.y\nx.y.z\n", 1),
    "import under a name": ("import y as x\nx\n", 1),
    "function": ("def x():\n    x()\n", 1),
}


@pytest.mark.parametrize(("code", "line"), ONE_READ.values(), ids=ONE_READ)
def test_a_read_means_the_binding_that_python_takes(code: str, line: int) -> None:
    scopes, (read,) = scopes_with_reads(code)
    variable = scopes.variable(read)
    assert variable is not None
    assert [getattr(binding, "lineno", None) for binding in variable.bindings] == [line]
    assert variable.loads == [read]


def test_a_binding_behind_global_belongs_to_the_module() -> None:
    scopes, (read,) = scopes_with_reads("x = 1\ndef f():\n    global x\n    x = 2\nprint(x)\n")
    variable = scopes.variable(read)
    assert variable is scopes.module.variables["x"]
    assert sorted(binding.lineno for binding in variable.bindings if isinstance(binding, ast.Name)) == [1, 4]


def test_a_binding_behind_nonlocal_belongs_to_the_function_around() -> None:
    code = "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    return x\n"
    scopes, (read,) = scopes_with_reads(code)
    variable = scopes.variable(read)
    assert variable is not None
    assert sorted(binding.lineno for binding in variable.bindings if isinstance(binding, ast.Name)) == [2, 5]


def test_what_nothing_binds_is_unbound() -> None:
    scopes, (read,) = scopes_with_reads("from y import *\nclass A:\n    x = 1\ndef f():\n    return x\n")
    assert scopes.variable(read) is None
    assert scopes.unbound["x"] == [read]
