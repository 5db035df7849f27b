"""Runs of `oomfix.profile.run`, each in a process of its own. Imports no torch."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

INDEPENDENT = "samples do not depend on each other"
COUPLED = "samples depend on each other"
"""How the assumption begins that batches may be split, which numbers decide and a simulated card has none."""

CANNOT_SIMULATE = 2
"""The exit code of `oomfix.profile.run` where a script needs what no simulation gives."""

_END_OF_FILE, _MOST_READS = b"\x04", 1000
_ROOT = Path(__file__).resolve().parent.parent.parent


def run_script(
    script: str, args: list[str], options: list[str], rewritten: Mapping[str, bytes] = MappingProxyType({})
) -> tuple[dict[str, Any] | None, int]:
    """What `oomfix.profile.run` finds in a process of its own, and its exit code; None where it found nothing.

    What the script writes is shown, on standard error, only where it failed. `rewritten` says for Python files what is
    run in place of what they hold. Without torch nothing runs, and a sentence on standard error says so.
    """
    if find_spec("torch") is None:
        missing = f"torch is not installed for {sys.executable}; pip install torch"
        print(f"{script}: cannot be simulated: {missing}", file=sys.stderr)
        return None, CANNOT_SIMULATE
    # the card is simulated even where there is a real one
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "estimate.json")
        options = [*options, *_rewritten(rewritten, folder)]
        command = [sys.executable, "-m", "oomfix.profile.run", "--output", str(output), *options, script, *args]
        # not a pipe: processes that the script leaves behind would keep it open
        said = Path(folder, "said")
        with _empty_terminal() as stdin, said.open("wb") as stderr:
            finished = subprocess.run(command, env=environment, stdin=stdin, stderr=stderr)
        if finished.returncode:
            sys.stderr.write(said.read_text(encoding="utf-8", errors="replace"))
        if not output.exists():
            return None, finished.returncode
        return json.loads(output.read_text(encoding="utf-8")), finished.returncode


@contextmanager
def _empty_terminal() -> Iterator[int]:
    """A terminal of 24 lines of 80 characters on which nobody types: scripts ask it for its size.

    What waits for a line gets the end of the file. Where there are no such terminals, nothing to read from.
    """
    if os.name != "posix":
        yield subprocess.DEVNULL
        return
    import fcntl
    import pty
    import struct
    import termios

    keyboard, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.write(keyboard, _END_OF_FILE * _MOST_READS)
        yield terminal
    finally:
        os.close(keyboard)
        os.close(terminal)


def _rewritten(contents: Mapping[str, bytes], folder: str) -> list[str]:
    """The option for rewritten files, whose contents are put into a folder."""
    if not contents:
        return []
    instead = {}
    for number, (path, content) in enumerate(contents.items()):
        instead[path] = str(Path(folder, f"{number}.py"))
        Path(instead[path]).write_bytes(content)
    index = Path(folder, "rewritten.json")
    index.write_text(json.dumps(instead), encoding="utf-8")
    return ["--rewritten", str(index)]
