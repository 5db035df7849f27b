"""What cannot be audited is told in one line, the rest is audited, and there is never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path

import pytest

from oomfix.audit import Auditor
from oomfix.discovery import Discovery
from oomfix.rules import all_rules
from oomfix.runner import Job, run
from oomfix.script.interpreter.follow import Follower

LOAD = "import torch\nx = torch.load(p)\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.py", None, "no such file or folder"),
        ("", None, "no such file or folder"),
        ("binary.py", b"\x7fELF\x00\x01backward", "a binary file (it holds null bytes), expected Python"),
        ("two.py", b"import torch\nprint 'x'\n", "line 2: Missing parentheses in call to 'print' (Python 2?)"),
        ("latin.py", b"import torch\nx = 'caf\xe9'\n", "not UTF-8: byte 0xe9 in line 2"),
        ("utf16.py", "import torch\n".encode("utf-16"), "UTF-16 text, expected UTF-8"),
        ("cookie.py", b"# coding: nonsense\nimport torch\n", "unknown encoding: nonsense"),
        ("deep.py", b"torch = " + b"[" * 3000 + b"]" * 3000, "too many nested parentheses"),
        pytest.param(
            "chain.py",
            b"torch = " + b"+".join([b"1"] * 50_000),
            "nested too deeply",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 parses it, and so it is audited"),
        ),
        ("broken.ipynb", b'{"cells": [', "not a notebook: line 1 is not JSON"),
    ],
)
def test_one_bad_file_is_told_and_the_others_are_audited(oomfix, name: str, content: bytes | None, message: str):
    (oomfix.folder / "good.py").write_text(LOAD)
    if content is not None:
        (oomfix.folder / name).write_bytes(content)
    done = oomfix("audit", name, "good.py", "--format", "concise")
    assert done.returncode == 2
    assert done.stdout.startswith("good.py:2:5 OOM205 ")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name or repr(name)}: ")
    assert message in line


@pytest.mark.parametrize("metadata", [{"language_info": {"name": "R"}}, {"kernelspec": {"language": "julia"}}])
def test_a_notebook_in_another_language_is_passed_over_unless_it_is_named(oomfix, notebook, metadata):
    (oomfix.folder / "good.py").write_text(LOAD)
    (oomfix.folder / "other.ipynb").write_bytes(notebook(("code", "x <- torch.load(p)"), **metadata))
    language = next(iter(next(iter(metadata.values())).values()))
    for _ in range(2):  # the second time from the cache
        walked = oomfix("audit", ".", "--format", "concise")
        assert (walked.returncode, walked.stderr, walked.stdout.count("\n")) == (1, "", 1)
        named = oomfix("audit", "other.ipynb")
        assert (named.returncode, named.stderr) == (2, f"other.ipynb: a notebook in {language}, expected Python\n")


@pytest.mark.parametrize("name", ["empty.py", "blank.py", "comment.py"])
def test_a_file_without_code_is_clean(oomfix, name: str):
    content = {"empty.py": b"", "blank.py": b"\xef\xbb\xbf\r\n\f\r\n", "comment.py": b"# torch.load(x)"}[name]
    (oomfix.folder / name).write_bytes(content)
    done = oomfix("audit", name)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_walk_tells_each_bad_file_and_goes_on(oomfix):
    (oomfix.folder / "good.py").write_text(LOAD)
    (oomfix.folder / "binary.py").write_bytes(b"\0\1\2")
    (oomfix.folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    (oomfix.folder / "two.py").write_bytes(b"print loss.backward()\n")
    (oomfix.folder / "link.py").symlink_to("nowhere.py")
    document = oomfix.json(".")
    assert [row["path"] for row in document["findings"]] == ["good.py"]
    assert sorted(row["path"] for row in document["errors"]) == ["binary.py", "latin.py", "link.py", "two.py"]


def test_a_folder_without_python_is_told(oomfix):
    (oomfix.folder / "notes").mkdir()
    (oomfix.folder / "notes" / "todo.txt").write_text("")
    done = oomfix("audit", "notes")
    assert done.returncode == 2
    assert done.stderr == "notes: no Python files or notebooks in this folder\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.oomfix\n", "pyproject.toml: not TOML: "),
        (
            '[tool.oomfix]\nignroe = ["OOM1"]\n',
            "pyproject.toml: [tool.oomfix]: unknown key 'ignroe'; did you mean ignore?",
        ),
    ],
)
def test_a_broken_pyproject_is_told_and_the_files_are_audited(oomfix, text: str, message: str):
    (oomfix.folder / "a.py").write_text(LOAD)
    (oomfix.folder / "pyproject.toml").write_text(text)
    done = oomfix("audit", "a.py", "--format", "concise")
    assert done.returncode == 2
    assert "OOM205" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def test_a_pipe_or_device_is_not_waited_for(oomfix):
    os.mkfifo(oomfix.folder / "pipe.py")
    done = oomfix("audit", "pipe.py", "/dev/zero")
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["pipe.py", "/dev/zero"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_file_without_permission_is_told(oomfix):
    (oomfix.folder / "a.py").write_text(LOAD)
    (oomfix.folder / "a.py").chmod(0)
    done = oomfix("audit", "a.py")
    assert (done.returncode, done.stderr) == (2, "a.py: cannot read: Permission denied\n")


def test_a_file_that_goes_while_it_is_audited_is_told(tmp_path: Path):
    (tmp_path / "a.py").write_text(LOAD)
    found = Discovery().find(str(tmp_path / "a.py"), str(tmp_path))
    (tmp_path / "a.py").unlink()
    (report,) = run(Auditor(all_rules()), [Job(found[0], None, None)], 1)
    assert report.errors == ("cannot read: No such file or directory",)


def test_errors_are_told_once_in_every_format(oomfix):
    for form, where in (("json", "stdout"), ("sarif", "stdout"), ("github", "stdout"), ("rich", "stderr")):
        done = oomfix("audit", "missing.py", "--format", form)
        assert done.returncode == 2
        texts = {"stdout": done.stdout, "stderr": done.stderr}
        assert texts.pop(where).count("no such file or folder") == 1
        assert "no such file" not in "".join(texts.values())


def test_a_reader_that_stops_early_is_no_error(oomfix):
    (oomfix.folder / "a.py").write_text("import torch\n" + "x = torch.load(p)\n" * 3_000)
    # unbuffered, Python itself swallows the error
    env = {
        **os.environ,
        "OOMFIX_CACHE_DIR": str(oomfix.cache),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONUNBUFFERED": "",
    }
    command = f"{sys.executable} -m oomfix audit a.py --format concise | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=oomfix.folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_an_output_that_cannot_be_written_is_told(oomfix):
    (oomfix.folder / "a.py").write_text(LOAD)
    env = {**os.environ, "OOMFIX_CACHE_DIR": str(oomfix.cache), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    for redirect, message in (("> /dev/full", "No space left on device"), (">&-", "it is closed")):
        command = f"{sys.executable} -m oomfix audit a.py {redirect}"
        done = subprocess.run(["bash", "-c", command], cwd=oomfix.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr == f"Error: standard output: cannot write: {message}\n"


def test_a_closed_standard_input_is_told_and_the_files_are_audited(oomfix):
    (oomfix.folder / "a.py").write_text(LOAD)
    env = {**os.environ, "OOMFIX_CACHE_DIR": str(oomfix.cache), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = f"{sys.executable} -m oomfix audit - a.py --format concise <&-"
    done = subprocess.run(["bash", "-c", command], cwd=oomfix.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("a.py:2:5 OOM205 ")
    assert done.stderr == "<stdin>: cannot read standard input: it is closed\n"


def test_a_folder_that_cannot_be_read_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)  # root may read every folder
    discovery = Discovery()
    assert discovery.find(str(tmp_path), str(tmp_path)) == []
    assert discovery.problems == [(str(tmp_path), "cannot read: Permission denied")]


def test_a_terminal_without_the_letters_still_gets_a_report(oomfix):
    (oomfix.folder / "é漢.py").write_text("import torch\nx = torch.load('漢')\n")
    done = oomfix("audit", "é漢.py", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 1
    assert r"torch.load('\u6f22')" in done.stdout


def test_a_name_that_is_no_text_is_shown_and_audited(oomfix):
    with open(os.path.join(os.fsencode(oomfix.folder), b"caf\xe9.py"), "wb") as file:
        file.write(LOAD.encode())
    for form in ("rich", "concise", "json", "sarif", "github"):
        done = oomfix("audit", ".", "--format", form)
        assert (done.returncode, done.stderr) == (1, "")
        assert "OOM205" in done.stdout


def test_an_error_is_one_line_whatever_its_path(oomfix):
    done = oomfix("audit", "no\nsuch\x1b[31m.py", "--format", "concise")
    assert (done.returncode, done.stderr) == (2, "no?such?[31m.py: no such file or folder\n")


def test_a_bug_in_a_rule_stops_that_rule_only(tmp_path: Path):
    class Broken:
        code = "OOM999"
        needs = (b"torch",)

        def check(self, script):
            raise KeyError("no such\nthing")

    report = Auditor([Broken(), *all_rules()]).audit("a.py", LOAD.encode())
    assert [finding.code for finding in report.findings] == ["OOM205"]
    assert report.errors == ("internal error in OOM999, please report it: KeyError in check: 'no such\\nthing'",)


def test_a_mistake_that_several_run_into_is_told_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Follower, "follow", lambda self: {}["no such thing"])
    code = b"import torch\nfor x in loader:\n    model(x).backward()\nstate = torch.load('x')\n"
    report = Auditor(all_rules()).audit("a.py", code)
    assert [finding.code for finding in report.findings] == ["OOM205"]
    (error,) = report.errors
    assert error.startswith("internal error in the search for training loops, OOM101, OOM102, ")
    assert error.endswith(", please report it: KeyError in <lambda>: 'no such thing'")


def test_what_is_no_mistake_of_a_rule_is_not_taken_for_one():
    class Full:
        code = "OOM999"
        needs = (b"torch",)

        def check(self, script):
            raise MemoryError

    with pytest.raises(MemoryError):
        Auditor([Full()]).audit("a.py", LOAD.encode())


def test_a_mistake_in_a_rule_leaves_the_other_files_and_exits_with_2(oomfix):
    (oomfix.folder / "a.py").write_text("import torch\nmarker = torch.load('x')\n")
    (oomfix.folder / "b.py").write_text(LOAD)
    code = (
        "from oomfix.cli import main\nfrom oomfix.rules.load_on_gpu import LoadOnGpu\ncheck = LoadOnGpu.check\n"
        "def broken(self, script):\n"
        "    if 'marker' in script.source.text: raise TypeError('not this')\n"
        "    return check(self, script)\n"
        "LoadOnGpu.check = broken\nmain(['audit', '.', '--no-cache', '--format', 'concise'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=oomfix.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "b.py:" in done.stdout and "OOM205" in done.stdout
    assert (
        "a.py: internal error in OOM205, please report it: TypeError in broken: not this" in done.stdout + done.stderr
    )


class Deadly(Auditor):
    """Takes its process with it."""

    def audit(self, path, data, target_torch=None, *, parse_always=False):
        os._exit(1)


def waited_for(future: Future) -> Future:
    wait([future])
    return future


@pytest.mark.parametrize("early", [False, True], ids=["at work", "before all work is handed out"])
def test_a_worker_that_dies_is_told(tmp_path: Path, monkeypatch, early: bool):
    if early:
        submit = ProcessPoolExecutor.submit
        monkeypatch.setattr(ProcessPoolExecutor, "submit", lambda *args: waited_for(submit(*args)))
    for number in range(4):
        (tmp_path / f"{number}.py").write_bytes(b"#" * 600_000)
    found = Discovery().find(str(tmp_path), str(tmp_path))
    reports = run(Deadly([]), [Job(file, None, None) for file in found], 2)
    assert len(reports) == 4
    assert all("a worker process died" in report.errors[0] for report in reports)


def audit_interrupted(oomfix, handler: str, then: str) -> subprocess.CompletedProcess[str]:
    """An audit in which a worker sends an interrupt to all processes, that of the command included."""
    for number in range(4):
        (oomfix.folder / f"{number}.py").write_bytes(b"#" * 600_000)
    code = (
        "import os, signal, time\nfrom oomfix.audit import Auditor\nfrom oomfix.cli import main\n"
        f"signal.signal(signal.SIGINT, {handler})\naudit = Auditor.audit\n"
        f"Auditor.audit = lambda *args, **options: os.killpg(0, signal.SIGINT) or {then}\n"
        "main(['audit', '.', '--no-cache', '-j', '2'])\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=oomfix.folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_an_interrupt_ends_every_process_at_once_and_in_one_line(oomfix):
    done = audit_interrupted(oomfix, "signal.default_int_handler", "time.sleep(40)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_where_interrupts_are_ignored_no_process_dies_of_one(oomfix):
    done = audit_interrupted(oomfix, "signal.SIG_IGN", "audit(*args, **options)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "no findings in 4 files with 0 training loops\n", "")
