"""Unmodified scripts under `oomfix profile`: they run, stop, and reach the peaks of the cards they died on."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oomfix.profile.command import profile
from oomfix.profile.refusals import CannotSimulate
from oomfix.profile.run import run as simulate
from oomfix.profile.text import lines
from tests.starter import WITH_TORCH, Request

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
GIB = 2**30

CRASH = "import torch\ntorch.ones(3).cuda()\nraise KeyError('mine')\n"
CPU_ONLY = "import torch\ntorch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()\n"
LARGE = "import torch\nx = torch.zeros(3 * 2**30 // 4, device='cuda')\ny = x + 1\n"

RUNS: dict[str, list[str]] = {
    "digits_cnn": [str(SCRIPTS / "digits_cnn.py"), "--batch-size", "32"],
    "char_gpt": ["--gpu", "t4", str(SCRIPTS / "char_gpt.py")],
    "word_lstm": [str(SCRIPTS / "word_lstm.py"), "--cuda"],
    "dcgan": ["--steps", "3", str(SCRIPTS / "dcgan.py")],
    "vae_and_siamese": [str(SCRIPTS / "vae_and_siamese.py")],
    "few_shot": ["--gpu", "p100", str(ROOT / "fixtures/few_shot/train.py")],
    "fine_grained": ["--gpu", "a100-80gb", str(ROOT / "fixtures/fine_grained/train.py")],
    "clip": ["--gpu", "rtx4060-laptop", str(ROOT / "fixtures/clip/train.py")],
    "retinopathy": [
        "--gpu", "v100", "--steps", "6", str(ROOT / "fixtures/retinopathy/train.py"),
        "--train_images", "4", "--val_images", "3",
    ],
    "camouflage": [
        "--gpu", "t4", "--budget", "14.74", "--stage", "2", str(ROOT / "fixtures/camouflage/train.py"),
        "--stage1-epochs", "1",
    ],
}  # fmt: skip
# scripts on packages that need not be here
for script, package in (("hf_trainer", "accelerate"), ("lightning_module", "lightning")):
    if find_spec(package) is not None:
        RUNS[script] = [str(SCRIPTS / f"{script}.py")]
SECOND_CARD = "import torch\ntorch.ones(3).to('cuda:1')\n"
SEVERAL_PROCESSES = "import torch.distributed as dist\ndist.init_process_group('nccl')\n"
DOWNLOAD = """
import socket
def download(url):
    try:
        raise socket.gaierror(-2, "Name or service not known")
    except OSError:
        raise RuntimeError(f"cannot open {url}")
download("https://data.example/mnist.gz")
"""
DEVICE_MAP = """
import torch
model = torch.nn.Linear(2, 2).cuda()
model.hf_device_map = {"head": 0, "body": "cpu"}
model(torch.ones(2).cuda())
"""
RECOVERING = """
import torch
from torch import nn
from oomfix import runtime

memory = runtime.preset("16gb")
blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
model = memory.prepare(nn.Sequential(*blocks).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16384, 1024).cuda()
whole = 0
for _ in range(3):
    def forward(x):
        global whole
        whole += len(x) == 16384
        return model(x).pow(2).mean()
    memory.forward_backward(forward, x)
    memory.step(optimizer)
assert whole >= 1
"""
SHARED_MODEL = "import torch\ntorch.nn.Linear(2, 2).cuda().share_memory()\n"
BY_HAND = """
import torch

model = torch.nn.Linear(1024, 1024).cuda()
seen = 0
while True:
    x = torch.randn(64, 1024, device="cuda")
    model(x).pow(2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    seen += 1
    assert seen < 3, "the third iteration is not asked for"
"""
SHAPES = "import torch\nmodel = torch.nn.Linear(3, 4).cuda()\nmodel(torch.randn(2, 5).cuda())\n"

SOURCES = {
    "by_hand": BY_HAND,
    "crash": CRASH,
    "cpu_only": CPU_ONLY,
    "large": LARGE,
    "recovering": RECOVERING,
    "shapes": SHAPES,
}
BUDGETS_GIB = {"large": 5, "recovering": 2}


@dataclass
class Run:
    code: int
    found: Any
    stderr: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by their names, each once and in a process of its own."""
    folder = tmp_path_factory.mktemp("runs")
    commands = dict(RUNS)
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
        commands[name] = [
            *(["--budget", str(BUDGETS_GIB[name])] if name in BUDGETS_GIB else []),
            str(folder / f"{name}.py"),
        ]

    settings = ("OOMFIX_PRESET", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    @cache
    def result(name: str) -> Run:
        output, log = folder / f"{name}.json", folder / f"{name}.log"
        arguments = ["--output", str(output), *commands[name]]
        request = Request("oomfix.profile.run", arguments, environment, str(folder))
        with log.open("wb") as said, open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), said.fileno(), said.fileno()]
            code = WITH_TORCH.run(request, files, limit_s=280)
        found = json.loads(output.read_text()) if output.exists() else None
        return Run(code, found, log.read_text())

    return result


