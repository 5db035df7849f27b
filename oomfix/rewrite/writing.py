"""Writing a file so that at any moment it holds its old content or its new one, never a mix."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import NamedTuple

from oomfix.source import Source, Unreadable

BACKUP_SUFFIX = ".orig"


class CannotWrite(Exception):
    """A file was left as it was; the message is one plain line that says why and what to do."""


class Written(NamedTuple):
    """What was written: the file that links lead to, and where its old content is kept (None: nowhere)."""

    path: str
    backup: str | None


def write_python(path: str, data: bytes, *, backup: bool = False) -> Written:
    """Replace the content of a Python file, all at once.

    A symbolic link stays a link: the file it leads to is replaced. Permissions stay, and owner and group where the
    system lets them. The data goes to a temporary file in the same folder, is flushed to the disk, and takes the
    name of the old file in one step; a process killed at any moment leaves one of the two contents under the name.

    Args:
        path: an existing file.
        data: its new content, as bytes.
        backup: keep the old content beside it, as `path` + ".orig" (an older backup is never replaced: ".orig.1").

    Raises:
        CannotWrite: the data is no Python 3, the file is read-only or gone, the disk is full; nothing has changed.
    """
    _check(path, data)
    target = os.path.realpath(path)
    try:
        state = os.stat(target)
        if not state.st_mode & stat.S_IWUSR or not os.access(target, os.W_OK):
            raise CannotWrite(f"{path}: read-only, left as it is; make it writable (chmod u+w) and run again")
        kept = _keep(target) if backup else None
        _replace(target, data, state)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CannotWrite(f"{path}: cannot write ({reason}), left as it is") from None
    return Written(target, kept)


def _check(path: str, data: bytes) -> None:
    try:
        source = Source.from_bytes(path, data)
        compile(source.text, path, "exec", dont_inherit=True)
    except (Unreadable, SyntaxError, ValueError) as error:
        raise CannotWrite(f"{path}: the result would not compile ({error}), left as it is; please report it") from None


def _replace(target: str, data: bytes, state: os.stat_result) -> None:
    folder, name = os.path.split(target)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _take_over(temporary, state)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _flush_folder(folder)


def _take_over(temporary: str, state: os.stat_result) -> None:
    """Give the new file the owner, group and mode of the old one."""
    if hasattr(os, "chown") and (os.stat(temporary).st_uid, os.stat(temporary).st_gid) != (state.st_uid, state.st_gid):
        # only root may give files away; the content matters more than the owner
        with contextlib.suppress(PermissionError):
            os.chown(temporary, state.st_uid, state.st_gid)
    os.chmod(temporary, stat.S_IMODE(state.st_mode))


def _flush_folder(folder: str) -> None:
    """Make the new name survive a power cut, where folders can be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keep(target: str) -> str:
    """Copy a file beside itself under a name that is free."""
    with open(target, "rb") as file:
        data = file.read()
    mode = stat.S_IMODE(os.stat(target).st_mode)
    number = 0
    while True:
        path = target + BACKUP_SUFFIX + (f".{number}" if number else "")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return path
