"""GPUs that can be simulated: what torch reports as their capacity, and their compute capability.

The capability decides what a training script does there: which number formats it may use and which attention
kernels run. The capacity is what the driver leaves of the memory printed on the box, as torch words it in its
out-of-memory errors ("GPU 0 has a total capacity of ..."): the figures here are those that users quote, the
lower one where drivers differ (by up to 1.5 %, mostly by ECC). Compute capabilities: NVIDIA's table
(developer.nvidia.com/cuda-gpus).

Imports no torch: the command line reads it.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from oomfix.presets import CUDA_CONTEXT_GIB, PRESETS, Card, Preset

_GIB = 2**30

CONTEXT_BYTES = 600 * 2**20
"""CUDA context with the kernels of a training script: 590 and 618 MiB measured; lazy loading can leave 135 MiB
(T4, torch 2.11), an old driver took 1343 MiB (V100). `oomfix.presets` reckons with the same figure."""

_OF_PRESETS = {
    key: card
    for key, preset in {
        "rtx4060-laptop": "8gb",
        "rtx3060": "12gb",
        "t4": "16gb",
        "rtx3090": "24gb",
        "a100-40gb": "40gb",
        "a40": "48gb",
        "a100-80gb": "80gb",
    }.items()
    if (card := PRESETS[preset].card) is not None
}

CARDS: Mapping[str, Card] = MappingProxyType(
    {
        **_OF_PRESETS,
        "a100": _OF_PRESETS["a100-40gb"],
        "p100": Card("P100 16GB", 15.89, (6, 0)),
        "v100": Card("V100 16GB", 15.77, (7, 0)),
        "v100-32gb": Card("V100 32GB", 31.74, (7, 0)),
        "rtx2080ti": Card("GeForce RTX 2080 Ti", 10.75, (7, 5)),
        "rtx3080": Card("GeForce RTX 3080", 9.77, (8, 6)),
        "rtx4090": Card("GeForce RTX 4090", 23.52, (8, 9)),
        "a10g": Card("A10G", 21.99, (8, 6)),
        "l4": Card("L4", 21.95, (8, 9)),
        "l40s": Card("L40S", 44.39, (8, 9)),
        "a6000": Card("RTX A6000", 47.43, (8, 6)),
        "h100": Card("H100 80GB", 79.10, (9, 0)),
        "h200": Card("H200", 139.72, (9, 0)),
    }
)
"""Every card by the name that `--gpu` takes."""


def find_card(name: str) -> Card:
    """The card called `name`, in any case, with or without blanks: "T4", "RTX 3090", "a100-80gb".

    Raises:
        ValueError: no card has this name.
    """
    key = name.lower().replace(" ", "").replace("_", "-")
    if key in CARDS:
        return CARDS[key]
    close = get_close_matches(key, CARDS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"gpu: got {name!r}, expected one of {', '.join(CARDS)}{hint}")


def key_of(card: Card) -> str:
    """The name that `--gpu` takes for one of `CARDS`."""
    return next(key for key, known in CARDS.items() if known == card)


def budget(text: str) -> int:
    """Bytes that the allocator may reserve under a preset ("16gb"), or on a card of so many GiB ("15.77").

    Raises:
        ValueError: neither a preset with a budget nor a number above what the CUDA context takes.
    """
    preset = PRESETS.get(text)
    if preset is not None and preset.budget_gib:
        return int(preset.budget_gib * _GIB)
    try:
        nbytes = int(float(text) * _GIB) - CONTEXT_BYTES
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes <= 0:
        names = ", ".join(name for name, known in PRESETS.items() if known.budget_gib)
        context = f"{CONTEXT_BYTES / _GIB:.2f}"
        raise ValueError(f"budget: got {text!r}, expected one of {names}, or the GiB of a card (above {context})")
    return nbytes


def card_options(preset: Preset) -> list[str]:
    """The options of `oomfix.profile.run` for the card of a preset; none where the preset has no card."""
    return [] if preset.card is None else ["--gpu", key_of(preset.card)]


def budget_options(preset: Preset, margin: float = 0.0) -> list[str]:
    """The options of `oomfix.profile.run` for the budget of a preset; none where the preset has no budget.

    Args:
        preset: the preset.
        margin: by what share a measured peak may exceed an estimate; the budget is that much smaller.
    """
    if preset.budget_gib is None:
        return []
    # the option takes the memory of a card, part of which the CUDA context fills
    return ["--budget", repr(preset.budget_gib / (1 + margin) + CUDA_CONTEXT_GIB)]
