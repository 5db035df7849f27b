"""The picture of a run says what the report says: the parts, the phases, the limit and the peak."""

import pytest

from oomfix.profile import estimate
from oomfix.profile.plot import draw, picture

pytest.importorskip("matplotlib")

GIB = 2**30


@pytest.fixture(scope="module")
def found():
    import torch
    from torch import nn

    result = estimate(
        lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))),
        lambda: torch.zeros(65536, 4096),
        lambda model, batch: model(batch).sum(),
        gpu="t4",
    )
    return {
        **result.as_json(),
        "script": "train.py",
        "out_of_memory": None,
        "budget_bytes": None,
        "batch_size": 65536,
        "error": None,
        "shares": None,
    }


def texts(figure):
    (axes,) = figure.axes
    words = [text.get_text() for text in axes.texts]
    return [*words, axes.get_title("left"), axes.get_title("right")]


def test_it_names_the_peak_the_limit_the_steps_and_whether_it_fits(found):
    words = texts(picture(found))
    assert f"peak {found['peak_allocated_bytes'] / GIB:.2f} GiB" in words
    assert "T4: 14.15 GiB for tensors" in words
    assert "train.py on T4" in words and "fits" in words
    assert {"step 1", "step 2"} <= set(words)


def test_the_stack_is_as_high_as_the_peak(found):
    """The layers of the picture are the categories of the breakdown, and add up to the peak."""
    figure = picture(found)
    (axes,) = figure.axes
    highest = max(path.vertices[:, 1].max() for layer in axes.collections[:7] for path in layer.get_paths())
    assert highest == pytest.approx(found["peak_allocated_bytes"] / GIB, rel=1e-6)
    names = {text.get_text() for text in figure.legends[0].get_texts()}
    assert set(found["breakdown"]) <= names
    assert {"forward", "backward", "optimizer", "reserved by torch"} <= names


def test_the_peak_is_pointed_at_where_it_is(found):
    figure = picture(found)
    totals = [sum(moment["breakdown"].values()) for moment in found["timeline"]]
    (arrow,) = [text for text in figure.axes[0].texts if text.get_text().startswith("peak")]
    assert arrow.xy == (totals.index(max(totals)), pytest.approx(max(totals) / GIB))


def test_a_budget_below_the_card_is_the_limit(found):
    words = texts(picture({**found, "budget_bytes": 4 * GIB}))
    assert "budget: 4.00 GiB for tensors" in words


def test_the_names_of_many_steps_leave_each_other_room(found):
    moment = found["timeline"][-1]
    timeline = [{**moment, "step": step} for step in range(1, 22) for _ in range(20 if step < 21 else 1)]
    words = texts(picture({**found, "timeline": timeline}))
    assert {"1", "20"} <= set(words)
    assert not {"step 1", "step 20", "step 21", "21"} & set(words)


def test_a_run_that_fits_and_leaks_does_not_look_well(found):
    leaking = {**found, "growth_bytes_per_step": GIB, "steps": found["steps"] * 2}
    assert "fits so far, grows 1.00 GiB per step" in texts(picture(leaking))
    # two steps do not show it
    assert "fits" in texts(picture({**leaking, "steps": found["steps"]}))


def test_a_long_path_leaves_room_for_the_verdict(found):
    words = texts(picture({**found, "script": f"{'folder/' * 20}train.py"}))
    assert any(word.startswith("...") and word.endswith("folder/train.py on T4") and len(word) < 50 for word in words)


def test_a_run_that_ran_out_of_memory_shows_the_request_that_was_refused(found):
    message = "CUDA out of memory. Tried to allocate 2.35 GiB. GPU 0 has a total capacity of 14.15 GiB"
    words = texts(picture({**found, "out_of_memory": message, "fits": {}}))
    assert "Tried to allocate 2.35 GiB: refused" in words and "ran out of memory" in words


def test_the_page_needs_no_other_file_and_holds_the_report(found, tmp_path):
    path = tmp_path / "mem.html"
    draw({**found, "script": "<train>.py"}, path)
    page = path.read_text()
    assert "<svg" in page and "&lt;train&gt;.py on T4 (14.74 GiB), 2 steps, batches of 65536\n" in page
    assert "largest at the peak" in page
    assert "<script" not in page and "http-equiv" not in page


def test_images_are_what_their_names_say(found, tmp_path):
    for name, start in (("mem.png", b"\x89PNG"), ("mem.svg", b"<?xml")):
        draw(found, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_other_names_are_refused(found, tmp_path):
    with pytest.raises(ValueError, match=r"plot: got 'mem.pdf', expected a name that ends in .png, .svg, .html"):
        draw(found, tmp_path / "mem.pdf")
