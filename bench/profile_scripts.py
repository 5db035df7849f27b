"""What `oomfix profile` says of the unmodified training scripts of pytorch/examples, and of three others.

    git clone https://github.com/pytorch/examples
    python -m bench.profile_scripts examples            # prints the table
    python -m bench.profile_scripts examples --write    # and writes bench/results/profile-scripts.md

Where a script would download images, `bench/stubs` stands in for torchvision: data sets of made-up images in the real
shapes. Two scripts get files that others would bring (a folder of images, the words of a text). Every script runs in
its own folder, in a copy of FOLDER.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.heading import heading
from oomfix.profile.text import size

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "profile-scripts.md"
STUBS = ROOT / "bench" / "stubs"
OWN = ROOT / "tests" / "profile" / "scripts"
_PATIENCE_SECONDS = 600
_WORDS = 33_278
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"[\w.]+(?:Error|Exception)\b")


def pictures(folder: Path) -> None:
    """Images for the scripts that open files: a style to learn, and those of a data set that is downloaded."""
    from PIL import Image

    picture = Image.new("RGB", (481, 321))
    for name in ("train", "test"):
        images = folder / "super_resolution" / "dataset" / "BSDS300" / "images" / name
        images.mkdir(parents=True, exist_ok=True)
        for number in range(64):
            picture.save(images / f"{number}.jpg")
    picture.save(folder / "fast_neural_style" / "style.jpg")


def waves(folder: Path) -> None:
    """What the script beside makes."""
    subprocess.run([sys.executable, "generate_sine_wave.py"], cwd=folder / "time_sequence_prediction", check=True)


def words(folder: Path) -> None:
    """Where the text of WikiText-2 is not there: as many different words as it has, in lines of thirty."""
    for name in ("train", "valid", "test"):
        text = folder / "word_language_model" / "data" / "wikitext-2" / f"{name}.txt"
        if not text.exists():
            text.parent.mkdir(parents=True, exist_ok=True)
            numbers = [f"word{number}" for number in range(_WORDS - 1)]
            lines = (" ".join(numbers[start : start + 30]) for start in range(0, len(numbers), 30))
            text.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """A script below FOLDER, or one of tests/profile/scripts; its arguments, and options of the profile."""

    script: str
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([*self.options, self.script, *self.args])


PREPARED: tuple[Callable[[Path], None], ...] = (pictures, waves, words)
CASES = (
    Case("mnist/main.py"),
    Case("mnist_rnn/main.py", ("--accel",)),
    Case("mnist_forward_forward/main.py"),
    Case("mnist_hogwild/main.py", ("--cuda",)),
    Case("vae/main.py"),
    Case("dcgan/main.py", ("--dataset", "fake", "--accel")),
    Case("siamese_network/main.py"),
    Case("imagenet/main.py", ("--dummy",)),
    Case("imagenet/main.py", ("--dummy", "-a", "resnet50", "--gpu", "0")),
    Case("word_language_model/main.py", ("--accel",)),
    Case("word_language_model/main.py", ("--accel", "--model", "Transformer")),
    Case("time_sequence_prediction/train.py"),
    Case("super_resolution/main.py", ("--upscale_factor", "3", "--accel")),
    Case("fast_neural_style/neural_style/neural_style.py", (
        "train", "--dataset", ".", "--style-image", "../style.jpg", "--save-model-dir", "models", "--accel")),
    Case("regression/main.py"),
    Case("reinforcement_learning/reinforce.py"),
    Case("reinforcement_learning/actor_critic.py"),
    Case("gat/main.py"),
    Case("gcn/main.py"),
    Case("language_translation/main.py", ("--backend", "gpu")),
    Case("legacy/snli/train.py"),
    Case("distributed/ddp/example.py", (), ("--ranks", "2")),
    Case("distributed/ddp-tutorial-series/single_gpu.py", ("2", "1")),
    Case("distributed/ddp-tutorial-series/multigpu.py", ("2", "1")),
    Case("distributed/ddp-tutorial-series/multigpu_torchrun.py", ("2", "1")),
    Case("distributed/ddp-tutorial-series/multigpu_torchrun.py", ("2", "1"), ("--ranks", "4")),
    Case("distributed/ddp-tutorial-series/multinode.py", ("2", "1"), ("--ranks", "4")),
    Case("distributed/minGPT-ddp/mingpt/main.py", (), ("--ranks", "2")),
    Case("distributed/FSDP/T5_training.py", (), ("--ranks", "2")),
    Case("distributed/FSDP2/example.py", (), ("--ranks", "2")),
    Case("distributed/tensor_parallelism/tensor_parallel_example.py", (), ("--ranks", "4")),
    Case("distributed/tensor_parallelism/sequence_parallel_example.py", (), ("--ranks", "4")),
    Case("distributed/tensor_parallelism/fsdp_tp_example.py", (), ("--ranks", "4")),
    Case("distributed/rpc/batch/reinforce.py"),
    Case("distributed/rpc/batch/parameter_server.py"),
    Case("distributed/rpc/ddp_rpc/main.py"),
    Case("distributed/rpc/parameter_server/rpc_parameter_server.py", ("--rank", "0")),
    Case("distributed/rpc/pipeline/main.py"),
    Case("distributed/rpc/rl/main.py"),
    Case("distributed/rpc/rnn/main.py"),
    Case("char_gpt.py"),
    Case("hf_trainer.py"),
    Case("lightning_module.py"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code, the estimate if there is one, what it wrote to standard error, and how long."""

    code: int
    found: dict[str, Any] | None
    said: str
    seconds: float

    @property
    def row(self) -> str:
        if self.found is not None and not self.found["error"]:
            found = self.found
            return (
                f"{len(found['steps'])} | {size(found['peak_allocated_bytes'])} | "
                f"{size(found['peak_reserved_bytes'])} | {found['peak_phase']} | {self.seconds:.0f}"
            )
        return f"| | | exit code {self.code}: {self._reason} | {self.seconds:.0f}"

    @property
    def _reason(self) -> str:
        """The sentence of a refusal, or the error that ended the script."""
        if self.code == 2:
            return self.said.partition("cannot be simulated: ")[2].strip()
        errors = [line for line in self.said.splitlines() if _ERROR.match(line)]
        return _COLOUR.sub("", errors[-1]).split(". ")[0] if errors else "it said nothing"


