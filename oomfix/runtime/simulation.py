"""All that the runtime knows of simulated cards: their tensors hold no numbers that could be compared.

`oomfix.profile` runs scripts that train through the runtime on tensors without data. Where a check would compare
numbers it goes by the assumption here; what shows without them (a forward that fails on a few rows, what it writes) it
finds out as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """What comparisons of numbers would have found.

    Attributes:
        coupled: why no batch may be split; None: samples do not depend on each other.
        note: called once for each check that goes by it.
    """

    coupled: str | None
    note: Callable[[], object]


assumption: Assumption | None = None
"""What checks go by while a card is simulated; None: tensors hold numbers."""
