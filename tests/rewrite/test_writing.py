"""A file holds its old content or its new one at any moment, and nothing else about it changes."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oomfix.rewrite import writing
from oomfix.rewrite.writing import CannotWrite, write_source

OLD, NEW = b"x = 1\n", b"x = 2\r\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(OLD)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_is_replaced_byte_for_byte_and_nothing_is_left_beside_it(script):
    write_source(str(script), NEW)
    assert script.read_bytes() == NEW
    assert files(script.parent) == ["train.py"]


def test_mode_stays(script):
    script.chmod(0o751)
    write_source(str(script), NEW)
    assert script.stat().st_mode & 0o7777 == 0o751


def test_a_link_stays_a_link_and_its_target_is_written(script, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to("train.py")
    written = write_source(str(link), NEW)
    assert link.is_symlink()
    assert script.read_bytes() == NEW
    assert written.path == str(script.resolve())


def test_a_read_only_file_is_refused_and_stays(script):
    script.chmod(0o444)
    with pytest.raises(CannotWrite, match=r"train\.py: read-only"):
        write_source(str(script), NEW)
    assert script.read_bytes() == OLD


def test_what_does_not_compile_is_never_written(script):
    with pytest.raises(CannotWrite, match="would not compile"):
        write_source(str(script), b"return = 1\n")
    with pytest.raises(CannotWrite, match="would not compile"):
        write_source(str(script), b"return 1\n")  # parses, and still is no module
    assert script.read_bytes() == OLD


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_content_and_no_other_file(script, monkeypatch, call):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, call, full)
    with pytest.raises(CannotWrite, match="No space left on device"):
        write_source(str(script), NEW)
    assert script.read_bytes() == OLD
    assert files(script.parent) == ["train.py"]


def test_a_missing_file_is_an_error_in_words(tmp_path):
    with pytest.raises(CannotWrite, match="cannot write"):
        write_source(str(tmp_path / "gone.py"), NEW)


def test_backups_hold_what_was_there_and_never_replace_each_other(script):
    assert write_source(str(script), NEW, backup=True).backup == f"{script}.orig"
    assert write_source(str(script), b"x = 3\n", backup=True).backup == f"{script}.orig.1"
    assert (script.parent / "train.py.orig").read_bytes() == OLD
    assert (script.parent / "train.py.orig.1").read_bytes() == NEW


KILLED = """
import json, os, signal, sys
from pathlib import Path
from oomfix.rewrite import writing

folder, backup = Path(sys.argv[1]), len(sys.argv) > 2
new = b"y = 0\\n" * 5000

def write(path, at):
    calls = 0

    def count(event, _):
        nonlocal calls
        if event in ("open", "os.chmod", "os.rename", "os.remove", "tempfile.mkstemp"):
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    writing.write_source(str(path), new, expected=b"x = 1\\n", backup=backup)
    os._exit(0)

for at in range(1, 40):
    path = folder / str(at) / "train.py"
    path.parent.mkdir()
    path.write_bytes(b"x = 1\\n")
    child = os.fork()
    if child == 0:
        write(path, at)
    status = os.waitpid(child, 0)[1]
    print(status)
    if status == 0:
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("backup", [[], ["backup"]])
def test_a_process_killed_at_any_call_leaves_old_or_new_content(tmp_path, backup):
    new = b"y = 0\n" * 5000
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *backup], capture_output=True, check=True)
    seen = []
    for at, status in enumerate(done.stdout.split(), start=1):
        content = (tmp_path / str(at) / "train.py").read_bytes()
        assert content in (OLD, new)
        if backup and content == new:
            assert (tmp_path / str(at) / "train.py.orig").read_bytes() == OLD
        seen.append((int(status), content == new))
    assert {(signal.SIGKILL, False), (signal.SIGKILL, True), (0, True)} == set(seen)


# -- what else a file is -----------------------------------------------------------------------------------------


