"""Running other content than some Python files hold, under the files' own names."""

import io
import linecache
import os
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from typing import Any

from oomfix.profile.patches import Patches


def overlay(patches: Patches, contents: Mapping[str, bytes]) -> None:
    """Let scripts and imports find `contents` where they look for the files; the files stay as they are.

    Args:
        patches: what is to be put back later.
        contents: real path of a Python file -> what it seems to hold. `inspect.getsource` sees it too.
    """
    open_code, get_code = io.open_code, SourceFileLoader.get_code

    def opened(path: str) -> Any:
        # runpy reads scripts through this
        content = contents.get(os.path.realpath(path))
        return open_code(path) if content is None else io.BytesIO(_known_to_linecache(path, content))

    def code_of(self: SourceFileLoader, fullname: str) -> Any:
        # imports would take the compiled file from __pycache__
        path = self.get_filename(fullname)
        content = contents.get(os.path.realpath(path))
        if content is None:
            return get_code(self, fullname)
        return self.source_to_code(_known_to_linecache(path, content), path)  # type: ignore[arg-type]

    patches.set(io, open_code=opened)
    patches.set(SourceFileLoader, get_code=code_of)


def _known_to_linecache(path: str, content: bytes) -> bytes:
    # without a time of modification, linecache never looks at the file
    linecache.cache[path] = (len(content), None, decode_source(content).splitlines(keepends=True), path)
    return content
