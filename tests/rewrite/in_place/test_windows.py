"""Accumulation windows that lose something are folded into the manager's; those that are right stay."""

import textwrap

import pytest

from oomfix.rewrite.apply import apply_to
from oomfix.rewrite.options import Options
from oomfix.rewrite.surroundings.local import findings_of
from oomfix.rules import all_rules
from oomfix.source import Source
from tests.rewrite.equivalence import rewritten

TOP = """\
import torch
import torch.nn.functional as F
from torch import nn

k = 4
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))] * 6
"""
TAIL_LOST = "the last window of an epoch, where shorter, was lost and is now stepped; batches weigh by their samples"


def window(
    *lines: str, header: str = "for i, (x, y) in enumerate(loader):", test: str = "(i + 1) % k == 0", loss: str = ""
) -> str:
    """A loop with a window: its loss, these lines, and the step."""
    loss = loss or "loss = F.cross_entropy(model(x), y)"
    step = [f"if {test}:", "    optimizer.step()", "    optimizer.zero_grad()"]
    return f"{header}\n" + "".join(f"    {line}\n" for line in (loss, *lines, *step))


def loop_of(body: str) -> tuple[str, tuple[str, ...]]:
    """The loop after apply, from its header on, and the notes."""
    result = rewritten(TOP + textwrap.dedent(body))
    compile(result.text, "train.py", "exec")
    source = Source.from_bytes("train.py", result.text.encode())
    if "accumulate" in result.text:
        assert {finding.code for finding in findings_of(source, all_rules())} & {"OOM301", "OOM302"} == set()
    return result.text[result.text.index("\nfor ") + 1 :], result.loops[-1].notes


FOLDED = """\
for i, (x, y) in enumerate(memory.accumulate(loader, k)):

    def forward(x, y):
        loss = F.cross_entropy(model(x), y)
        return loss

    memory.forward_backward(forward, x, y)
    if memory.window_closed:
        memory.step(optimizer)
""".replace(":\n\n    def", ":\n    def")


@pytest.mark.parametrize(
    "body",
    [
        window("loss = loss / k", "loss.backward()"),
        window("loss /= k", "loss.backward()"),
        window("loss = loss / float(k)", "loss.backward()"),
        window("(loss / k).backward()"),
        window("(loss * (1 / k)).backward()"),
        window("loss.div(k).backward()"),
        window("if k > 1:", "    loss = loss / k", "loss.backward()"),
        window("(loss / k if k > 1 else loss).backward()"),
        window("loss.backward()", loss="loss = F.cross_entropy(model(x), y) / k"),
        window("(loss / k).backward()", test="not (i + 1) % k"),
        window("(loss / k).backward()", test="((i + 1) % k == 0)"),
        window("(loss / k).backward()", test="i % k == k - 1"),
    ],
)
def test_a_window_that_loses_its_tail_is_the_managers_however_its_loss_is_divided(body):
    assert loop_of(body) == (FOLDED, (TAIL_LOST,))


@pytest.mark.parametrize(
    ("header", "after"),
    [
        ("for i, (x, y) in enumerate(loader, 1):", "enumerate(memory.accumulate(loader, k), 1):"),
        ("for i, (x, y) in enumerate(loader, start=1):", "enumerate(memory.accumulate(loader, k), start=1):"),
    ],
)
def test_a_count_from_one_is_understood(header, after):
    text, notes = loop_of(window("(loss / k).backward()", header=header, test="i % k == 0"))
    assert after in text and notes == (TAIL_LOST,)


@pytest.mark.parametrize(
    ("header", "after"),
    [
        ("enumerate(tqdm(loader))", "enumerate(memory.accumulate(tqdm(loader), k))"),
        (
            "tqdm(enumerate(loader), total=6)",
            "tqdm(enumerate(memory.accumulate(loader, k)), total=6)",
        ),
    ],
)
def test_progress_bars_keep_their_place(header, after):
    text, notes = loop_of(window("(loss / k).backward()", header=f"for i, (x, y) in {header}:"))
    assert f"for i, (x, y) in {after}:" in text and notes == (TAIL_LOST,)


