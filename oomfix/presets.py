"""Presets: what a card of a given size can hold, and the policies that go with it.

A preset is named after the memory printed on the box ("16gb"). No card has all of that, so the budget is
computed from the smallest real card of the class:

    budget = 0.95 * capacity - 600 MiB, rounded down to 0.1 GiB

The capacity is what torch reports as "total capacity" in its out-of-memory errors; 600 MiB are the CUDA
context with the kernels of a training script (590 and 618 MiB measured on published runs); the 5 % margin is
left for fragmentation and for the workspaces of cuBLAS and cuDNN. The capacities are those that users quote
in their error reports: an 8 GB laptop card 7.60 GiB, RTX 3060 11.62, T4 14.74, RTX 3090 23.56, A100 39.38 and
79.14, A40 44.34. Cards with ECC memory that are sold as 24 GB (A10G, L4) show about 22 GiB; a running script
never takes more than the card reports as free, so they are safe under "24gb" too.

This module imports neither torch nor libcst: the command line reads it on every start.
"""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn

Precision = Literal["auto", "no-fp16", "bf16", "fp16", "fp32"]
Split = Literal["verified", "always", "never"]
Policy = Literal["off", "if-needed", "on"]

CUDA_CONTEXT_GIB = 600 / 1024
MEMORY_FRACTION = 0.95
ENVIRONMENT_VARIABLE = "OOMFIX_PRESET"

_POLICIES = ("off", "if-needed", "on")
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("auto", "no-fp16", "bf16", "fp16", "fp32"),
    "split": ("verified", "always", "never"),
    "chunked_loss": _POLICIES,
    "checkpointing": _POLICIES,
    "offloading": _POLICIES,
    "lean_step": _POLICIES,
}


@dataclass(frozen=True)
class Card:
    """A GPU to simulate: its name, what torch reports as its total capacity (GiB), its compute capability."""

    name: str
    capacity_gib: float
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Preset:
    """A memory budget and the policies that keep training inside it. Immutable; `get` makes changed copies.

    Attributes:
        name: the preset's name, one of `PRESETS`.
        budget_gib: memory that tensors may take (GiB); None: what the card reports as free.
        micro_batches: into how many parts a batch is split; "auto": the fewest that fit.
        first_micro_batches: where "auto" starts if the whole batch does not fit.
        precision: "auto" is bf16 where the device has it, else fp16 with loss scaling, fp32 on the CPU; "no-fp16" is
            fp32 instead of fp16, for scripts that read or change gradients where a loss scale would be seen.
        split: "verified" splits a batch only where a check shows that the loss allows it; "always" trusts the user.
        chunked_loss: cross entropies over large logits a few rows at a time never, when splitting is not enough, or
            from the start.
        checkpointing: activation checkpointing never, when both are not enough, or from the start.
        offloading: activations in host memory never, when all of that is not enough, or from the start.
        clip_norm: largest gradient norm, where the script does not clip by itself; None: no clipping.
        empty_cache_every: empty the allocator's cache every so many steps; None: only where much of it was unused
            even at the peak, which is checked every hundred steps.
        expandable_segments: let the CUDA allocator grow its segments (less fragmentation).
        memory_fraction: share of the card that the allocator may reserve, above 0, at most 1.
        prefetch_factor: batches that each loader worker prepares ahead, in `loader_kwargs`.
        pin_memory: batches are put into page-locked host memory where there is CUDA, in `loader_kwargs`.
        lean_step: give optimizers a form of their step without copies of all parameters never, when the step
            would not fit, or from the start; a form that the script chose (`foreach=`, `fused=`) stays.
        card: the smallest real card of the class, which `oomfix profile` simulates; None: the card at hand.

    Raises:
        TypeError: a field has a value of the wrong type.
        ValueError: a field has a value out of its range.
    """

    name: str
    budget_gib: float | None
    micro_batches: int | Literal["auto"]
    first_micro_batches: int
    precision: Precision
    split: Split
    chunked_loss: Policy
    checkpointing: Policy
    offloading: Policy
    clip_norm: float | None
    empty_cache_every: int | None
    expandable_segments: bool
    memory_fraction: float
    prefetch_factor: int
    pin_memory: bool
    lean_step: Policy
    card: Card | None

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            _check_choice(field, getattr(self, field), choices)
        if self.micro_batches != "auto":
            _check_count("micro_batches", self.micro_batches, 'a whole number of at least 1, or "auto"')
        for field in ("first_micro_batches", "prefetch_factor"):
            _check_count(field, getattr(self, field), "a whole number of at least 1")
        if self.empty_cache_every is not None:
            _check_count("empty_cache_every", self.empty_cache_every, "a whole number of at least 1, or None")
        if self.budget_gib is not None:
            _check_positive("budget_gib", self.budget_gib, "a finite number of GiB above 0, or None")
        if self.clip_norm is not None:
            _check_positive("clip_norm", self.clip_norm, "a finite norm above 0, or None")
        _check_positive("memory_fraction", self.memory_fraction, "a share above 0, at most 1", most=1.0)
        for field in ("expandable_segments", "pin_memory"):
            _check_type(field, getattr(self, field), bool, "True or False")
        _check_type("card", self.card, (Card, type(None)), "a Card or None")


