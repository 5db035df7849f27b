"""The five training scripts under fixtures/ run, learn, repeat themselves and are what their README says."""

import importlib.util
import json
import os
import re
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.starter import WITH_TORCH, Request

torch = pytest.importorskip("torch")

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = ["few_shot", "fine_grained", "clip", "retinopathy", "camouflage"]
FEW_AND_MORE = [
    "few_shot",
    "clip",
    *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in ("few_shot", "clip")),
]
QUIET = "ignore:.*(torch.cuda.amp|CUDA is not available|lr_scheduler)"
LOSS = re.compile(r"^epoch (\d+): train loss (\d+\.\d{6})\b", re.MULTILINE)

# What the line of a finding must hold: the line numbers of expected.json rot when a script is edited.
MARKS = {
    "OOM101": r" \+= ",
    "OOM102": r"\.append\(|self\.\w+ = ",
    "OOM201": r"model\(|model\.encode_|self\.set_forward\(",
    "OOM202": r"model\(|self\.set_forward_loss\(",
    "OOM203": r"\.zero_grad\(\)",
    "OOM205": r"torch\.load\([^,]*\)",
    "OOM301": r"\.backward\(\)",
    "OOM302": r"if .*% .* == 0:",
    "OOM303": r"clip_grad_norm_\(",
    "OOM305": r"\.backward\(\)",
    "OOM401": r"torch\.cuda\.amp\.(autocast|GradScaler)\(",
    "OOM501": r"torch\.cuda\.empty_cache\(\)",
}


