"""Of several attempts to lift the slices of a file, the one that lifts most is taken over, whole."""

import pytest

from oomfix.rewrite import loop_rewriter
from oomfix.rewrite.facts.verdict import Attempt, Lifted
from oomfix.rewrite.loops import Judge
from oomfix.rewrite.preparations import in_turn
from oomfix.rewrite.slicing.lifter import lift_backwards
from oomfix.script.syntax.edits import Edit
from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP, apply

LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def attempts(monkeypatch):
    """Lets each attempt lift the loops of these numbers alone; between them a comment is added to the script."""
    waiting: list[set[int]] = []

    def lifting(reading, order, manager):
        chosen = waiting.pop(0)
        told = Lifted(f"attempt with {len(waiting)} to go stays")
        found = lift_backwards(reading, [(one, number in chosen) for number, (one, _) in enumerate(order)], manager)
        others = [(one, told) for number, (one, _) in enumerate(order) if number not in chosen]
        return Attempt(found.edits, [*found.loops, *others])

    def comment(reading, manager):
        return [Edit(0, 0, "# more\n")] if waiting else []

    monkeypatch.setattr(loop_rewriter, "lift_backwards", lifting)
    monkeypatch.setattr(in_turn, "_PREPARATIONS", (comment,))
    return waiting


@pytest.mark.parametrize(
    ("lifted", "forms", "comments"),
    [
        ([{0, 1}], "micro-batched micro-batched", 0),
        ([{0}, {0, 1}], "micro-batched micro-batched", 1),
        ([{0}, {1}], "micro-batched in-place", 0),
        ([{0}, {1}, set(), {0, 1}], "micro-batched micro-batched", 3),
        ([set(), {1}], "in-place micro-batched", 1),
    ],
)
def test_an_attempt_counts_that_lifts_more_and_all_that_the_first_one_lifts(attempts, lifted, forms, comments):
    attempts += lifted
    text, loops = apply(LOOP + LOOP)
    assert [form for form, _ in loops] == forms.split()
    assert text.count("# more") == comments
    assert text.count(".forward_backward(") == forms.count("micro-batched")


def test_a_loop_that_no_attempt_lifts_is_told_the_reason_of_the_last(attempts):
    attempts += [{0}, {0}]
    assert apply(LOOP + LOOP)[1][1] == ("in-place", "attempt with 0 to go stays")


WINDOWS = """\
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0 and x.sum() > 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_windows_that_are_not_folded_in_the_end_leave_what_is_said_of_others(monkeypatch):
    class LeavesFolded(Judge):
        def verdicts(self):
            verdicts = super().verdicts()
            if "accumulate" in self._script.source.text:
                verdicts[0].leave("it was folded")
            return verdicts

    monkeypatch.setattr(loop_rewriter, "Judge", LeavesFolded)
    result = rewritten(TOP + WINDOWS)
    assert "accumulate" not in result.text
    assert [any(note.startswith(loop_rewriter.WINDOW_STAYS) for note in loop.notes) for loop in result.loops] == [
        False,
        True,
    ]
