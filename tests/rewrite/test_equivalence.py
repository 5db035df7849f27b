"""A rewritten script trains the same: to the bit with OOMFIX_PRESET=off, to rounding when batches are split."""

import re
from functools import cache
from pathlib import Path

import pytest

from oomfix.presets import PRESETS
from oomfix.rewrite.apply import apply_to
from oomfix.rewrite.options import Options
from oomfix.rules import all_rules
from oomfix.source import Source
from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

original_run = cache(run)  # of a script as it was written, which several tests compare with

HERE = Path(__file__).parent
FIXTURES = HERE.parent.parent / "fixtures"
SCRIPTS = sorted((HERE / "scripts").glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]
SEEDS = ["few_shot", "fine_grained", "clip", "retinopathy", "camouflage"]

EXPECTED = {
    "char_lstm": "micro-batched",
    "char_transformer": "micro-batched",
    "digits_cnn": "micro-batched",
    "digits_mlp": "micro-batched",
    "gan": "micro-batched",
    "phases": "micro-batched",
    "sam": "micro-batched",
    "own_scaler": "micro-batched",
    "by_hand": "micro-batched micro-batched",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem == "char_lstm" else path for path in SCRIPTS],
    ids=NAMES,
)
def test_real_training_is_the_same_to_the_bit_when_off_and_to_rounding_when_split(path):
    text = path.read_text()
    before = original_run(text)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == EXPECTED[path.stem].split()
    assert_same_bits(before, run(after.text, preset="off"))
    split = run(rewritten(text, micro_batches=3).text)
    assert split.calls_in_parts if "micro-batched" in EXPECTED[path.stem] and path.stem != "char_lstm" else True
    assert_close(before, split)


@pytest.mark.parametrize("name", SEEDS)
def test_fixtures_train_the_same_to_the_bit_when_off(name):
    text = (FIXTURES / name / "train.py").read_text()
    after = (FIXTURES / name / "after_16gb.py").read_text()
    argv = ["--tiny", "--epochs", "3" if name == "camouflage" else "2"]
    assert_same_bits(run(text, argv), run(after, argv, preset="off"))


@pytest.mark.parametrize("name", ["clip", "retinopathy"])
def test_fixtures_train_the_same_to_rounding_when_split(name):
    """With normalisation by sample: BatchNorm over micro-batches is another computation, and the runtime says so.

    few_shot stays in place, fine_grained pairs images within a batch, and camouflage balances its experts over one.
    """
    text = (FIXTURES / name / "train.py").read_text()
    text = re.sub(r"nn\.BatchNorm2d\(", "nn.GroupNorm(1, ", text)
    argv = ["--tiny", "--epochs", "2", *(["--ovo_dropout", "0"] if name == "retinopathy" else [])]
    assert_close(run(text, argv), run(rewritten(text, micro_batches=3).text, argv))


@pytest.mark.parametrize("name", SEEDS)
def test_fixtures_become_their_golden_files(name):
    """One for all presets: what they choose is chosen when the script runs. Each preset has its turn with a fixture."""
    source = Source.from_bytes("train.py", (FIXTURES / name / "train.py").read_bytes())
    golden = (FIXTURES / name / "after_16gb.py").read_text()
    assert golden.count("16gb") == 1
    for preset in {"16gb", *list(PRESETS)[SEEDS.index(name) :: len(SEEDS)]}:
        after = apply_to(source, all_rules(), Options(preset))
        assert after.text == golden.replace("16gb", preset)


@pytest.mark.parametrize(
    "name",
    [
        "digits_mlp",
        "gan",
        "phases",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("char_transformer", "digits_cnn")),
    ],
)
def test_scaled_gradients_are_unscaled_before_they_are_clipped_and_stepped(name):
    """In fp16 the loss is scaled by 65536: a clip or a step that saw scaled gradients would be far off."""
    text = (HERE / "scripts" / f"{name}.py").read_text()
    assert_close(original_run(text), run(rewritten(text, precision="fp16").text), relative=1e-2)


# how a step of each window has to be divided, which the scripts do not: by the batches that their last window has
_WINDOWS = {
    "fine_grained": ("args.accumulation_steps", ["--accumulation_steps", "3"]),
    "clip": ("args.gradient_accumulation", ["--gradient_accumulation", "4"]),
}


@pytest.mark.parametrize("name", sorted(_WINDOWS))
def test_folded_windows_train_as_the_fixtures_would_without_their_bugs_to_the_bit(name):
    text = (FIXTURES / name / "train.py").read_text()
    size, options = _WINDOWS[name]
    argv = ["--tiny", "--epochs", "2", *options]
    mended = re.sub(
        r"scaler.scale\(loss.*?\)\.backward\(\)",
        f"scaler.scale(loss / min({size}, len(loader) - step // {size} * {size})).backward()",
        text,
    ).replace(f"if (step + 1) % {size} == 0:", f"if (step + 1) % {size} == 0 or step + 1 == len(loader):")
    before, after = run(mended, argv), run((FIXTURES / name / "after_16gb.py").read_text(), argv, preset="off")
    assert len(run(text, argv).recording.steps) < len(before.recording.steps)
    assert_same_bits(before, after)


ZERO_GRADIENTS = """
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
layers = [nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(8):
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
    optimizer.zero_grad()
    with torch.autocast("cpu", enabled=False):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss.item():.12f}")
"""


def test_what_adam_makes_of_rounding_is_all_that_differs_under_a_loss_scaler():
    """The bias ahead of the normalisation has a gradient of zero: in fp32, Adam makes steps of its rounding noise."""
    before = run(ZERO_GRADIENTS)
    assert_same_bits(before, run(rewritten(ZERO_GRADIENTS).text, preset="off"))
    split = run(rewritten(ZERO_GRADIENTS, micro_batches=3).text)
    assert split.calls_in_parts == 8
    assert_close(before, split, relative=1e-10)
