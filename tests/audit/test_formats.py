"""The same findings in every format."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import jsonschema
import pytest

from oomfix.pages import pages
from oomfix.report import AuditedFile, Report, concise, github, rich, sarif
from oomfix.report import json as json_format
from oomfix.results import Change, Located
from oomfix.rules import all_rules

SCHEMA = json.loads((Path(__file__).parent / "sarif_for_github.json").read_text())


def located(**changes: object) -> Located:
    found = Located(
        code="OOM205",
        name="load-on-gpu",
        severity="warning",
        message="`torch.load` without `map_location`",
        cell=None,
        line=3,
        column=5,
        end_line=3,
        end_column=18,
        fix="local",
        changes=(Change(3, 17, 3, 17, ', map_location="cpu"'),),
        context_line=1,
        context=("import torch", "", "x = torch.load(p)", "y = 1"),
        fixed=('x = torch.load(p, map_location="cpu")',),
        silenced_by=(),
    )
    return found._replace(**changes)


def report(*findings: Located, path: str = "a.py") -> Report:
    return Report([AuditedFile(path, findings)])


def plain(report: Report) -> str:
    stream = StringIO()
    rich.write(report, stream, terminal=False)
    return stream.getvalue()


def test_concise_is_a_line_that_editors_understand():
    assert concise.render(report(located())) == "a.py:3:5 OOM205 `torch.load` without `map_location`\n"
    assert concise.render(report(located(cell=3), path="a.ipynb")).startswith("a.ipynb:cell 3:3:5 OOM205 ")


def test_json_is_the_documented_object():
    loop = {"line": 2, "end_line": 5}
    whole = Report([AuditedFile("a.py", [located()], [loop]), AuditedFile("b.py", errors=["not UTF-8"])])
    assert json.loads(json_format.render(whole)) == {
        "version": 1,
        "findings": [
            {
                "path": "a.py",
                "line": 3,
                "column": 5,
                "end_line": 3,
                "end_column": 18,
                "code": "OOM205",
                "name": "load-on-gpu",
                "severity": "warning",
                "message": "`torch.load` without `map_location`",
                "fix": "local",
            }
        ],
        "loops": [{"path": "a.py", "line": 2, "end_line": 5}],
        "errors": [{"path": "b.py", "message": "not UTF-8"}],
    }
    assert json.loads(json_format.render(report(located(cell=4))))["findings"][0]["cell"] == 4


@pytest.mark.parametrize("severity", ["error", "warning", "note"])
@pytest.mark.parametrize("cell", [None, 2])
def test_sarif_is_what_github_takes(severity: str, cell: int | None):
    bad = AuditedFile("bad é.py", errors=["not UTF-8"])
    log = json.loads(
        sarif.render(
            Report([AuditedFile("my dir/a.py", [located(severity=severity, cell=cell), located()]), bad]),
            pages(all_rules()),
        )
    )
    jsonschema.validate(log, SCHEMA)
    run = log["runs"][0]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    assert run["results"][0]["level"] == severity
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20dir/a.py"
    assert run["invocations"][0]["executionSuccessful"] is False
    assert run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"] == "not UTF-8"


def test_sarif_fingerprints_stay_when_a_line_moves_and_differ_between_equal_lines():
    def prints(*findings: Located) -> list[str]:
        log = json.loads(sarif.render(report(*findings), pages(all_rules())))
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in log["runs"][0]["results"]]

    moved = located(line=13, end_line=13, context_line=11)
    assert prints(located()) == prints(moved)
    assert len(set(prints(located(), moved))) == 2
    assert prints(located()) != prints(located(context=("", "", "z = torch.load(p)", "")))


def test_sarif_names_a_file_by_one_name(tmp_path: Path):
    log = json.loads(sarif.render(report(located(), path="./b/../a.py"), pages(all_rules())))
    assert log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "a.py"}


def test_sarif_fixes_make_the_fixed_text(oomfix):
    text = "import torch\r\n\r\nx = 'é'; model.load_state_dict(torch.load(  'é'))\r\n"
    (oomfix.folder / "a.py").write_bytes(text.encode())
    log = json.loads(oomfix("audit", "a.py", "--format", "sarif").stdout)
    (result,) = log["runs"][0]["results"]
    (replacement,) = result["fixes"][0]["artifactChanges"][0]["replacements"]
    lines = text.split("\r\n")
    region = replacement["deletedRegion"]
    assert region["startLine"] == region["endLine"] == 3
    line = lines[2]
    start, end = region["startColumn"] - 1, region["endColumn"] - 1
    lines[2] = line[:start] + replacement["insertedContent"]["text"] + line[end:]
    assert "\r\n".join(lines) == text.replace("'é'))", "'é', map_location='cpu'))")
    region = result["locations"][0]["physicalLocation"]["region"]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == "torch.load(  'é')"


def test_github_annotations_escape_what_would_end_them():
    finding = located(message="50 % of\nlines: a, b", end_line=4)
    assert github.render(report(finding, path="a,b:c%.py")) == (
        "::warning file=a%2Cb%3Ac%25.py,line=3,endLine=4,title=OOM205 load-on-gpu::50 %25 of%0Alines: a, b\n"
    )
    one_line = github.render(report(located(severity="note")))
    assert one_line.startswith("::notice file=a.py,line=3,endLine=3,col=5,endColumn=18,title=OOM205")


def test_github_tells_cell_and_line_of_a_notebook_and_errors():
    lines = github.render(
        Report([AuditedFile("a.ipynb", [located(cell=2, severity="error")]), AuditedFile("b.py", errors=["empty"])])
    ).splitlines()
    assert lines[0].startswith("::error file=a.ipynb,title=OOM205 load-on-gpu::cell 2, line 3, column 5: ")
    assert lines[1] == "::error file=b.py::empty"


def test_a_frame_marks_the_finding_in_its_lines():
    assert plain(report(located())) == (
        "a.py:3:5  OOM205  warning  `torch.load` without `map_location`\n"
        "    1 | import torch\n"
        "    2 |\n"
        "  > 3 | x = torch.load(p)\n"
        "      |     ^^^^^^^^^^^^^\n"
        "    4 | y = 1\n"
        '  fix: x = torch.load(p, map_location="cpu")\n'
        "\n"
        "1 warning in 1 file with 0 training loops; 1 of 1 with a fix shown\n"
        "`oomfix apply --preset 16gb --diff a.py` shows what it would change\n"
        "`oomfix explain OOM205` says why\n"
    )


def test_carets_stand_under_tabs_and_wide_characters():
    text = "\tx = '漢字'; torch.load(p)"
    column = text.index("torch") + 1
    frame = plain(report(located(context=("", "", text), column=column, end_column=len(text) + 1))).splitlines()
    assert frame[3] == "  > 3 |     x = '漢字'; torch.load(p)"
    assert frame[4] == "      |                 " + "^" * 13  # 8 columns for x = '', 4 for the two characters


def test_a_line_of_source_cannot_play_with_the_terminal():
    text = "x = '\x1b[2J\x07'; torch.load(p)"
    shown = plain(report(located(context=("", "", text), message="a\x1b[31mb"), path="\x1b]0;a.py"))
    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("indent", [0, 30, 200])
def test_no_line_is_wider_than_the_terminal_and_the_finding_is_in_sight(width: int, indent: int):
    text = " " * indent + "x = torch.load(p) + " + "y" * 200
    finding = located(message="a long message " * 12, context=("", "", text), column=indent + 5, end_column=indent + 18)
    lines = ["".join(span.text for span in line) for line in rich.layout(report(finding), width)]
    assert [line for line in lines if len(line) > width] == []
    code = next(line for line in lines if line.startswith("  > 3"))
    carets = lines[lines.index(code) + 1]
    assert code[carets.index("^") : carets.rindex("^") + 1] == "torch.load(p)"


def test_a_word_of_the_message_is_not_broken_while_a_line_can_hold_it():
    word = "`" + "x" * 60 + "`"
    lines = ["".join(s.text for s in line) for line in rich.layout(report(located(message=f"keeps {word} on")), 80)]
    assert lines[:2] == ["a.py:3:5  OOM205  warning  keeps", f"    {word} on"]


def test_a_finding_of_many_lines_is_underlined_on_its_first():
    finding = located(line=1, end_line=3, context_line=1, context=("x = torch.load(", "    p", ")"), end_column=2)
    assert plain(report(finding)).splitlines()[2] == "      |     " + "^" * 11


def test_a_removed_statement_and_a_long_fix_are_told():
    assert "  fix: remove it\n" in plain(report(located(fixed=())))
    shown = plain(report(located(fixed=tuple(f"line {n}" for n in range(7)))))
    assert "  fix: line 0\n       line 1\n       line 2\n       and 4 more lines\n" in shown
    assert "fix:" not in plain(report(located(fix="runtime", changes=(), fixed=())))


def test_the_summary_explains_what_leaks_memory_ahead_of_what_is_as_severe():
    found = [located(code="OOM401"), located(code="OOM201")]
    assert plain(report(*found)).splitlines()[-1] == "`oomfix explain OOM201` says why"
    found.append(located(code="OOM303", severity="error"))
    assert plain(report(*found)).splitlines()[-1] == "`oomfix explain OOM303` says why"


def test_the_summary_counts():
    files = [
        AuditedFile("a.py", [located(severity="error", code="OOM101"), located(), located(fix=None)], [{}]),
        AuditedFile("b.py", loops=[{}]),
        AuditedFile("c.py", errors=["not UTF-8"]),
    ]
    assert plain(Report(files)).splitlines()[-3:] == [
        "1 error, 2 warnings in 2 files with 2 training loops; 2 of 3 with a fix shown; 1 path not audited in full",
        "`oomfix apply --preset 16gb --diff a.py` shows what it would change",
        "`oomfix explain OOM101` says why",
    ]
    assert plain(Report([AuditedFile("b.py")])) == "no findings in 1 file with 0 training loops\n"
    assert plain(Report([AuditedFile("c.py", errors=["not UTF-8"])])) == "nothing could be audited\n"
    assert plain(Report([])) == "nothing to audit\n"


def test_a_fix_elsewhere_names_its_line():
    """A decorator stands above the function, often out of the frame."""
    elsewhere = located(changes=(Change(1, 1, 1, 1, "@torch.no_grad()\n"),), fixed=("@torch.no_grad()",))
    assert "  fix at line 1: @torch.no_grad()\n" in plain(report(elsewhere))
    assert "  fix: x = torch.load(" in plain(report(located()))


def test_apply_is_named_where_it_would_fix_something():
    def hints(*files: AuditedFile) -> list[str]:
        return [line for line in plain(Report(files)).splitlines() if "oomfix apply" in line]

    said = "`oomfix apply --preset 16gb --diff {}` shows what it would change"
    assert hints(AuditedFile("a.py", [located(fix="runtime")]), AuditedFile("b.py")) == [said.format("a.py")]
    assert hints(AuditedFile("my runs/a.py", [located()])) == [said.format("'my runs/a.py'")]
    two = [AuditedFile(name, [located()]) for name in ("runs/a.py", "my runs/b.py")]
    assert hints(*two) == [said.format("runs/a.py 'my runs/b.py'")]
    many = [AuditedFile(f"runs/{name}/train.py", [located()]) for name in "abcd"]
    assert hints(*many) == [said.format("runs")]
    assert hints(*many, *two) == [said.format(".")]
    assert hints(*many, AuditedFile("/elsewhere/train.py", [located()])) == [said.format("PATH")]
    assert hints(AuditedFile("a.py", [located(fix=None), located(severity="note")])) == []
    assert hints(AuditedFile("<stdin>", [located()])) == []


def test_a_command_is_not_broken_by_a_narrow_terminal():
    path = "experiments/with/a/long/name/train.py"
    lines = ["".join(s.text for s in line) for line in rich.layout(report(located(), path=path), 50)]
    command = f"`oomfix apply --preset 16gb --diff {path}`"
    assert lines[lines.index(command) + 1] == "    shows what it would change"


@pytest.mark.parametrize("before", ["", "x" * 100 + " = 1; "])
def test_what_a_fix_changes_is_in_sight(before: str):
    text, fixed = f"{before}y = torch.load(p)", f'{before}y = torch.load(p, map_location="cpu")'
    finding = located(context=("for p in paths:", "    pass", text), column=len(before) + 5, fixed=(fixed,))
    lines = ["".join(span.text for span in line) for line in rich.layout(report(finding), 60)]
    assert any(line.startswith("  fix: ") and 'p, map_location="cpu")' in line for line in lines)
    assert "    1 | for p in paths:" in lines  # and the lines around it are shown from their beginning


def test_colour_only_where_it_is_wanted(oomfix):
    (oomfix.folder / "a.py").write_text("import torch\nx = torch.load(p)\n")
    piped = oomfix("audit", "a.py")
    forced = oomfix("audit", "a.py", FORCE_COLOR="1", COLUMNS="200", TERM="xterm-256color")
    without = oomfix("audit", "a.py", FORCE_COLOR="1", NO_COLOR="1", COLUMNS="200", TERM="xterm-256color")
    assert "\x1b" not in piped.stdout
    assert re.search(r"\x1b\[1;33m", forced.stdout)
    assert not re.search(r"\x1b\[(\d+;)*3\d", without.stdout)
    bare = re.sub(r"\x1b\[[\d;]*m", "", forced.stdout)
    assert [line.rstrip() for line in bare.splitlines()] == piped.stdout.splitlines()


def test_statistics_count_each_rule(oomfix):
    (oomfix.folder / "a.py").write_text("import torch\nx = torch.load(p)\ny = torch.load(q)\n")
    assert oomfix("audit", "a.py", "--statistics").stdout == "2  OOM205  warning  load-on-gpu\n"
    document = oomfix.json("a.py", "--statistics")
    assert document == {
        "version": 1,
        "statistics": [{"code": "OOM205", "name": "load-on-gpu", "severity": "warning", "count": 2}],
        "errors": [],
    }
    assert "--statistics: has no sarif format" in oomfix("audit", "a.py", "--statistics", "--format", "sarif").stderr


def test_cell_and_line_are_told_in_every_format(oomfix, notebook):
    cells = [("markdown", "# Load"), ("code", "%matplotlib inline\nimport torch\nx = torch.load(p)\n")]
    (oomfix.folder / "a.ipynb").write_bytes(notebook(*cells))
    assert oomfix("audit", "a.ipynb", "--format", "concise").stdout.startswith("a.ipynb:cell 2:3:5 OOM205 ")
    assert oomfix("audit", "a.ipynb").stdout.startswith("a.ipynb:cell 2:3:5  OOM205")
    (row,) = oomfix.json("a.ipynb")["findings"]
    assert (row["cell"], row["line"], row["column"]) == (2, 3, 5)
    assert "::cell 2, line 3, column 5: " in oomfix("audit", "a.ipynb", "--format", "github").stdout
    log = json.loads(oomfix("audit", "a.ipynb", "--format", "sarif").stdout)
    jsonschema.validate(log, SCHEMA)
    assert log["runs"][0]["results"][0]["message"]["text"].startswith("cell 2, line 3, column 5: ")


def test_json_tells_what_apply_would_make_of_each_loop(oomfix, notebook):
    plain_loop = "import torch\nfor x, y in loader:\n    loss = criterion(model(x), y)\n    {}\n    optimizer.step()\n"
    backwards = {"a.py": "loss.backward()", "b.py": "engine.backward(loss)"}
    for name, backward in backwards.items():
        (oomfix.folder / name).write_text(plain_loop.format(backward))
    (oomfix.folder / "c.ipynb").write_bytes(
        notebook(("code", "%cd x\n"), ("code", plain_loop.format("loss.backward()")))
    )
    said = json.loads(oomfix("apply", "--preset", "8gb", "--check", "--format", "json", ".").stdout)["loops"]
    oomfix("audit", ".")  # what this leaves in the cache says nothing of it
    for _ in range(2):  # the second one from the cache
        rows = {row["path"]: (row["rewrite"], row["reason"]) for row in oomfix.json(".")["loops"]}
        assert rows == {row["path"]: (row["rewrite"], row["reason"]) for row in said}
    assert rows["a.py"] == rows["c.ipynb"] == ("micro-batched", None)
    assert rows["b.py"][0] == "none"
    assert oomfix.json("-", input=b"for x in l:\n    model(x).backward()\n    opt.step()\n")["loops"][0]["rewrite"]


def test_loops_of_a_notebook_count_lines_within_their_cell(oomfix, notebook):
    helper = "def step(loss):\n    loss.backward()\n"
    loop = (
        "import torch\nfor x, y in loader:\n    loss = criterion(model(x), y)\n    step(loss)\n    optimizer.step()\n"
    )
    (oomfix.folder / "a.ipynb").write_bytes(notebook(("code", helper), ("code", loop)))
    (row,) = oomfix.json("a.ipynb")["loops"]
    assert (row["cell"], row["line"], row["end_line"], row["steps"]) == (2, 2, 5, [5])
    assert row["backwards"] == [{"cell": 1, "line": 2}]


def test_the_frame_of_a_notebook_shows_the_lines_that_its_author_wrote(oomfix, notebook):
    cell = "  %%time\n  !nvidia-smi\n  x = torch.load(p)\n  %cd foo\n"
    (oomfix.folder / "a.ipynb").write_bytes(notebook(("code", "import torch"), ("code", cell)))
    shown = oomfix("audit", "a.ipynb").stdout.splitlines()
    assert shown[0].startswith("a.ipynb:cell 2:3:7  OOM205")
    assert shown[1:6] == [
        "    1 |   %%time",
        "    2 |   !nvidia-smi",
        "  > 3 |   x = torch.load(p)",
        "      |       ^^^^^^^^^^^^^",
        "    4 |   %cd foo",
    ]


SHARED_EDITS = """\
import torch
from torch.cuda.amp import GradScaler

