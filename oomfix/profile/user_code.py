"""Which line of the user's code is running."""

import os
from functools import cache
from types import FrameType

import torch

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # all of oomfix
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", _STANDARD_LIBRARY)


def user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost line of code that is neither torch's, nor ours, nor, if possible, that of an installed package."""
    installed = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            return frame.f_code.co_filename, frame.f_lineno
        if kind == "installed" and installed is None:
            installed = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return installed


@cache
def _kind(file: str) -> str:
    if file.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")):
        return "torch"
    return "installed" if any(folder in file for folder in _INSTALLED) else "user"