def test_a_header_made_before_the_loop_is_wrapped_where_it_is_made():
    body = "bar = tqdm(enumerate(loader))\n" + window("(loss / k).backward()", header="for i, (x, y) in bar:")
    result = rewritten(TOP + body)
    assert "bar = tqdm(enumerate(memory.accumulate(loader, k)))\n" in result.text
    assert result.text.index("memory = runtime.preset") < result.text.index("bar = ")


def test_a_loss_that_is_logged_divided_is_still_logged_divided():
    text, _ = loop_of(window("loss = loss / k", "loss.backward()", "print(loss.item())"))
    assert text == FOLDED.replace("    memory.forward", "    loss = memory.forward").replace(
        "    if memory", "    loss = loss / k\n    print(loss.item())\n    if memory"
    )
    text, _ = loop_of(window("loss = loss / k", "print(loss.item())", "loss.backward()"))
    assert text == FOLDED.replace("    memory.forward", "    loss = memory.forward").replace(
        "    if memory", "    loss = loss / k\n    print(loss.item())\n    if memory"
    )


def test_a_loss_that_is_logged_before_it_is_divided_is_not_divided_at_all():
    text, _ = loop_of(window("print(loss.item())", "loss = loss / k", "loss.backward()"))
    assert "/ k" not in text
    assert text.index("forward_backward") < text.index("print(loss.item())")


@pytest.mark.parametrize(
    ("lines", "behind"),
    [
        (["scaled = loss / k", "scaled.backward()"], ""),
        (["print(loss.item())", "scaled = loss / k", "scaled.backward()"], "    print(loss.item())\n"),
        (
            ["scaled = loss / k", "scaled.backward()", "print(scaled.item())"],
            "    scaled = loss / k\n    print(scaled.item())\n",
        ),
        (
            ["scaled = loss / float(k)", "print(scaled.item())", "scaled.backward()"],
            "    scaled = loss / float(k)\n    print(scaled.item())\n",
        ),
    ],
    ids=["not read", "logged undivided", "read later", "read before"],
)
def test_a_divided_loss_with_a_name_of_its_own_gives_way_to_the_undivided_one(lines, behind):
    text, _ = loop_of(window(*lines))
    call = "    loss = memory.forward" if behind else "    memory.forward"
    assert text == FOLDED.replace("    memory.forward", call).replace("    if memory", behind + "    if memory")


def test_a_divided_loss_is_not_mistaken_for_what_its_name_is_bound_to_later():
    text, _ = loop_of(
        window("scaled = loss / k", "loss = scaled.detach() * k", "scaled.backward()", "print(loss.item())")
    )
    assert "return loss" not in text


def test_a_missing_division_is_made_and_its_consequence_is_told():
    text, notes = loop_of(window("loss.backward()", test="(i + 1) % k == 0 or i + 1 == len(loader)"))
    assert text == FOLDED
    assert notes == (
        "the loss was not divided by `k`, and is now: gradients are `k` times smaller, and a learning rate that was "
        "tuned to them has to grow (by the same factor for plain SGD)",
    )


def test_what_was_mended_is_counted_by_its_line():
    result = rewritten(TOP + window("loss.backward()"))
    assert [(fix.code, fix.line) for fix in result.fixed if fix.code < "OOM4"] == [("OOM301", 11), ("OOM302", 12)]
    assert [(loop.line, loop.end_line) for loop in result.loops] == [(9, 14)]


def test_a_step_behind_the_loop_is_the_windows():
    tail = "if (i + 1) % k != 0:\n    optimizer.step()\n    optimizer.zero_grad()\nprint(i)\n"
    text, _ = loop_of(window("loss.backward()") + tail)
    assert text == FOLDED + "print(i)\n"


