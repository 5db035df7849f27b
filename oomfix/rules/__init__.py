"""The rules, one file each; adding a file adds a rule."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from oomfix.rules.base import Edit, Finding, Invalid, Rule, Severity

__all__ = ["Edit", "Finding", "Invalid", "Rule", "Severity", "all_rules"]


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of this package, ordered by code."""
    modules = (info.name for info in pkgutil.iter_modules(__path__) if info.name != "base")
    for module in modules:
        importlib.import_module(f"{__name__}.{module}")
    return tuple(sorted((rule() for rule in Rule.__subclasses__()), key=lambda rule: rule.code))
