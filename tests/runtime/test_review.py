"""Losses, windows and forwards that were once split or weighted wrongly without a word."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

LABELS = torch.arange(64) % 20


def inputs():
    return torch.randn(64, 4).double(), torch.randn(64, 3).double()


def gradient_errors(forward, parameters, *batches, **overrides):
    """The relative error of each call's gradient against a plain backward."""
    memory, errors = runtime.preset("16gb", **{"micro_batches": 4, **overrides}), []
    for batch in batches:
        forward(*batch).backward()
        expected = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        memory.forward_backward(forward, *batch)
        for parameter, gradient in zip(parameters, expected, strict=True):
            errors.append(float((parameter.grad - gradient).abs().max() / gradient.abs().max()))
            parameter.grad = None
    return errors


def triplet(net):
    def forward(x, y):
        e = F.normalize(net(x))
        distances = torch.cdist(e, e)
        same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
        margins = (distances[:, :, None] - distances[:, None] + 0.5).clamp(min=0)
        return (margins * (same[:, :, None] & ~same[:, None])).sum() / same.sum().clamp(min=1)

    return forward


def top_of(net):
    return lambda x, y: F.mse_loss(net(x), y, reduction="none").mean(1).topk(min(16, len(x))).values.mean()


def balanced_losses(net):
    def forward(x, y):
        a, b = F.mse_loss(net(x), y), F.l1_loss(net(x), y)
        return a + b * (a / b).detach()

    return forward


def masked_mean(net):
    return lambda x, y, mask: ((net(x) - y) ** 2 * mask).sum() / mask.sum()


def test_a_loss_that_is_zero_on_the_rows_checked_is_not_split():
    net, (x, _) = nn.Linear(4, 3).double(), inputs()
    assert max(gradient_errors(triplet(net), [*net.parameters()], *[(x, LABELS)] * 3)) < 1e-12


@pytest.mark.parametrize("loss", [top_of, balanced_losses])
def test_losses_whose_parts_only_look_independent_run_whole(loss):
    net = nn.Linear(4, 3).double()
    assert max(gradient_errors(loss(net), [*net.parameters()], inputs())) < 1e-12


@pytest.mark.parametrize("masked", [[20, 40, 41, 42, 43], []])
def test_a_masked_mean_runs_whole_though_the_mask_is_full_at_first(masked):
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    mask, later = torch.ones(64, 3).double(), torch.ones(64, 3).double()
    mask[masked] = 0
    later[7] = 0
    batches = [(x, y, mask), (x, y, mask), (x, y, later)]
    assert max(gradient_errors(masked_mean(net), [*net.parameters()], *batches)) < 1e-12


def test_a_float_that_was_zero_on_the_rows_checked_is_not_averaged():
    net, x = nn.Linear(4, 100).double(), inputs()[0]
    target = net(x).argmax(1)
    wrong = torch.ones(64, dtype=torch.bool)
    wrong[[7, 22]] = False
    target[wrong] = (target[wrong] + 1) % 100

    def forward(x, y):
        out = net(x)
        return F.cross_entropy(out, y), (out.argmax(1) == y).float().sum()

    expected = forward(x, target)[1]
    got = runtime.preset("16gb", micro_batches=16).forward_backward(forward, x, target)[1]
    assert float(got) == float(expected)


def test_what_is_known_of_a_decorated_forward_is_not_used_for_another():
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    memory = runtime.preset("16gb", micro_batches=4)

    @torch.enable_grad()
    def independent(x, y):
        return F.mse_loss(net(x), y)

    @torch.enable_grad()
    def coupled(x, y):
        return F.cross_entropy(F.normalize(net(x)) @ F.normalize(y).T, torch.arange(len(x)))

    for forward in (independent, independent, independent, coupled):
        net.zero_grad()
        forward(x, y).backward()
        expected = net.weight.grad
        net.zero_grad()
        memory.forward_backward(forward, x, y)
        assert torch.allclose(net.weight.grad, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bound", ["argument", "partial", "closure"])
def test_a_flag_or_criterion_of_a_forward_is_part_of_what_is_known(bound):
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    memory = runtime.preset("16gb", micro_batches=4)

    def loss(x, y, reduction):
        return F.mse_loss(net(x), y, reduction=reduction)

    def closing_over(criterion):
        return lambda x, y: criterion(net(x), y)

    for reduction in ("mean", "mean", "mean", "sum", "mean", "sum"):
        net.zero_grad()
        loss(x, y, reduction).backward()
        expected = net.weight.grad
        net.zero_grad()
        if bound == "argument":
            memory.forward_backward(loss, x, y, reduction)
        elif bound == "partial":
            memory.forward_backward(functools.partial(loss, reduction=reduction), x, y)
        else:
            memory.forward_backward(closing_over(nn.MSELoss(reduction=reduction)), x, y)
        assert torch.allclose(net.weight.grad, expected, rtol=1e-10, atol=1e-14)
