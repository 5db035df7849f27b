"""Encodings, line ends and indentation survive; a second run changes nothing; the audit agrees."""

import ast

import pytest
from click.testing import CliRunner

from oomfix.audit import Auditor
from oomfix.rewrite.command import apply
from oomfix.rules import all_rules
from oomfix.source import Source

SCRIPT = '''\
"""Trains."""
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0
text = """
  left as it is
"""
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)  # caf\u00e9
    loss.backward()
    optimizer.step()
    total += loss
'''
RUN = CliRunner()


def encoded(text: str, newline: str, encoding: str, bom: bytes) -> bytes:
    head = f"# coding: {encoding}\n" if encoding != "utf-8" else ""
    return bom + (head + text).replace("\n", newline).encode(encoding)


@pytest.mark.parametrize("unit", ["  ", "    ", "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("encoding", "bom"), [("utf-8", b""), ("utf-8", b"\xef\xbb\xbf"), ("latin-1", b"")])
def test_bytes_outside_of_the_loop_stay(tmp_path, unit, newline, encoding, bom):
    path = tmp_path / "train.py"
    text = SCRIPT.replace("    ", unit)
    before = encoded(text, newline, encoding, bom)
    path.write_bytes(before)
    done = RUN.invoke(apply, ["--preset", "16gb", str(path)])
    assert done.exit_code == 0, done.output
    after = path.read_bytes()
    lifted = text.replace(f"{unit}optimizer.zero_grad()\n", "").replace(
        text[text.index(f"{unit}loss = nn") : text.index(f"{unit}total")],
        f"{unit}def forward(x, y):\n{unit}{unit}loss = nn.functional.cross_entropy(model(x), y)  # caf\u00e9\n"
        f"{unit}{unit}return loss\n\n{unit}loss = memory.forward_backward(forward, x, y)\n"
        f"{unit}memory.step(optimizer)\n",
    )
    lifted = lifted.replace(
        "from torch import nn\n",
        'from oomfix import runtime\nfrom torch import nn\n\nmemory = runtime.preset("16gb")\n',
    )
    lifted = lifted.replace("optimizer = torch", "memory.prepare(model)\noptimizer = torch")
    assert after == encoded(lifted, newline, encoding, bom)


def test_f_strings_of_python_3_12_stay_and_do_not_keep_the_loop_from_being_rewritten(tmp_path):
    path = tmp_path / "train.py"
    newer = 'print(f"{str({"a": 1}["a"])}")\n'
    path.write_text(SCRIPT + newer)
    done = RUN.invoke(apply, ["--preset", "16gb", str(path)])
    assert done.exit_code == 0, done.output
    after = path.read_text()
    assert "memory.forward_backward(forward, x, y)" in after
    assert after.endswith(newer)


def test_a_second_run_changes_nothing(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    RUN.invoke(apply, ["--preset", "16gb", str(path)])
    once = path.read_bytes()
    done = RUN.invoke(apply, ["--preset", "16gb", "--check", str(path)])
    assert done.exit_code == 0
    assert "left alone: it already trains through oomfix.runtime" in done.output
    assert path.read_bytes() == once


def test_the_audit_finds_nothing_that_was_fixed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    codes = {finding.code for finding in Auditor(all_rules()).audit("t.py", path.read_bytes()).findings}
    assert {"OOM101", "OOM203"} <= codes
    RUN.invoke(apply, ["--preset", "16gb", str(path)])
    report = Auditor(all_rules()).audit("t.py", path.read_bytes())
    assert report.findings == ()
    assert len(report.loops) == 1


def test_check_and_diff_write_nothing_and_check_says_by_its_status_that_something_would_change(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert RUN.invoke(apply, ["--preset", "16gb", "--check", str(path)]).exit_code == 1
    diff = RUN.invoke(apply, ["--preset", "16gb", "--diff", str(path)])
    assert diff.exit_code == 0
    assert "+    memory.step(optimizer)\n" in diff.output
    assert path.read_text() == SCRIPT


def test_options_are_written_into_the_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    RUN.invoke(apply, ["--preset", "8gb", "--micro-batches", "4", "--clip-norm", "0.5", "--backup", str(path)])
    assert 'memory = runtime.preset("8gb", micro_batches=4, clip_norm=0.5)\n' in path.read_text()
    assert (tmp_path / "train.py.orig").read_text() == SCRIPT


def test_only_local_codes_leave_loops_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    RUN.invoke(apply, ["--preset", "16gb", "--only", "OOM101", str(path)])
    assert path.read_text() == SCRIPT.replace("total += loss", "total += loss.detach()")


def test_json_names_loops_by_their_lines_before_and_edits_that_lead_to_the_result(tmp_path):
    import json

    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = RUN.invoke(apply, ["--preset", "16gb", "--format", "json", str(path)])
    report = json.loads(done.output)
    assert report["version"] == 1
    assert report["loops"] == [
        {"path": str(path), "line": 11, "end_line": 16, "rewrite": "micro-batched", "reason": None}
    ]
    lines = SCRIPT.splitlines(keepends=True)
    for edit in reversed(report["files"][0]["edits"]):
        lines[edit["line"] - 1 : edit["end_line"]] = [edit["replacement"]]
    assert "".join(lines) == path.read_text()
    assert report["errors"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "17gb"], "did you mean '16gb'?"),
        (["--preset", "16gb", "--clip-norm", "-1"], "clip_norm: got -1.0"),
        (["--preset", "16gb", "--clip-norm", "inf"], "clip_norm: got inf, expected a finite norm above 0"),
        (["--preset", "16gb", "--only", "OOM999"], "OOM999"),
        (["--preset", "16gb", "--only", "loss"], "'loss' is no rule and no prefix of one"),
    ],
)
def test_wrong_options_are_refused_in_words(tmp_path, arguments, said):
    done = RUN.invoke(apply, [*arguments, str(tmp_path)])
    assert done.exit_code == 2
    assert said in done.output


def test_an_unreadable_file_is_told_and_the_others_are_rewritten(tmp_path):
    (tmp_path / "a.py").write_text("print 'python 2'\n")
    (tmp_path / "b.py").write_text(SCRIPT)
    done = RUN.invoke(apply, ["--preset", "16gb", str(tmp_path)])
    assert done.exit_code == 2
    assert "Python 2?" in done.output
    assert "memory.step" in (tmp_path / "b.py").read_text()


def test_without_a_path_and_a_terminal_nothing_is_rewritten(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(apply, ["--preset", "16gb"])
    assert done.exit_code == 2
    assert (tmp_path / "train.py").read_text() == SCRIPT


def test_strings_over_several_lines_are_not_indented():
    from tests.rewrite.equivalence import rewritten

    inside = '        loss = criterion(model(x), y, note=f"""a\n  b {x!r}\n""")\n'
    text = f"import torch\n\ndef train(model, criterion, loader, optimizer):\n    for x, y in loader:\n{inside}"
    text += "        loss.backward()\n        optimizer.step()\n"
    result = rewritten(text).text
    assert '            loss = criterion(model(x), y, note=f"""a\n  b {x!r}\n""")\n' in result
    ast.parse(result)
    assert Source.from_bytes("t.py", result.encode()).text == result


def test_a_loop_that_steps_through_the_runtime_and_goes_backward_without_it_is_told_what_is_missing(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom oomfix import runtime\n\nmemory = runtime.preset('16gb')\nmodel = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x in torch.randn(3, 6, 4):\n"
        "    loss = model(x).mean()\n    loss.backward()\n    memory.step(optimizer)\n"
    )
    done = RUN.invoke(apply, ["--preset", "16gb", str(path)])
    said = "left alone: the step in line 10 is that of oomfix.runtime, and the backward is not: `memory.backward`"
    assert f"train.py:7  {said}\n" in done.output


def test_a_manager_that_was_made_for_another_preset_is_named(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    RUN.invoke(apply, ["--preset", "16gb", str(path)])
    line = path.read_text().splitlines().index('memory = runtime.preset("16gb")') + 1
    said = f"line {line} makes the manager for '16gb': write '8gb' there to train in that"
    assert said in RUN.invoke(apply, ["--preset", "8gb", str(path)]).output
    assert said not in RUN.invoke(apply, ["--preset", "16gb", str(path)]).output
