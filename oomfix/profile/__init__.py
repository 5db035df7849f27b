"""The simulated GPU: what a training step needs in memory, measured without one.

    from oomfix.profile import estimate

    found = estimate(build, batch, loss, precision="bf16", gpu="t4")
    found.peak_allocated_bytes, found.breakdown, found.fits["16gb"].fits

`largest_batch` searches with such estimates, `MemoryTrace` records a block of code on real tensors.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomfix.profile.estimation import estimate, largest_batch
    from oomfix.profile.report import Estimate
    from oomfix.profile.trace import MemoryTrace

__all__ = ["Estimate", "MemoryTrace", "estimate", "largest_batch"]


def __getattr__(name: str) -> Any:
    # the command line imports from this package, and must not import torch
    from importlib import import_module

    modules = {"estimate": "estimation", "largest_batch": "estimation", "Estimate": "report", "MemoryTrace": "trace"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
