"""How right `oomfix audit` was on scripts that nobody had developed it on: the first run on a set of the corpus.

    python -m bench.first_run

Reads bench/corpus/first-run.tsv and writes bench/results/audit-first-run.md. The rows are data of the past and stay as
they are: every place that the auditor of that day reported or a reviewer had labelled, with the label as it was before
anybody ran the auditor on the script (`frozen`) and as it was after every disagreement had been read again
(`corrected`). Today's figures on the same scripts are those of `bench.corpus`.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.corpus import SHEET, score_table
from bench.scoring import Mark, Score, judge, scores

RESULT = Path(__file__).parent / "results" / "audit-first-run.md"
DAY = "2026-11-21"
REVISION = "89a5762"
"""The revision of this project that ran."""


class Place(NamedTuple):
    """A row of first-run.tsv; a label is True for true, False for debatable and None where there is none."""

    mark: Mark
    found: bool
    frozen: bool | None
    corrected: bool | None


def read_places() -> Iterator[Place]:
    """The rows of first-run.tsv."""
    labels = {"true": True, "debatable": False, "none": None}
    with (SHEET / "first-run.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield Place(
                Mark(row["repo"], row["path"], int(row["line"]), row["code"]),
                row["found"] == "yes",
                labels[row["frozen"]],
                labels[row["corrected"]],
            )


def scores_by(places: list[Place], label: str) -> dict[str, Score]:
    """The scores by one of the two columns of labels, `frozen` or `corrected`."""
    found = [place.mark for place in places if place.found]
    labelled = [(place.mark, truth) for place in places if (truth := getattr(place, label)) is not None]
    return scores(judge(found, labelled))


def main() -> None:
    """Write the result."""
    places = list(read_places())
    scripts = {(place.mark.repo, place.mark.path) for place in places}
    changed = sum(place.frozen is not place.corrected for place in places)
    RESULT.write_text(
        f"""# The auditor on scripts it had never seen

`python -m bench.first_run` on the rows of bench/corpus/first-run.tsv: oomfix at revision {REVISION}, {DAY}, CPU only.

{len(scripts)} scripts of {len({repo for repo, _ in scripts})} public repositories, the third set of
bench/corpus/scripts.tsv. They were chosen for what the sheet hardly covered (kept graphs, retained graphs, recurrent
states, mixed precision without a scaler, accumulation windows), by topic and by text search, and labelled by reading;
the labels were frozen before the auditor ran on any of them. They have been used to develop the rules since:
bench/results/audit-corpus.md says what the current version makes of them, and is no blind figure.

By the frozen labels:

{score_table(scores_by(places, "frozen"))}

By the labels after every disagreement had been read again, {changed} of {len(places)} places changed:

{score_table(scores_by(places, "corrected"))}

OOM104 and OOM304 have no certain case in the set: published scripts detach, repackage or renew their states, and train
in float16 without a scaler only where an option is set to it.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
