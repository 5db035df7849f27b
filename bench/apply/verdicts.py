"""What `oomfix apply` does to the training loops of real scripts, one line per loop, and whether a reader agrees.

    python -m bench.apply.verdicts FOLDER...

FOLDER holds scripts as OWNER__NAME/PATH (bench/README.md says how to get them). Nothing is written there. Writes
bench/apply/verdicts.tsv and bench/results/apply-corpus.md. The last column of the sheet is a reader's: `right` or
`wrong`, empty where nobody has read the loop; it is kept as long as what is said of the loop stays the same. Loops of
scripts that are not there keep their lines.

Checked for every file by the way: the result compiles, a second run changes nothing, and the audit of the result
reports none of the fixed findings again.
"""

import csv
import datetime
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from oomfix.parsing import Unreadable, parse
from oomfix.rewrite.apply import Applied, apply_to
from oomfix.rewrite.options import Options
from oomfix.rewrite.surroundings.local import findings_of
from oomfix.rules import all_rules
from oomfix.source import Source

HERE = Path(__file__).parent
SHEET = HERE / "verdicts.tsv"
RESULTS = HERE.parent / "results" / "apply-corpus.md"
COLUMNS = ("repo", "path", "line", "rewrite", "reason", "verdict")
FRAMEWORK = re.compile(r"^(Accelerate|Fabric|DeepSpeed|apex)\b|torch\.distributed\.autograd|trains it, not torch$")
NOTHING_TRAINED = re.compile(r"^no optimizer step and no update")
RULES = all_rules()


class Row(NamedTuple):
    """A loop: where it is, what was done, and what a reader said of it."""

    repo: str
    path: str
    line: int
    rewrite: str
    reason: str
    verdict: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What has to stay the same for a reader's verdict to hold."""
        return (self.repo, self.path, str(self.line), self.rewrite, self.reason)


def main(folders: Sequence[str]) -> None:
    """Rewrite every script in memory, and write the sheet and the summary."""
    earlier = _earlier()
    known = {row.key: row.verdict for row in earlier}
    rows: list[Row] = []
    there: set[tuple[str, str]] = set()
    problems: list[str] = []
    files = 0
    seconds: list[float] = []
    for root, path in _scripts(folders):
        relative = path.relative_to(root)
        try:
            source = Source.from_bytes(str(path), path.read_bytes())
        except Unreadable:
            continue
        files += 1
        start = time.process_time()
        applied = apply_to(source, RULES, Options("16gb"))
        seconds.append(time.process_time() - start)
        problems += [f"{relative}: {problem}" for problem in _problems(source, applied)]
        repo, *inside = relative.parts
        there.add((repo.replace("__", "/", 1), "/".join(inside)))
        for loop in applied.loops:
            row = Row(repo.replace("__", "/", 1), "/".join(inside), loop.line, loop.rewrite, loop.reason or "")
            if loop.function is None:
                rows.append(row._replace(verdict=known.get(row.key, "")))
    if not files:
        sys.exit(f"{', '.join(folders)}: holds no script; the sheet stays")
    absent = [row for row in earlier if (row.repo, row.path) not in there]
    rows = sorted([*absent, *rows], key=lambda row: (row.repo, row.path, row.line))
    _write(rows)
    RESULTS.write_text(_summary(rows, len(absent), files, problems, seconds))
    print(RESULTS.read_text())


def _scripts(folders: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    for folder in folders:
        # `rglob` does not go into the linked folders of a collection
        found = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
        yield from ((Path(folder), path) for path in sorted(found) if path.suffix == ".py")


def _earlier() -> list[Row]:
    """The lines of the sheet as it is."""
    if not SHEET.exists():
        return []
    with SHEET.open(newline="") as file:
        rows = [[row[column] for column in COLUMNS] for row in csv.DictReader(file, delimiter="\t")]
    return [Row(repo, path, int(line), rewrite, reason, verdict) for repo, path, line, rewrite, reason, verdict in rows]


def _problems(source: Source, applied: Applied) -> Iterator[str]:
    try:
        parse(applied.text)
        if _compiles(source.text):
            compile(applied.text, "after", "exec", dont_inherit=True)
    except (SyntaxError, Unreadable) as error:
        yield f"does not compile: {error}"
        return
    again = Source.from_bytes(source.path, applied.text.encode("utf-8"))
    if apply_to(again, RULES, Options("16gb")).text != applied.text:
        yield "a second run changes it again"
    fixed = Counter(fix.code for fix in applied.fixed)
    before = Counter(finding.code for finding in findings_of(source, RULES))
    after = Counter(finding.code for finding in findings_of(again, RULES))
    left = {code: max(before[code] - count, 0) for code, count in fixed.items()}
    yield from (f"{code} fixed and still reported" for code in fixed if after[code] > left[code])


def _compiles(text: str) -> bool:
    """Whether this Python can run a text; some are written for a later one."""
    try:
        compile(text, "before", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _write(rows: Sequence[Row]) -> None:
    with SHEET.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def _summary(rows: Sequence[Row], absent: int, files: int, problems: Sequence[str], seconds: Sequence[float]) -> str:
    forms = Counter(row.rewrite for row in rows)
    free = [row for row in rows if not FRAMEWORK.search(row.reason)]
    training = [row for row in free if not NOTHING_TRAINED.match(row.reason)]
    rewritten = sum(row.rewrite != "none" for row in free)
    read = Counter(row.verdict for row in rows if row.verdict)
    reasons = Counter((row.rewrite, _kind(row.reason)) for row in rows if row.reason)
    lines = [
        "# `oomfix apply --preset 16gb` on real training scripts",
        "",
        f"Made by `python -m bench.apply.verdicts` on {datetime.date.today()}, Python {sys.version.split()[0]}; no "
        "torch is used. The loops, one by one: bench/apply/verdicts.tsv.",
        "",
        f"{files} scripts read in this run"
        + (f", which hold all but {absent} of these loops; those are as in an earlier run" if absent else "")
        + f". {len(rows)} training loops: {forms['micro-batched']} micro-batched, {forms['in-place']} in "
        f"place, {forms['none']} left alone. Outside of frameworks, apex and other libraries: {rewritten} of "
        f"{len(free)} rewritten ({100 * rewritten / max(len(free), 1):.1f} %); without the "
        f"{len(free) - len(training)} that train nothing (saliency maps, gradient norms): "
        f"{100 * rewritten / max(len(training), 1):.1f} %. Read by eye: "
        f"{read['right']} right, {read['wrong']} wrong.",
        "",
        f"CPU time per script: mean {1000 * sum(seconds) / max(len(seconds), 1):.0f} ms, longest "
        f"{1000 * max(seconds, default=0):.0f} ms.",
        "",
        f"Problems found (does not compile, changes again, still reported): {len(problems)}",
        *(f"- {problem}" for problem in problems),
        "",
        "| form | why not more | loops |",
        "|---|---|---|",
        *(f"| {form} | {reason} | {count} |" for (form, reason), count in reasons.most_common()),
    ]
    return "\n".join(lines) + "\n"


def _kind(reason: str) -> str:
    """A reason without the lines and names of its script."""
    reason = re.sub(r"`[^`]*`", "`...`", reason)
    reason = re.sub(r"\(lines? [\d, ]+\)", "", reason)
    reason = re.sub(r"\bline \d+(, line \d+)*", "line N", reason)
    reason = re.sub(r"changes [\w.]+", "changes NAME", reason)
    return re.sub(r"^[\w.]+ (is read later|may have)", r"NAME \1", reason).strip()


if __name__ == "__main__":
    main(sys.argv[1:])
