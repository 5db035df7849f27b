"""SARIF 2.1.0, as code scanning on GitHub and editors read it, with the local fixes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from oomfix import __version__
from oomfix.pages import Page, markdown
from oomfix.report import Report
from oomfix.results import Change, Located

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render(report: Report, pages: Sequence[Page]) -> str:
    """The report as a SARIF log with one run; columns count characters."""
    indices = {page.code: index for index, page in enumerate(pages)}
    errors = [_notification(path, message) for path, message in report.errors()]
    run = {
        "tool": {"driver": {"name": "oomfix", "version": __version__, "rules": [_rule(page) for page in pages]}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not errors, "toolExecutionNotifications": errors}],
        "results": _results(report, indices),
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(page: Page) -> dict[str, Any]:
    text = markdown(page)
    return {
        "id": page.code,
        "name": "".join(word.capitalize() for word in page.name.split("-")),
        "shortDescription": {"text": page.name},
        "fullDescription": {"text": page.summary},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": page.severity},
        "properties": {"tags": ["gpu-memory"]},
    }


def _results(report: Report, indices: dict[str, int]) -> list[dict[str, Any]]:
    results = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for path, finding in report.findings():
        key = (path, finding.code, finding.text)
        seen[key] += 1
        fingerprint = _fingerprint(*key, seen[key])
        results.append(_result(path, finding, indices[finding.code], fingerprint))
    return results


def _result(path: str, finding: Located, index: int, fingerprint: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": finding.message},
        "locations": [_location(path, finding)],
        "partialFingerprints": {"primaryLocationLineHash": fingerprint},
    }
    if finding.cell is not None:
        where = f"cell {finding.cell}, line {finding.line}, column {finding.column}"
        result["message"] = {"text": f"{where}: {finding.message}"}
        result["locations"][0]["logicalLocations"] = [{"fullyQualifiedName": where, "kind": "module"}]
    elif finding.changes:
        result["fixes"] = [_fix(path, finding)]
    return result


def _location(path: str, finding: Located) -> dict[str, Any]:
    # of a notebook, SARIF counts the lines of the JSON file: the cell and its line are told in the message
    region = {"startLine": 1} if finding.cell is not None else _region(finding)
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}, "region": region}}


def _region(span: Located | Change) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _fix(path: str, finding: Located) -> dict[str, Any]:
    replacements = [
        {"deletedRegion": _region(change), "insertedContent": {"text": change.replacement}}
        for change in finding.changes
    ]
    return {
        "description": {"text": f"Fix {finding.name}"},
        "artifactChanges": [{"artifactLocation": {"uri": _uri(path)}, "replacements": replacements}],
    }


def _notification(path: str, message: str) -> dict[str, Any]:
    location = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    return {"level": "error", "message": {"text": message}, "locations": [location]}


def _uri(path: str) -> str:
    # code scanning knows no file by a name with ".." or "./" in it
    posix = quote(os.fsencode(os.path.normpath(path).replace(os.sep, "/")))
    return f"file://{posix}" if posix.startswith("/") else posix


def _fingerprint(path: str, code: str, text: str, occurrence: int) -> str:
    """The same for a finding whose line has only moved."""
    key = "\0".join((path, code, text)).encode("utf-8", "surrogateescape")
    return f"{blake2b(key, digest_size=8).hexdigest()}:{occurrence}"
