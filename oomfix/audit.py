"""The audit of one file: bytes -> words that rules need -> tree -> script -> findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from oomfix.parsing import ForeignLanguage, Unreadable, decode
from oomfix.prefilter import Prefilter
from oomfix.results import FileReport, Located, Silencer, locate
from oomfix.rules.base import TRAINS, Finding, Rule, holds
from oomfix.source import Source
from oomfix.spelling import did_you_mean
from oomfix.suppressions import Comment, Statements, UnusedSuppression, comments

if TYPE_CHECKING:
    from oomfix.script import Script

# Training loops are listed, and only what holds "oomfix:" holds a comment that may silence nothing.
_NEEDED_BY_AUDIT = (*TRAINS, b"oomfix:")

TorchVersion = tuple[int, int]
Answer = TypeVar("Answer")


class Auditor:
    """Runs rules over files.

    Args:
        rules: the rules to run, each with `needs`, the byte strings without which it cannot fire.
        forms: say of each training loop what `oomfix apply` would make of it, which takes longer than all the rest.
    """

    def __init__(self, rules: Sequence[Rule], *, forms: bool = False) -> None:
        self.rules = tuple(rules)
        self.forms = forms
        self._prefilter = Prefilter([*_NEEDED_BY_AUDIT, *(need for rule in self.rules for need in rule.needs)])

    def audit(
        self, path: str, data: bytes, target_torch: TorchVersion | None = None, *, parse_always: bool = False
    ) -> FileReport:
        """What the rules find in the bytes of a file; never raises.

        Args:
            path: how the file is named in messages; .ipynb makes it a notebook.
            target_torch: the oldest torch that the script must run on; None: unknown.
            parse_always: say whether the file can be parsed, even when no rule could fire on it.
        """
        try:
            if not parse_always and not self._prefilter.passes(data):
                if not path.endswith(".ipynb"):
                    decode(data)
                return FileReport(parsed=False)
            source = Source.from_bytes(path, data)
        except ForeignLanguage as problem:
            return FileReport(foreign=str(problem))
        except Unreadable as problem:
            return FileReport(errors=(str(problem),))
        return self._audit_source(source, data, target_torch)

    def _audit_source(self, source: Source, data: bytes, target_torch: TorchVersion | None) -> FileReport:
        errors = source.problems
        findings: list[Finding] = []
        loops: tuple[dict[str, Any], ...] = ()
        if self._prefilter.passes(source.code):
            # imported here: a file without training code needs none of it
            from oomfix.script import Script

            analysis = _Analysis(Script.read(source, target_torch))
            try:
                facts = analysis.loops()
                if self.forms and facts:
                    facts = analysis.with_forms(facts, data, target_torch)
                loops = tuple(_loop(source, loop) for loop in facts)
                findings = analysis.findings(self.rules)
                errors += analysis.errors()
            except RecursionError:
                errors += ("cannot analyse: nested too deeply",)
        silencers = comments(source)
        return FileReport(
            findings=_located(source, findings, silencers),
            loops=loops,
            errors=errors,
            silencers=tuple(_silencer(source, comment) for comment in silencers),
        )


BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""What a mistake in a rule raises.

Rules compute: they read no files and ask nothing of the system. Whatever else comes (no memory left, an interrupt) is
not theirs, and ends the run.
"""