def test_a_window_skipped_by_continue_is_understood():
    body = window("(loss / k).backward()", test="(i + 1) % k != 0").replace(
        "        optimizer.step()\n        optimizer.zero_grad()\n",
        "        continue\n    optimizer.step()\n    optimizer.zero_grad()\n",
    )
    text, _ = loop_of(body)
    assert "    if not memory.window_closed:\n        continue\n    memory.step(optimizer)\n" in text


@pytest.mark.parametrize(
    "body",
    [
        window("(loss / k).backward()", test="(i + 1) % k == 0 or i + 1 == len(loader)"),
        window("(loss / k).backward()") + "optimizer.step()\n",
    ],
)
def test_a_window_with_nothing_to_mend_stays_as_it_is_written(body):
    text, notes = loop_of(body)
    assert "accumulate" not in text and "% k == 0" in text and notes == ()


SCHEDULED = window("{loss}.backward()").replace("zero_grad()", "zero_grad()\n        schedule.step()")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (window("(loss / k).backward()", test="i % k == 0"), "`i % k == 0` is not seen to be true at every k-th batch"),
        (window("(loss / k).backward()", test="(i + 1) % k == 0 and i"), "is not seen to be true"),
        (
            window("(loss / k).backward()", test="(i + 1) % k == 0", header="for i, (x, y) in enumerate(zip(a, b)):"),
            "no l",
        ),
        (window("k = 2", "(loss / k).backward()"), "`k` may be another number in the loop"),
        ("k = 64 / 16\n" + window("(loss / k).backward()"), "`k` is a quotient, and may be no whole number"),
        ("k = max(1, 40 / 16)\n" + window("(loss / k).backward()"), "`k` is a quotient, and may be no whole number"),
        (window("i += 1", "(loss / k).backward()"), "`i` is changed inside of the loop"),
        (window("(loss / 8).backward()"), "the division of the loss of line 11 by `k` is not in sight"),
        (window("if loss > 3:", "    continue", "(loss / k).backward()"), "`continue` in line 11 may leave it open"),
        (window("(loss / k).backward()", "if i > 9:", "    break"), "may leave it open"),
        (window("if x.sum() > 0:", "    (loss / k).backward()"), "line 11 may pass over a batch"),
        (window("optimizer.zero_grad()", "(loss / k).backward()"), "line 11 resets gradients within it"),
        (
            window("(loss / k).backward()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
            "line 12 clips or reads gradients within it",
        ),
        (window("(loss / k).backward()", "(model(x).mean() / k).backward()"), "several losses share it"),
        (
            "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 9)\n" + SCHEDULED.format(loss="(loss / k)"),
            "OneCycleLR counts its steps",
        ),
        (
            "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 9)\n" + SCHEDULED.format(loss="loss"),
            "OneCycleLR counts its steps",
        ),
        (window("loss.backward()", loss="loss = F.cross_entropy(model(x), y, reduction='sum')"), "may be a sum"),
        (
            window("with model.no_sync():", "    (loss / k).backward()"),
            "when gradients are exchanged in line 11 is not seen to follow it",
        ),
    ],
)
def test_a_window_that_cannot_be_followed_stays_and_says_why(body, reason):
    text, notes = loop_of(body)
    assert "accumulate" not in text
    assert notes[0].startswith("its accumulation window stays: ") and reason in notes[0], notes


def mends_of_windows(found) -> list[str]:
    return sorted(finding.code for finding in found if finding.code in ("OOM301", "OOM302"))


@pytest.mark.parametrize(
    "body",
    [
        window("(loss / k).backward()", test="i % k == 0"),
        window("loss.backward()", test="i % k == 0"),
        "for _ in range(2):\n" + textwrap.indent(window("loss.backward()", test="i % k == 0"), "    "),
    ],
)
def test_what_the_next_audit_finds_in_a_window_that_stays_is_told_with_the_reason(body):
    result = rewritten(TOP + body)
    audited = findings_of(Source.from_bytes("train.py", result.text.encode()), all_rules())
    assert mends_of_windows(result.unfixed) == mends_of_windows(audited) != []
    assert all(left.message.endswith(f"; {result.loops[0].notes[0]}") for left in result.unfixed)


