"""The table of the five projects: README shows what the bench wrote, for every project, and the bench still applies."""

from __future__ import annotations

from pathlib import Path

from bench.readme import block_pattern
from bench.seeds import BLOCK, CHECKPOINTED, CONFIGURATIONS, RESULTS, SEEDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_shows_the_tables_that_the_bench_wrote():
    (block,) = block_pattern(BLOCK).findall(README)
    _, tables = RESULTS.read_text(encoding="utf-8").split("\n\n| script |", 1)
    assert block == ("| script |" + tables).rstrip()


def test_every_project_and_every_configuration_has_its_row():
    (block,) = block_pattern(BLOCK).findall(README)
    rows = [
        line.split(" | ") for line in block.splitlines() if line.startswith("| ") and not line.startswith("| script")
    ]
    assert [row[0].removeprefix("| ") for row in rows if len(row) == 5 and "`" in row[-1]] == [
        seed.name for seed in SEEDS
    ]
    assert [row[2] for row in rows if row[3].endswith("GB")] == [written for *_, written in CONFIGURATIONS]


def test_the_results_say_where_they_are_from():
    head = RESULTS.read_text(encoding="utf-8").splitlines()[2]
    assert "`python -m bench.seeds --write`" in head and "torch" in head and "no GPU" in head


def test_the_checkpointed_configurations_are_still_written_as_the_script_is():
    source = (ROOT / "fixtures" / "fine_grained" / "train.py").read_text(encoding="utf-8")
    for old, new in CHECKPOINTED:
        assert source.count(old) >= 1, old
        source = source.replace(old, new)
    compile(source, "train.py", "exec")
    assert source.count("checkpoint(block, ") == 2
