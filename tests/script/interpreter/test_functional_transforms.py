"""Functions of torch that differentiate the function that they are given."""

from __future__ import annotations

import pytest

CODE = """
    import functorch
    import torch

    class Penalty:
        def test(self, net, batch, weights):
            net.eval()
            moved = {transform}(lambda x: net(x), {more})
            return moved[1].square().mean()
"""


@pytest.mark.parametrize(
    ("transform", "more", "found"),
    [
        ("functorch.jvp", "(batch,), (weights,)", []),
        ("torch.func.vjp", "batch", []),
        ("torch.func.jacrev", "argnums=0", []),
        ("torch.autograd.functional.jacobian", "batch", []),
        ("torch.autograd.functional.hessian", "batch", []),
        ("map", "batch", [("OOM201", 7)]),
        ("apply", "batch", [("OOM201", 7)]),
    ],
)
def test_what_a_transform_differentiates_is_no_evaluation(report, transform, more, found):
    assert report(CODE.format(transform=transform, more=more)) == found


def test_neither_is_a_function_that_is_given_by_its_name(report):
    code = """
        import torch

        def validate(net, batch):
            def energy(x):
                return net(x).sum()
            forces = torch.func.grad(energy)(batch)
            return forces, {asked}
    """
    assert report(code.format(asked="None")) == []
    assert report(code.format(asked="net(batch)")) == [("OOM201", 7)]
