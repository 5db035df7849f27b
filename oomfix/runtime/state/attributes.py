"""Attributes of modules and other objects, kept so that they can be compared and put back."""

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from itertools import chain
from typing import Any, NamedTuple

_CONTAINERS = (dict, list, set, deque)


def namespace(owner: Any) -> MutableMapping[str, Any]:
    """The attributes of `owner`, or the mapping that stands for them; written to, it changes them."""
    return owner if isinstance(owner, MutableMapping) else vars(owner)


class Containers(dict[Any, Any]):
    """Lists, dictionaries and sets that a function refers to, under its names for them.

    What is only added to at the end is a record of what went by, rather than state: it counts as unchanged.
    """


class _Saved(NamedTuple):
    """One owner's attributes, as they were, with what their containers held and how to tell that they still do."""

    attributes: MutableMapping[str, Any]
    before: dict[str, Any]
    contents: dict[str, Any]
    is_same: Callable[[Any, Any], bool]


class _Held:
    """Containers, and what their copies hold."""

    def __init__(self, live: list[Any], copies: list[Any]) -> None:
        self._live = live
        self._dicts = [container for container in live if isinstance(container, dict)]
        self._lengths = list(map(len, copies))
        self._held = list(chain.from_iterable(copies))
        self._values = list(chain.from_iterable(copy.values() for copy in copies if isinstance(copy, dict)))

    def are_same(self) -> bool:
        """Whether they hold the very objects that their copies hold, in the same order."""
        return (
            list(map(len, self._live)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._live), self._held))
            and all(map(operator.is_, chain.from_iterable(each.values() for each in self._dicts), self._values))
        )


