"""The benches of the auditor count what they say: findings against labels, places, ratios and made-up scripts."""

import ast
import csv

import pytest

from bench.audit import script_of
from bench.corpus import (
    LOOP,
    PARSE,
    SHEET,
    Label,
    Places,
    compare,
    earlier_rival_section,
    earlier_verdicts,
    listed_scripts,
    read_labels,
    read_texts,
    score_table,
    write_verdicts,
)
from bench.processes import Run, cpu_ratio, ratio
from bench.scoring import Mark, Score, Verdict, judge, moved, scores, total


def at(line: int, code: str = "OOM101") -> Mark:
    return Mark("owner/name", "train.py", line, code)


def test_precision_is_of_what_was_found_and_recall_of_what_is_there():
    """Two right, one wrong, two missed: precision 2/3, recall 2/4."""
    found = [at(1), at(2), at(3)]
    labels = [(at(1), True), (at(2), True), (at(8), True), (at(9), True)]

    score = scores(judge(found, labels))["OOM101"]

    assert score == Score(right=2, wrong=1, missed=2)
    assert score.precision == pytest.approx(2 / 3)
    assert score.recall == pytest.approx(1 / 2)


def test_a_debatable_place_is_scored_neither_when_found_nor_when_not():
    labels = [(at(1), False), (at(2), False)]

    verdicts = judge([at(1)], labels)

    assert verdicts == {at(1): Verdict.DEBATABLE}
    assert scores(verdicts) == {"OOM101": Score()}


def test_what_is_found_or_labelled_twice_on_one_line_counts_once():
    score = scores(judge([at(1), at(1), at(2), at(2)], [(at(1), True), (at(1), True), (at(3), True), (at(3), True)]))

    assert score == {"OOM101": Score(right=1, wrong=1, missed=1)}


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_line_with_a_true_and_a_debatable_occurrence_is_true(order):
    labels = [(at(1), label) for label in order]

    assert judge([at(1)], labels) == {at(1): Verdict.RIGHT}
    assert judge([], labels) == {at(1): Verdict.MISSED}


def test_the_same_line_of_another_code_or_file_is_another_place():
    elsewhere = Mark("owner/name", "test.py", 1, "OOM101")

    verdicts = judge([at(1, "OOM102"), elsewhere], [(at(1), True)])

    assert verdicts == {elsewhere: Verdict.WRONG, at(1): Verdict.MISSED, at(1, "OOM102"): Verdict.WRONG}


def test_no_precision_without_findings_and_no_recall_without_labels():
    assert Score().precision is None
    assert Score().recall is None
    assert Score(missed=1).recall == 0.0
    assert Score(wrong=1).precision == 0.0


def test_all_findings_leave_out_training_loops():
    table = score_table({"OOM101": Score(1, 0, 0), "OOM201": Score(0, 1, 0), LOOP: Score(7, 7, 7)})

    assert table.splitlines()[-1] == "| all findings | 1 | 1 | 0 | 0.500 | 1.000 |"


def test_total_adds_every_count():
    assert total([Score(1, 2, 3), Score(10, 20, 30)]) == Score(11, 22, 33)


def test_moved_marks_that_meet_are_one_and_those_sent_nowhere_are_none():
    assert moved([at(1), at(2), at(3)], lambda mark: None if mark.line == 3 else mark._replace(line=0)) == {at(0)}


SCRIPT = b"""\
def train(model):
    for x in loader:
        losses.append(
            model(x)
        )

def test(model):
    a = model(1)
    b = model(2)
"""


def test_a_statement_is_the_innermost_one_around_a_line():
    places = Places(SCRIPT)

    assert [places.statement(at(line)).line for line in (2, 3, 4, 5)] == [2, 3, 3, 3]


def test_a_function_is_the_one_around_a_line_and_the_module_is_0():
    places = Places(SCRIPT + b"c = 1\n")

    assert [places.function(at(line)).line for line in (4, 8, 9, 10)] == [1, 7, 7, 0]


def test_python_2_is_compared_line_by_line():
    assert Places(b"print 'x'\n").statement(at(1)) == at(1)


