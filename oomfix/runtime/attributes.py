"""Attributes of modules and other objects, kept so that they can be compared and put back."""

import operator
from collections.abc import Iterable
from typing import Any


class Attributes:
    """The attributes of some modules, or other objects, at one moment, with what their containers held."""

    def __init__(self, owners: Iterable[Any]) -> None:
        self._saved = [(vars(owner), dict(vars(owner)), _contents(vars(owner))) for owner in owners]

    def changed(self) -> set[str]:
        """The names of the attributes that have changed."""
        names: set[str] = set()
        for attributes, before, contents in self._saved:
            names |= attributes.keys() ^ before.keys()
            names |= {name for name, value in before.items() if name in attributes and attributes[name] is not value}
            names |= {name for name, content in contents.items() if not _same_content(before[name], content)}
        return names

    def changes(self) -> dict[tuple[int, str], Any]:
        """The values of the attributes that have changed, under the number of their module and their name."""
        found: dict[tuple[int, str], Any] = {}
        for index, (attributes, before, contents) in enumerate(self._saved):
            for name, value in attributes.items():
                if name not in before or value is not before[name]:
                    found[index, name] = value
                elif name in contents and not _same_content(value, contents[name]):
                    found[index, name] = list(value.items()) if isinstance(value, dict) else list(value)
        return found

    def restore(self) -> set[str]:
        """Put everything back; the names of the attributes that had changed."""
        changed = set()
        for attributes, before, contents in self._saved:
            for name in attributes.keys() - before.keys():
                del attributes[name]
                changed.add(name)
            for name, value in before.items():
                if attributes.get(name) is not value:
                    attributes[name] = value
                    changed.add(name)
            for name, content in contents.items():
                if not _same_content(before[name], content):
                    _refill(before[name], content)
                    changed.add(name)
        return changed


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, dict):
            found[name] = dict(value)
        elif isinstance(value, list):
            found[name] = list(value)
        elif isinstance(value, set):
            found[name] = set(value)
    return found


def _same_content(container: Any, content: Any) -> bool:
    if not container or len(container) != len(content):
        return not container and not content
    if isinstance(container, set):
        return bool(container == content)
    if not all(map(operator.is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)