class Attributes:
    """The attributes of some modules, or other objects, at one moment, with what their containers held.

    Containers in containers too (a history of several losses), but not deeper: that is data.

    Args:
        owners: objects with attributes, or mappings that stand for such.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._saved: list[_Saved] = []
        # every module has a dozen empty dictionaries for hooks, which one look can tell apart from filled ones
        self._empty: list[Any] = []
        self._places: list[tuple[int, str]] = []
        self._inner: list[tuple[tuple[int, str], Any, Any]] = []
        for index, owner in enumerate(owners):
            attributes = namespace(owner)
            before, contents = dict(attributes), {}
            for name, value in before.items():
                if isinstance(value, _CONTAINERS):
                    if value or isinstance(owner, Containers):
                        contents[name] = value.copy()
                        for inner in value.values() if isinstance(value, dict) else value:
                            if isinstance(inner, _CONTAINERS):
                                self._inner.append(((index, name), inner, inner.copy()))
                    else:
                        self._empty.append(value)
                        self._places.append((index, name))
            is_same = _begins_with if isinstance(owner, Containers) else _same_content
            self._saved.append(_Saved(attributes, before, contents, is_same))

    @functools.cached_property
    def _all(self) -> _Held | None:
        """Attributes and containers with their copies; None where attributes are no plain dictionary."""
        saved = self._saved
        if not all(isinstance(one.attributes, dict) for one in saved):
            return None
        live = [one.attributes for one in saved]
        live += [one.before[name] for one in saved for name in one.contents]
        live += [container for _, container, _ in self._inner]
        copies: list[Any] = [one.before for one in saved]
        copies += [content for one in saved for content in one.contents.values()]
        copies += [content for _, _, content in self._inner]
        return _Held(live, copies)

    def are_untouched(self) -> bool:
        """Whether nothing at all has changed, seen without a look at each owner; False where that does not tell."""
        return not any(self._empty) and self._all is not None and self._all.are_same()

    def changed(self) -> set[str]:
        """The names of the attributes that have changed."""
        return {name for _, name in self.changes()}

    def changes(self) -> dict[tuple[int, str], Any]:
        """The values of the attributes that have changed, under the number of their owner and their name.

        Of a container that was changed itself a copy, with copies of those in it; None for an attribute that is gone.
        """
        found: dict[tuple[int, str], Any] = {}
        if self.are_untouched():
            return found
        for index, (attributes, before, contents, is_same) in enumerate(self._saved):
            if not _same_values(attributes, before):
                for name in attributes.keys() | before.keys():
                    stays = name in attributes and name in before and attributes[name] is before[name]
                    if not stays:
                        found[index, name] = attributes.get(name)
            for name, content in contents.items():
                if (index, name) not in found and not is_same(before[name], content):
                    found[index, name] = _copied(before[name])
        for (index, name), container, content in self._inner:
            if (index, name) not in found and not self._saved[index].is_same(container, content):
                found[index, name] = _copied(self._saved[index].before[name])
        if any(self._empty):
            for place, container in zip(self._places, self._empty, strict=True):
                if container:
                    found.setdefault(place, _copied(container))
        return found

    def grown(self) -> dict[tuple[int, str], Any]:
        """Copies of the containers that were only added to, and count as unchanged, as `changes` gives others."""
        if self.are_untouched():
            return {}
        grown = [place for place, container, content in self._inner if not _same_content(container, content)]
        for index, saved in enumerate(self._saved):
            kept = saved.contents.items()
            grown += [(index, name) for name, content in kept if not _same_content(saved.before[name], content)]
        changed = self.changes()
        return {place: _copied(self._saved[place[0]].before[place[1]]) for place in grown if place not in changed}

    def put(self, changes: dict[tuple[int, str], Any]) -> None:
        """Change attributes as they were seen to change; what was written into a container is written there again."""
        for (index, name), value in changes.items():
            attributes, held = self._saved[index].attributes, self._saved[index].before.get(name)
            if isinstance(held, _CONTAINERS) and type(held) is type(value):
                _refill(held, value)
                value = held
            attributes[name] = value

    def restore(self, keeps_records: bool = True) -> set[str]:
        """Put everything back; the names of the attributes that had changed.

        Args:
            keeps_records: what was added to lists that count as unchanged stays there.
        """
        if self.are_untouched():
            return set()
        changes = self.changes()
        for index, name in changes:
            attributes, before = self._saved[index].attributes, self._saved[index].before
            if name not in before:
                del attributes[name]
            elif name not in attributes or attributes[name] is not before[name]:
                attributes[name] = before[name]
        for saved in self._saved:
            for name, content in saved.contents.items():
                if not _is_as_before(saved, saved.before[name], content, keeps_records):
                    _refill(saved.before[name], content)
        for (index, _), container, content in self._inner:
            if not _is_as_before(self._saved[index], container, content, keeps_records):
                _refill(container, content)
        for container in self._empty:
            container.clear()
        return {name for _, name in changes}


def _copied(container: Any) -> Any:
    """A copy of a container, and of the containers in it: later runs write into the same ones."""
    copy = container.copy()
    for key, inner in _items(container):
        if isinstance(inner, _CONTAINERS):
            copy[key] = inner.copy()
    return copy


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Where a container holds what; a set holds no containers."""
    if isinstance(container, dict):
        return container.items()
    return () if isinstance(container, set) else enumerate(container)


def _same_values(attributes: MutableMapping[str, Any], before: dict[str, Any]) -> bool:
    return attributes.keys() == before.keys() and all(
        map(operator.is_, map(attributes.__getitem__, before), before.values())
    )


def _begins_with(container: Any, content: Any) -> bool:
    if isinstance(container, deque) and container.maxlen is not None and content:
        return _same_content(container, content)  # what is added drives something out in the end
    if isinstance(container, set):
        return bool(content <= container)
    if len(container) < len(content) or not all(map(operator.is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))


def _is_as_before(saved: _Saved, container: Any, content: Any, keeps_records: bool) -> bool:
    is_record = keeps_records and isinstance(container, list)
    return saved.is_same(container, content) if is_record else _same_content(container, content)


def _same_content(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return bool(container == content)
    if not all(map(operator.is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)
