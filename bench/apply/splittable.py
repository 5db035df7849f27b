"""Of the training loops that a reader called certainly splittable before `apply` ran, how many are micro-batched?

    python -m bench.apply.splittable

Reads bench/apply/splittable.tsv, the loops of the blind sets 22a to 22d, 23b, 23c, 24a to 24d and 25a to 37a with a
reader's label (certain, no, hard), his reason and the form that they had in their first run, and
bench/apply/verdicts.tsv for the form that they have now. Writes bench/results/apply-splittable.md.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "apply-splittable.md"
LABELS = ("certain", "hard", "no")
FORMS = ("micro-batched", "in-place", "none", "absent")


def rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of a sheet, by the names of its columns."""
    with (HERE / name).open(encoding="utf-8", newline="") as sheet:
        yield from csv.DictReader(sheet, delimiter="\t", quoting=csv.QUOTE_NONE)


def table(forms: Counter[tuple[str, str]]) -> str:
    """A line per label, a column per form."""
    lines = [f"| label | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 1) + "|"]
    lines += [f"| {label} | {' | '.join(str(forms[label, form]) for form in FORMS)} |" for label in LABELS]
    return "\n".join(lines)


def main() -> None:
    """Write the result."""
    loops = list(rows("splittable.tsv"))
    now = {(row["repo"], row["path"], row["line"]): row for row in rows("verdicts.tsv")}
    forms = [now.get((row["repo"], row["path"], row["line"]), {"rewrite": "absent", "reason": ""}) for row in loops]
    first = Counter((row["label"], row["first"]) for row in loops)
    today = Counter((row["label"], form["rewrite"]) for row, form in zip(loops, forms, strict=True))
    left = [
        f"- {row['repo']} {row['path']}:{row['line']}: {form['reason'] or 'not found as a training loop'}"
        for row, form in zip(loops, forms, strict=True)
        if row["label"] == "certain" and form["rewrite"] != "micro-batched"
    ]
    listed = "\n".join(left)
    RESULT.write_text(
        f"""# Loops that can certainly be split, by `oomfix apply --preset 16gb`

`python -m bench.apply.splittable` on bench/apply/splittable.tsv: {len(loops)} training loops outside of frameworks, of
public scripts that nobody had run or rewritten when readers judged by eye whether an iteration could be computed in
micro-batches with the same gradients: certainly, certainly not, or hard to say. What is micro-batched and cannot be
split runs whole: the runtime verifies every loss.

In the first run (revision f8ce903 for sets 22a to 22d, fa42524 for 23b and 23c, 200ad2c for 24a to 24d,
daa1f63 for 25a and 25b, 0dd39cc for 26a and 26b, 674aa65 for 27a and 27b, b766fe3 for 28a and 28b, 5d02435 for 29a
and 29b, 3d5295c for 30a and 30b, d09359b for 31a to 31c, 68af84a for 32a and 32b, bd46e8c for 33a
and 33b, 159a677 for 34a to 34c, d8dceb9 for 35a, cd32818 for 36a, 14d933a for
37a):

{table(first)}

Now:

{table(today)}

Certain, and not micro-batched:

{listed}
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
