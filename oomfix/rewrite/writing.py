"""Writing a file so that at any moment it holds its old content or its new one, never a mix."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from oomfix.parsing import Unreadable
from oomfix.source import Source

BACKUP_SUFFIX = ".orig"
_TEMPORARY = (".oomfix.", ".tmp")


class CannotWrite(Exception):
    """A file was left as it was; the message is one plain line that says why and what to do."""


class Written(NamedTuple):
    """What was written.

    Attributes:
        path: the file that links lead to.
        backup: where its old content is kept; None: nowhere.
        notes: what else became of it, one plain line each.
    """

    path: str
    backup: str | None
    notes: tuple[str, ...]


def write_source(path: str, data: bytes, *, expected: bytes | None = None, backup: bool = False) -> Written:
    """Replace the content of a Python file or notebook, all at once.

    A symbolic link stays a link: the file it leads to is replaced. Permissions stay, and owner and group where the
    system lets them. Other names of the file (hard links) keep the old content. The data goes to a temporary file in
    the same folder, is flushed to the disk, and takes the name of the old file in one step; a process killed at any
    moment leaves one of the two contents under the name. Processes that write to the same folder take turns.

    Args:
        path: an existing file.
        data: its new content, as bytes.
        expected: its present content; if it is another by now, the file stays as it is.
        backup: keep the old content beside it, as `path` + ".orig" (an older backup is never replaced: ".orig.1").

    Raises:
        CannotWrite: the data is no Python 3, the file is read-only, gone or changed, the disk is full; nothing has
            changed.
    """
    _check(path, data)
    target = os.path.realpath(path)
    try:
        with _alone_in(os.path.dirname(target)):
            state = os.stat(target)
            if not state.st_mode & stat.S_IWUSR or not os.access(target, os.W_OK):
                raise CannotWrite(f"{path}: read-only, left as it is; make it writable (chmod u+w) and run again")
            with open(target, "rb") as file:
                present = file.read()
            if expected is not None and present != expected:
                if present == data:  # another process was here for the same
                    return Written(target, None, ())
                raise CannotWrite(f"{path}: changed while it was being rewritten, left as it is; run again")
            kept = _keep(target, present) if backup else None
            notes = None
            try:
                notes = _replace(target, data, state)
            finally:
                if kept is not None and notes is None:
                    os.unlink(kept)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CannotWrite(f"{path}: cannot write ({reason}), left as it is") from None
    return Written(target, kept, (*_of_backup(path, target, kept), *notes))


def _check(path: str, data: bytes) -> None:
    try:
        source = Source.from_bytes(path, data)
        if source.cells is None:  # cells of a notebook may await at their top
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are of what the script held before
                compile(source.tree, path, "exec", dont_inherit=True)
    except (Unreadable, SyntaxError, ValueError) as error:
        raise CannotWrite(f"{path}: the result would not compile ({error}), left as it is; please report it") from None


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Wait until no other process is in here for this folder, where the system can lock folders, and clean up."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = None
    try:
        # a folder that may not be listed, or that lies on a network without locks, is written all the same
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in glob.iglob(os.path.join(glob.escape(folder), "*".join(_TEMPORARY))):
                os.unlink(left)  # by a process that was killed: nobody else writes now
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    """Write to an open file, down to the disk, and close it."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(target: str, data: bytes, state: os.stat_result) -> tuple[str, ...]:
    folder = os.path.dirname(target)
    descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY[0], suffix=_TEMPORARY[1], dir=folder)
    try:
        _write(descriptor, data)
        notes = _take_over(target, temporary, state)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has taken the place of the old one
            os.unlink(temporary)
    _flush_folder(folder)
    return notes


def _take_over(target: str, temporary: str, state: os.stat_result) -> tuple[str, ...]:
    """Give the new file the owner, group, mode and extended attributes of the old one; what could not be given."""
    notes = []
    if state.st_nlink > 1:
        others = "its other name keeps" if state.st_nlink == 2 else f"its {state.st_nlink - 1} other names keep"
        notes.append(f"{others} the old content (hard links)")
    own = os.stat(temporary)
    if hasattr(os, "chown") and (own.st_uid, own.st_gid) != (state.st_uid, state.st_gid):
        try:
            os.chown(temporary, state.st_uid, state.st_gid)
        except PermissionError:  # only root may give files away; the content matters more than the owner
            notes.append(f"it belongs to user {own.st_uid} and group {own.st_gid} now")
    os.chmod(temporary, stat.S_IMODE(state.st_mode))
    if hasattr(os, "listxattr"):
        # access lists are such attributes; some file systems have none, and some only root may set
        with contextlib.suppress(OSError):
            for name in os.listxattr(target):
                with contextlib.suppress(PermissionError):
                    os.setxattr(temporary, name, os.getxattr(target, name))
    return tuple(notes)


def _flush_folder(folder: str) -> None:
    """Make the new name survive a power cut, where folders can be opened."""
    if os.name != "posix":
        return
    # the file has its new content by now: nothing that fails here may say that it has not
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _keep(target: str, data: bytes) -> str:
    """Put the content of a file beside it under a name that is free."""
    mode = stat.S_IMODE(os.stat(target).st_mode)
    number = 0
    while True:
        path = target + BACKUP_SUFFIX + (f".{number}" if number else "")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            number += 1
            continue
        complete = False
        try:
            _write(descriptor, data)
            complete = True
        finally:
            if not complete:
                os.unlink(path)
        return path


def _of_backup(path: str, target: str, kept: str | None) -> tuple[str, ...]:
    if kept is None:
        return ()
    shown = kept if os.path.islink(path) else path + kept.removeprefix(target)
    return (f"old content kept in {shown}",)
