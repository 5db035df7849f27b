"""The commands, run as users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import click
import pytest

from oomfix import __version__
from oomfix.cli import main
from oomfix.pages import markdown, pages, table
from oomfix.rules import all_rules
from oomfix.terminal import broken, tell, write_table

ROOT = Path(__file__).resolve().parents[2]
LOAD = "import torch\nx = torch.load(p)\n"
CLEAN = "import torch\nx = torch.load(p, map_location='cpu')\n"


def test_exit_status_tells_findings_from_none(oomfix):
    (oomfix.folder / "bad.py").write_text(LOAD)
    (oomfix.folder / "good.py").write_text(CLEAN)
    assert oomfix("audit", "good.py").returncode == 0
    assert oomfix("audit", "good.py", "bad.py").returncode == 1
    assert oomfix("audit", "bad.py", "missing.py").returncode == 2


@pytest.mark.parametrize(("fail_on", "status"), [("error", 0), ("warning", 1), ("note", 1), ("never", 0)])
def test_fail_on_is_the_least_severity_that_fails(oomfix, fail_on: str, status: int):
    (oomfix.folder / "a.py").write_text(LOAD)
    done = oomfix("audit", "a.py", "--fail-on", fail_on, "--format", "concise")
    assert done.returncode == status
    assert "OOM205" in done.stdout


def test_notes_do_not_fail_by_default_but_by_fail_on_note(oomfix):
    (oomfix.folder / "a.py").write_text("x = 1  # oomfix: ignore\n")
    assert oomfix("audit", "a.py").returncode == 0
    assert oomfix("audit", "a.py", "--fail-on", "note").returncode == 1


def test_select_and_ignore_take_codes_and_prefixes(oomfix):
    (oomfix.folder / "a.py").write_text(LOAD + "from torch.cuda.amp import autocast\n")

    def codes(*args: str) -> list[str]:
        return [row["code"] for row in oomfix.json("a.py", *args)["findings"]]

    assert codes() == ["OOM205", "OOM401"]
    assert codes("--select", "OOM2") == ["OOM205"]
    assert codes("--select", "oom2,OOM401", "--ignore", "OOM205") == ["OOM401"]
    assert codes("--ignore", "OOM205", "--ignore", "OOM4") == []
    assert codes("--select", "OOM2", "--select", "OOM401") == ["OOM205", "OOM401"]
    (oomfix.folder / "pyproject.toml").write_text('[tool.oomfix]\nignore = ["OOM4"]\n')
    assert codes() == ["OOM205"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--select", "OOM20S"), "'OOM20S' is no rule and no prefix of one; did you mean OOM205?"),
        (("--target-torch", "new"), "'new': expected a torch version such as 2.3"),
        (("--fail-on", "warn"), "'warn' is not one of 'error', 'warning', 'note', 'never'"),
        (("--format", "xml"), "'xml' is not one of"),
        (("-j", "0"), "0 is not in the range"),
        (("--baseline", ""), "got an empty name, expected a file"),
        (("--write-baseline", ""), "got an empty name, expected a file"),
    ],
)
def test_a_wrong_flag_is_a_usage_error_that_says_what_is_right(oomfix, args: tuple[str, ...], message: str):
    (oomfix.folder / "a.py").write_text(LOAD)
    done = oomfix("audit", "a.py", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_the_target_torch_reaches_the_rules(oomfix):
    (oomfix.folder / "a.py").write_text(
        "for x in y:\n    optimizer.zero_grad()\n    f(x).backward()\n    optimizer.step()\n"
    )

    def severities(*args: str) -> list[str]:
        return [row["severity"] for row in oomfix.json("a.py", "--select", "OOM203", *args)["findings"]]

    assert severities() == ["note"]
    assert severities("--target-torch", "1.13") == ["warning"]
    (oomfix.folder / "requirements.txt").write_text("torch==1.12.1\n")
    assert severities() == ["warning"]
    assert severities("--target-torch", "2.1") != ["warning"]


def test_standard_input_is_audited_under_the_name_it_is_given(oomfix):
    (row,) = oomfix.json("-", input=LOAD.encode())["findings"]
    assert (row["path"], row["line"]) == ("<stdin>", 2)
    (row,) = oomfix.json("-", "--stdin-filename", "src/a.py", input=LOAD.encode())["findings"]
    assert row["path"] == "src/a.py"


def test_settings_of_standard_input_are_those_of_the_file_it_stands_for(oomfix):
    (oomfix.folder / "sub").mkdir()
    (oomfix.folder / "sub" / "pyproject.toml").write_text('[tool.oomfix]\nselect = ["OOM4"]\n')
    assert oomfix.json("-", "--stdin-filename", "sub/a.py", input=LOAD.encode())["findings"] == []
    assert len(oomfix.json("-", input=LOAD.encode())["findings"]) == 1


def test_a_notebook_may_come_from_standard_input(oomfix, notebook):
    data = notebook(("code", LOAD))
    for arguments in (["--stdin-filename", "a.ipynb"], []):
        (row,) = oomfix.json("-", *arguments, input=data)["findings"]
        assert (row["cell"], row["line"]) == (1, 2)


def test_every_number_of_processes_gives_the_same_bytes(oomfix):
    for number in range(30):
        (oomfix.folder / f"m{number:02}.py").write_text(LOAD * (number % 3) + "# filler\n" * 6_000)
    (oomfix.folder / "m07.py").write_text("x = (\n" + LOAD)
    one = oomfix("audit", ".", "-j", "1", "--no-cache", "--format", "json")
    four = oomfix("audit", ".", "-j", "4", "--no-cache", "--format", "json")
    assert (one.returncode, one.stdout) == (four.returncode, four.stdout)
    assert len(json.loads(one.stdout)["findings"]) == 29
    assert [error["path"] for error in json.loads(one.stdout)["errors"]] == ["m07.py"]


def test_no_cache_leaves_no_trace(oomfix):
    (oomfix.folder / "a.py").write_text(LOAD)
    oomfix("audit", "a.py", "--no-cache")
    assert not oomfix.cache.exists()
    oomfix("audit", "a.py")
    assert len(list(oomfix.cache.iterdir())) == 1
    assert sorted(path.name for path in oomfix.folder.iterdir()) == [".git", "a.py"]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_each_rule_has_a_page_with_its_examples(rule):
    (page,) = [page for page in pages([rule]) if page.code == rule.code]
    text = markdown(page)
    assert text.startswith(f"# {rule.code} {rule.name} ({rule.severity.value})\n")
    for invalid in rule.INVALID:
        for number in invalid.lines:
            line = invalid.code.splitlines()[number - 1].strip()
            assert f"{line}  # <- here\n" in text
    assert text.count("Not reported:") == len(rule.VALID)


def test_a_rule_is_explained_by_code_and_by_name(oomfix):
    page = {page.code: page for page in pages(all_rules())}["OOM205"]
    assert oomfix("explain", "oom205").stdout == markdown(page)
    assert oomfix("explain", "load-on-gpu").stdout.startswith("# OOM205 load-on-gpu (warning)\n")
    assert oomfix("explain", "OOM001").stdout.startswith("# OOM001 unused-suppression (note)\n")


def test_an_unknown_rule_is_answered_with_the_nearest(oomfix):
    done = oomfix("explain", "OOM2O5")
    assert done.returncode == 2
    assert "'OOM2O5' is no rule; did you mean OOM205?" in done.stderr
    assert "; did you mean loss-accumulation?" in oomfix("explain", "loss-acumulation").stderr
    assert "'oom40' is no rule but the start of OOM401\n" in oomfix("explain", "oom40").stderr


def test_rules_lists_every_rule(oomfix):
    codes = ["OOM001", *(rule.code for rule in all_rules())]
    assert [line.split()[0] for line in oomfix("rules").stdout.splitlines()[1:]] == codes
    rows = json.loads(oomfix("rules", "--format", "json").stdout)["rules"]
    assert [row["code"] for row in rows] == codes
    assert all(set(row) == {"code", "name", "severity", "fix", "summary"} for row in rows)


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_rules_fit_the_terminal_and_no_word_is_broken(monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    rows = table(pages(all_rules()))
    write_table(rows, stream)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if len(line.rstrip()) > columns] == []
    shown = " ".join(" ".join(lines).split())
    assert all(row[-1] in shown for row in rows)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_errors_fit_the_terminal_and_no_word_is_broken(monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    message = "not UTF-8: byte 0xe9 in line 1; save it as UTF-8, or declare its encoding in the first line"
    tell("train.py", message)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if len(line) > columns] == []
    assert " ".join(stream.getvalue().split()) == f"train.py: {message}"


def test_an_error_is_one_line_for_programs(oomfix):
    (oomfix.folder / "train.py").write_bytes(b"x = '" + b"very " * 40 + b"\xe9'\nloss.backward()\n")
    assert len(oomfix("audit", "train.py", COLUMNS="40").stderr.splitlines()) == 1


def test_presets_shows_the_table(oomfix):
    from oomfix.presets import table

    lines = oomfix("presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [row[0] for row in table()]


def test_the_version_is_told(oomfix):
    assert oomfix("--version").stdout == f"oomfix, version {__version__}\n"


def test_the_changelog_tells_of_every_command():
    commands = main.list_commands(click.Context(main))
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [command for command in commands if f"`oomfix {command}`" not in text] == []


def test_contributing_tells_the_style_commands_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = [line.removesuffix(" || status=1") for line in ci.splitlines() if line.startswith("ruff ")]
    assert commands
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert " && ".join(commands) in contributing


def loaded_by_audit(oomfix, form):
    """What an audit prints, and the modules that it imports."""
    code = (
        "import sys\nfrom oomfix.cli import main\n"
        f"try:\n    main(['audit', 'a.py', '--format', '{form}', '--no-cache'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted(sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=oomfix.folder, env=env, capture_output=True, text=True)
    return done.stdout, set(eval(done.stdout.splitlines()[-1]))


def test_an_audit_imports_nothing_that_it_does_not_need(oomfix):
    (oomfix.folder / "a.py").write_text(LOAD)
    printed, loaded = loaded_by_audit(oomfix, "concise")
    heavy = {"torch", "libcst", "rich", "jsonschema", "multiprocessing", "pathspec", "platformdirs", "tomllib"}
    assert "OOM205" in printed
    assert loaded & heavy == set()


@pytest.mark.parametrize("form", ["concise", "json"])
def test_an_audit_of_a_file_without_a_loop_imports_no_rewriter(oomfix, form):
    """Every module is a third of a millisecond of each run, and half of all rewrite loops."""
    (oomfix.folder / "a.py").write_text(LOAD)
    printed, loaded = loaded_by_audit(oomfix, form)
    own = {name for name in loaded if name.split(".")[0] == "oomfix"}
    assert "OOM205" in printed
    assert {name for name in own if name.startswith("oomfix.rewrite.")} == {
        "oomfix.rewrite.text",
        "oomfix.rewrite.text.edits",
    }
    assert len(own) <= 106  # 100 files in 6 folders of script and rewrite


def test_what_apply_would_do_is_said_without_its_libraries(oomfix):
    """Of the names that this script imports, apply would take out one and leave the other."""
    (oomfix.folder / "a.py").write_text(
        "from torch.cuda.amp import autocast, custom_fwd\nforward = custom_fwd(operator)\n"
        "for x, y in loader:\n    with autocast():\n        loss = criterion(model(x), y)\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    printed, loaded = loaded_by_audit(oomfix, "json")
    assert '"rewrite": "micro-batched"' in printed
    assert loaded & {"torch", "libcst", "rich"} == set()


def test_no_rule_needs_bytes_that_a_notebook_writes_otherwise():
    """The words are searched in the raw file, and JSON escapes quotes, backslashes and line ends."""
    for rule in all_rules():
        for need in rule.needs:
            for word in (need,) if isinstance(need, bytes) else need:
                assert word.isascii()
                assert not set(word) & set(b'"\\\n\r\t')


def test_a_line_is_broken_under_itself_on_a_terminal_alone():
    line = "  fits the T4; fits the presets 8gb, 12gb"
    assert broken(line, None) == broken(line, 80) == [line]
    assert broken(line, 30) == ["  fits the T4; fits the", "      presets 8gb, 12gb"]
    assert broken("", 30) == [""]


def test_without_a_path_the_current_folder_is_audited(oomfix):
    (oomfix.folder / "bad.py").write_text(LOAD)
    done = oomfix("audit", "--format", "concise")
    assert (done.returncode, done.stdout.split()[:2]) == (1, ["bad.py:2:5", "OOM205"])


@pytest.mark.parametrize("command", main.list_commands(click.Context(main)))
def test_the_list_of_commands_is_made_of_whole_sentences(command: str):
    """In 80 columns click would cut a longer one, and end it in dots."""
    help_ = main.get_command(click.Context(main), command).get_short_help_str(limit=66)
    assert help_.endswith(".") and not help_.endswith("...")