def get(name: str, /, **overrides: Any) -> Preset:
    """The preset called `name`, with the fields in `overrides` changed.

    Args:
        name: one of `PRESETS`: "8gb", "12gb", "16gb", "24gb", "40gb", "48gb", "80gb", "auto" or "off".
        overrides: new values for fields of `Preset`, except `name`.

    Raises:
        ValueError: no preset has this name, or a value is out of its field's range.
        TypeError: no field has this name, or a value is of the wrong type.
    """
    _check_type("preset", name, str, f"one of {_listed(PRESETS)}")
    _check_choice("preset", name, PRESETS)
    known = tuple(field.name for field in fields(Preset) if field.name != "name")
    for field in overrides:
        if field not in known:
            _refuse(TypeError, "preset override", field, f"one of {_listed(known)}{_nearest(field, known)}")
    return replace(PRESETS[name], **overrides)


def from_environment(preset: Preset, environ: Mapping[str, str] = os.environ) -> Preset:
    """The preset that OOMFIX_PRESET names, else `preset` itself.

    Another card's preset keeps what the script changed (precision, clipping, ...) except the budget, which
    belongs to the card. "off" keeps nothing: it stands for the script as it was.

    Raises:
        ValueError: OOMFIX_PRESET names no preset.
    """
    name = environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not name:
        return preset
    _check_choice(ENVIRONMENT_VARIABLE, name, PRESETS)
    if name == "off":
        return PRESETS[name]
    return get(name, **_changes(preset))


def table(own: Mapping[str, Preset] = MappingProxyType({})) -> list[tuple[str, ...]]:
    """The presets as rows of text, then one's own by their names; the first row is the header. For `oomfix presets`."""
    header = ("preset", "card", "capacity", "budget", "parts", "checkpointing", "emptied")
    return [header, *(_row(name, preset) for name, preset in {**PRESETS, **own}.items())]


def _row(name: str, preset: Preset) -> tuple[str, ...]:
    if name == "off":
        return ("off", "-", "-", "-", "1", "off", "never")
    card, every = preset.card, preset.empty_cache_every
    return (
        name,
        # 80 columns hold the table
        card.name.removeprefix("GeForce ") if card else "the card at hand",
        f"{card.capacity_gib:.2f} GiB" if card else "-",
        "free" if preset.budget_gib is None else f"{preset.budget_gib:.1f} GiB",
        str(preset.first_micro_batches),
        preset.checkpointing,
        "fragmented" if every is None else f"{every} steps",
    )


