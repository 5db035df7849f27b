"""Where a program makes some calls, and in which rounds of its loops, so that those of two runs can be told apart.

A loop that leaves out what is not there (`for kind in kinds: if mask.any(): ...`) makes as many calls at one place for
other kinds. Its rounds are counted by the functions of torch that it calls in each: whether a kind is there, for one.
"""

from types import CodeType, FrameType
from typing import Any

# what torch and this package put between a program and the function that it calls
_BETWEEN = ("oomfix.runtime", "torch.overrides", "torch._tensor")
_Place = tuple[CodeType, int]


def way_to(frame: FrameType | None, outside: int) -> tuple[_Place, ...]:
    """The calls of the program that lead to `frame` from the frame with that id, the last one first."""
    way: list[_Place] = []
    while frame is not None and id(frame) != outside:
        if not _is_between(frame):
            way.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(way)


class CallPlaces:
    """The places of some calls of one run.

    Args:
        outside: the frame that runs it.
    """

    def __init__(self, outside: FrameType) -> None:
        # its number alone, which nothing else gets as long as it runs: a frame would keep its tensors
        self._outside = id(outside)
        self._counts: dict[CodeType, dict[int, int]] = {}
        self._calls: list[tuple[tuple[_Place, ...], dict[_Place, int]]] = []

    def note(self, frame: FrameType | None) -> None:
        """Count a function of torch that is called from `frame`."""
        while frame is not None and id(frame) != self._outside:
            if not _is_between(frame):
                counts = self._counts.setdefault(frame.f_code, {})
                counts[frame.f_lasti] = counts.get(frame.f_lasti, 0) + 1
                return
            frame = frame.f_back

    def mark(self, frame: FrameType | None) -> None:
        """Remember a call that is made from `frame`."""
        way = way_to(frame, self._outside)
        codes = dict.fromkeys(code for code, _ in way)
        counts = {(code, place): n for code in codes for place, n in self._counts.get(code, {}).items()}
        self._calls.append((way, counts))

    def found(self) -> list[int]:
        """A number for the place and the round of each call that was remembered."""
        moving: dict[tuple[_Place, ...], set[_Place]] = {}
        for way, counts in self._calls:
            codes = dict.fromkeys(code for code, _ in way)
            last = {(code, place): n for code in codes for place, n in self._counts.get(code, {}).items()}
            moving.setdefault(way, set()).update(place for place, n in last.items() if counts.get(place) != n)
        return [hash((way, _round(counts, moving[way]))) for way, counts in self._calls]


def _round(counts: dict[_Place, int], moving: set[_Place]) -> int:
    return max((counts.get(place, 0) for place in moving), default=0)


def _is_between(frame: FrameType) -> bool:
    name: Any = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith(_BETWEEN)
