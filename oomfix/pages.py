"""What is told of each rule: its page, its examples, and the tables made of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oomfix.rules.base import Invalid, Rule
from oomfix.suppressions import UnusedSuppression


class Page(NamedTuple):
    """A rule, as it is told.

    Attributes:
        severity: "error", "warning" or "note".
        summary: the first sentence of the page, on one line.
        text: the page: what is found, why it matters, when the rule is quiet, the fix. Markdown.
        fix: "local", "runtime", "local or runtime" or None: what can mend it.
        invalid: code that the rule reports.
        valid: code that it does not.
    """

    code: str
    name: str
    severity: str
    summary: str
    text: str
    fix: str | None
    invalid: tuple[Invalid, ...]
    valid: tuple[str, ...]


def pages(rules: Iterable[Rule]) -> list[Page]:
    """The pages of the rules and of the audit's own finding, by code."""
    own = UnusedSuppression
    text = inspect.cleandoc(own.__doc__ or "")
    unused = Page(own.code, own.name, own.severity.value, _summary(text), text, None, (), ())
    return sorted([unused, *(_page(rule) for rule in rules)], key=lambda page: page.code)


def _page(rule: Rule) -> Page:
    text = inspect.cleandoc(type(rule).__doc__ or "")
    kinds = {"local": any(invalid.fixed for invalid in rule.INVALID), "runtime": rule.fixed_by_runtime}
    return Page(
        code=rule.code,
        name=rule.name,
        severity=rule.severity.value,
        summary=_summary(text),
        text=text,
        fix=" or ".join(kind for kind, has in kinds.items() if has) or None,
        invalid=tuple(rule.INVALID),
        valid=tuple(rule.VALID),
    )


def _summary(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def markdown(page: Page) -> str:
    """The whole page with its examples, as Markdown that also reads well as plain text."""
    parts = [f"# {page.code} {page.name} ({page.severity})", page.text]
    for example in page.invalid:
        parts += ["Reported:", _code(_marked(example))]
        if example.fixed == example.code:
            parts.append("There is no automatic fix here.")
        elif example.fixed is not None:
            parts += ["After the fix:", _code(example.fixed)]
    for code in page.valid:
        parts += ["Not reported:", _code(code)]
    return "\n\n".join(parts) + "\n"


def _marked(example: Invalid) -> str:
    """The code with a comment at the end of each line that is reported."""
    lines = example.code.splitlines()
    return "\n".join(
        f"{line}  # <- here" if number in example.lines else line for number, line in enumerate(lines, start=1)
    )


def _code(code: str) -> str:
    return f"```python\n{textwrap.dedent(code).strip()}\n```"


def table(rows: Sequence[Page]) -> list[tuple[str, ...]]:
    """Code, name, severity, fix and summary of each page; the first row is the header."""
    header = ("code", "name", "severity", "fix", "finds")
    return [header, *((page.code, page.name, page.severity, page.fix or "-", page.summary) for page in rows)]


def markdown_table(rows: Sequence[Page]) -> str:
    """The table of rules as the README shows it."""
    header, *body = table(rows)
    cells = [header, tuple("---" for _ in header), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)
