"""What statements read whatever happens."""

import ast

import pytest

from oomfix.rewrite.slicing.unsure_inputs import read_at_once


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("loss = f(x, y[i])", "f x y i"),
        ("x = g(z)\nloss = f(x)", "g z f"),
        ("x += a\nf(x)", "a f"),
        ("x: T = a", "a"),
        ("x: T\ny = a", "a"),
        ("f(a)\nif b:\n    c()\nf(d)", "f a"),
        ("with made(a) as b:\n    c = b + d", "made a d"),
        ("x = a and b", "a"),
        ("x = b if a else c", "a"),
        ("x = a < b < c", "a b"),
        ("x = [i + c for i in a for j in b]", "a"),
        ("x = {i: c for i in a}", "a"),
        ("x = f(lambda: a)", "f"),
        ("x[a] = b", "x a b"),
    ],
)
def test_names_that_are_read_in_any_case(code, expected):
    assert read_at_once(ast.parse(code).body) == set(expected.split())
