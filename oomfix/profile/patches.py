"""Attributes replaced for a while."""

from typing import Any

_MISSING = object()


class Patches:
    """Context that puts every attribute it replaced back on leaving, last one first."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, **values: Any) -> None:
        """Replace attributes of a module or class."""
        for name, value in values.items():
            # a class may only inherit what is replaced: then it is deleted again, not copied down
            saved = vars(owner).get(name, _MISSING)
            self._saved.append((owner, name, saved))
            setattr(owner, name, value)

    def __enter__(self) -> "Patches":
        return self

    def __exit__(self, *error: object) -> None:
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
