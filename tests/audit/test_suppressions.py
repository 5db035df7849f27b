"""`# oomfix:` comments: which findings they silence, and which comments silence nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.audit import Auditor, Selection
from oomfix.rules.base import Finding, Severity


class MarkRule:
    """Reports every name that is its mark. No subclass of Rule, which would make it one of oomfix's."""

    severity = Severity.WARNING
    name = "mark"

    def __init__(self, code: str = "OOM901", mark: str = "MARK") -> None:
        self.code = code
        self.mark = mark
        self.needs = (mark.encode(),)

    def check(self, script) -> Iterator[Finding]:
        for line, text in enumerate(script.source.lines, start=1):
            column = text.find(self.mark) + 1
            if column and not text.lstrip().startswith("#"):
                end = column + len(self.mark)
                yield Finding(self.code, self.name, self.severity, "a mark", line, column, line, end)


def shown(text: str, *, select: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """The codes and lines that are shown for a text."""
    rules = [MarkRule(), MarkRule("OOM902", "OTHER")]
    report = Auditor(rules).audit("a.py", text.encode())
    assert report.errors == ()
    selection = Selection(select, ignore, ("OOM001", "OOM901", "OOM902"))
    return [(finding.code, finding.line) for finding in selection.visible(report)]


@pytest.mark.parametrize(
    "comment",
    [
        "# oomfix: ignore",
        "# oomfix: ignore[OOM901]",
        "# oomfix: ignore[OOM902, OOM9]",
        "# oomfix: ignore[ oom901 ] because the total is small",
        "# noqa: E501  # oomfix: ignore[OOM901]",
        "#oomfix:ignore[OOM901]  # noqa",
    ],
)
def test_a_comment_silences_the_finding_of_its_line(comment: str):
    assert ("OOM901", 1) not in shown(f"x = MARK  {comment}\n")
    assert ("OOM901", 2) in shown(f"x = 1  {comment}\ny = MARK\n")


@given(
    lines=st.integers(1, 6), mark=st.integers(0, 5), comment=st.integers(0, 5), newline=st.sampled_from(["\n", "\r\n"])
)
def test_any_line_of_the_statement_will_do(lines: int, mark: int, comment: int, newline: str):
    rows = [f"    {'MARK' if row == mark % lines else 'x'}," for row in range(lines)]
    rows = ["before = 0", "f(", *rows, ")", "after = 0"]
    rows[1 + comment % (lines + 2)] += "  # oomfix: ignore[OOM901]"
    assert shown(newline.join(rows)) == []


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("if MARK:  # oomfix: ignore\n    x = 1\n", True),
        ("if (a and\n    MARK):  # oomfix: ignore\n    x = 1\n", True),
        ("if MARK:\n    x = 1  # oomfix: ignore\n", False),
        ("for x in MARK:\n    pass\nelse:  # oomfix: ignore\n    pass\n", False),
        ("if a:  # oomfix: ignore\n    MARK\n", False),
        ("@MARK\ndef f(\n    x,  # oomfix: ignore\n):\n    pass\n", True),
        ("class A:  # oomfix: ignore\n    def f(self): return MARK\n", False),
        ("with a, MARK as b: pass  # oomfix: ignore\n", True),
        ("try:\n    pass\nexcept MARK:  # oomfix: ignore\n    pass\n", True),
        ("try:  # oomfix: ignore\n    pass\nexcept MARK:\n    pass\n", False),
        ("match MARK:  # oomfix: ignore\n    case 1:\n        pass\n", True),
        ("x = 1; MARK  # oomfix: ignore\n", True),
        ("x = '''\nMARK\n'''  # oomfix: ignore\n", True),
        ("f(\n    # oomfix: ignore\n    MARK,\n)\n", False),
        ("for x in MARK:\n    # oomfix: ignore\n    pass\n", False),
        ("x = MARK, '# oomfix: ignore'\n", False),
        ("x = '''\n# oomfix: ignore\n''', MARK\n", False),
        ("\f\nx = MARK \\\n    + 1  # oomfix: ignore\n", True),
    ],
)
def test_only_the_statement_of_the_comment_is_silenced(text: str, silent: bool):
    assert ("OOM901" not in [code for code, _ in shown(text)]) is silent


def test_ignore_file_silences_the_file_wherever_it_stands():
    assert shown("x = MARK\ny = OTHER\n# oomfix: ignore-file\n") == []
    assert shown("# oomfix: ignore-file[OOM901]\nx = MARK\ny = OTHER\n") == [("OOM902", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1  # oomfix: ignore\n",
        "x = MARK  # oomfix: ignore[OOM902]\n",
        "x = MARK  # oomfix: ignore[OOM901, OOM902]\n",
        "# oomfix: ignore[OOM901]\nx = MARK\n",
        "# oomfix: ignore-file\n",
        "x = MARK  # oomfix: ignore[OOM999]\n",
        "x = MARK  # oomfix: ignore[]\n",
        "x = MARK  # oomfix: ignroe[OOM901]\n",
        "x = MARK  # oomfix: ignore[OOM901\n",
        "x = MARK  # oomfix: ignore-files\n",
    ],
)
def test_a_comment_that_silences_nothing_is_reported(text: str):
    assert ("OOM001", 1) in shown(text)


@pytest.mark.parametrize("comment", ["ignore OOM901", "ignore: OOM901", "ignore=oom901", "ignore-file (OOM901)"])
def test_a_code_outside_of_brackets_silences_nothing_rather_than_everything(comment: str):
    assert shown(f"x = MARK  # oomfix: {comment}\n") == [("OOM901", 1), ("OOM001", 1)]


def test_words_after_a_comment_may_name_codes():
    assert shown("x = MARK  # oomfix: ignore, unlike OOM902\n") == []


@pytest.mark.parametrize(
    ("selected", "text"),
    [
        ({"select": ("OOM902", "OOM001")}, "x = 1  # oomfix: ignore[OOM901]\n"),
        ({"ignore": ("OOM901",)}, "x = 1  # oomfix: ignore[OOM901]\n"),
        ({"ignore": ("OOM901",)}, "x = 1  # oomfix: ignore\n"),
        ({"ignore": ("OOM001",)}, "x = 1  # oomfix: ignore\n"),
        ({"select": ("OOM901",)}, "x = 1  # oomfix: ignore\n"),
    ],
)
def test_a_comment_for_a_rule_that_did_not_run_is_not_called_unused(selected, text: str):
    assert shown(text, **selected) == []


def test_an_unused_comment_is_reported_where_it_stands():
    report = Auditor([MarkRule()]).audit("a.py", b"x = 'caf\xc3\xa9'  # noqa  # oomfix: ignore[OOM90]\n")
    (finding,) = Selection((), (), ("OOM001", "OOM901")).visible(report)
    assert (finding.line, finding.column, finding.end_column) == (1, 21, 44)
    assert (finding.severity, finding.message) == ("note", "silences no finding of OOM90; remove it")


def test_the_nearest_code_is_named_for_one_that_does_not_exist():
    report = Auditor([MarkRule()]).audit("a.py", b"x = MARK  # oomfix: ignore[OOM9O1]\n")
    finding = Selection((), (), ("OOM001", "OOM901")).visible(report)[-1]
    assert finding.message == "names OOM9O1, which is no rule; did you mean OOM901?"
