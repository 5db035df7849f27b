"""Losses that one iteration leaves to the backward of a later one: nothing of them is evaluated without a graph."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply

ADDED_UP = """\
total = 0
for i, (x, y) in enumerate(loader * 4):
    loss = F.cross_entropy(model(x), y)
    total = total + loss
    if i % 2 == 1:
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        print(total.item())
        total = 0
"""

OTHER_NAME = """\
previous = torch.zeros(())
for i, (x, y) in enumerate(loader * 4):
    loss = F.cross_entropy(model(x), y)
    if i % 2 == 1:
        optimizer.zero_grad()
        (loss + previous).backward()
        optimizer.step()
    else:
        previous = loss
    print(loss.item(), previous.item())
"""

IN_A_LIST = """\
kept = [torch.zeros(())]
for i, (x, y) in enumerate(loader * 4):
    loss = F.cross_entropy(model(x), y)
    if i % 2 == 1:
        optimizer.zero_grad()
        (loss + sum(kept)).backward()
        optimizer.step()
        kept = [torch.zeros(())]
    else:
        kept.append(loss)
    print(loss.item())
"""

STATE = """\
rnn = nn.RNN(4, 4)
h = torch.zeros(1, 4)
for i, (x, y) in enumerate(loader * 4):
    out, h = rnn(x, h)
    loss = F.cross_entropy(model(out), y)
    if i % 2 == 1:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = h.detach()
    print(loss.item())
"""

GRADIENT = """\
for i, (x, y) in enumerate(loader * 4):
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    if i % 2 == 1:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        print(torch.autograd.grad(loss, x)[0].sum().item())
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ADDED_UP, "total goes on into the loss of a later iteration, with its graph where line 12 runs no backward"),
        (
            OTHER_NAME,
            "previous goes on into the loss of a later iteration, with its graph where line 11 runs no backward",
        ),
        (IN_A_LIST, "kept goes on into the loss of a later iteration, with its graph where line 11 runs no backward"),
        (
            IN_A_LIST.replace("        kept.append(loss)", "        for one in [loss]:\n            kept.append(one)"),
            "kept goes on into the loss of a later iteration, with its graph where line 11 runs no backward",
        ),
        (
            IN_A_LIST.replace("sum(kept)", "1")
            .replace("kept = [torch.zeros(())]", "kept = []", 1)
            .replace("        kept = [torch.zeros(())]\n", "")
            + "sum(kept[-1:]).backward()\n",
            "line 18 runs a backward through kept, with its graph where line 11 runs none",
        ),
        (STATE, "h goes on into the loss of a later iteration, with its graph where line 13 runs no backward"),
        (GRADIENT, "line 16 takes a gradient where line 11 runs no backward"),
    ],
)
def test_a_graph_that_is_left_to_a_later_backward_keeps_the_loss_in_place(body, reason):
    after = rewritten(TOP + body)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("in-place", reason)]
    assert_same_bits(run(TOP + body), run(after.text, preset="off"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    out, h =", "    h = h.detach()\n    out, h ="),
        ("    print(", "    h = h.detach()\n    print("),
        ("    out, h =", "    x = x + 0\n    out, _ ="),
    ],
)
def test_a_state_that_goes_on_without_its_graph_is_no_matter(old, new):
    body = STATE.replace(old, new)
    after = rewritten(TOP + body)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(TOP + body), run(after.text, preset="off"))


@pytest.mark.parametrize("detached", ["loss.detach()", "loss.item()", "float(loss)"])
def test_a_number_that_goes_on_is_no_matter(detached):
    body = OTHER_NAME.replace("previous = loss", f"previous = torch.zeros(()) + {detached}")
    after = rewritten(TOP + body)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(TOP + body), run(after.text, preset="off"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss = F", "warm = min(1.0, warm + 0.1)\n    loss = warm * F"),
        ("loss = F.cross_entropy(model(x), y)", "with scaler:\n        loss = F.cross_entropy(model(x), y)"),
    ],
)
def test_what_the_slice_hands_on_without_a_graph_is_no_matter(old, new):
    head = "scaler, warm = torch.autocast('cpu', enabled=False), 0.1\n"
    body = head + ADDED_UP.replace("total = total + loss", "total = loss").replace(old, new)
    after = rewritten(TOP + body)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(TOP + body), run(after.text, preset="off"))


def test_a_sum_that_goes_through_iterations_is_no_division_of_the_loss():
    body = ADDED_UP.replace("total = total + loss", "total += loss")
    text, loops = apply(body)
    assert loops == [("in-place", "line 11 adds to total, which was made outside of the slice")]
    assert_same_bits(run(TOP + body), run(text, preset="off"))


@pytest.mark.parametrize("told", ["print(loss.item())", "loss = loss * 1"])
def test_a_division_that_the_branch_reads_stays_ahead_of_it(told):
    body = f"""\
for i, (x, y) in enumerate(loader * 4):
    loss = F.cross_entropy(model(x), y)
    print(loss.item())
    loss = loss / 2
    if i % 2 == 1:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {told}
    print(loss.item())
"""
    assert_same_bits(run(TOP + body), run(rewritten(TOP + body).text, preset="off"))


def test_the_manager_that_autocasts_and_goes_backward_carries_no_graph():
    _, forms = apply("""\
        train = True
        for x, y in loader:
            with torch.autocast("cpu", enabled=False):
                loss = F.cross_entropy(model(x), y)
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(loss.item())
        """)
    assert forms == [("micro-batched", None)]


def test_the_manager_keeps_no_graph_that_it_is_given():
    """The name of the rewrite's own is no state of the loop."""
    body = """\
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader * 4):
    with torch.autocast("cuda"):
        loss = F.cross_entropy(model(x), y)
    if torch.is_autocast_enabled():
        scaler.scale(loss).backward()
        if i % 2 == 1:
            scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        if i % 2 == 1:
            optimizer.step()
"""
    (loop,) = rewritten(TOP + body).loops
    assert loop.rewrite == "in-place"
    assert "it has 2 backwards" in loop.reason
    assert "memory" not in loop.reason
