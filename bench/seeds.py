"""The five write-ups, reproduced without a GPU: their scripts run out of memory on their cards, and fit once rewritten.

    python -m bench.seeds            # prints the tables
    python -m bench.seeds --write    # and writes them to bench/results/seeds.md and README.md

Every script of fixtures/ runs at its real size under `oomfix profile`: as it is on the card of its write-up, and as
`oomfix apply --preset` rewrites it within the preset's memory. Whether the samples of a batch depend on each other
cannot be seen on a card that holds no numbers: that is checked by the runtime itself on the host, on the small version
of the rewritten script.

The second table is the write-up of fine_grained: its own figures for four configurations, beside ours.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.readme import README, block_pattern
from oomfix.presets import PRESETS
from oomfix.profile.process import run_script
from oomfix.rewrite.what_if import WhatIf, rewrite_for

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "seeds.md"
GIB, GB = 2**30, 10**9
BLOCK = "seeds"


@dataclass(frozen=True)
class Seed:
    """A write-up: the card it names, what happened there, and the preset that fits the card.

    Attributes:
        name: the fixture.
        gpu, capacity_gib: the card, and what its error message gives as capacity.
        story: what the write-up tells.
        preset: what `apply` gets.
        options, args: further options of the profile and arguments of the script, that reach the place in question.
        per_step: what one optimizer step stands for in the story of a leak; "" where it is none.
    """

    name: str
    gpu: str
    capacity_gib: float
    story: str
    preset: str
    options: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    per_step: str = ""

    @property
    def script(self) -> str:
        return f"fixtures/{self.name}/train.py"


SEEDS = (
    Seed("few_shot", "p100", 15.89, "in backward; 2.35 GiB asked for", "16gb"),
    Seed("fine_grained", "t4", 14.74, "no card named; its fix aims at 16 GB", "16gb"),
    Seed("clip", "rtx4060-laptop", 7.60, "in backward, at about 7.5 GB", "8gb"),
    # one image step per epoch: what leaks is kept once per epoch
    Seed("retinopathy", "v100", 15.77, "after epoch 38", "16gb", ("--steps", "6"),
         ("--train_images", "4", "--val_images", "3"), "epoch"),
    Seed("camouflage", "t4", 14.74, "first iteration of stage 2", "16gb", ("--stage", "2"), ("--stage1-epochs", "1")),
)  # fmt: skip

CHECKPOINTED = (
    ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
    ("self.attention_map = attention\n", "self.attention_map = attention.detach()\n"),
    ("            x = block(x)\n", "            x = checkpoint(block, x, use_reentrant=False)\n"),
    ("block(x, context=torch.cat([x, x[pair]], dim=1))",
     "checkpoint(block, x, torch.cat([x, x[pair]], dim=1), use_reentrant=False)"),
)  # fmt: skip
FINE_GRAINED = "fixtures/fine_grained/train.py"
CONFIGURATIONS = (
    (16, 1, "40-45 GB"), (8, 2, "22-24 GB"), (4, 4, "14-15 GB, checkpointed"), (2, 8, "10-12 GB, checkpointed"),
)  # fmt: skip


def seeds_table() -> list[str]:
    """What happens to each script, before and after, as a table."""
    rows = ["| script | card | write-up | simulated | after `apply` |", "|---|---|---|---|---|"]
    for seed in SEEDS:
        before = profile(seed, ["--gpu", seed.gpu, "--budget", str(seed.capacity_gib)])
        changed = rewrite_for(seed.script, seed.preset)
        whole = whole_because(seed, changed)
        coupled = ["--coupled"] if whole == "samples depend on each other" else []
        after = profile(seed, [*changed.options, *coupled], changed.contents)
        row = (
            seed.name,
            f"{before['card']['name']}, {seed.capacity_gib:.2f} GiB",
            seed.story,
            told(seed, before),
            outcome(seed, after, changed, whole),
        )
        rows.append(f"| {' | '.join(row)} |")
        print(rows[-1], file=sys.stderr)
    return rows


def profile(seed: Seed, options: list[str], contents: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """A run of a seed's script; an error where it fails for another reason than memory."""
    found, code = run_script(seed.script, list(seed.args), [*options, *seed.options], contents or {})
    if found is None or (found["error"] and not found["out_of_memory"]):
        raise RuntimeError(f"{seed.name}: exit code {code}, see above")
    return found