def test_both_tools_are_scored_by_the_same_labels_under_the_same_names():
    """OOM101 and OOM102 are one rule there; a rule that only one of both has is left out on both sides."""
    labels = [
        Label(at(3, "OOM102"), True, ""),
        Label(at(8, "OOM201"), True, ""),
        Label(at(9, "OOM201"), True, ""),
        Label(at(2, "OOM202"), True, ""),
    ]
    ours = [at(3, "OOM101"), at(8, "OOM201"), at(9, "OOM201"), at(5, "OOM203")]
    theirs = [at(4, "kept graphs"), at(8, "missing no_grad")]
    places = Places(SCRIPT)

    mine, rival = compare(labels, ours, theirs, places.statement)
    assert mine == {"kept graphs": Score(right=1), "missing no_grad": Score(right=2)}
    assert rival == {"kept graphs": Score(right=1), "missing no_grad": Score(right=1, missed=1)}

    _, rival = compare(labels, ours, theirs, places.function)
    assert rival == {"kept graphs": Score(right=1), "missing no_grad": Score(right=1)}


def test_a_script_of_another_length_than_the_sheet_says_is_refused(tmp_path):
    """Its labels would be about other lines."""
    first = listed_scripts()[0]
    text = tmp_path / first.place
    text.parent.mkdir(parents=True)
    text.write_text("pass\n" * (first.lines + 1))

    with pytest.raises(ValueError, match=rf"{first.lines + 1} lines, expected {first.lines}"):
        read_texts(tmp_path, [first])

    text.write_text("pass\n" * first.lines)
    assert list(read_texts(tmp_path, listed_scripts())) == [first]


def test_a_folder_without_scripts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds none of the scripts"):
        read_texts(tmp_path, listed_scripts())


def test_verdicts_on_scripts_that_are_not_there_are_those_of_the_run_before(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.corpus.SHEET", tmp_path)
    verdicts = {Mark("a/b", "x.py", 3, "OOM201"): Verdict.RIGHT, Mark("c/d", "x.py", 4, "LOOP"): Verdict.MISSED}
    write_verdicts(verdicts)

    assert earlier_verdicts({("c/d", "x.py"), ("e/f", "x.py")}) == {Mark("c/d", "x.py", 4, "LOOP"): Verdict.MISSED}


def test_what_the_page_says_of_the_rival_stays_until_it_runs_again(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.corpus.RESULT", tmp_path / "page.md")
    assert earlier_rival_section() == ""
    (tmp_path / "page.md").write_text("# Title\n\n## Beside rival 1.0\n\nA table.\n\n## Differences\n\nNone.\n")

    assert earlier_rival_section() == "\n## Beside rival 1.0\n\nA table.\n"


def test_every_label_is_about_a_line_of_a_listed_script():
    lines = {(script.repo, script.path): script.lines for script in listed_scripts()}

    for mark, _, _ in read_labels():
        first = 0 if mark.code == PARSE else 1
        assert first <= mark.line <= lines[mark.repo, mark.path], mark


def test_every_true_label_and_no_other_is_right_or_missed_in_the_sheet_of_verdicts():
    """The committed verdicts belong to the committed labels."""
    with (SHEET / "verdicts.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    judged = {
        Mark(row["repo"], row["path"], int(row["line"]), row["code"])
        for row in rows
        if row["verdict"] in ("right", "missed")
    }

    assert judged == {label.mark for label in read_labels() if label.is_true}


def test_a_ratio_is_taken_within_rounds():
    """A busy second round slows both and changes nothing, one that hits a single run is outvoted; the ratio of the
    medians would be 0.2."""
    slow = [Run(2.0, 6.0, 0), Run(20.0, 6.0, 0), Run(2.0, 6.0, 0)]
    fast = [Run(1.0, 2.0, 0), Run(10.0, 2.0, 0), Run(10.0, 1.0, 0)]

    assert ratio(slow, fast) == 2.0
    assert cpu_ratio(slow, fast) == 3.0


@pytest.mark.parametrize("lines", [1, 300, 1000])
def test_a_script_made_for_timing_has_the_length_and_parses(lines):
    text = script_of(lines)

    assert len(text.splitlines()) == lines
    ast.parse(text)
