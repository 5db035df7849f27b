"""What is promised beside other libraries holds in the committed table of `bench.comparison`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "bench" / "results" / "comparison-cpu.md").read_text(encoding="utf-8")
ON_GPU = ROOT / "bench" / "results" / "comparison-cuda.md"
TRANSFORMERS = ["ViT-B/16, 224 px, batch 64", "GPT-2 124M, 1024 tokens, batch 16"]
OTHERS = ["ResNet-50, 224 px, batch 64", "U-Net 64 wide, 256 px, batch 32"]
PLAIN, EIGHT = "plain loop, fp32", "oomfix, preset 8gb"


def rows(text: str, workload: str) -> dict[str, list[str]]:
    """The rows of a workload's table: cells by the name of the loop."""
    section = text.split(f"### {workload}\n", 1)[1].split("\n### ", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {name: others for name, *others in cells[2:]}


def peaks(workload: str) -> dict[str, float]:
    return {name: float(cells[0]) for name, cells in rows(TEXT, workload).items()}


def same_techniques(found: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Ours, and those of the loops that have the same techniques switched on by hand."""
    by_name = {name.split(":")[0]: value for name, value in found.items() if ": " in name}
    return by_name.pop("oomfix"), by_name


@pytest.mark.parametrize("workload", TRANSFORMERS)
def test_8gb_peaks_at_a_quarter_of_the_plain_loop_at_most(workload):
    found = peaks(workload)
    assert found[PLAIN] / found[EIGHT] >= 4.0


@pytest.mark.parametrize("workload", TRANSFORMERS)
def test_the_peak_is_never_above_that_of_another_library_with_the_same_techniques(workload):
    ours, others = same_techniques(peaks(workload))
    assert others.keys() == {"by hand", "Accelerate", "Fabric"}
    assert ours <= min(others.values())


@pytest.mark.parametrize("workload", OTHERS)
def test_with_batch_statistics_the_peak_is_within_a_hundredth_of_theirs(workload):
    """Running statistics are kept, so that a call can start again."""
    ours, others = same_techniques(peaks(workload))
    assert ours <= min(others.values()) + 0.01


@pytest.mark.parametrize("workload", [*TRANSFORMERS, *OTHERS])
def test_a_preset_stays_within_its_card(workload):
    from oomfix.presets import PRESETS

    for name, peak in peaks(workload).items():
        if name.startswith("oomfix, preset "):
            assert peak <= PRESETS[name.removeprefix("oomfix, preset ")].budget_gib


def test_the_readme_quotes_the_table():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    vit, gpt2 = map(peaks, TRANSFORMERS)
    said = re.search(
        r"`8gb` trains ViT-B/16 at batch 64 in (\S+) GiB where the plain fp32 loop takes (\S+), "
        r"and GPT-2 124M at 16 times 1024 tokens in (\S+) instead of (\S+);",
        text,
    )
    assert said is not None
    assert [float(number) for number in said.groups()] == [vit[EIGHT], vit[PLAIN], gpt2[EIGHT], gpt2[PLAIN]]


@pytest.mark.skipif(not ON_GPU.exists(), reason="was not run on a GPU yet")
@pytest.mark.parametrize("workload", TRANSFORMERS)
def test_on_a_gpu_8gb_takes_at_most_1_35_times_a_plain_bf16_loop(workload):
    found = rows(ON_GPU.read_text(encoding="utf-8"), workload)
    assert float(found[EIGHT][2]) <= 1.35
    assert float(found[PLAIN][0]) / float(found[EIGHT][0]) >= 4.0