def test_a_folded_window_has_nothing_left_to_be_fixed():
    result = rewritten(TOP + window("loss.backward()"))
    assert mends_of_windows(result.fixed) == ["OOM301", "OOM302"]
    assert result.unfixed == ()


def test_a_window_that_was_not_looked_at_is_not_said_to_stay():
    source = Source.from_bytes("train.py", (TOP + window("loss.backward()")).encode())
    assert apply_to(source, all_rules(), Options("16gb", runtime=False)).unfixed == ()


def test_a_window_that_is_not_to_be_mended_stays():
    source = Source.from_bytes("train.py", (TOP + window("(loss / k).backward()")).encode())
    after = apply_to(source, all_rules(), Options("16gb", ignore=("OOM302",)))
    assert "accumulate" not in after.text and "forward_backward" in after.text


def test_a_header_that_would_get_too_long_is_given_a_name_for_its_batches():
    header = "for i, (x, y) in tqdm(enumerate(loader), total=len(loader), desc='a long description of all'):"
    text, _ = loop_of(window("(loss / k).backward()", header=header))
    result = rewritten(TOP + window("(loss / k).backward()", header=header)).text
    assert text.startswith("for i, (x, y) in tqdm(\n    enumerate(batches), total=len(loader), desc=")
    assert f"batches = memory.accumulate(loader, k)\n{header[:20]}" in result
    assert max(map(len, result.splitlines())) <= len(header)


def test_a_progress_bar_with_a_name_has_the_length_of_what_it_shows():
    body = "data_iter = tqdm(loader)\n" + window(
        "(loss / k).backward()", header="for i, (x, y) in enumerate(data_iter):"
    )
    assert "enumerate(memory.accumulate(data_iter, k))" in rewritten(TOP + body).text
    assert "accumulate" not in rewritten(TOP + body.replace("tqdm(loader)", "tqdm(zip(a, b))")).text


def test_a_comment_about_the_division_goes_with_it():
    text, _ = loop_of(window("# normalize by the number of accumulation steps", "loss = loss / k", "loss.backward()"))
    assert text == FOLDED


def test_a_division_between_blank_lines_that_is_read_later_is_moved():
    text, _ = loop_of(window("", "if k > 1:", "    loss = loss / k", "", "print(loss.item())", "", "loss.backward()"))
    assert text.index("forward_backward") < text.index("if k > 1:") < text.index("print(loss.item())")


COSINE = "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)\n"
SCHEDULE_STEPS = "a schedule that counts whole windows alone ends sooner"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (SCHEDULED.format(loss="(loss / k)"), True),
        # it is stepped for each batch, as before
        (window("(loss / k).backward()") + "    schedule.step()\n", False),
        # each epoch had as many steps before
        (SCHEDULED.format(loss="loss").replace("== 0:", "== 0 or i + 1 == len(loader):"), False),
        (
            SCHEDULED.format(loss="loss") + "if (i + 1) % k != 0:\n    optimizer.step()\n    schedule.step()\n",
            False,
        ),
    ],
)
def test_a_schedule_that_is_stepped_with_the_tail_is_told(body, told):
    text, notes = loop_of(COSINE + body)
    assert "accumulate" in text
    assert [note.startswith("`schedule.step` in line 16 runs with that step too") for note in notes].count(True) == told
    assert any(note.endswith(SCHEDULE_STEPS) for note in notes) is told


@pytest.mark.parametrize(
    ("before", "was"),
    [
        ("", "went into the first step of the next epoch, if there was one, and is now"),
        ("    optimizer.zero_grad()\n", "was lost and is now"),
    ],
)
def test_what_became_of_a_tail_depends_on_where_gradients_are_reset(before, was):
    body = "for epoch in range(2):\n" + before + textwrap.indent(window("(loss / k).backward()"), "    ")
    assert f"the last window of an epoch, where shorter, {was} stepped" in rewritten(TOP + body).loops[0].notes[0]
