"""Losses whose terms nearly cancel each other, such as a critic's two means, are as exact as their terms."""

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.outputs import Weight
from oomfix.runtime.batches.rule_choice import choose, close
from oomfix.runtime.state.probe import Writes
from oomfix.runtime.verification.watching import Watch

BATCHES = 9
DTYPES = [torch.float32, torch.float64]


def critic(dtype, spread):
    """A network whose outputs are 0.01, apart from each other by about `spread`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(spread)
        model[2].bias.fill_(0.01)
    return model


def trained(loss, dtype, spread, then=lambda model: None, **overrides):
    """The parameters after some steps, `then` called behind each, and the report."""
    runtime.reset()
    memory = runtime.preset("16gb", precision="fp32", **overrides)
    model = memory.prepare(critic(dtype, spread))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def forward(real, made):
        return loss(model(real), model(made))

    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        real, made = (torch.randn(12, 6, generator=generator, dtype=dtype) for _ in range(2))
        memory.forward_backward(forward, real, made)
        memory.step(optimizer)
        then(model)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), str(memory.report())


def difference(real, made):
    return -real.mean() + made.mean()


def difference_in_place(real, made):
    loss = made.mean()
    loss -= real.mean()
    return loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", [difference, difference_in_place])
def test_what_a_first_check_saw_holds_where_later_losses_cancel(loss, dtype, caplog):
    """A critic whose weights are clipped after each step: its outputs are alike from the first one on."""

    @torch.no_grad()
    def clip(model):
        model[2].weight.fill_(1e-7 if dtype == torch.float32 else 1e-16)
        model[2].bias.fill_(0.01)

    _, report = trained(loss, dtype, 1.0, clip, micro_batches=3)
    assert "depend" not in caplog.text
    assert f"3 micro-batches, {BATCHES} training calls" in report


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_of_terms_that_cancel_trains_the_same_in_parts(dtype):
    whole, _ = trained(difference, dtype, 1e-3)
    split, report = trained(difference, dtype, 1e-3, micro_batches=3)
    assert "3 micro-batches" in report
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=0)


def test_a_dependence_that_is_larger_than_rounding_is_seen_behind_terms_that_cancel():
    def coupled(real, made):
        return difference(real, made) + (real - real.mean()).pow(2).mean()

    _, report = trained(coupled, torch.float32, 0.1, micro_batches=3)
    assert "samples depend on each other" in report


def test_a_large_number_that_is_no_term_of_the_loss_hides_nothing():
    seen = torch.tensor(1e9)

    def coupled(real, made):
        (seen + real.detach().sum()).sqrt()
        return (real - real.mean()).pow(2).mean() + made.pow(2).mean()

    _, report = trained(coupled, torch.float32, 1.0, micro_batches=3)
    assert "samples depend on each other" in report


def test_terms_are_those_of_sums_too_as_they_were_when_they_were_added():
    with Watch(4, None, Writes()) as watch:
        first, second, third, fourth = (torch.tensor(number) for number in (1.0, 2.0, 4.0, 8.0))
        loss = first + second - third
        loss -= fourth
    assert sorted(term.item() for term in watch.terms_of(loss)) == [-1.0, 1.0, 2.0, 3.0, 4.0, 8.0]


def test_infinite_terms_explain_nothing_and_infinity_is_close_to_itself_alone():
    one, infinite = torch.tensor(1.0), torch.tensor(float("inf"))
    parts, shares = [torch.tensor(5.0), torch.tensor(7.0)], [Weight(3, 3), Weight(1, 1)]
    assert choose(one, parts, shares, [infinite]) is None
    assert close(infinite, infinite)
    assert not close(one, infinite)
    assert not close(infinite, one)
    assert not close(infinite, -infinite)


def test_what_is_no_number_is_close_to_itself_alone():
    one, none = torch.tensor(1.0), torch.tensor(float("nan"))
    assert close(none, none)
    assert not close(one, none)
    assert not close(none, one)


@pytest.mark.parametrize("reduced", ["mean", "sum"])
def test_a_small_term_that_is_returned_beside_a_large_one_is_put_together_as_what_it_is(reduced):
    """A likelihood with a tiny variance has a loss of a million, whose rounding the other term is within."""
    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    torch.manual_seed(0)
    model = nn.Linear(6, 2)

    def forward(x):
        out = model(x)
        likelihood, penalty = (out[:, :1] - 900).pow(2).mean() * 10, getattr(out[:, 1:].pow(2), reduced)()
        return likelihood + penalty, penalty

    for _ in range(3):
        x = torch.randn(12, 6)
        expected = forward(x)[1].detach()
        _, penalty = memory.forward_backward(forward, x)
        assert 1e-3 < float(expected) < 100
        torch.testing.assert_close(penalty, expected, rtol=1e-5, atol=0)
    report = memory.report().forwards[0]
    assert (report.micro_batches, report.whole_because) == (3, None)