@cache
def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fixture_{name}", FIXTURES / name / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(name: str, directory: Path) -> str:
    """What a tiny run prints in a process of its own."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    request = Request(str(FIXTURES / name / "train.py"), ["--tiny"], environment, str(directory))
    with tempfile.TemporaryFile("w+") as printed, open(os.devnull) as nothing:
        assert WITH_TORCH.run(request, [nothing.fileno(), printed.fileno(), 2], limit_s=60) == 0
        printed.seek(0)
        return printed.read()


def tiny(name: str) -> tuple[ModuleType, object]:
    module = load(name)
    torch.manual_seed(0)
    return module, module.parse_args(["--tiny"])


@pytest.mark.parametrize("name", FEW_AND_MORE)
@pytest.mark.filterwarnings(QUIET)
def test_the_tiny_run_repeats_itself_and_learns(name, tmp_path, monkeypatch, capsys):
    """Two processes, one of them this one, print the same; losses end lower than each sequence of epochs began."""
    printed = printed_by(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = load(name)
    module.main(module.parse_args(["--tiny"]))
    assert capsys.readouterr().out == printed

    losses = [(int(epoch), float(loss)) for epoch, loss in LOSS.findall(printed)]
    starts = [i for i, (epoch, _) in enumerate(losses) if epoch == 1]
    assert starts and starts[0] == 0
    for begin, end in zip(starts, [*starts[1:], len(losses)], strict=True):
        assert end - begin > 1
        assert losses[end - 1][1] < losses[begin][1]
    assert not list(tmp_path.iterdir()), "a run leaves no file"


@pytest.mark.parametrize("name", FEW_AND_MORE)
@pytest.mark.filterwarnings(QUIET)
def test_seed_and_epochs_count_next_to_tiny(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module, losses = load(name), []
    for seed in ("1", "2"):
        module.main(module.parse_args(["--tiny", "--epochs", "1", "--seed", seed]))
        losses.append(LOSS.findall(capsys.readouterr().out))
    assert {epoch for run in losses for epoch, _ in run} == {"1"}
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("name", "part", "parameters"),
    [
        ("few_shot", "feature", 21_284_672),
        ("few_shot", "", 74_471_834),
        ("fine_grained", "", 100_733_584),
        ("clip", "", 151_277_313),
        ("retinopathy", "", 25_642_097),
        ("retinopathy", "backbone", 25_510_896),
        ("camouflage", "encoder", 18_000_136),
        ("camouflage", "", 26_418_984),
    ],
)
def test_at_real_size_the_models_have_the_parameters_the_readme_states(name, part, parameters):
    """Built on the meta device. ResNet-34, CLIP ViT-B/32 and SE-ResNeXt-50 match the published models."""
    module = load(name)
    with torch.device("meta"):
        model = module.build_model(module.parse_args([]))
    assert sum(p.numel() for p in model.get_submodule(part).parameters()) == parameters
    assert f"{parameters:,}" in (FIXTURES / "README.md").read_text(encoding="utf-8")


def test_expected_findings_stand_on_lines_that_can_have_them():
    expected = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
    assert sorted(expected) == sorted(f"{name}/train.py" for name in NAMES)
    for path, findings in expected.items():
        lines = (FIXTURES / path).read_text(encoding="utf-8").splitlines()
        places = [(finding["line"], finding["code"]) for finding in findings]
        assert places == sorted(set(places)), f"{path}: in the order of lines, then codes, none twice"
        for line, code in places:
            assert re.search(MARKS[code], lines[line - 1]), f"{path}:{line} {code}: {lines[line - 1]}"
        zero_grads = {n for n, text in enumerate(lines, 1) if ".zero_grad()" in text}
        assert {line for line, code in places if code == "OOM203"} == zero_grads


def test_the_readme_lists_exactly_the_expected_findings():
    expected = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
    readme = (FIXTURES / "README.md").read_text(encoding="utf-8")
    for path, findings in expected.items():
        lines = defaultdict(list)
        for finding in findings:
            lines[finding["code"]].append(finding["line"])
        row = "; ".join(f"{code}: {', '.join(map(str, lines[code]))}" for code in sorted(lines))
        assert f"| {Path(path).parent} | {row} |" in readme


def test_few_shot_keeps_the_losses_of_every_episode_with_their_graphs():
    module, args = tiny("few_shot")
    model = module.build_model(args)
    episode = torch.randn(args.n_way, args.k_shot + args.n_query, 3, args.image_size, args.image_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.train_loop([episode] * 3, optimizer, torch.device("cpu"))
    assert [len(losses) for losses in model.vic_history.values()] == [3, 3, 3]
    assert all(loss.grad_fn is not None for losses in model.vic_history.values() for loss in losses)


def test_fine_grained_keeps_the_attention_maps_until_the_next_forward():
    module, args = tiny("fine_grained")
    model = module.build_model(args)
    model(torch.randn(2, 3, args.image_size, args.image_size))
    assert all(block.attention.attention_map.grad_fn is not None for block in model.blocks)


def test_clip_validates_with_gradients_and_returns_losses_that_carry_them():
    module, args = tiny("clip")
    model = module.build_model(args)
    shape = (args.image_size, args.vocab_size, args.context_length)
    loader = torch.utils.data.DataLoader(module.CarCaptions(4, *shape, seed=0), batch_size=2)
    val_loss, _ = module.validate(model, loader, torch.device("cpu"))
    assert val_loss.grad_fn is not None

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train_loss = module.train_epoch(model, loader, optimizer, scheduler, scaler, args, torch.device("cpu"))
    assert train_loss.grad_fn is not None


def test_retinopathy_keeps_one_graph_per_epoch_for_the_reference_images():
    module, args = tiny("retinopathy")
    args.epochs = 2
    model = module.build_model(args)
    loader = torch.utils.data.DataLoader(module.FundusImages((0, 1), 2, args.img_size, seed=0), batch_size=2)
    references = torch.randn(args.reference_images, 3, args.img_size, args.img_size)
    _, history = module.train_binary_classifier(model, loader, loader, references, args, torch.device("cpu"))
    assert len(history["reference"]) == 2
    assert all(outputs.grad_fn is not None for outputs in history["reference"])


@pytest.mark.filterwarnings("ignore:.*(torch.cuda.amp|CUDA is not available)")
def test_camouflage_trains_only_the_decoder_in_its_first_stage_and_everything_in_its_second(monkeypatch):
    module, args = tiny("camouflage")
    trained = []

    def record(model, epochs, optimizer, *_):
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        encoder = {id(p) for p in model.encoder.parameters()}
        trained.append((len(groups), sum(id(p) in encoder for p in groups), len([*model.parameters()])))
        assert all(p.requires_grad for p in groups)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "train_stage", record)
    module.main(args)
    (first, first_encoder, _), (second, second_encoder, everything) = trained
    assert first_encoder == 0 < first
    assert second == everything == first + second_encoder
