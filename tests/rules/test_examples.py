"""Every rule's own examples: what it must report and where, what it must not, and the code after its edit."""

from __future__ import annotations

import ast
import inspect

import pytest

from oomfix.rewrite.text.edits import apply_edits
from oomfix.rules import Invalid, Rule, all_rules
from oomfix.rules.base import holds
from oomfix.script import Script
from oomfix.source import Source

INVALID = [
    pytest.param(rule, example, id=f"{rule.code}-{number}")
    for rule in all_rules()
    for number, example in enumerate(rule.INVALID)
]
VALID = [
    pytest.param(rule, example, id=f"{rule.code}-{number}")
    for rule in all_rules()
    for number, example in enumerate(rule.VALID)
]


def script_of(code: str) -> Script:
    return Script.read(Source.from_bytes("example.py", code.encode()))


@pytest.mark.parametrize(("rule", "example"), INVALID)
def test_invalid_code_is_reported_at_its_lines(rule: Rule, example: Invalid) -> None:
    findings = list(rule.check(script_of(example.code)))
    assert tuple(sorted(finding.line for finding in findings)) == example.lines


@pytest.mark.parametrize(("rule", "example"), VALID)
def test_valid_code_is_not_reported(rule: Rule, example: str) -> None:
    assert [(finding.line, finding.message) for finding in rule.check(script_of(example))] == []


@pytest.mark.parametrize(("rule", "example"), [case for case in INVALID if case.values[1].fixed is not None])
def test_the_edits_give_the_fixed_code_which_is_clean(rule: Rule, example: Invalid) -> None:
    edits = [edit for finding in rule.check(script_of(example.code)) for edit in finding.edits]
    fixed = apply_edits(example.code, edits)
    assert fixed == example.fixed
    ast.parse(fixed)
    assert [finding for finding in rule.check(script_of(fixed)) if finding.fix == "local"] == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_a_rule_has_a_page_and_examples(rule: Rule) -> None:
    page = inspect.getdoc(type(rule)) or ""
    assert rule.INVALID and rule.VALID
    assert all(f"\n{part}" in page for part in ("Why:", "Quiet when:", "Fix:")), page


@pytest.mark.parametrize(("rule", "example"), INVALID)
def test_the_prefilter_lets_invalid_code_through(rule: Rule, example: Invalid) -> None:
    assert any(holds(example.code.encode(), need) for need in rule.needs)


def test_codes_and_names_are_unique() -> None:
    rules = all_rules()
    assert len({rule.code for rule in rules}) == len(rules) == len({rule.name for rule in rules})
