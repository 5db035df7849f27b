"""What runs networks moves on with its calls when a script is edited in place, and is not found out again."""

from pathlib import Path

import pytest

from oomfix.rewrite import loop_rewriter
from oomfix.rewrite.facts.events import Events
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.loop_attempts import rewrite_loops
from oomfix.rewrite.options import Options
from oomfix.rules.base import Edit
from oomfix.script import Script
from oomfix.source import Source

ROOT = Path(__file__).parents[3]
SCRIPTS = [*sorted(ROOT.glob("fixtures/*/train.py")), *sorted(ROOT.glob("tests/rewrite/scripts/*.py"))]
PLAIN = """
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""


def reading_of(text):
    return Reading(Script.read(Source.from_bytes("train.py", text.encode())))


def readings_in_place(text, monkeypatch):
    """The readings whose backwards are the manager's, as the rewriter makes them."""
    found = []
    lift = loop_rewriter.lift_backwards
    monkeypatch.setattr(loop_rewriter, "lift_backwards", lambda *given: found.append(given[0]) or lift(*given))
    rewrite_loops(reading_of(text), Options("16gb"))
    return found


def told(events):
    """Events without their numbers, which differ where a script was followed twice."""
    places = {origin: (run.node.lineno, run.node.col_offset) for origin, run in events.runs.items()}
    runs = [
        (places[one.origin], one.path, one.direct, one.trains, one.may_record_graph) for one in events.runs.values()
    ]
    backwards = [
        ((one.node.lineno, one.node.col_offset), sorted(places[origin] for origin in one.origins & places.keys()))
        for one in events.backwards
    ]
    return runs, backwards


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_events_that_moved_are_those_that_following_the_new_text_finds(path, monkeypatch):
    readings = readings_in_place(path.read_text(encoding="utf-8"), monkeypatch)
    for reading in readings:
        assert told(reading.events) == told(Events.of(reading.script))


def test_a_script_that_was_edited_in_place_is_not_followed_again(monkeypatch):
    reading, *_ = readings_in_place(PLAIN, monkeypatch)
    assert [run.path for run in reading.events.runs.values()] == ["model"]
    assert "trace" not in vars(reading.script)


@pytest.mark.parametrize(("old", "new", "path"), [("model(x)", "net(x)", "net"), ("(x)", "(x.half())", "model")])
def test_a_script_whose_network_is_called_otherwise_is_followed_again(old, new, path):
    start = PLAIN.index(old)
    edited = reading_of(PLAIN).edited([Edit(start, start + len(old), new)], in_place=True)
    assert [run.path for run in edited.events.runs.values()] == [path]
    assert "trace" in vars(edited.script)
