"""Batches that are fetched on the way to a loss are fetched once, whatever the number of parts."""

import pytest

from tests.rewrite.equivalence import assert_close, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import TOP

FETCH = """
import itertools
batches = itertools.cycle([(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(5)])
class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, batch, scale=1):
        x, y = batch
        return F.mse_loss(self.model(x), y) * scale
judge = Judge()
for step in range(4):
    optimizer.zero_grad()
    {statement}
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize(
    "statement",
    [
        "loss = judge(next(batches))",
        "loss = judge(next(batches), scale=2) / 2",
        "with torch.autocast('cpu', enabled=False):\n        loss = judge(next(batches))",
    ],
)
def test_a_batch_fetched_for_the_network_gets_a_name_and_is_split(statement):
    text = TOP + FETCH.format(statement=statement)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "batch = next(batches)" in after.text
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)


@pytest.mark.parametrize(
    "statement",
    [
        "out = judge((torch.ones(6, 4), torch.ones(6, 2)))\n    loss = out + judge(next(batches))",
        "loss = judge((torch.ones(6, 4), torch.ones(6, 2))) + judge(next(batches))",
    ],
    ids=["behind a forward", "behind a call of the same statement"],
)
def test_a_batch_fetched_behind_a_forward_keeps_its_place(statement):
    after = rewritten(TOP + FETCH.format(statement=statement))
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "fetches a batch on the way to the loss" in (after.loops[0].reason or "")
    assert "batch = next" not in after.text


HELPER = """
import itertools
batches = itertools.cycle([(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(5)])
parts = {{"first": torch.zeros(4)}}


def prepared():
    {fetched}
    return x + 1, y


def penalty(model):
    x, y = prepared()
    return F.mse_loss(model(x), y)


for noise, _ in loader:
    optimizer.zero_grad()
    {statements}
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
FETCHED = "x, y = next(batches)"


@pytest.mark.parametrize(
    "statements",
    [
        "out = model(noise)\n    loss = out.pow(2).mean() + penalty(model)",
        "out = model(noise)\n    x, y = prepared()\n    loss = out.pow(2).mean() + F.mse_loss(model(x), y)",
    ],
    ids=["in a helper of a helper", "behind a forward"],
)
@pytest.mark.parametrize("fetched", [FETCHED, "x, y = next(iter(train_loader))"])
def test_a_helper_that_fetches_behind_a_forward_runs_once(statements, fetched):
    (loop,) = rewritten(TOP + HELPER.format(statements=statements, fetched=fetched)).loops
    assert loop.rewrite == "in-place"
    assert "fetches a batch on the way to the loss" in (loop.reason or "")


def test_a_helper_that_fetches_ahead_of_the_network_stays_outside():
    statements = "x, y = prepared()\n    loss = F.mse_loss(model(x), y)"
    text = TOP + HELPER.format(statements=statements, fetched=FETCHED)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "    x, y = prepared()\n\n    def forward(x, y):" in after.text
    split = run(rewritten(text, micro_batches=3).text)
    assert split.calls_in_parts
    assert_close(run(text), split)


@pytest.mark.parametrize(
    "asked",
    [
        "x, y = torch.ones(6, 4), next(model.parameters()).new_ones(6, 2)",
        "x, y = next(iter(parts.values())) + torch.ones(6, 4), torch.ones(6, 2)",
        "x, y = torch.ones(6, 4), next(part for part in [torch.ones(6, 2)])",
    ],
)
def test_a_helper_that_asks_for_the_first_of_what_stays_fetches_nothing(asked):
    statements = "out = model(noise)\n    loss = out.pow(2).mean() + penalty(model)"
    (loop,) = rewritten(TOP + HELPER.format(statements=statements, fetched=asked)).loops
    assert loop.rewrite == "micro-batched"
