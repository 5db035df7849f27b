"""What `oomfix apply` says of its work: a line for each loop, and the totals."""

import json
import subprocess

from oomfix.presets import PRESETS
from oomfix.rewrite.apply import Unfixed
from oomfix.rewrite.facts.verdict import LoopOutcome
from oomfix.rewrite.files import Change, FileOutcome
from oomfix.rewrite.loop_attempts import Fixed
from oomfix.rewrite.proving.proof import Proof
from oomfix.rewrite.summary import as_json, as_text, diffs

LOOPS = (
    LoopOutcome(12, 20, "micro-batched", None, notes=("the loss is divided by 4 now",)),
    LoopOutcome(30, 38, "in-place", "the loss reads a list that the loop fills"),
    LoopOutcome(3, 9, "none", "LBFGS evaluates its closure several times", cell=2),
)
REWRITTEN = FileOutcome(
    "train.py",
    changes=(Change("a\n", "b\n"),),
    content=b"b\n",
    loops=LOOPS,
    fixed=(Fixed("OOM201", 1, ""), Fixed("OOM101", 2, ""), Fixed("OOM101", 3, "")),
    unfixed=(Unfixed(7, "OOM205", "it loads onto the GPU"), Unfixed(4, "OOM104", "detach it", cell=2)),
    notes=("old content kept in train.py.orig",),
)


def test_each_loop_says_its_form_and_why_not_more_and_what_changes():
    assert as_text([REWRITTEN], written=True).splitlines() == [
        "train.py:12  micro-batched",
        "train.py:12  the loss is divided by 4 now",
        "train.py:30  in place: the loss reads a list that the loop fills",
        "train.py:cell 2:3  left alone: LBFGS evaluates its closure several times",
        "train.py  OOM101 fixed in lines 2, 3",
        "train.py:1  OOM201 fixed",
        "train.py:7  OOM205 not fixed: it loads onto the GPU",
        "train.py:cell 2:4  OOM104 not fixed: detach it",
        "train.py  old content kept in train.py.orig",
        "",
        "1 file rewritten: 3 training loops (1 micro-batched, 1 in place, 1 left alone), 3 findings fixed",
        "OOMFIX_PRESET=off in the environment trains as before, in whole batches",
    ]


def test_why_a_window_stays_is_said_where_its_finding_is():
    why = "its accumulation window stays: `i % k == 0` is not seen"
    left = Unfixed(17, "OOM302", f"the tail is lost; {why}")
    outcome = REWRITTEN._replace(loops=(LOOPS[0]._replace(notes=(why,)),), unfixed=(left,))
    lines = as_text([outcome], written=True).splitlines()
    assert f"train.py:17  OOM302 not fixed: the tail is lost; {why}" in lines
    assert sum(why in line for line in lines) == 1
    found_elsewhere = as_text([outcome._replace(unfixed=())], written=True).splitlines()
    assert f"train.py:12  {why}" in found_elsewhere


def test_json_says_why_a_window_stays_as_a_reason():
    why = "its accumulation window stays: `i % k == 0` is not seen"
    loops = tuple(loop._replace(notes=(*loop.notes, why)) for loop in LOOPS[:2])
    found = json.loads(as_json([REWRITTEN._replace(loops=loops)]))["loops"]
    assert [loop["reason"] for loop in found] == [why, f"{LOOPS[1].reason}; {why}"]
    assert json.loads(as_json([REWRITTEN]))["loops"][0]["reason"] is None


def test_what_would_be_done_is_not_said_as_if_it_were_done():
    last = as_text([REWRITTEN], written=False).splitlines()[-1]
    assert last.startswith("1 file would be rewritten: 3 training loops")


def test_what_was_not_looked_at_and_what_was_not_done_is_not_counted():
    without_loops = as_text([REWRITTEN._replace(loops=())], written=True).splitlines()[-1]
    assert without_loops == "1 file rewritten: 3 findings fixed"
    without_fixes = as_text([REWRITTEN._replace(fixed=(), loops=LOOPS[:1])], written=False).splitlines()[-1]
    assert without_fixes == "1 file would be rewritten: 1 training loop (1 micro-batched)"


def test_lines_are_broken_where_the_terminal_ends():
    lines = as_text([REWRITTEN], written=True, width=40).splitlines()
    assert lines[3:5] == ["train.py:30  in place: the loss reads a", "    list that the loop fills"]
    assert all(len(line) <= 40 for line in lines)


def test_a_proof_is_broken_too_and_its_table_keeps_its_columns():
    found = {"card": {"name": "T4", "capacity_gib": 14.74}, "breakdown": {}, "margin_fraction": 0.04, "steps": []}
    found |= {"out_of_memory": None, "peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31}
    proof = Proof("train.py", "16gb", PRESETS["16gb"], found, found)
    lines = as_text([REWRITTEN], proof, written=False, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "  reserved              2.00 GiB    2.00 GiB" in lines
    assert lines[lines.index("") :].count("") == 2
    assert lines[-2:] == [
        "peak 1.0 GiB -> 1.0 GiB, fits 16 GiB (13.4 GiB of it for tensors, less a margin",
        "    of 4 %)",
    ]


def test_nothing_to_do_is_said_so():
    assert as_text([FileOutcome("util.py")], written=True) == "nothing to rewrite: no training loop\n"
    failed = [FileOutcome("util.py"), FileOutcome("gone.py", errors=("no such file",))]
    assert as_text(failed, written=False) == "nothing to rewrite: 1 file failed\n"
    done = FileOutcome("train.py", loops=(LoopOutcome(3, 9, "none", "it already trains through oomfix.runtime"),))
    assert as_text([done], written=True).splitlines()[-1] == "nothing to rewrite: 1 training loop (1 left alone)"


def test_loops_that_were_not_looked_at_are_not_denied():
    said = as_text([FileOutcome("train.py")], written=False, loops=False)
    assert said == "no local fix to make; training loops stay as they are\n"


def test_the_diff_of_a_long_file_leaves_its_blank_lines_alone_and_is_a_patch(tmp_path):
    """Lines that are many, as blank ones, are no junk to start a match at: they would be taken out and put in again."""
    lines = [f"x{number} = 0\n\n" for number in range(200)]
    before = "".join(lines)
    after = "".join("y = 1\n\n" if number in (90, 91, 92) else line for number, line in enumerate(lines)).rstrip("\n")
    shown = diffs([FileOutcome("long.py", changes=(Change(before, after),))], colour=False)
    assert shown.count("\n-\n") == 1  # the one at the end of the file, which is gone
    (tmp_path / "long.py").write_text(before)
    subprocess.run(["git", "apply"], cwd=tmp_path, input=shown, text=True, check=True, capture_output=True)
    assert (tmp_path / "long.py").read_text() == after
