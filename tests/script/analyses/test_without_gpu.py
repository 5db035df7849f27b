"""Forwards on the side of a decision on which there is no GPU."""

from __future__ import annotations

import pytest

CODE = """
    import torch
    import torch as tch
    from torch import cuda

    def train(model, loader, optimizer, args):
        {before}
        for x, y in loader:
            if {test}:
                out = model(x.cuda())
            else:
                out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
"""
FIRST, SECOND = ("OOM202", 9), ("OOM202", 11)


@pytest.mark.parametrize(
    ("test", "before"),
    [
        ("torch.cuda.is_available()", "pass"),
        ("tch.cuda.is_available()", "pass"),
        ("cuda.is_available() or args.gpu", "pass"),
        ("use_cuda", "use_cuda = torch.cuda.is_available()"),
        ("args.cuda", "args.cuda = torch.cuda.is_available()"),
    ],
)
def test_without_a_gpu_there_is_none_of_its_autocast(report, test, before):
    assert report(CODE.format(test=test, before=before)) == [FIRST]


def test_the_first_side_may_be_the_one_without_a_gpu(report):
    assert report(CODE.format(test="not torch.cuda.is_available()", before="pass")) == [SECOND]


@pytest.mark.parametrize(
    ("test", "before"),
    [
        ("torch.cuda.is_available() and args.amp", "pass"),
        ("torch.cuda.device_count()", "pass"),
        ("use_cuda", "use_cuda = torch.cuda.is_available() and args.cuda"),
        ("use_cuda", "use_cuda = torch.cuda.is_available(); use_cuda = args.cuda"),
    ],
)
def test_where_more_decides_both_sides_may_have_a_gpu(report, test, before):
    assert report(CODE.format(test=test, before=before)) == [FIRST, SECOND]