def outcomes(folder: Path, cases: tuple[Case, ...]) -> Iterator[tuple[Case, Outcome]]:
    """Every case, run after the other in a copy of `folder`."""
    with tempfile.TemporaryDirectory() as copied:
        copy = Path(copied, "examples")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git"))
        for prepare in PREPARED:
            prepare(copy)
        for case in cases:
            yield case, profile(case, copy)


def profile(case: Case, folder: Path) -> Outcome:
    """One script under `oomfix profile`."""
    script = folder / case.script if "/" in case.script else OWN / case.script
    environment = dict(os.environ)
    # packages that can do without torchvision would take the stub for the real one
    stubs = [str(STUBS)] if _uses_torchvision(script) else []
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *stubs])
    command = [sys.executable, "-m", "oomfix", "profile", "--format", "json", *case.options, script.name]
    start = time.perf_counter()
    ended = subprocess.run(
        [*command, "--", *case.args],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
    )
    seconds = time.perf_counter() - start
    found = json.loads(ended.stdout) if ended.stdout.startswith("{") else None
    return Outcome(ended.returncode, found, ended.stderr, seconds)


def _uses_torchvision(script: Path) -> bool:
    return any("torchvision" in file.read_text(encoding="utf-8") for file in script.parent.glob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkout of pytorch/examples")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    cases = tuple(case for case in CASES if options.only in case.name)
    rows = [
        "| script | steps | allocated | reserved | peak in, or why not | seconds |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for case, outcome in outcomes(options.folder, cases):
        rows.append(f"| `{case.name}` | {outcome.row} |")
        print(rows[-1], flush=True)
    if options.write:
        RESULTS.write_text(
            "\n".join([*heading("Public scripts under profile", "cpu", "bench.profile_scripts"), *rows, ""]),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
