"""How right `oomfix audit` is on real training scripts that reviewers labelled by eye.

    python -m bench.corpus FOLDER [--rival] [--rivals FOLDER]

FOLDER holds the scripts of bench/corpus/scripts.tsv as OWNER__NAME/PATH (bench/README.md says how to get them).
Writes bench/corpus/verdicts.tsv, the verdict on every finding of the current version and what it missed, and
bench/results/audit-corpus.md. The verdicts on scripts that are not in FOLDER stay those of the run before, and the
page says on how many. With --rival, torch-preflight runs on the same scripts and is scored by the same labels on the
rules that both have; without it, what the page says of it stays.
"""

import argparse
import ast
import csv
import datetime
import json
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.rivals import Rival, default_folder
from bench.scoring import Mark, Score, Verdict, judge, moved, scores, total
from oomfix import __version__
from oomfix.audit import Auditor
from oomfix.results import FileReport
from oomfix.rules import all_rules

BENCH = Path(__file__).parent
SHEET = BENCH / "corpus"
RESULT = BENCH / "results" / "audit-corpus.md"

LOOP = "LOOP"
PARSE = "PARSE"

SHARED_RULES = {
    "OOM101": "kept graphs",
    "OOM102": "kept graphs",
    "OOM201": "missing no_grad",
    "OOM301": "loss division",
}
"""Our codes of the rules that torch-preflight has too, and what both are called in the table."""
RIVAL_RULES = {"TG001": "kept graphs", "TG002": "missing no_grad", "TG014": "loss division"}


class Listed(NamedTuple):
    """A row of scripts.tsv: where the text comes from, and how many lines it must have."""

    repo: str
    commit: str
    path: str
    lines: int

    @property
    def place(self) -> str:
        """Its path below the folder of the corpus."""
        return f"{self.repo.replace('/', '__')}/{self.path}"


class Label(NamedTuple):
    """A row of labels.tsv."""

    mark: Mark
    is_true: bool
    note: str


def listed_scripts() -> list[Listed]:
    """The scripts of the sheet."""
    return [Listed(row["repo"], row["commit"], row["path"], int(row["lines"])) for row in _rows("scripts.tsv")]


