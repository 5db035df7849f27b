"""What the functions of torch do, as far as a check of a forward has to know it (`watching`), told by their names."""

import functools
from enum import Enum, auto
from typing import Any

import torch.nn.functional as F

from oomfix.runtime.verification.truths import COUNTS, EQUALS, NAMES, ORDERS

# functions that select among values along a dimension, or draw indices below a bound
_SELECTIONS = ("topk", "kthvalue", "sort", "argsort", "msort", "median", "nanmedian")
_INDEX_DRAWS = ("randperm", "randint")
_EXTREMES = ("max", "min", "amax", "amin", "argmax", "argmin")
# functions that are linear on both sides of a threshold, so that a mean over a batch shows nothing of it far away
_CLAMPS = ("clamp", "clamp_", "clamp_min", "clamp_max", "clip", "maximum", "minimum")
_BENDS = (*_CLAMPS, "abs", "__abs__", "absolute", "relu", "relu_", "leaky_relu", "hardtanh", "threshold", "where",
          "relu6", "fmax", "fmin", "l1_loss", "smooth_l1_loss", "huber_loss")  # fmt: skip
# these jump from one number to the next, so that they show a threshold only where it lies between two runs
_STEPS = ("floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "heaviside", "fmod", "remainder",
          "floor_divide", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__rshift__", "__rrshift__",
          "bitwise_right_shift")  # fmt: skip
_DIVISIONS = ("div", "divide")  # these round too, where they are asked to
_CASTS = ("long", "int", "short", "to", "type")  # and these, where the result is whole
# these bend too, where what they are taken of is a few numbers for the whole batch
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm")
# these give each of what is marked its number
_NUMBERINGS = ("cumsum", "cumsum_")
# these say where the samples are that some are picked by
_PICKING = ("nonzero", "argwhere", "masked_select")
# others that give a mask
_MASKS = (*EQUALS, "isfinite", "__invert__", "logical_not", "bitwise_not",
          "__and__", "logical_and", "bitwise_and", "__or__", "logical_or", "bitwise_or")  # fmt: skip
# what gives the sum or difference of two terms of a loss
IN_PLACE = ("add_", "__iadd__", "sub_", "__isub__")
_ADDITIONS = ("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", *IN_PLACE)
# besides those whose names end with an underscore, unless they begin with two
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")


class Kind(Enum):
    """What a function of torch does, as far as it matters."""

    OTHER = auto()
    ADDS = auto()
    CROSS_ENTROPY = auto()
    WRITES = auto()
    SELECTS = auto()
    EXTREMES = auto()
    NORMS = auto()
    NUMBERS = auto()
    PICKS = auto()
    TAKES = auto()
    DRAWS_INDICES = auto()
    BENDS = auto()
    STEPS = auto()
    DIVIDES = auto()
    CASTS = auto()
    COUNTS = auto()
    COMPARES = auto()
    MASKS = auto()
    DISTINGUISHES = auto()
    READS = auto()
    DECIDES = auto()


MAY_PICK = (Kind.TAKES, Kind.SELECTS, Kind.BENDS)
BENDING = (Kind.BENDS, Kind.STEPS, Kind.COMPARES, Kind.SELECTS, Kind.EXTREMES, Kind.NORMS)


@functools.lru_cache(maxsize=4096)
def kind_of(func: Any) -> Kind:
    """The kind of `func`, read off its name once."""
    name = getattr(func, "__name__", "")
    if name in ORDERS:
        return Kind.COMPARES
    if name in _BENDS:
        return Kind.BENDS
    if name.removesuffix("_") in _STEPS or name in _STEPS:
        return Kind.STEPS
    if name.removesuffix("_") in _DIVISIONS:
        return Kind.DIVIDES
    if name in _CASTS:
        return Kind.CASTS
    if name in COUNTS:
        return Kind.COUNTS
    if name in _MASKS:
        return Kind.MASKS
    if name == "unique":
        return Kind.DISTINGUISHES
    if name == "item":
        return Kind.READS
    if name in NAMES:
        return Kind.DECIDES
    if func in (F.cross_entropy, F.nll_loss):
        return Kind.CROSS_ENTROPY
    if name in _ADDITIONS:
        return Kind.ADDS
    if name.endswith("_") and (not name.startswith("__") or name in _WRITES):
        return Kind.WRITES
    if name in _SELECTIONS:
        return Kind.SELECTS
    if name in _EXTREMES:
        return Kind.EXTREMES
    if name in _NORMS:
        return Kind.NORMS
    if name in _NUMBERINGS:
        return Kind.NUMBERS
    if name in _PICKING:
        return Kind.PICKS
    if name == "__getitem__":
        return Kind.TAKES
    return Kind.DRAWS_INDICES if name in _INDEX_DRAWS else Kind.OTHER
