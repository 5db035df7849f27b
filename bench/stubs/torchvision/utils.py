"""Pictures that nobody looks at."""

from typing import Any


def save_image(*args: Any, **kwargs: Any) -> None:
    return None
