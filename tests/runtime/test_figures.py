"""Figures in docstrings and in the list of examples are those of the committed results, in rows about them."""

import inspect
import re
from pathlib import Path

import pytest

from oomfix import runtime

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "techniques-cpu.md"
COMPARISON = ROOT / "bench" / "results" / "comparison-cpu.md"
STAGES = ROOT / "bench" / "results" / "stages-cpu.md"
QUOTING = [name for name in runtime.__all__ if RESULTS.name in (inspect.getdoc(getattr(runtime, name)) or "")]
WITHOUT = ("plain loop", "the state keeps its graph", "`del optimizer` after the first")
BESIDE = ("plain loop", "checkpointing and offloading")
FIGURE = re.compile(r"(?<!torch )\b\d+\.\d\d\b")


def rows(results=RESULTS):
    """The rows of all tables: (workload, technique, cells)."""
    workload = ""
    for line in results.read_text().splitlines():
        if line.startswith("## "):
            workload = line[3:]
        elif line.startswith("| ") and not line.startswith("| loop"):
            technique, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            yield workload, technique, cells


def is_about(technique, name):
    return re.search(rf"^`{name}`|, `{name}`$", technique) is not None or technique in BESIDE


@pytest.mark.parametrize("name", QUOTING)
def test_every_figure_of_a_docstring_is_in_a_row_about_it(name):
    figures = FIGURE.findall(inspect.getdoc(getattr(runtime, name)))
    about = {cell for _, technique, cells in rows() if is_about(technique, name) for cell in cells}
    assert figures
    assert [figure for figure in figures if figure not in about] == []


@pytest.mark.parametrize("name", [name for name in QUOTING if name != "offload_activations"])
def test_a_docstring_quotes_the_peak_and_the_time_of_its_technique(name):
    """Offloading moves nothing on a CPU: its time is not known."""
    figures = set(FIGURE.findall(inspect.getdoc(getattr(runtime, name))))
    own = [cells for _, technique, cells in rows() if is_about(technique, name) and technique not in BESIDE]
    assert any(cells[0] in figures and cells[3] in figures for cells in own)


def test_techniques_quote_what_they_save():
    assert len(QUOTING) >= 8


@pytest.mark.parametrize("name", ["detach_", "stage", "ProgressiveUnfreezing"])
def test_what_acts_between_iterations_and_stages_quotes_both_peaks_and_its_time(name):
    said = inspect.getdoc(getattr(runtime, name))
    ((workload, own),) = [(w, cells) for w, technique, cells in rows(STAGES) if technique.startswith(f"`{name}`")]
    without = next(cells for w, _, cells in rows(STAGES) if w == workload)
    assert set(FIGURE.findall(said)) <= {own[0], own[1], without[0]}
    assert f"{own[0]} GiB instead of {without[0]}" in " ".join(said.split())
    assert own[1] in said or f"{own[2]} ms" in " ".join(said.split())


def test_the_list_of_examples_quotes_the_rows_of_its_techniques():
    quoted = 0
    for line in (ROOT / "examples" / "README.md").read_text().splitlines():
        found = re.fullmatch(r"\| .* \| `(\w+)`.* \| (.+): (\S+) -> (\S+) \| (.*) \|", line)
        if found is None:
            continue
        name, workload, plain, peak, elapsed = found.groups()
        every = [*rows(), *rows(STAGES)]
        mine = [(w, t, cells) for w, t, cells in every if w == workload or w.startswith(f"{workload},")]
        assert plain in [cells[0] for _, technique, cells in mine if technique in WITHOUT]
        own = [cells for w, technique, cells in mine if technique.startswith(f"`{name}`") and cells[0] == peak]
        assert any(figure in cells for cells in own for figure in re.findall(r"\d+\.\d\d|\d+(?= ms)", elapsed)), line
        quoted += 1
    assert quoted == 9


def test_the_list_of_examples_quotes_micro_batches():
    said = " ".join((ROOT / "examples" / "README.md").read_text().split())
    (workload, plain, peak, elapsed) = re.search(
        r"\((GPT-2 .*), in 4 of them: (\S+) -> (\S+), time (\S+)\)", said
    ).groups()
    found = {technique: cells for name, technique, cells in rows() if name == workload}
    assert found["plain loop"][0] == plain
    assert (found["4 micro-batches by hand"][0], found["4 micro-batches by hand"][3]) == (peak, elapsed)


def test_the_readme_quotes_the_comparison():
    said = " ".join((ROOT / "README.md").read_text().split())
    quoted = re.search(
        r"`(?P<preset>\w+)` trains (?P<vit>\S+) at batch 64 in (?P<vit_peak>\S+) GiB where the plain fp32 loop takes "
        r"(?P<vit_plain>\S+), and (?P<gpt>GPT-2 124M) at 16 times 1024 tokens in (?P<gpt_peak>\S+) instead of "
        r"(?P<gpt_plain>[\d.]+);",
        said,
    ).groupdict()
    for model in ("vit", "gpt"):
        table = COMPARISON.read_text().split(f"### {quoted[model]}, ")[1].split("### ")[0]
        peaks = {
            cells[1]: cells[2] for cells in (re.split(r"\s*\|\s*", line) for line in table.splitlines()) if cells[2:]
        }
        assert peaks["plain loop, fp32"] == quoted[f"{model}_plain"]
        assert peaks[f"oomfix, preset {quoted['preset']}"] == quoted[f"{model}_peak"]
        by_hand, *others = (float(peak) for loop, peak in peaks.items() if "4 micro-batches, checkpointing" in loop)
        assert len(others) == 3
        assert all(peak <= 1.02 * by_hand for peak in others)  # "peak where the same techniques by hand do"
