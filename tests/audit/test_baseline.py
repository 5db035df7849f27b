"""Known findings stay quiet, new ones do not."""

from __future__ import annotations

import pytest

FIRST = "import torch\nx = torch.load('a.pt')\n"


def codes(oomfix, *args: str) -> list[tuple[str, int]]:
    return [(row["path"], row["line"]) for row in oomfix.json(*args)["findings"]]


def test_known_findings_stay_known_when_lines_above_change(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    written = oomfix("audit", "a.py", "--write-baseline", "known.json")
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "known.json: 1 finding written as known\n")
    (oomfix.folder / "a.py").write_text("# new\n\n" + FIRST.replace("x =", "    \nx  =").replace("x  =", "x ="))
    assert oomfix("audit", "a.py", "--baseline", "known.json").returncode == 0
    assert codes(oomfix, "a.py", "--baseline", "known.json") == []


def test_the_summary_counts_what_the_baseline_leaves_out(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    oomfix("audit", "a.py", "--write-baseline", "known.json")
    known = oomfix("audit", "a.py", "--baseline", "known.json").stdout
    assert known == "no new findings in 1 file with 0 training loops; 1 known\n"
    (oomfix.folder / "a.py").write_text(FIRST + "y = torch.load('b.pt')\n")
    summary = oomfix("audit", "a.py", "--baseline", "known.json").stdout.splitlines()[-2]
    assert summary == "1 warning in 1 file with 0 training loops; 0 of 1 with a fix shown; 1 known"


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


def test_a_baseline_may_begin_with_a_byte_order_mark(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    oomfix("audit", "a.py", "--write-baseline", "known.json")
    known = oomfix.folder / "known.json"
    known.write_bytes(b"\xef\xbb\xbf" + known.read_bytes())
    assert codes(oomfix, "a.py", "--baseline", "known.json") == []


def test_the_baseline_of_the_project_is_used(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    oomfix("audit", "a.py", "--write-baseline", "known.json")
    (oomfix.folder / "pyproject.toml").write_text('[tool.oomfix]\nbaseline = "known.json"\n')
    assert codes(oomfix, "a.py") == []
    written = oomfix("audit", "a.py", "--write-baseline", "known.json")
    assert written.stderr == "known.json: 1 finding written as known\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read this baseline: No such file or directory"),
        ("{", "not a baseline: line 1 is not JSON"),
        ("[]", "not a baseline, expected"),
        ('{"version": 2, "findings": []}', "not a baseline, expected"),
        ('{"version": 1, "findings": [{"path": "a.py"}]}', "not a baseline, expected"),
        (b"\xff", "not a baseline, expected"),
        (
            '{"version": 1, "findings": [{"path": "a.py", "code": "OOM205", "text": "", "count": 1e400}]}',
            "not a baseline, expected",
        ),
    ],
)
@pytest.mark.parametrize("named_by", ["flag", "pyproject"])
def test_a_faulty_baseline_is_told_in_one_line_and_the_files_are_audited(oomfix, content, message: str, named_by: str):
    (oomfix.folder / "a.py").write_text(FIRST)
    if content is not None:
        (oomfix.folder / "known.json").write_bytes(content.encode() if isinstance(content, str) else content)
    if named_by == "pyproject":
        (oomfix.folder / "pyproject.toml").write_text('[tool.oomfix]\nbaseline = "known.json"\n')
    flags = ("--baseline", "known.json") if named_by == "flag" else ()
    done = oomfix("audit", "a.py", "--format", "concise", *flags)
    assert done.returncode == 2
    assert done.stdout.startswith("a.py:2:5 OOM205 ")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"known.json: {message}")


def test_a_faulty_baseline_is_told_although_nothing_is_found(oomfix):
    (oomfix.folder / "a.py").write_text("x = 1\n")
    done = oomfix("audit", "a.py", "--baseline", "known.json")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_baseline_that_cannot_be_written_is_told_in_one_line(oomfix):
    (oomfix.folder / "a.py").write_text(FIRST)
    done = oomfix("audit", "a.py", "--write-baseline", "missing/known.json")
    assert done.returncode == 2
    assert done.stderr == "Error: missing/known.json: cannot write this baseline: No such file or directory\n"


def test_writing_and_reading_one_at_once_is_refused(oomfix):
    done = oomfix("audit", "a.py", "--baseline", "x.json", "--write-baseline", "x.json")
    assert done.returncode == 2
    assert "expected no --baseline beside it" in done.stderr
