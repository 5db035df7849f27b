"""How the CUDA allocator gets its memory from the driver, and how much of the card it may have."""

import os
import sys

import torch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def configure_allocator(
    *,
    expandable_segments: bool | None = True,
    max_split_size_mb: int | None = None,
    garbage_collection_threshold: float | None = None,
) -> str:
    """Configure the CUDA allocator of this process and of those it starts.

    Args:
        expandable_segments: True lets segments grow, which avoids most fragmentation where sizes vary; Linux only.
        max_split_size_mb: blocks above this are not split (MiB, above 20); for older drivers, instead of the first.
        garbage_collection_threshold: share of the allowed memory above which unused blocks are given back.

    Each argument that is None leaves what the environment says. Settings of the environment that have no argument
    here are kept.

    Returns:
        The settings as text, the value of PYTORCH_CUDA_ALLOC_CONF.

    Raises:
        ValueError: a number out of its range.

    Before CUDA starts this sets PYTORCH_CUDA_ALLOC_CONF, which every version of torch reads (PYTORCH_ALLOC_CONF
    too where that is set already). Afterwards it tells the running allocator, which applies settings to the
    segments that it makes from then on; so call it first. CUDA is not started.
    """
    if max_split_size_mb is not None and not (isinstance(max_split_size_mb, int) and max_split_size_mb > 20):
        raise ValueError(f"max_split_size_mb: got {max_split_size_mb!r}, expected more than 20 (MiB)")
    threshold = garbage_collection_threshold
    if threshold is not None and not (isinstance(threshold, float) and 0 < threshold < 1):
        raise ValueError(f"garbage_collection_threshold: got {threshold!r}, expected a share between 0 and 1")
    asked = {
        "expandable_segments": expandable_segments,
        "max_split_size_mb": max_split_size_mb,
        "garbage_collection_threshold": garbage_collection_threshold,
    }
    settings = _parsed(next((os.environ[name] for name in reversed(_VARIABLES) if name in os.environ), ""))
    settings.update({key: str(value) for key, value in asked.items() if value is not None})
    if not sys.platform.startswith("linux"):
        settings.pop("expandable_segments", None)
    text = ",".join(f"{key}:{value}" for key, value in settings.items())
    for name in _VARIABLES:
        if name == _VARIABLES[0] or name in os.environ:
            os.environ[name] = text
    if text and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.memory._set_allocator_settings(text)
    return text


def memory_fraction(share: float, device: int | torch.device | None = None) -> None:
    """Limit this process to `share` of a card's memory; allocations beyond it run out of memory.

    For cards that others use too: a desktop, other processes. It makes nothing smaller: a process that needs
    more fails earlier.

    Args:
        share: of all memory of the card, above 0, at most 1.
        device: the card; None: the current one.

    Raises:
        ValueError: `share` is out of its range.

    CUDA is not started: before it runs, the limit waits until it does.
    """
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share: got {share!r}, expected a share above 0, at most 1")
    torch.cuda._lazy_call(lambda: torch.cuda.set_per_process_memory_fraction(share, device))  # type: ignore[no-untyped-call]


def _parsed(text: str) -> dict[str, str]:
    # the parts of a bracketed value (roundup_power2_divisions:[256:1,512:2]) come out again in their order
    split = (pair.split(":", 1) for pair in text.split(",") if ":" in pair)
    return {key.strip(): value.strip() for key, value in split}
