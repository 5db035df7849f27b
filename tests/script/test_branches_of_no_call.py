"""Branches that no call of the file takes: other files may ask for them."""

from __future__ import annotations

import pytest

PREDICT = """
    import torch

    def predict(model, x, flipped=False):
        if flipped:
            x = x.flip(-1)
            return model(x).argmax(1).cpu().numpy()
        return model(x).argmax(1).cpu().numpy()

    def test(model, loader):
        {context}
            for x, y in loader:
                save(predict(model, x{given}))
"""


@pytest.mark.parametrize(
    ("context", "given", "found"),
    [
        ("with timer():", "", [6, 7]),
        ("with timer():", ", flipped=True", [6, 7]),
        ("with torch.no_grad():", "", []),
        ("with torch.set_grad_enabled(flag):", "", []),
    ],
)
def test_a_branch_of_no_call_runs_as_those_of_the_calls_do(report, context, given, found):
    assert report(PREDICT.format(context=context, given=given)) == [("OOM201", line) for line in found]


TRAIN = """
    import torch

    def compute(model, x, y, mixed=False):
        if mixed:
            x = mix(x)
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
        else:
            criterion(model(x), y).backward()

    def train(model, loader, optimizer):
        for x, y in loader:
            {context}
                compute(model, x.cuda(), y)
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ("with timer():", [("OOM202", 10)]),
        ("with torch.autocast('cuda', torch.bfloat16):", [("OOM305", 8), ("OOM305", 10)]),
    ],
)
def test_a_branch_of_no_call_runs_under_the_autocast_of_the_calls(report, context, found):
    assert report(TRAIN.format(context=context)) == found
