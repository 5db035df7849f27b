"""Chains of tests without an `else` of which one must hold."""

from __future__ import annotations

import pytest

CHAINED = """
    def epoch(loader, kind, warm):
        for x, y in loader:
            {before}
            out = model(x)
            if kind == "ce":
                loss = cross_entropy(out, y)
            elif kind == "mse":
                loss = squares(out, y)
            {between}
            loss.backward(retain_graph=True)
            optimizer.step()
            if warm:
                out = model(y)
                if kind == "ce":
                    loss = cross_entropy(out, y)
                elif {test}:
                    loss = squares(out, y)
                loss.backward()
                optimizer.step()
"""
RETAINED = ("OOM103", 10)


def chained(before: str = "pass", between: str = "pass", test: str = 'kind == "mse"') -> str:
    return CHAINED.format(before=before, between=between, test=test)


def test_a_loss_that_every_test_makes_anew_is_never_the_last_one(report):
    assert RETAINED in report(chained())


@pytest.mark.parametrize(
    "other",
    [
        {"before": "loss = 0.0"},
        {"between": "if kind == 'none': continue"},
        {"between": "kind = next(kinds)"},
        {"test": 'kind == "l1"'},
    ],
)
def test_where_none_may_hold_the_last_loss_may_come_through(report, other):
    assert RETAINED not in report(chained(**other))
