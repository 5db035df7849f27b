"""Running other content than some Python files hold, under the files' own names."""

import importlib.machinery
import importlib.util
import io
import linecache
import os
from collections.abc import Mapping
from typing import Any

from oomfix.profile.patches import Patches


def overlay(patches: Patches, contents: Mapping[str, bytes]) -> None:
    """Let scripts and imports find `contents` where they look for the files; the files stay as they are.

    Args:
        patches: what is to be put back later.
        contents: real path of a Python file -> what it seems to hold. `inspect.getsource` sees it too.
    """
    open_code, get_code = io.open_code, importlib.machinery.SourceFileLoader.get_code

    def opened(path: str) -> Any:
        # runpy reads scripts through this
        content = contents.get(os.path.realpath(path))
        return open_code(path) if content is None else io.BytesIO(content)

    def code_of(self: importlib.machinery.SourceFileLoader, fullname: str) -> Any:
        # imports would take the compiled file from __pycache__
        path = self.get_filename(fullname)
        content = contents.get(os.path.realpath(path))
        return get_code(self, fullname) if content is None else self.source_to_code(content, path)

    patches.set(io, open_code=opened)
    patches.set(importlib.machinery.SourceFileLoader, get_code=code_of)
    for path, content in contents.items():
        _show_in_tracebacks(path, content)


def _show_in_tracebacks(path: str, content: bytes) -> None:
    lines = importlib.util.decode_source(content).splitlines(keepends=True)
    # without a time of modification, linecache never looks at the file
    linecache.cache[path] = (len(content), None, lines, path)
