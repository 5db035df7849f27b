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
import os, signal, sys
from oomfix.rewrite import writing

path, at = sys.argv[1], int(sys.argv[2])
calls = 0

def count(event, _):
    global calls
    if event in ("open", "os.chmod", "os.rename", "os.remove", "tempfile.mkstemp"):
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)

data = b"y = 0\\n" * 50000
sys.addaudithook(count)
writing.write_source(path, data)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_process_killed_at_any_call_leaves_old_or_new_content(tmp_path):
    new = b"y = 0\n" * 50000
    seen = set()
    for at in range(1, 30):
        path = tmp_path / f"train_{at}.py"
        path.write_bytes(OLD)
        done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(at)], capture_output=True, check=False)
        content = path.read_bytes()
        assert content in (OLD, new)
        seen.add(content == new)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        pytest.fail("the write never came to its end")
    assert seen == {False, True}
