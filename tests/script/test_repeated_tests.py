"""Decisions that are asked twice: what one side of them has bound is there where it is asked again."""

from __future__ import annotations

import pytest

ASKED_TWICE = """
    def train(loader, noise):
        for x, y in loader:
            net.train()
            model.train()
            if {first}:
                level = net(x)
                out = model(x, level)
            else:
                out = model(x)
            loss = criterion(out, y)
            if {again}:
                loss = loss + criterion(level, noise)
            loss.backward()
            optimizer.step()
            net.eval()
            model.eval()
            if opt.mode == "both":
                level = net(x)
                out = model(x, level)
            else:
                out = model(x)
            print(psnr(out, y))
"""


def test_a_look_after_the_step_is_none_of_the_next_loss_where_the_same_test_makes_its_term(report):
    reported = report(ASKED_TWICE.format(first='opt.mode == "both"', again='opt.mode == "both"'))
    assert ("OOM201", 18) in reported
    assert ("OOM201", 19) in reported


@pytest.mark.parametrize("again", ['opt.mode != "one"', "asks()"])
def test_another_test_says_nothing_about_what_was_bound(report, again):
    assert ("OOM201", 18) not in report(ASKED_TWICE.format(first='opt.mode == "both"', again=again))


CHANGED = """
    def train(loader, kind):
        total = 0.0
        for x, y in loader:
            if kind == "plain":
                value = 1.0
            else:
                value = criterion(model(x), y)
                value.backward()
                optimizer.step()
            {between}
            if kind == "plain":
                total += value
"""


@pytest.mark.parametrize(
    ("between", "kept"), [("", False), ("kind = next(kinds)", True), ("value = criterion(model(x), y)", True)]
)
def test_what_was_bound_since_counts(report, between, kept):
    assert (("OOM101", 12) in report(CHANGED.format(between=between))) is kept