def read_labels() -> list[Label]:
    """The reviewers' labels."""
    return [
        Label(
            Mark(row["repo"], row["path"], int(row["line"]), row["code"]),
            {"true": True, "debatable": False}[row["label"]],
            row["note"],
        )
        for row in _rows("labels.tsv")
    ]


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (SHEET / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_texts(folder: Path, listed: Sequence[Listed]) -> dict[Listed, bytes]:
    """The scripts that are in the folder, with what they hold.

    Raises:
        ValueError: none is, or one has another number of lines than the sheet says, so that its labels mean nothing.
    """
    texts = {script: (folder / script.place).read_bytes() for script in listed if (folder / script.place).is_file()}
    if not texts:
        raise ValueError(f"FOLDER {folder}: holds none of the scripts of bench/corpus/scripts.tsv as OWNER__NAME/PATH")
    for script, data in texts.items():
        if (lines := len(data.splitlines())) != script.lines:
            raise ValueError(f"{folder / script.place}: {lines} lines, expected {script.lines} as at {script.commit}")
    return texts


def audit(texts: Mapping[Listed, bytes]) -> list[Mark]:
    """Every finding, every training loop (LOOP) and every script that cannot be parsed (PARSE, line 0)."""
    auditor = Auditor(all_rules())
    marks: list[Mark] = []
    for script, data in texts.items():
        marks += _marks(script, auditor.audit(script.path, data, parse_always=True))
    return marks


def _marks(script: Listed, report: FileReport) -> Iterator[Mark]:
    for finding in report.findings:
        yield Mark(script.repo, script.path, finding.line, finding.code)
    for loop in report.loops:
        yield Mark(script.repo, script.path, loop["line"], LOOP)
    if report.errors:
        yield Mark(script.repo, script.path, 0, PARSE)


def audit_by_rival(rival: Rival, folder: Path, texts: Mapping[Listed, bytes]) -> list[Mark]:
    """What torch-preflight finds with the rules that both have, under the names in `RIVAL_RULES`.

    Raises:
        ValueError: it did not answer with JSON.
    """
    scripts = {script.place: script for script in texts}
    command = [rival.command, "check", "--format", "json", "--select", ",".join(RIVAL_RULES), *scripts]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return [
        Mark(
            scripts[found["path"]].repo,
            scripts[found["path"]].path,
            found["line"],
            RIVAL_RULES[found["code"]],
        )
        for found in json.loads(answer)["diagnostics"]
    ]


class Places:
    """The statement and the function around each line of a script, by their first lines.

    torch-preflight points at the stored expression where we point at the statement, and names one forward of a
    function where reviewers label all. Both tools are therefore compared by statement and by function.
    """

    def __init__(self, text: bytes) -> None:
        self._statements: dict[int, int] = {}
        self._functions: dict[int, int] = {}
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # Python 2: nothing is labelled in it
            return
        for node in ast.walk(tree):  # parents come first, so that the innermost is kept
            if isinstance(node, ast.stmt):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                self._statements |= dict.fromkeys(lines, node.lineno)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._functions |= dict.fromkeys(lines, node.lineno)

    def statement(self, mark: Mark) -> Mark:
        """The mark at the first line of its innermost statement."""
        return mark._replace(line=self._statements.get(mark.line, mark.line))

    def function(self, mark: Mark) -> Mark:
        """The mark at the first line of its innermost function; 0 for the module."""
        return mark._replace(line=self._functions.get(mark.line, 0))


def compare(
    labels: Sequence[Label],
    ours: Iterable[Mark],
    theirs: Iterable[Mark],
    place: Callable[[Mark], Mark],
) -> tuple[dict[str, Score], dict[str, Score]]:
    """Our scores and theirs on the rules that both have, at the places that `place` gives."""

    def shared(mark: Mark) -> Mark | None:
        rule = SHARED_RULES.get(mark.code, mark.code)
        return place(mark._replace(code=rule)) if rule in RIVAL_RULES.values() else None

    truth = [(mark, label.is_true) for label in labels if (mark := shared(label.mark)) is not None]
    return scores(judge(moved(ours, shared), truth)), scores(judge(moved(theirs, shared), truth))


def score_table(parts: Mapping[str, Score]) -> str:
    """A Markdown table of scores, one row per code or rule and one for all findings."""
    findings = total(score for code, score in parts.items() if code not in (LOOP, PARSE))
    rows = [*((code, score) for code, score in parts.items()), ("all findings", findings)]
    lines = ["| | right | wrong | missed | precision | recall |", "|---|---|---|---|---|---|"]
    for name, score in rows:
        cells = [name, *map(str, score), _share(score.precision), _share(score.recall)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rival_table(name: str, ours: Mapping[str, Score], theirs: Mapping[str, Score]) -> str:
    """A Markdown table of both tools side by side."""
    lines = [
        f"| rule | oomfix: right, wrong, missed | precision | recall "
        f"| {name}: right, wrong, missed | precision | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    rules = sorted(set(ours) | set(theirs))
    rows = [(rule, ours.get(rule, Score()), theirs.get(rule, Score())) for rule in rules]
    rows.append(("all three", total(ours.values()), total(theirs.values())))
    for rule, *pair in rows:
        cells = [rule]
        for score in pair:
            cells += [", ".join(map(str, score)), _share(score.precision), _share(score.recall)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def difference_list(verdicts: Mapping[Mark, Verdict], labels: Sequence[Label]) -> str:
    """The findings that are wrong and the labels that were missed, with the reviewers' words."""
    notes = {label.mark: label.note for label in labels if label.is_true}
    lines = [
        f"- {verdict.value}: {mark.code} {mark.repo} {mark.path}:{mark.line}"
        + (f" ({notes[mark]})" if notes.get(mark) else "")
        for mark, verdict in verdicts.items()
        if verdict in (Verdict.WRONG, Verdict.MISSED)
    ]
    return "\n".join(lines) or "None."


def earlier_verdicts(absent: Collection[tuple[str, str]]) -> dict[Mark, Verdict]:
    """What verdicts.tsv says of scripts, given by repository and path."""
    rows = [row for row in _rows("verdicts.tsv") if (row["repo"], row["path"]) in absent]
    return {Mark(row["repo"], row["path"], int(row["line"]), row["code"]): Verdict(row["verdict"]) for row in rows}


def earlier_rival_section() -> str:
    """What the page says of the rival, as it is; nothing where it says nothing."""
    page = RESULT.read_text(encoding="utf-8") if RESULT.exists() else ""
    begin, end = page.find("\n## Beside "), page.find("\n## Differences")
    return page[begin:end] if 0 <= begin < end else ""


def write_verdicts(verdicts: Mapping[Mark, Verdict]) -> None:
    """Write bench/corpus/verdicts.tsv."""
    with (SHEET / "verdicts.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
        writer.writerow(["repo", "path", "line", "code", "verdict"])
        writer.writerows([*mark, verdict.value] for mark, verdict in verdicts.items())


def report(
    listed: Sequence[Listed], absent: int, verdicts: Mapping[Mark, Verdict], labels: Sequence[Label], rival: str
) -> str:
    """The text of bench/results/audit-corpus.md."""
    unsure = sum(verdict is Verdict.DEBATABLE for verdict in verdicts.values())
    earlier = f" {absent} of them were not there; their verdicts are those of the run before." if absent else ""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"""# The auditor on real training scripts

`python -m bench.corpus FOLDER`, {today}, oomfix {__version__}, Python
{platform.python_version()}, CPU only, no torch needed or imported.

{len(listed)} scripts of {len({script.repo for script in listed})} public repositories,
{sum(script.lines for script in listed):,} lines.{earlier}
The labels are those of bench/corpus/labels.tsv. `LOOP` is a training loop found, `PARSE` a script that is no
Python 3 and was said to be none. Not scored: {unsure} findings at places that reviewers call debatable.

{score_table(scores(verdicts))}
{rival}
## Differences

{difference_list(verdicts, labels)}
"""


def rival_section(
    rival: Rival, ours: Sequence[Mark], labels: Sequence[Label], folder: Path, texts: Mapping[Listed, bytes]
) -> str:
    """Both tools on the rules that both have, by statement and by function."""
    theirs = audit_by_rival(rival, folder, texts)
    places = {(script.repo, script.path): Places(data) for script, data in texts.items()}

    def statement(mark: Mark) -> Mark:
        return places[mark.repo, mark.path].statement(mark)

    def function(mark: Mark) -> Mark:
        return places[mark.repo, mark.path].function(mark)

    name = f"{rival.name} {rival.version}"
    return f"""
## Beside {name}

On {len(texts)} scripts, those that were there in the run of {datetime.date.today()} that measured both.

On the rules that both have: kept graphs (OOM101 and OOM102; TG001), missing no_grad (OOM201; TG002) and missing loss
division (OOM301; TG014). TG001 covers neither OOM103 nor OOM104. TG002 and TG001 point at other columns and lines of
the same statement, and TG002 reports one forward per function; so the first table counts statements and the second,
which forgives it that, counts functions: one right finding is enough for all of a function.

{rival_table(name, *compare(labels, ours, theirs, statement))}

By function:

{rival_table(name, *compare(labels, ours, theirs, function))}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the scripts are, as OWNER__NAME/PATH")
    parser.add_argument("--rival", action="store_true", help="also run torch-preflight on the same scripts")
    parser.add_argument(
        "--rivals",
        metavar="FOLDER",
        type=Path,
        help="virtual environments of the rivals [default: in the user's cache]",
    )
    options = parser.parse_args(arguments)
    listed = listed_scripts()
    try:
        texts = read_texts(options.folder, listed)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))
    there = {(script.repo, script.path) for script in texts}
    absent = {(script.repo, script.path) for script in listed} - there
    all_labels = read_labels()
    labels = [label for label in all_labels if (label.mark.repo, label.mark.path) in there]
    ours = audit(texts)
    verdicts = judge(ours, ((label.mark, label.is_true) for label in labels))
    verdicts = dict(sorted({**earlier_verdicts(absent), **verdicts}.items()))
    beside = earlier_rival_section()
    if options.rival:
        rival = Rival(options.rivals or default_folder(), "torch-preflight")
        beside = rival_section(rival, ours, labels, options.folder, texts)
    write_verdicts(verdicts)
    text = report(listed, len(absent), verdicts, all_labels, beside)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
