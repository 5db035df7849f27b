"""Graphs of autograd that a script draws or looks at: what gives them needs gradients."""

from __future__ import annotations

import pytest

DRAWN = """
    import torch
    {imported}

    model = Net()
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    out = model(torch.zeros(1, 3, 32, 32))
    {shown}
"""


@pytest.mark.parametrize(
    ("imported", "shown", "found"),
    [
        ("from torchviz import make_dot", "make_dot(out.mean(), params=weights).render('net')", []),
        ("import torchviz", "torchviz.make_dot(out)", []),
        ("from tools import make_dot", "picture = make_dot(out)", []),
        ("pass", "print(out.grad_fn)", []),
        ("pass", "walk(out.sum().grad_fn.next_functions)", []),
        ("pass", "print(out.shape)", [("OOM201", 8)]),
    ],
)
def test_a_network_whose_graph_is_looked_at_runs_with_gradients(report, imported, shown, found):
    assert report(DRAWN.format(imported=imported, shown=shown)) == found


def test_a_function_of_the_file_that_goes_through_the_graph_needs_it(report):
    code = """
        import torch

        def save_graph(model, device):
            model.eval()
            out = model(torch.randn(1, 3, 224, 224).to(device))

            def add_nodes(node):
                for child, _ in node.next_functions:
                    add_nodes(child)

            add_nodes(out.grad_fn)
    """
    assert report(code) == []