def test_a_backup_is_named_as_its_file_is(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    assert write_source("train.py", NEW, backup=True).notes == ("old content kept in train.py.orig",)
    Path("link.py").symlink_to("train.py")
    kept = f"{script.resolve()}.orig.1"
    assert write_source("link.py", OLD, backup=True).notes == (f"old content kept in {kept}",)


def test_what_a_killed_process_left_is_gone_after_the_next_write(script):
    left = script.parent / f".oomfix.{'a' * 8}.tmp"
    left.write_bytes(NEW[:3])
    (script.parent / ".oomfix.toml").write_bytes(b"mine")
    write_source(str(script), NEW)
    assert files(script.parent) == [".oomfix.toml", "train.py"]


def test_other_names_of_a_file_keep_the_old_content_and_that_is_told(script):
    (script.parent / "snapshot.py").hardlink_to(script)
    written = write_source(str(script), NEW)
    assert (script.parent / "snapshot.py").read_bytes() == OLD
    assert script.read_bytes() == NEW
    assert written.notes == ("its other name keeps the old content (hard links)",)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_owner_and_group_stay(script):
    os.chown(script, 1234, 2345)
    assert write_source(str(script), NEW).notes == ()
    assert (script.stat().st_uid, script.stat().st_gid) == (1234, 2345)


def test_an_owner_that_cannot_be_kept_is_told(script, monkeypatch):
    state = script.stat()

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(writing.os, "chown", refused)
    real = os.stat
    elsewhere = os.stat_result([*state[:4], state.st_uid + 1, *state[5:]])
    monkeypatch.setattr(writing.os, "stat", lambda path: elsewhere if str(path) == str(script) else real(path))
    written = write_source(str(script), NEW)
    assert written.notes == (f"it belongs to user {state.st_uid} and group {state.st_gid} now",)
    assert script.read_bytes() == NEW


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="no extended attributes")
def test_extended_attributes_stay(script):
    try:
        os.setxattr(script, "user.oomfix", b"kept")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    write_source(str(script), NEW)
    assert os.getxattr(script, "user.oomfix") == b"kept"


# -- others at work on the same file -----------------------------------------------------------------------------


def test_what_somebody_wrote_meanwhile_is_never_lost(script):
    script.write_bytes(b"x = 'edited'\n")
    with pytest.raises(CannotWrite, match="changed while it was being rewritten, left as it is; run again"):
        write_source(str(script), NEW, expected=OLD)
    assert script.read_bytes() == b"x = 'edited'\n"
    assert files(script.parent) == ["train.py"]


def test_what_somebody_rewrote_in_the_same_way_is_no_conflict(script):
    script.write_bytes(NEW)
    assert write_source(str(script), NEW, expected=OLD, backup=True).backup is None


def test_a_failed_write_leaves_no_backup(script, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "replace", full)
    with pytest.raises(CannotWrite):
        write_source(str(script), NEW, backup=True)
    assert files(script.parent) == ["train.py"]


WRITER = """
import sys
from oomfix.rewrite.writing import CannotWrite, write_source

path, mine = sys.argv[1], sys.argv[2].encode()
print(flush=True)
sys.stdin.readline()
wrote = 0
for number in range(200):
    before = open(path, "rb").read()
    try:
        write_source(path, before + b"# " + mine + b"\\n", expected=before)
        wrote += 1
    except CannotWrite:
        pass
print(wrote)
"""


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be locked")
def test_no_line_of_two_processes_that_write_at_once_is_lost(script):
    command = [sys.executable, "-c", WRITER, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, name], **pipes) for name in ("a", "b")]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    wrote = [int(process.communicate()[0]) for process in processes]
    content = script.read_text().splitlines()
    assert [content.count("# a"), content.count("# b")] == wrote
    assert len(content) == 1 + sum(wrote)


# -- the command -------------------------------------------------------------------------------------------------

SCRIPT = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
ON_A_FULL_DISK = """
import resource, signal, sys
from oomfix.cli import main

if sys.argv[1] == "killed":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
del sys.argv[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
main(["apply", "--preset", "16gb", *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
def test_the_command_on_a_full_disk_says_so_and_leaves_every_file(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(SCRIPT)
    command = [sys.executable, "-c", ON_A_FULL_DISK, "told", "--backup", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"{tmp_path / name}: cannot write (File too large), left as it is" for name in ("a.py", "b.py")
    ]
    assert done.stdout == "nothing rewritten: 2 files failed\n"
    assert files(tmp_path) == ["a.py", "b.py"]
    assert {(tmp_path / name).read_text() for name in ("a.py", "b.py")} == {SCRIPT}


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
def test_a_command_killed_in_the_middle_of_writing_leaves_the_old_content(tmp_path):
    (tmp_path / "a.py").write_text(SCRIPT)
    command = [sys.executable, "-c", ON_A_FULL_DISK, "killed", str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGXFSZ
    assert (tmp_path / "a.py").read_text() == SCRIPT


def test_two_commands_at_once_leave_each_file_as_one_of_them_makes_it(tmp_path):
    names = [f"train_{number}.py" for number in range(12)]
    for folder in ("8gb", "16gb", "both"):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(SCRIPT)
    apply = [sys.executable, "-m", "oomfix", "apply", "--preset"]
    runs = [
        subprocess.Popen([*apply, preset, str(tmp_path / folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for preset in ("8gb", "16gb")
        for folder in (preset, "both")
    ]
    said = [run.communicate() for run in runs]
    assert [runs[0].returncode, runs[2].returncode] == [0, 0], said
    assert all(run.returncode in (0, 2) for run in runs), said
    for name in names:
        wanted = [(tmp_path / preset / name).read_text() for preset in ("8gb", "16gb")]
        assert (tmp_path / "both" / name).read_text() in wanted
    assert files(tmp_path / "both") == sorted(names)
