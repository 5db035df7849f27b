"""Which torch a script has to run on: as told, else as its requirement files say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from oomfix.audit import TorchVersion

# `torch>=1.8,<2`, `torch[opt]==2.1.0+cu118`, `torch (>=1.7)`, `- pytorch=1.12`, `["torch ~= 2.1"]`, `torch = "^2.0"`,
# `torch = {version = "^2.0", source = "cpu"}`
_REQUIREMENT = re.compile(
    r"""(?<![\w./-]) (?:py)?torch (?![\w.-]) \s* (?:\[[\w,\s-]*\])? \(?
        (?P<bounds> \s* (?: =\s* (?: \{[^}]*? \bversion\s*=\s* )? ["'] )?
            (?: \s* [=~><!^]+ \s* ["']? v? \d [\w.*+]* \s* ,? )+ )""",
    re.VERBOSE | re.IGNORECASE,
)
# `https://download.pytorch.org/whl/cu113/torch-1.11.0%2Bcu113-cp38-cp38-linux_x86_64.whl`
_WHEEL = re.compile(r"/torch-(?P<version>\d+\.\d+)[\w.+%]*-\w+-\w+-\w+\.whl")
_BOUND = re.compile(r"""(?P<operator>[=~><!^]+)\s*["']?\s*v?(?P<major>\d+)(?:\.(?P<minor>\d+))?""")
_LOWER = frozenset({"==", "=", "===", "~=", ">=", ">", "^", "~"})
_LAST_OF_1 = (1, 13)
# `2.3`, `1.13.1+cu117`, `2.13.0a0+git1234abc`, `2.6.0.dev20241112`, `2`
_VERSION = re.compile(
    r"""v? (?P<major>\d+) (?: \. (?P<minor>\d+) (?: \.\d+ )? )?
        (?: [-_.]? (?: a | b | rc | post | dev ) \d* )* (?: \+ [\w.-]+ )?""",
    re.VERBOSE,
)
_NAMES = re.compile(
    r"""pyproject\.toml | setup\.(py|cfg) | Pipfile | [\w.-]*requirements?[\w.-]*\.(txt|in) | constraints\.txt
        | (env|conda)([_.-].*)?\.ya?ml | environment.*\.ya?ml""",
    re.VERBOSE,
)


def parse_version(text: str) -> TorchVersion:
    """Major and minor of a version such as "2.3", "2" (2.0) or "2.3.1+cu121", as `torch.__version__` says it.

    Raises:
        ValueError: the text is no such version.
    """
    match = _VERSION.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r}: expected a torch version such as 2.3")
    return int(match["major"]), int(match["minor"] or 0)


def target_of(folder: str) -> TorchVersion | None:
    """The oldest torch that the requirement files nearest to a folder allow; None where none says.

    Looks in the folder and above it, up to the root of the repository.
    """
    while True:
        versions = [version for path in _requirement_files(folder) for version in _stated(path)]
        if versions:
            return min(versions)
        parent = os.path.dirname(folder)
        if parent == folder or os.path.exists(os.path.join(folder, ".git")):
            return None
        folder = parent


def _requirement_files(folder: str) -> Iterator[str]:
    for name in _names(folder):
        path = os.path.join(folder, name)
        if _NAMES.fullmatch(name):
            yield path
        elif name == "requirements":
            yield from (os.path.join(path, inner) for inner in _names(path) if inner.endswith(".txt"))


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # the walk reports a folder that cannot be read; here it only states nothing
        return []


def _stated(path: str) -> Iterator[TorchVersion]:
    if not os.path.isfile(path):
        return
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        match = _REQUIREMENT.search(line.partition("#")[0])
        wheel = None if match else _WHEEL.search(line)
        version = oldest_allowed(match["bounds"]) if match else parse_version(wheel["version"]) if wheel else None
        if version:
            yield version


def oldest_allowed(bounds: str) -> TorchVersion | None:
    """The oldest version that bounds such as ">=1.8,<2" allow; with an upper bound alone, the newest."""
    found = [(match["operator"], (int(match["major"]), int(match["minor"] or 0))) for match in _BOUND.finditer(bounds)]
    lowest = [version for operator, version in found if operator in _LOWER]
    if lowest:
        return max(lowest)
    return min((_upper(operator, version) for operator, version in found if "<" in operator), default=None)


def _upper(operator: str, version: TorchVersion) -> TorchVersion:
    if "=" in operator:
        return version
    major, minor = version
    return (major, minor - 1) if minor else _LAST_OF_1
