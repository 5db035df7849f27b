"""Which names are bound for certain behind a statement, and which are read ahead of it."""

import ast

import pytest

from oomfix.rewrite.dataflow.liveness import Liveness, definitely_bound, names_bound


@pytest.mark.parametrize(
    ("last", "bound"),
    [
        ("case _:\n        a = 2", {"a"}),
        ("case other:\n        a = 2", {"a"}),
        ("case _:\n        raise ValueError(kind)", {"a", "b"}),
        ("case _ if strict:\n        a = 2", set()),
        ("case 2:\n        a = 2", set()),
    ],
)
def test_a_match_binds_what_all_of_its_cases_bind_where_one_is_for_all(last, bound):
    code = f"match kind:\n    case 1:\n        a, b = 1, 2\n    {last}\n"
    assert definitely_bound(ast.parse(code).body) == bound


@pytest.mark.parametrize(
    ("code", "read"),
    [
        (
            "match kind:\n    case Kind.A:\n        b = a\n    case [a, *b]:\n        print(a, b)\n",
            {"kind", "Kind", "a", "print"},
        ),
        ("match kind:\n    case Point(x=a, y=c) if a > b:\n        print(a, c)\n", {"kind", "Point", "b", "print"}),
        ("with one() as a, two(a) as b:\n    b.go(c)\n", {"one", "two", "c"}),
        ("with one() as a, two(b) as b:\n    b.go(a)\n", {"one", "two", "b"}),
    ],
)
def test_names_are_read_ahead_of_a_statement_unless_it_binds_them_first(code, read):
    tree = ast.parse(code)
    assert Liveness(tree, tree).before(tree.body, set()) == read


def test_a_comprehension_binds_what_it_names_in_its_expressions_alone():
    code = "print([last := f(x) for x in xs])\nfound = {k: (n := v) for k, v in d.items()}\n"
    assert names_bound(*ast.parse(code).body) == {"last", "found", "n"}
