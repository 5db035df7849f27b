"""A sample that comes twice counts twice, unless the loss groups its samples, by their labels for example.

Rows that a check chooses are unlike each other, so that each may be alone in its group: the sum over classes of their
mean losses looks like one over samples then.
"""

from oomfix.runtime.evidence import Runs
from oomfix.runtime.few_rows import FewRows
from oomfix.runtime.judging import judge
from oomfix.runtime.verdict import Verdict


def by_repetition(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict where both parts have a row in common; None where the forward fails."""
    evidence = few.compared(count, how, repeats=True)
    return None if evidence.failure else judge(evidence)
