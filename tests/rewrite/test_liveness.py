"""Which names are bound for certain behind a statement."""

import ast

import pytest

from oomfix.rewrite.liveness import definitely_bound


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
