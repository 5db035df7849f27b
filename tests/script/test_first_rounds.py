"""A test for None that only the first round of a loop passes: the later rounds take its other side."""

from __future__ import annotations

import pytest

TEST = """
    import torch

    def evaluate(model, loader):
        model.eval()
        total, state = None, None
        for x, y in loader:
            with {grad}:
                loss = criterion(model(x), y)
            if {test}:
                {first}
            else:
                {later}
        return total
"""


@pytest.mark.parametrize(
    ("test", "first", "later", "found"),
    [
        ("total is None", "total = loss", "total += loss", [("OOM101", 12)]),
        ("total is None", "total = loss", "total = total + loss", [("OOM101", 12)]),
        ("total is None", "total = loss", "total = torch.cat([total, loss])", [("OOM102", 12)]),
        ("total is not None", "total += loss", "total = loss", [("OOM101", 10)]),
        ("not total is None", "total += loss", "total = loss", [("OOM101", 10)]),
        ("total is None", "total = loss.item()", "total += loss.item()", []),
        ("state is None", "total = loss", "total = torch.cat([total, loss])", []),
    ],
)
def test_what_the_later_rounds_do_is_followed(report, test, first, later, found):
    code = TEST.format(grad="torch.enable_grad()", test=test, first=first, later=later)
    assert [(code, line) for code, line in report(code) if code.startswith("OOM1")] == found


def test_without_gradients_they_keep_nothing(report):
    code = TEST.format(grad="torch.no_grad()", test="total is None", first="total = loss", later="total += loss")
    assert report(code) == []


def test_a_network_that_the_first_round_makes_is_run_by_all(report):
    assert report("""
        from torch import nn

        def evaluate(loader):
            net = None
            for x, y in loader:
                if net is None:
                    net = nn.Linear(x.shape[1], 2)
                    net.eval()
                else:
                    print(y)
                print(net(x).argmax(1))
    """) == [("OOM201", 11)]
