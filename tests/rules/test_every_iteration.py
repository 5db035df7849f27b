"""What runs on every iteration of a batch loop."""

from __future__ import annotations

import pytest

from oomfix.rules.empty_cache_in_loop import EmptyCacheInLoop
from oomfix.script import Script
from oomfix.source import Source

LOOP = """
import torch
for i, (x, y) in enumerate(loader):
    {before}
    criterion(model(x), y).backward()
    optimizer.step()
    {call}
"""


def lines(before: str, call: str = "torch.cuda.empty_cache()") -> list[int]:
    script = Script.read(Source.from_bytes("train.py", LOOP.format(before=before, call=call).encode()))
    return [finding.line for finding in EmptyCacheInLoop().check(script)]


@pytest.mark.parametrize(
    "before",
    [
        "pass",
        "if len(x) == 0: continue",
        "if x is None: break",
        "if not torch.isfinite(x).all(): continue",
        "if x is None:\n        if i: break\n        else: continue",
    ],
)
def test_a_batch_left_out_here_and_there_does_not_make_it_seldom(before: str) -> None:
    assert lines(before) == [7 + before.count("\n")]


@pytest.mark.parametrize(
    "call",
    [
        "if i >= limit: break\n    else: torch.cuda.empty_cache()",
        "if i < limit: torch.cuda.empty_cache()\n    else: raise StopIteration",
    ],
)
def test_a_branch_beside_the_end_of_the_loop_is_taken_by_every_iteration(call: str) -> None:
    line = 7 + call[: call.index("torch")].count("\n")
    assert lines("pass", call) == [line]


@pytest.mark.parametrize(
    ("before", "call"),
    [
        ("if i % 10 != 0: continue", "torch.cuda.empty_cache()"),
        ("if (i + 1) % args.accumulation_steps: continue", "torch.cuda.empty_cache()"),
        ("pass", "if i % 10 == 0: torch.cuda.empty_cache()"),
        ("pass", "if args.clean: torch.cuda.empty_cache()"),
        ("pass", "if args.keep: continue\n    else: torch.cuda.empty_cache()"),
    ],
)
def test_every_few_iterations_is_seldom(before: str, call: str) -> None:
    assert lines(before, call) == []


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("for number, batch in tqdm(enumerate(data)):", True),
        ("for batch_idx in range(steps):", True),
        ("for x, y in tqdm(train_loader):", True),
        ("for x, y in data:", False),
        ("for batch_size in (1, 2, 4):", False),
        ("for loader in loaders:", False),
        ("for phase in loaders.values():", False),
        ("while running:", False),
    ],
)
def test_a_loop_that_trains_out_of_sight_is_over_batches_by_its_names(header: str, found: bool) -> None:
    code = f"import torch\n{header}\n    run_one(x, y)\n    torch.cuda.empty_cache()\n"
    script = Script.read(Source.from_bytes("train.py", code.encode()))
    assert [finding.line for finding in EmptyCacheInLoop().check(script)] == ([4] if found else [])


@pytest.mark.parametrize(
    "call",
    [
        'if device == "cuda" and i % 10 == 0: torch.cuda.empty_cache()',
        "if cuda and (i + 1) % k == 0: torch.cuda.empty_cache()",
        "if torch.cuda.memory_reserved() > limit: torch.cuda.empty_cache()",
        "if gpu_usage() > 0.9: torch.cuda.empty_cache()",
    ],
)
def test_a_check_for_the_device_that_also_counts_or_asks_for_its_memory_is_seldom(call: str) -> None:
    assert lines("pass", call) == []


STAGE = """
import torch
{helper}
for name in names:
    {made}
    with torch.no_grad():
        out = {run}
    torch.cuda.empty_cache()
"""


@pytest.mark.parametrize(
    ("helper", "made", "run", "found"),
    [
        ("model = Net().cuda()", "x = read(name)", "model(x)", True),
        ("model = Net().cuda()", "model = model.eval()", "model(x)", True),
        ("", "model = Net().cuda().eval()", "model(x)", False),
        ("", "model = load(name)", "model.predict(x)", False),
        ("def run(name):\n    model = Net().cuda()\n    return model(x)", "pass", "run(name)", False),
        ("def run(model, x):\n    return model(x)\nmodel = Net().cuda()", "pass", "run(model, x)", True),
    ],
)
def test_a_loop_that_makes_its_network_is_over_stages(helper: str, made: str, run: str, found: bool) -> None:
    code = STAGE.format(helper=helper, made=made, run=run)
    script = Script.read(Source.from_bytes("infer.py", code.encode()))
    assert bool(list(EmptyCacheInLoop().check(script))) is found
