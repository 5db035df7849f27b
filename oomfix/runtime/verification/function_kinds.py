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
_NUMBERINGS = ("cumsum",)
# these give numbers to what a check does not watch
_LEAVING = ("numpy", "__array__", "tolist")
# these say where the samples are that some are picked by
_PICKING = ("nonzero", "argwhere", "masked_select")
# others that give a mask
_MASKS = (*EQUALS, "isfinite", "__invert__", "logical_not", "bitwise_not",
          "__and__", "logical_and", "bitwise_and", "__or__", "logical_or", "bitwise_or")  # fmt: skip
# and these draw one, entry by entry
_FLIPS = ("bernoulli", "bernoulli_")
# what gives the sum or difference of two terms of a loss
IN_PLACE = ("add_", "__iadd__", "sub_", "__isub__")
_ADDITIONS = ("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", *IN_PLACE)
# besides those whose names end with an underscore, unless they begin with two
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")


# these weigh the terms of a loss
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")


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
    MULTIPLIES = auto()
    CASTS = auto()
    COUNTS = auto()
    COMPARES = auto()
    MASKS = auto()
    FLIPS = auto()
    DISTINGUISHES = auto()
    READS = auto()
    LEAVES = auto()
    DECIDES = auto()


MAY_PICK = (Kind.TAKES, Kind.SELECTS, Kind.BENDS)
BENDING = (Kind.BENDS, Kind.STEPS, Kind.COMPARES, Kind.SELECTS, Kind.EXTREMES, Kind.NORMS)


def _with_in_place(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(f"{name}_" for name in names))


# of a name that stands twice, the first kind counts
_NAMED = (
    (Kind.COMPARES, ORDERS),
    (Kind.BENDS, _BENDS),
    (Kind.STEPS, _with_in_place(_STEPS)),
    (Kind.DIVIDES, _with_in_place(_DIVISIONS)),
    (Kind.MULTIPLIES, _PRODUCTS),
    (Kind.CASTS, _CASTS),
    (Kind.COUNTS, COUNTS),
    (Kind.MASKS, _MASKS),
    (Kind.FLIPS, _FLIPS),
    (Kind.DISTINGUISHES, ("unique",)),
    (Kind.READS, ("item",)),
    (Kind.LEAVES, _LEAVING),
    (Kind.DECIDES, NAMES),
    (Kind.ADDS, _ADDITIONS),
    (Kind.SELECTS, _SELECTIONS),
    (Kind.EXTREMES, _EXTREMES),
    (Kind.NORMS, _NORMS),
    (Kind.NUMBERS, _NUMBERINGS),
    (Kind.PICKS, _PICKING),
    (Kind.TAKES, ("__getitem__",)),
    (Kind.DRAWS_INDICES, _INDEX_DRAWS),
)
_KINDS = {name: kind for kind, names in reversed(_NAMED) for name in names}


@functools.lru_cache(maxsize=4096)
def kind_of(func: Any) -> Kind:
    """The kind of `func`, read off its name once."""
    if func in (F.cross_entropy, F.nll_loss):
        return Kind.CROSS_ENTROPY
    name = getattr(func, "__name__", "")
    writes = name.endswith("_") and (not name.startswith("__") or name in _WRITES)
    return _KINDS.get(name, Kind.WRITES if writes else Kind.OTHER)
