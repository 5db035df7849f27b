"""Losses made at random: means and sums over masks and labels, divided by counts, with factors; and their batches.

Each is written as the source of a function, so that every call in it has a place of its own.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, ...]
IGNORED = -100
NAMES = "x, y, a, b, p, q, w"
VALUES = ("ce", "out.sum(1)", "out.square().mean(1)", "out[:, 0].tanh()", "(out[:, 1] - w).abs()", "(out.sum(1) * w)")
MASKS = (
    "a", "b", "(~a)", "(y < 2)", "(y == 3)", "(a & b)", "(a | (y == 1))", "(p >= 0)", "(q >= 0)", "(q > 0)",
    "(x[:, 0] > 0.5)", "(a & (y > 0))", "(w > 0.6)",
)  # fmt: skip
COUNTS = (
    "{m}.sum()", "{m}.sum().clamp(min=1)", "max(1, int({m}.sum()))", "max({m}.sum().item(), 1)", "int({m}.sum())",
    "({m}.double().sum() + 1e-8)", "{m}.double().sum().clamp_min(1.0)",
)  # fmt: skip
BENT_COUNTS = (
    "{m}.sum().clamp(min={k})", "max({k}, int({m}.sum()))", "({m}.sum() // 2 + 1)", "max(int({m}.sum()) // 2, 1)",
    "{m}.sum().clamp(min=1, max=4)", "min(int({m}.sum()) + 1, 5)", "round(int({m}.sum()) / 3 + 1)",
    "torch.div({m}.sum(), 2, rounding_mode='floor').clamp(min=1)", "({m}.sum() / 3).ceil().clamp(min=1)",
    "math.ceil(int({m}.sum()) / 2 + 0.5)", "({m}.sum() + 1)", "torch.maximum({m}.sum(), torch.tensor({k}))",
    "({m}.sum() % 3 + 1)", "({m}.sum() / 2).long().clamp(min=1)", "({m}.sum() >> 1).clamp(min=1)",
)  # fmt: skip
TERMS = (
    "({v} * {m}).sum() / {c}", "({v} * {m}).sum() / {c}", "{v}[{m}].mean()", "F.cross_entropy(out, {t})",
    "F.cross_entropy(out, {t}, weight=w.new_tensor([0.2, 0.6, 1.0, 1.3]))", "{v}.mean()", "{v}[{m}].sum() / {c}",
    "torch.where({m}, {v}, torch.where({n}, {u}, 0.0)).mean()", "F.mse_loss(out[{m}][:, 0], w[{m}])",
    "F.cross_entropy(out, {t}, reduction='sum') / {c}", "({v} * w).sum() / w.sum()", "({v} * ({m} & {n})).sum() / {c}",
    "torch.where({m}, {v}, 0.0).sum() / {c}", "{v}.sum() / len(x)", "{v}.sum()",
)  # fmt: skip
FACTORS = (
    "({m}.sum() > {k})", "(1 if {m}.sum() > {k} else 0.3)", "torch.where({m}.sum() > {k}, 1.0, 0.5)", "{m}.sum()",
    "{m}.double().mean()", "{m}.any()", "(2 if {m}.any() else 1)", "({m}.sum() == {k})", "torch.sign({m}.sum() - {k})",
    "(2 if {m}.sum() else 1)", "({m}.sum() / len(x))", "({m}.double().sum() - {k}).relu()",
    "({k} < {m}.sum()).double()", "torch.heaviside({m}.double().sum() - {k}.5, w.new_zeros(()))",
    "({m}.count_nonzero() >= {k})",
)  # fmt: skip
BRANCHES = ("{m}.any()", "{m}.sum() > 0", "{m}.sum() > 2", "{m}.all()")


class RandomLoss:
    """A loss and its batches, drawn from a seed.

    Attributes:
        source: of the function.
        loss: the function itself, of a network and a batch.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._bends = self._random.random() < 0.5
        terms = " + ".join(self._term() for _ in range(self._random.choice([1, 2, 2, 3])))
        body = ["out = model(x)", "ce = F.cross_entropy(out, y, reduction='none')", f"return {terms}"]
        self.source = "\n    ".join([f"def loss(model, {NAMES}):", *body])
        space: dict[str, Any] = {"F": F, "torch": torch, "math": math}
        exec(compile(self.source, f"<loss {seed}>", "exec"), space)
        self.loss: Callable[..., torch.Tensor] = space["loss"]
        self._arrangement = self._random.choice(["any", "any", "halves", "rare", "sorted"])
        self._rows = self._random.choice([12, 18, 24])

    def batches(self, count: int) -> list[Batch]:
        """So many batches for it."""
        return [self._batch() for _ in range(count)]

    def _term(self) -> str:
        bends = self._bends and self._random.random() < 0.6
        count = self._filled(self._random.choice(COUNTS + BENT_COUNTS if bends else COUNTS))
        term = self._filled(self._random.choice(TERMS), c=count)
        if self._random.random() < 0.3:
            term = f"{self._filled(self._random.choice(FACTORS)) if bends else 0.5} * ({term})"
        if bends and self._random.random() < 0.15:
            term = f"(({term}) if {self._filled(self._random.choice(BRANCHES))} else out.mean())"
        return term

    def _filled(self, form: str, **given: str) -> str:
        draw = self._random.choice
        mask = draw(MASKS)
        others = {"m": mask, "n": draw(MASKS), "v": draw(VALUES), "u": draw(VALUES), "t": draw("ypq")}
        return form.format(**others, k=draw([1, 2, 3, 4]), **given)

    def _batch(self) -> Batch:
        rows, generator = self._rows, torch.Generator().manual_seed(self._random.randrange(1 << 30))

        def mask() -> torch.Tensor:
            found = torch.rand(rows, generator=generator) < self._random.choice([0.1, 0.3, 0.6, 0.9])
            if self._arrangement == "halves":
                found[self._random.choice([slice(rows // 2), slice(rows // 2, None), slice(rows // 3)])] = False
            elif self._arrangement == "rare":
                found[:] = False
                found[[self._random.randrange(rows), self._random.randrange(rows)]] = True
            return found

        def labels() -> torch.Tensor:
            return torch.randint(0, 4, (rows,), generator=generator)

        x = torch.randn(rows, 5, dtype=torch.float64, generator=generator)
        w = torch.rand(rows, dtype=torch.float64, generator=generator)
        y = labels()
        batch = (
            x,
            y,
            mask(),
            mask(),
            labels().masked_fill(~mask(), IGNORED),
            labels().masked_fill(~mask(), IGNORED),
            w,
        )
        order = y.argsort() if self._arrangement == "sorted" else torch.arange(rows)
        return tuple(tensor[order] for tensor in batch)


class Network(nn.Module):
    """Four classes of five numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x).tanh())
