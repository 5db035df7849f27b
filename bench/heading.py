"""The lines that a page of results begins with: what was run, with what, on what, and when."""

import datetime
import platform
import sys
from collections.abc import Sequence

import torch


def heading(title: str, device: str, module: str, packages: Sequence[str] = ()) -> list[str]:
    """The first lines of a page.

    Args:
        title: what is measured.
        device: "cpu" or "cuda".
        module: the bench, as `python -m` takes it; its arguments are those of this process.
        packages: names and versions of what is compared, besides torch.
    """
    on = f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"
    if device == "cuda":
        on = torch.cuda.get_device_name()
    versions = ", ".join([f"torch {torch.__version__}", *packages])
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    return [f"# {title}, {device}", "", f"{on}; {versions}; {datetime.date.today()}; `{command}`", ""]