@pytest.mark.parametrize("name", ["digits_cnn", "char_gpt", "word_lstm", "dcgan", "vae_and_siamese"])
def test_scripts_of_the_public_kind_run_unmodified(runs, name):
    run = runs(name)
    assert run.code == 0, run.stderr
    found = run.found
    assert found["error"] is None and len(found["steps"]) >= 2
    assert found["peak_reserved_bytes"] >= found["peak_allocated_bytes"] == sum(found["breakdown"].values())
    assert not any((ROOT / junk).exists() for junk in ("ckpt.pt", "digits.pt"))


@pytest.mark.parametrize(
    ("name", "model"), [("hf_trainer", "Bert"), pytest.param("lightning_module", "Sequential", marks=pytest.mark.slow)]
)
def test_scripts_on_a_framework_run_unmodified(runs, name, model):
    """Nothing of a framework's own is profiled: modules of the user's model, Adam's two moments, bf16 activations."""
    if name not in RUNS:
        pytest.skip(f"{name}.py needs a package that is not installed")
    run = runs(name)
    assert run.code == 0, run.stderr
    found = run.found
    assert found["stopped"] and len(found["steps"]) == 2
    assert found["breakdown"]["optimizer state"] == pytest.approx(2 * found["breakdown"]["weights"], rel=0.05)
    assert any(tensor["module"].startswith(model) and tensor["dtype"] == "bfloat16" for tensor in found["top_tensors"])


def test_sizes_follow_from_the_script(runs):
    """27.6 M parameters would be 105 MiB; this network has 1,199,882 parameters, Adadelta two accumulators each."""
    breakdown = runs("digits_cnn").found["breakdown"]
    assert breakdown["weights"] == pytest.approx(1_199_882 * 4, rel=1e-3)
    assert breakdown["optimizer state"] == pytest.approx(2 * 1_199_882 * 4, rel=1e-3)
    assert breakdown["inputs"] == 32 * 784 * 4 + 512


def test_optimizers_that_take_turns_make_one_step_together(runs):
    found = runs("dcgan").found
    assert len(found["steps"]) == 3 and found["stopped"]
    assert found["growth_bytes_per_step"] == 0
    # both optimizers were built before the models moved, and still have the state of all parameters
    assert found["breakdown"]["optimizer state"] == pytest.approx(2 * found["breakdown"]["weights"], rel=0.05)


def test_what_had_to_be_assumed_is_said_with_file_and_line(runs):
    source = (SCRIPTS / "char_gpt.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "losses[k] = loss.item()" in text)
    assumptions = runs("char_gpt").found["assumptions"]
    assert f"a number read from the card is 1 at {SCRIPTS / 'char_gpt.py'}:{line}, 2 times" in assumptions
    assert any(sentence.startswith("torch.compile was left out") for sentence in assumptions)
    assert any(sentence.startswith("torch.save wrote nothing") for sentence in assumptions)


def test_steps_without_an_optimizer_are_seen(runs):
    """4 MiB of weights, as much of gradients, and the scaled gradient that the update makes."""
    found = runs("by_hand").found
    assert found["error"] is None and found["stopped"] and len(found["steps"]) == 2
    assert found["breakdown"]["gradients"] == pytest.approx(4 * 2**20, rel=0.01)
    assert all(4 * 2**20 < step["live_bytes"] < 5 * 2**20 + 16.25 * 2**20 for step in found["steps"])


def test_recurrent_layers_have_their_own_margin(runs):
    assert runs("word_lstm").found["margin_fraction"] == pytest.approx(0.10)


def test_few_shot_does_not_fit_the_card_it_died_on(runs):
    """15.89 GiB; the request in its error message, 2.35 GiB, is one covariance matrix of 25,088 features."""
    found = runs("few_shot").found
    assert not found["fits"]["card"]["fits"] and found["fits"]["24gb"]["fits"]
    assert found["peak_phase"] == "backward"
    largest = found["top_tensors"][0]
    assert largest["shape"] == [25088, 25088] and largest["nbytes"] // largest["count"] == pytest.approx(
        2.35 * GIB, rel=1e-2
    )


@pytest.mark.slow
def test_fine_grained_needs_what_its_table_says_for_batch_16(runs):
    """40-45 GB were written down for the paper's original configuration."""
    found = runs("fine_grained").found
    on_the_card = found["peak_reserved_bytes"] + found["context_bytes"]
    assert 0.95 * 40e9 < on_the_card < 45e9
    assert not found["fits"]["40gb"]["fits"]


