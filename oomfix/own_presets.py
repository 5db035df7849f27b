"""Presets of one's own: `[tool.oomfix.presets.NAME]` in pyproject.toml, for `oomfix apply` and `oomfix profile`.

A preset of one's own is one of `oomfix.presets.PRESETS` with some fields changed. The scripts that it is applied to get
the name of that one and the changed fields, not its own name: training may run where there is no pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oomfix.presets import PRESETS, Preset, get
from oomfix.spelling import did_you_mean

DEFAULT_BASE = "auto"
_AS_IT_WAS = "off"


class Chosen(NamedTuple):
    """A preset of `oomfix.presets` and the fields of it that are changed."""

    base: str
    overrides: dict[str, Any]

    @property
    def preset(self) -> Preset:
        """The preset with its fields changed."""
        return get(self.base, **self.overrides)


def read_presets(tables: object) -> dict[str, Chosen]:
    """What `[tool.oomfix.presets]` holds: a table for each preset, with the fields of `oomfix.presets.Preset`.

    Its key `base` names the preset whose other fields it takes ("auto" where there is none). Words of a field may be
    joined by "-" or "_".

    Raises:
        ValueError: no tables, a name that is taken, an unknown field, a value out of its range or of the wrong type.
    """
    if not isinstance(tables, dict):
        raise ValueError(f"got {tables!r}, expected a table for each preset")
    found = {}
    for name, table in tables.items():
        if name in PRESETS:
            raise ValueError(f"{name}: is a preset already, expected another name")
        if not isinstance(table, dict):
            raise ValueError(f"{name}: got {table!r}, expected a table of fields")
        fields = {key.replace("-", "_"): value for key, value in table.items()}
        base = fields.pop("base", DEFAULT_BASE)
        if base == _AS_IT_WAS:
            raise ValueError(f"{name}: base: got {base!r}, which is no preset to change")
        try:
            get(base, **fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
        found[name] = Chosen(base, fields)
    return found


def choose(name: str, own: Mapping[str, Chosen], overrides: Mapping[str, Any]) -> Chosen:
    """The preset called `name`, one's own or one of `oomfix.presets`, with more fields changed.

    Raises:
        ValueError: no preset has this name, or a value is out of its range.
    """
    if own and name not in own and name not in PRESETS:
        names = [repr(known) for known in (*PRESETS, *own)]
        raise ValueError(f"preset: got {name!r}, expected one of {', '.join(names)}{did_you_mean(repr(name), names)}")
    if name == _AS_IT_WAS:
        raise ValueError(f"preset: got {name!r}, which is the script as it was; expected the memory to train in")
    base = own.get(name, Chosen(name, {}))
    chosen = Chosen(base.base, {**base.overrides, **overrides})
    get(chosen.base, **chosen.overrides)
    return chosen
