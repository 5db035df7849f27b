"""The first entries of something are kept: all of a few rows, and not all of a batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

ROWS = 48
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """Each takes so many samples at most, but never less than eight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        room = max(8, int(len(x) / 4 * 1.25))
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            served = (shares.argmax(-1) == number).nonzero().flatten()[:room]
            out = out.index_add(0, served, expert(x[served]) * shares[served, number].unsqueeze(1))
        return out


def trained(loss: Loss, make: Callable[[], nn.Module], **overrides: int) -> tuple[list[torch.Tensor], int]:
    """The weights after some steps, and how many calls ran in parts."""
    runtime.reset()
    torch.manual_seed(0)
    model = make().double()
    memory = runtime.preset("16gb", precision="fp32", **overrides)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 4, (ROWS,), generator=generator)
        memory.forward_backward(lambda x, y: loss(model, x, y), x, y)
        memory.step(optimizer)
    (known,) = memory._forwards
    return [parameter.detach() for parameter in model.parameters()], known.split_calls


def of_all(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def of_the_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x[:32]), y[:32])


def of_two_views(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(torch.cat([x, 0.9 * x]))
    return F.cross_entropy(out[: len(x)], y) + (out[: len(x)] - out[len(x) :]).square().mean()


def of_the_first_boxes_of_each(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([one[one > 0][:2].sum() for one in model(x)]).mean() + F.cross_entropy(model(x), y)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize(("loss", "make"), [(of_all, Experts), (of_the_first, lambda: nn.Linear(6, 4))])
def test_what_a_few_rows_do_not_fill_runs_whole(loss, make, parts):
    whole, _ = trained(loss, make)
    split, calls = trained(loss, make, micro_batches=parts)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == 0


@pytest.mark.parametrize("loss", [of_two_views, of_the_first_boxes_of_each])
def test_the_first_of_each_sample_and_as_many_as_there_are_samples_are_split(loss):
    whole, _ = trained(loss, lambda: nn.Linear(6, 4))
    split, calls = trained(loss, lambda: nn.Linear(6, 4), micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == 4
