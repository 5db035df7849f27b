"""What may reset or change gradients on its way."""

import ast

import pytest

from oomfix.rewrite.dataflow.on_gradients import may_reset_gradients


@pytest.mark.parametrize(
    ("code", "resets"),
    [
        ("[clamp(p) for p in parameters]", True),
        ("[losses.append(loss) for loss in found]", False),
        ("sizes = [count(p) for p in parameters]", False),
        ("dist.all_reduce(accuracy)", False),
        ("for p in parameters: dist.all_reduce(p)", True),
    ],
)
def test_gradients_may_be_reset_by_what_is_called_for_its_effect(code, resets):
    assert may_reset_gradients(ast.parse(code).body[0]) == resets