scaler = GradScaler()
other = GradScaler()

def validate(model, loader):
    model.eval()
    total, correct = 0, 0
    for x, y in loader:
        total += criterion(model(x), y).item()
    for x, y in loader:
        correct += criterion(model(x), y).item()
    return total, correct
"""
AMP_FIXED = SHARED_EDITS.replace("torch.cuda.amp", "torch.amp").replace("GradScaler()", 'GradScaler("cuda")')
EVALUATION_FIXED = SHARED_EDITS.replace("def validate", "@torch.no_grad()\ndef validate")


def test_sarif_fixes_are_complete_each_alone_and_right_all_together_once_merged(oomfix):
    (oomfix.folder / "a.py").write_text(SHARED_EDITS)
    log = json.loads(oomfix("audit", "a.py", "--format", "sarif").stdout)
    fixes = [
        (result["ruleId"], _replacements(fix))
        for result in log["runs"][0]["results"]
        for fix in result.get("fixes", [])
    ]
    assert [code for code, _ in fixes] == ["OOM401", "OOM401", "OOM401", "OOM201", "OOM201"]
    for code, replacements in fixes:
        assert _replaced(SHARED_EDITS, replacements) == {"OOM401": AMP_FIXED, "OOM201": EVALUATION_FIXED}[code]
    merged = list(dict.fromkeys(replacement for _, replacements in fixes for replacement in replacements))
    both = AMP_FIXED.replace("def validate", "@torch.no_grad()\ndef validate")
    assert _replaced(SHARED_EDITS, merged) == both


def _replacements(fix: dict) -> list[tuple[int, int, int, int, str]]:
    (change,) = fix["artifactChanges"]
    return [
        (
            *(replacement["deletedRegion"][key] for key in ("startLine", "startColumn", "endLine", "endColumn")),
            replacement["insertedContent"]["text"],
        )
        for replacement in change["replacements"]
    ]


def _replaced(text: str, replacements: list[tuple[int, int, int, int, str]]) -> str:
    lines = text.splitlines(keepends=True)
    for line, column, end_line, end_column, inserted in sorted(replacements, reverse=True):
        assert line == end_line
        old = lines[line - 1]
        lines[line - 1] = old[: column - 1] + inserted + old[end_column - 1 :]
    return "".join(lines)