class _Analysis:
    """One script, asked for its loops and by each rule; a mistake in one of these stops that one only.

    It is an error of the file, with the rule and the place of the mistake: the other findings stand, other files are
    audited, and the exit status is 2.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._code = script.source.code
        self._bugs: dict[str, list[str]] = {}

    def loops(self) -> list[dict[str, Any]]:
        """What is known of each training loop, by line."""
        if not any(holds(self._code, need) for need in TRAINS):
            return []
        return self._try("the search for training loops", lambda: [loop.to_json() for loop in self._script.loops])

    def with_forms(
        self, loops: list[dict[str, Any]], data: bytes, target_torch: TorchVersion | None
    ) -> list[dict[str, Any]]:
        """The loops with "rewrite", the form that `apply` would give each, and "reason", why not more, or None."""
        # imported here: only JSON tells it
        from oomfix.rewrite.forms import loop_forms

        ask = partial(loop_forms, self._script, data, len(loops), target_torch)
        forms = self._try("the search for what `apply` would do", ask)
        return [loop | form._asdict() for loop, form in zip(loops, forms, strict=True)] if forms else loops

    def findings(self, rules: Sequence[Rule]) -> list[Finding]:
        """What the rules find, by line and column."""
        found: list[Finding] = []
        for rule in rules:
            if any(holds(self._code, need) for need in rule.needs):
                found += self._try(rule.code, partial(self._found_by, rule))
        if found and self._script.is_of_another_library:
            return []
        return sorted(dict.fromkeys(found), key=lambda f: (f.line, f.column, f.code))

    def _found_by(self, rule: Rule) -> list[Finding]:
        return list(rule.check(self._script))

    def errors(self) -> tuple[str, ...]:
        """The mistakes met so far, each once, with all who ran into it."""
        return tuple(
            f"internal error in {', '.join(asked)}, please report it: {bug}" for bug, asked in self._bugs.items()
        )

    def _try(self, asked: str, work: Callable[[], list[Answer]]) -> list[Answer]:
        try:
            return work()
        except RecursionError:  # the script's nesting, not a mistake
            raise
        except BUGS as bug:
            self._bugs.setdefault(_where(bug), []).append(asked)
            return []


class Selection(NamedTuple):
    """Which findings are wanted: those that a prefix in `select` names and none in `ignore` does.

    Attributes:
        select: codes or prefixes of codes; empty for all.
        ignore: codes or prefixes of codes.
        known: every code there is, for comments that name others.
    """

    select: tuple[str, ...]
    ignore: tuple[str, ...]
    known: tuple[str, ...]

    def wants(self, code: str) -> bool:
        """Whether findings with this code are wanted."""
        return (not self.select or code.startswith(self.select)) and not (self.ignore and code.startswith(self.ignore))

    def visible(self, report: FileReport) -> list[Located]:
        """The findings to show: wanted, not silenced by a comment, and the comments that silence nothing."""
        wanted = [finding for finding in report.findings if self.wants(finding.code)]
        shown = [finding for finding in wanted if not finding.silenced_by]
        if self.wants(UnusedSuppression.code):
            shown += self._unused(report.silencers, wanted)
        return sorted(shown, key=lambda finding: (finding.cell or 0, finding.line, finding.column, finding.code))

    def _unused(self, silencers: Sequence[Silencer], wanted: Sequence[Located]) -> Iterator[Located]:
        silenced: dict[int, set[str]] = {}
        for finding in wanted:
            for index in finding.silenced_by:
                silenced.setdefault(index, set()).add(finding.code)
        for index, silencer in enumerate(silencers):
            message = silencer.problem or self._unused_message(silencer.codes, silenced.get(index, set()))
            if message:
                yield silencer.unused._replace(message=message)

    def _unused_message(self, codes: tuple[str, ...], silenced: set[str]) -> str | None:
        if not codes:
            return None if silenced or self.select or self.ignore else "silences no finding; remove it"
        unknown = [code for code in codes if not any(known.startswith(code) for known in self.known)]
        if unknown:
            return f"names {unknown[0]}, which is no rule{did_you_mean(unknown[0], self.known)}"
        unused = [
            code
            for code in codes
            if not any(found.startswith(code) for found in silenced)
            and all(self.wants(known) for known in self.known if known.startswith(code))
        ]
        return f"silences no finding of {', '.join(unused)}; remove it" if unused else None


def _located(source: Source, findings: list[Finding], silencers: list[Comment]) -> tuple[Located, ...]:
    if not silencers:
        return tuple(locate(source, finding) for finding in findings)
    statements = Statements(source.tree)
    of_line: dict[int, list[int]] = {}
    of_file: list[int] = []
    for index, comment in enumerate(silencers):
        if not comment.problem:
            (of_file if comment.whole_file else of_line.setdefault(comment.line, [])).append(index)

    def silenced_by(finding: Finding) -> tuple[int, ...]:
        near = [index for line in statements.lines(finding.line) for index in of_line.get(line, ())]
        return tuple(index for index in sorted(of_file + near) if silencers[index].names(finding.code))

    return tuple(locate(source, finding, silenced_by(finding)) for finding in findings)


def _silencer(source: Source, comment: Comment) -> Silencer:
    unused = Finding(
        code=UnusedSuppression.code,
        name=UnusedSuppression.name,
        severity=UnusedSuppression.severity,
        message="",
        line=comment.line,
        column=comment.column,
        end_line=comment.line,
        end_column=comment.end_column,
    )
    return Silencer(comment.codes, comment.problem, locate(source, unused))


def _loop(source: Source, facts: dict[str, Any]) -> dict[str, Any]:
    """A loop's facts with its lines as the reader of a notebook counts them."""
    if source.cells is None:
        return facts
    cell, line = source.locate(facts["line"])
    facts |= {"cell": cell, "line": line, "end_line": source.locate(facts["end_line"])[1]}
    for key in ("forwards", "backwards", "steps"):
        facts[key] = [_line_in_cell(source, line, cell) for line in facts[key]]
    return facts


def _line_in_cell(source: Source, line: int, cell: int | None) -> int | dict[str, int | None]:
    """The line in its cell; with the cell where a helper defined in another one is meant."""
    own_cell, own_line = source.locate(line)
    return own_line if own_cell == cell else {"cell": own_cell, "line": own_line}


def _where(bug: Exception) -> str:
    trace = bug.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    place = f" in {code.co_name}" if code is not None else ""
    return f"{type(bug).__name__}{place}: {' '.join(str(bug).split())}"