def _changes(preset: Preset) -> dict[str, Any]:
    """The fields that the script changed, but for those that belong to the card."""
    # a preset under a name of its own counts as changes to "auto", which stands for no particular card
    original = PRESETS.get(preset.name, PRESETS["auto"])
    names = (field.name for field in fields(Preset) if field.name not in ("name", "budget_gib", "card"))
    return {name: getattr(preset, name) for name in names if getattr(preset, name) != getattr(original, name)}


def _check_choice(field: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        _refuse(ValueError, field, value, f"one of {_listed(choices)}{_nearest(value, choices)}")


def _check_count(field: str, value: object, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(TypeError, field, value, expected)
    if value < 1:
        _refuse(ValueError, field, value, expected)


def _check_positive(field: str, value: object, expected: str, most: float = sys.float_info.max) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(TypeError, field, value, expected)
    if not 0 < value <= most:
        _refuse(ValueError, field, value, expected)


def _check_type(field: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, types):
        _refuse(TypeError, field, value, expected)


def _refuse(error: type[Exception], field: str, value: object, expected: str) -> NoReturn:
    raise error(f"{field}: got {value!r}, expected {expected}")


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _nearest(name: object, names: Collection[str]) -> str:
    # imported here: only a mistake needs it, and the command line reads this module on every start
    from difflib import get_close_matches

    close = get_close_matches(str(name).lower().replace(" ", ""), list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _budget_gib(card: Card) -> float:
    return int((MEMORY_FRACTION * card.capacity_gib - CUDA_CONTEXT_GIB) * 10) / 10


def _for_card(
    name: str,
    card: Card,
    first_micro_batches: int,
    checkpointing: Policy = "if-needed",
    empty_cache_every: int | None = None,
) -> Preset:
    return Preset(
        name=name,
        budget_gib=_budget_gib(card),
        micro_batches="auto",
        first_micro_batches=first_micro_batches,
        precision="auto",
        split="verified",
        chunked_loss="if-needed",
        checkpointing=checkpointing,
        offloading="if-needed",
        clip_norm=None,
        empty_cache_every=empty_cache_every,
        expandable_segments=True,
        memory_fraction=MEMORY_FRACTION,
        prefetch_factor=2,
        pin_memory=True,
        lean_step="if-needed",
        card=card,
    )


_LAPTOP_8GB = Card("GeForce RTX 4060 Laptop", 7.60, (8, 9))
_RTX_3060 = Card("GeForce RTX 3060", 11.62, (8, 6))
_T4 = Card("T4", 14.74, (7, 5))
_RTX_3090 = Card("GeForce RTX 3090", 23.56, (8, 6))
_A100_40GB = Card("A100 40GB", 39.38, (8, 0))
_A40 = Card("A40", 44.34, (8, 6))
_A100_80GB = Card("A100 80GB", 79.14, (8, 0))

# First splits of 4, 2 and 1 at 8, 16 and 24 GB are where people ended who fixed such scripts by hand.
_FOR_CARDS = (
    _for_card("8gb", _LAPTOP_8GB, 4, checkpointing="on", empty_cache_every=10),
    _for_card("12gb", _RTX_3060, 4),
    _for_card("16gb", _T4, 2),
    _for_card("24gb", _RTX_3090, 1),
    _for_card("40gb", _A100_40GB, 1),
    _for_card("48gb", _A40, 1),
    _for_card("80gb", _A100_80GB, 1),
)
_AUTO = replace(_FOR_CARDS[2], name="auto", budget_gib=None, card=None)
_OFF = Preset(
    name="off",
    budget_gib=None,
    micro_batches=1,
    first_micro_batches=1,
    precision="fp32",
    split="never",
    chunked_loss="off",
    checkpointing="off",
    offloading="off",
    clip_norm=None,
    empty_cache_every=None,
    expandable_segments=False,
    memory_fraction=1.0,
    prefetch_factor=2,
    pin_memory=False,
    lean_step="off",
    card=None,
)

PRESETS: Mapping[str, Preset] = MappingProxyType({p.name: p for p in (*_FOR_CARDS, _AUTO, _OFF)})
"""Every preset by name, smallest card first; "off" is the script as it was: whole batches, own precision."""