@pytest.mark.slow
def test_clip_fills_a_card_of_eight_gigabytes(runs):
    """It died on a card that was full at about 7.5 GB."""
    found = runs("clip").found
    assert not found["fits"]["card"]["fits"]
    assert 7.5e9 < found["peak_reserved_bytes"] + found["context_bytes"] < 9e9


def test_retinopathy_fits_and_leaks_until_it_does_not(runs):
    """One step per epoch here: 15.77 GiB were full after epoch 38."""
    found = runs("retinopathy").found
    assert found["fits"]["card"]["fits"]
    grows = found["growth_bytes_per_step"]
    epochs = (15.77 * GIB - found["context_bytes"] - found["steps"][0]["peak_allocated_bytes"]) / grows
    assert 25 < epochs < 45
    assert any("full after" in line for line in lines(found))


@pytest.mark.slow
def test_camouflage_survives_stage_1_and_dies_in_the_first_iteration_of_stage_2(runs):
    """14.74 GiB; only part of what torch had reserved there was in use, and the rest too scattered to serve."""
    run = runs("camouflage")
    assert "stage 2: encoder and decoder" in run.stderr
    assert run.found["out_of_memory"] and not run.found["steps"]
    # the state of the first stage's optimizer is still there, for a decoder of 8.4 M parameters
    assert run.found["breakdown"]["optimizer state"] == pytest.approx(2 * 4 * 8_418_848, rel=0.01)


def test_a_budget_raises_out_of_memory_at_its_limit(runs):
    run = runs("large")
    assert run.code == 0
    assert "Tried to allocate 3.00 GiB" in run.found["out_of_memory"]
    # the context has its share of the card that was asked for
    assert "a total capacity of 5.00 GiB of which 1.41 GiB is free" in run.found["out_of_memory"]
    assert run.found["peak_allocated_bytes"] == 3 * GIB and run.found["fits"] == {}


def test_a_script_on_the_runtime_recovers_on_a_card_that_is_too_small(runs):
    """The whole batch does not fit 2 GiB less the context: the runtime takes it in pieces and the script goes on."""
    run = runs("recovering")
    assert run.code == 0, run.stderr
    assert run.found["out_of_memory"] is None and len(run.found["steps"]) == 2
    assert run.found["peak_reserved_bytes"] <= 2 * GIB - run.found["context_bytes"]


def test_a_script_that_fails_shows_its_own_traceback(runs):
    run = runs("crash")
    assert run.code == 1 and "KeyError: 'mine'" in run.stderr
    first, where, *_, last = run.found["error"].splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'mine'")
    assert where.endswith('crash.py", line 3, in <module>')


def test_an_operation_that_is_refused_shows_no_frame_of_the_simulation(runs):
    run = runs("shapes")
    assert run.code == 1
    frames = [line for line in run.found["error"].splitlines() if line.startswith("  File")]
    assert frames[0].endswith('shapes.py", line 3, in <module>') and frames[-1].endswith("in forward")
    assert not any("oomfix" in frame or "fake_tensor" in frame for frame in frames)
    assert run.stderr.count("Traceback") == 1


def test_what_cannot_be_simulated_is_refused_in_one_sentence(runs):
    run = runs("cpu_only")
    assert run.code == 2 and run.found is None
    assert 'no tensor was moved to "cuda"' in run.stderr and len(run.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_package\n", "it imports no_such_package, which is not installed"),
        (SECOND_CARD, "it uses a second card"),
        (SEVERAL_PROCESSES, "it trains in several processes"),
        ("open('no_such_file.csv')\n", "it needs the file no_such_file.csv"),
        (DOWNLOAD, "it downloads from data.example, which cannot be reached"),
        (SHARED_MODEL, "it shares its model with other processes"),
        (DEVICE_MAP, "its device map spreads a model over 0, cpu: one card is simulated"),
        ("raise SystemExit(3)\n", "it ended itself with exit code 3"),
        ("raise SystemExit('no config')\n", "it ended itself and said: no config"),
        ("from .engine import train", "a module of a package: `oomfix profile -m package.module`"),
    ],
)
def test_every_refusal_says_what_is_in_the_way(tmp_path, monkeypatch, source, reason):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text(source)
    with pytest.raises(CannotSimulate, match=reason):
        simulate(str(script), [])


def test_the_command_writes_json_alone_to_standard_output():
    result = CliRunner().invoke(profile, ["--format", "json", str(SCRIPTS / "vae_and_siamese.py")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"peak_allocated_bytes", "peak_reserved_bytes", "breakdown", "fits", "assumptions", "steps"} <= set(found)


def test_the_command_names_an_unknown_card():
    result = CliRunner().invoke(profile, ["--gpu", "rtx3091", str(SCRIPTS / "dcgan.py")])
    assert result.exit_code == 2 and "did you mean 'rtx3090'?" in result.output


def test_the_command_line_imports_no_torch():
    code = "import sys, oomfix.profile.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
