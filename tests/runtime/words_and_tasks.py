"""A network with words, sentences and tasks to predict, and its training in parts beside that of whole batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

Batch = dict[str, torch.Tensor]
ROWS, WORDS, CLASSES, TASKS = 12, 6, 5, 3


class Network(nn.Module):
    """A trunk with an output for each word, for each sentence, and for each of three tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.words, self.sentences, self.number = nn.Linear(8, CLASSES), nn.Linear(8, 2), nn.Linear(8, 1)
        self.tasks = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(TASKS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.trunk(x)
        pooled = hidden.mean(1)
        tasks = torch.stack([task(pooled) for task in self.tasks], 1)
        return self.words(hidden), self.sentences(pooled), self.number(pooled)[:, 0], tasks


def of_sentences(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"])[1], batch["follows"])


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Of each, another share of the words is masked, and in some parts all of them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, most: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    found = []
    for number in range(count):
        slots, share = draw(ROWS, WORDS, most=CLASSES), torch.rand(ROWS, 1, generator=generator)
        masked = torch.rand(ROWS, WORDS, generator=generator) < share
        masked[: number % 3 * 3] = True
        lengths = draw(ROWS, 1, most=WORDS) + 1
        tasks = draw(ROWS, TASKS, most=CLASSES)
        tasks[torch.rand(ROWS, TASKS, generator=generator) < torch.tensor([0.1, 0.3, 0.5])] = -1
        found.append(
            {
                "x": torch.randn(ROWS, WORDS, 4, dtype=torch.float64, generator=generator),
                "words": slots.masked_fill(masked, -100),
                "slots": slots,
                "kept": (4 - slots).masked_fill(masked, -100).double(),
                "mask": (torch.arange(WORDS) < lengths).long(),
                "follows": draw(ROWS, most=2),
                "tasks": tasks,
                "number": torch.randn(ROWS, dtype=torch.float64, generator=generator),
            }
        )
    return found


def trained(
    loss: Callable[[nn.Module, Batch], Any], micro_batches: int, data: list[Batch] | None = None
) -> tuple[Any, int | None]:
    """Every loss and gradient, and the micro-batches of the last call, None: it ran whole."""
    runtime.reset()
    torch.manual_seed(0)
    model = Network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)
    memory.prepare(model)
    seen = []
    for number, batch in enumerate(batches(6) if data is None else data):
        torch.manual_seed(number)
        seen.append(memory.forward_backward(lambda **batch: loss(model, batch), **batch))
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        memory.step(optimizer)
        optimizer.zero_grad()
    return seen, memory.report().forwards[0].micro_batches


def parts_as_whole(
    loss: Callable[[nn.Module, Batch], Any], micro_batches: int, data: list[Batch] | None = None
) -> int | None:
    """The micro-batches of the last call of a training whose losses and gradients are those of whole batches."""
    expected, _ = trained(loss, 1, data)
    seen, parts = trained(loss, micro_batches, data)
    torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-13)
    return parts
