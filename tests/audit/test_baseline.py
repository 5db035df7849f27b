"""Known findings stay quiet, new ones do not."""

from __future__ import annotations

import pytest

FIRST = "import torch\nx = torch.load('a.pt')\n"


def codes(oomfix, *args: str) -> list[tuple[str, int]]:
    return [(row["path"], row["line"]) for row in oomfix.json(*args)["findings"]]


def test_known_findings_stay_known_when_lines_above_change(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    written = oomfix("audit", "a.py", "--write-baseline", "known.json")
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "known.json: 1 findings written as known\n")
    (oomfix.folder / "a.py").write_text("# new\n\n" + FIRST.replace("x =", "    \nx  =").replace("x  =", "x ="))
    assert oomfix("audit", "a.py", "--baseline", "known.json").returncode == 0
    assert codes(oomfix, "a.py", "--baseline", "known.json") == []


def test_a_changed_line_and_a_second_equal_line_are_new(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    oomfix("audit", ".", "--write-baseline", "known.json")
    (oomfix.folder / "a.py").write_text(FIRST + "x = torch.load('a.pt')\ny = torch.load('a.pt')\n")
    assert codes(oomfix, "a.py", "--baseline", "known.json") == [("a.py", 3), ("a.py", 4)]


def test_paths_are_those_seen_from_the_baseline(oomfix):
    (oomfix.folder / "src").mkdir()
    (oomfix.folder / "src" / "a.py").write_text(FIRST)
    (oomfix.folder / "src" / "b.py").write_text(FIRST)
    oomfix("audit", "src/a.py", "--write-baseline", "known.json")
    oomfix.folder = oomfix.folder / "src"
    assert codes(oomfix, "a.py", "b.py", "--baseline", "../known.json") == [("b.py", 2)]


def test_the_baseline_of_the_project_is_used(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    oomfix("audit", "a.py", "--write-baseline", "known.json")
    (oomfix.folder / "pyproject.toml").write_text('[tool.oomfix]\nbaseline = "known.json"\n')
    assert codes(oomfix, "a.py") == []
    written = oomfix("audit", "a.py", "--write-baseline", "known.json")
    assert written.stderr == "known.json: 1 findings written as known\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "baseline known.json: No such file or directory"),
        ("{", "baseline known.json: line 1 is not JSON"),
        ("[]", "baseline known.json: not a baseline, expected"),
        ('{"version": 2, "findings": []}', "baseline known.json: not a baseline, expected"),
        ('{"version": 1, "findings": [{"path": "a.py"}]}', "baseline known.json: not a baseline, expected"),
        (b"\xff", "baseline known.json: not a baseline, expected"),
    ],
)
def test_a_faulty_baseline_is_a_usage_error(oomfix, content, message: str):
    (oomfix.folder / "a.py").write_text(FIRST)
    if content is not None:
        (oomfix.folder / "known.json").write_bytes(content.encode() if isinstance(content, str) else content)
    done = oomfix("audit", "a.py", "--baseline", "known.json")
    assert done.returncode == 2
    assert f"Error: {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_writing_and_reading_one_at_once_is_refused(oomfix):
    done = oomfix("audit", "a.py", "--baseline", "x.json", "--write-baseline", "x.json")
    assert done.returncode == 2
    assert "expected no --baseline beside it" in done.stderr
