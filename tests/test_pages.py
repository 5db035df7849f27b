"""The pages of rules: what `oomfix explain` and code scanning show."""

from __future__ import annotations

from oomfix.pages import Page, markdown
from oomfix.rules import Invalid

LEAK = "\ntotal += loss\n"


def page(*invalid: Invalid) -> Page:
    return Page("OOM901", "leak", "error", "Leaks.", "Leaks.", "local", invalid, ())


def test_an_example_that_the_rule_can_fix_is_followed_by_the_code_after_the_fix():
    text = markdown(page(Invalid(LEAK, (2,), "\ntotal += loss.detach()\n")))
    assert text.endswith("After the fix:\n\n```python\ntotal += loss.detach()\n```\n")


def test_an_example_that_the_rule_leaves_as_it_is_says_so_instead_of_showing_it_twice():
    text = markdown(page(Invalid(LEAK, (2,), LEAK)))
    assert text.count("total += loss") == 1
    assert text.endswith("There is no automatic fix here.\n")
