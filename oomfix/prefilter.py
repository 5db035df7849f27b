"""Which files can matter at all: those that hold the words that some rule needs. The others are never parsed."""

from __future__ import annotations

from collections.abc import Iterable

from oomfix.rules.base import Need, holds

_SHARED = (
    b"cuda",
    b"cpu",
    b"zero_",
    b"backward(",
    b"Trainer(",
    b"def val",
    b"evaluate(",
    b"from_pretrained(",
    b"torch",
)
"""What several words have in common and most files lack: looked for first, in place of each of these words.

Nothing but speed depends on them. In a tree of libraries they save a third of the search.
"""


class Prefilter:
    """Looks for any of many needs in the bytes of a file.

    Args:
        needs: words, or groups of words that a file must hold together.
    """

    def __init__(self, needs: Iterable[Need]) -> None:
        distinct = list(dict.fromkeys(needs))
        words = _shortest({need for need in distinct if isinstance(need, bytes)})
        self._words = tuple(word for word in words if _shared_part(word) is None)
        rest: list[Need] = [*words, *(need for need in distinct if isinstance(need, tuple))]
        guarded: dict[bytes, list[Need]] = {}
        for need in rest:
            part = _shared_part(need)
            if part is not None or isinstance(need, tuple):
                guarded.setdefault(part or b"", []).append(need)
        self._guarded = tuple(guarded.items())

    def passes(self, data: bytes) -> bool:
        """Whether a file with these bytes may matter."""
        # single words first, without a call for each: most files hold none of them
        return any(word in data for word in self._words) or any(
            part in data and any(holds(data, need) for need in needs) for part, needs in self._guarded
        )


def _shared_part(need: Need) -> bytes | None:
    """The part, shared with others, that a file with this need holds."""
    words = (need,) if isinstance(need, bytes) else need
    return next((part for part in _SHARED if any(part in word for word in words)), None)


def _shortest(words: set[bytes]) -> tuple[bytes, ...]:
    """The words that contain no other of them: a file holds one of these exactly when it holds one of all."""
    return tuple(sorted(word for word in words if not any(w != word and w in word for w in words)))