def told(seed: Seed, found: dict[str, Any]) -> str:
    """What happened on the card, in the words of the write-ups."""
    if found["out_of_memory"]:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", found["out_of_memory"])
        assert asked is not None
        where = "first step" if not found["steps"] else f"step {len(found['steps']) + 1}"
        phase = found["timeline"][-1]["phase"]
        stage = f" of stage {found['stage']}" if found["stage"] else ""
        return f"out of memory in {phase}, {where}{stage}; {asked.group(1)} asked for"
    grows = found["growth_bytes_per_step"]
    if seed.per_step and grows:
        room = found["budget_bytes"] - found["steps"][0]["peak_allocated_bytes"]
        return f"{grows / GIB:.2f} GiB more per {seed.per_step}: full after {seed.per_step} {1 + room // grows}"
    return f"fits, with {found['peak_reserved_bytes'] / GIB:.1f} GiB reserved"


def outcome(seed: Seed, found: dict[str, Any], changed: WhatIf, because: str) -> str:
    """What happens to the rewritten script within the preset's budget."""
    budget = PRESETS[seed.preset].budget_gib
    whole = f", batches whole: {because}" if because else ""
    if found["out_of_memory"]:
        return f"`{seed.preset}`: out of memory ({budget} GiB{whole})"
    grows = (
        f", grows {found['growth_bytes_per_step'] / GIB:.2f} GiB a step"
        if found["growth_bytes_per_step"] > GIB / 100
        else ""
    )
    return f"`{seed.preset}`: {found['peak_reserved_bytes'] / GIB:.1f} of {budget} GiB{grows}{whole}"


def whole_because(seed: Seed, changed: WhatIf) -> str:
    """Why the runtime, checking real numbers on the host, keeps batches whole; "" where it splits them."""
    (content,) = changed.contents.values()
    as_written = f'runtime.preset("{seed.preset}"'.encode()
    assert content.count(as_written) == 1
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_bytes(content.replace(as_written, as_written + b", micro_batches=2"))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(script), "--tiny"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{seed.name} --tiny, rewritten: {done.stderr}")
    said = re.search(r"batches run whole, because ([^:,.]+)", done.stderr)
    return said.group(1) if said else ""


def configurations_table() -> list[str]:
    """The table of the write-up of fine_grained, and what is predicted for its rows."""
    source = Path(FINE_GRAINED).read_text(encoding="utf-8")
    for old, new in CHECKPOINTED:
        assert old in source, old
        source = source.replace(old, new)
    checkpointed = {os.path.realpath(FINE_GRAINED): source.encode()}
    rows = [
        "| batch | accumulated | write-up | predicted | predicted with checkpointing |",
        "|---:|---:|---:|---:|---:|",
    ]
    for batch, steps, written in CONFIGURATIONS:
        args = ["--batch_size", str(batch), "--accumulation_steps", str(steps)]
        needs = []
        for contents in ({}, checkpointed):
            found, code = run_script(FINE_GRAINED, args, ["--gpu", "a100-80gb"], contents)
            if found is None or found["error"]:
                raise RuntimeError(f"fine_grained, batch {batch}: exit code {code}, see above")
            needs.append(f"{(found['peak_reserved_bytes'] + found['context_bytes']) / GB:.1f} GB")
        rows.append(f"| {batch} | {steps} | {written} | {needs[0]} | {needs[1]} |")
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} and README.md")
    options = parser.parse_args()
    os.chdir(ROOT)
    block = "\n".join([*seeds_table(), "", *configurations_table()])
    print(block)
    if options.write:
        head = [
            "# The five write-ups in simulation",
            "",
            f"`python -m bench.seeds --write`, {datetime.date.today()}, torch {torch.__version__}, no GPU.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, block, ""]), encoding="utf-8")
        text = README.read_text(encoding="utf-8")
        README.write_text(block_pattern(BLOCK).sub(lambda _: block, text), encoding="utf-8")


if __name__ == "__main__":
    main()
