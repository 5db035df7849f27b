"""What a log between lines of a loss reads, and a later one changes, is read in the function and logged behind it."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply, assert_trains_the_same

SCRIPT = """\
from types import SimpleNamespace

args = SimpleNamespace(shared="yes", freq=2)
log, total = [], 0.0
for x, y in loader * 3:
    optimizer.zero_grad()
    {ahead}
    out = model(x)
    {between}
    loss = F.cross_entropy(out, y)
    {logged}
    {adds}
    loss.backward()
    optimizer.step()
    {behind}
print(log, total)
"""
ADDS = "loss += model(-x).pow(2).mean()"


def script(ahead="pass", between="pass", logged="pass", adds=ADDS, behind="log.append(loss.item())"):
    parts = {"ahead": ahead, "between": between, "logged": logged, "adds": adds, "behind": behind}
    return SCRIPT.format(**{name: part.replace("\n", "\n    ") for name, part in parts.items()})


@pytest.mark.parametrize(
    ("logged", "line"),
    [
        ("log.append(loss.item())", "loss_before = loss.item()"),
        ("log.append(loss.detach().cpu().item() / len(x))", "loss_before = loss.detach().cpu().item()"),
        ("total += loss.item()", "loss_before = loss.item()"),
        ("if len(log) > 1:\n    print(f'{loss.item():.6f}')", "loss_before = loss.item()"),
    ],
)
def test_a_number_of_a_loss_that_a_later_line_adds_to_is_read_in_the_function(logged, line):
    text = assert_trains_the_same(script(logged=logged))
    assert f"        {line}\n" in text and "_, loss_before = " in text.replace("loss, loss_before", "_, loss_before")


@pytest.mark.parametrize("adds", ["loss = loss / 3", "loss = loss + model(-x).pow(2).mean()"])
def test_a_loss_that_a_later_line_binds_anew_keeps_its_own_name_for_what_logs_it(adds):
    text = assert_trains_the_same(script(logged="log.append(loss.item() * 2)", adds=f"{adds}\nloss = loss * 2"))
    assert "        loss_before = loss\n" in text
    assert "\n    log.append(loss_before.item() * 2)\n" in text


def test_a_batch_that_a_later_line_reshapes_keeps_its_own_name_ahead_of_the_function():
    text = assert_trains_the_same(script(between="print(y.size(), x.size())\ny = y.view(-1)", logged="print(y.size())"))
    assert "\n    y_before = y\n" in text[: text.index("    def forward")]
    assert "\n    print(y_before.size(), x.size())\n    print(y.size())\n" in text[text.index("forward_backward") :]


def test_two_logs_of_one_value_share_its_name_where_nothing_changes_in_between():
    logged = "log.append(loss.item())\nlog.append(loss.item() + 1)"
    text = assert_trains_the_same(script(logged=logged, adds="loss = loss * 2\nloss = loss + 1"))
    assert text.count("loss_before = loss\n") == 1


@pytest.mark.parametrize(
    ("logged", "adds"),
    [
        ("log.append((loss * 1).item())", ADDS),
        ("log.append(loss.item(dim) if dim else loss.clamp(0, 1).item())", ADDS),
        ("log.append((lambda: loss.item())())", ADDS),
        ("log.append(loss.item())\nloss = loss * (1 + len(log))", ADDS),
    ],
    ids=["computed with", "more than a number", "later", "on the way to the loss"],
)
def test_what_is_no_number_or_is_needed_for_the_loss_stays_where_it_is(logged, adds):
    text = TOP + "dim = None\n" + script(logged=logged, adds=adds)
    after = rewritten(text, precision="fp32", micro_batches=3)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "_before" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_what_stands_ahead_of_the_network_and_reads_the_slice_goes_behind_it():
    text = "scaled = {'x': 1.0}\n" + script(
        ahead="def features(x):\n    return {'x': x * 2, 'part': x[:, :1]}\n\n"
        "found = features(x)\npart = found['part']",
        between="out = model(found['x']) + out",
        behind="log.append(part.mean().item())",
    )
    assert_trains_the_same(text.replace("    out = model(x)\n", "    out = 0\n"))


AUX = "if args.shared{}:\n    aux = model(-x).pow(2).mean()\n    loss += aux"


@pytest.mark.parametrize("asked", ["", " is not None", " == 'yes'"])
def test_a_term_of_a_setting_that_is_read_behind_the_backward_in_any_case_is_given_out(asked):
    behind = "if len(log) > 1:\n    print(len(log))\ntotal += aux.item()"
    text = assert_trains_the_same(script(logged="log.append(loss.item())", adds=AUX.format(asked), behind=behind))
    assert "loss_before, aux = memory.forward_backward(" in text


@pytest.mark.parametrize(
    "behind",
    [
        "if args.shared is not None:\n    total += aux.item()",
        "if len(log) > 99:\n    break\ntotal += aux.item()",
        "total += aux.item()\naux = aux * 2",
    ],
    ids=["under the test", "left before", "bound anew"],
)
def test_a_term_of_a_setting_that_may_not_be_read_is_given_out_under_the_test(behind):
    adds = AUX.format(" is not None").replace("loss += aux", "loss = loss + aux")
    text = assert_trains_the_same(script(adds=adds, behind=behind))
    assert "    if args.shared is not None:\n        aux = its_aux\n" in text


def test_a_term_that_may_have_no_value_is_not_given_out():
    adds = AUX.format(" and len(log) < 2").replace("loss += aux", "loss = loss + aux")
    _, [(form, reason)] = apply(script(adds=adds, behind="total += aux.item()"))
    assert (form, reason) == ("in-place", "aux is read later, and only bound on some ways through the slice")


def test_what_another_loss_is_computed_from_needs_no_names():
    body = script(
        logged="log.append(loss.item())",
        adds=f"{ADDS}\nother = model(x + 1)\nsecond = other.pow(2).mean()",
        behind="optimizer.zero_grad()\nother = other * 2\n(second + other.mean()).backward()\noptimizer.step()",
    )
    assert "other_before" not in apply(body)[0]


def test_two_logs_of_a_number_read_it_once_where_no_line_between_them_adds_to_it():
    text = assert_trains_the_same(script(logged="log.append(loss.item())\nprint(loss.item() * 2)"))
    assert text.count("loss_before = loss.item()\n") == 1
    assert "\n    log.append(loss_before)\n    print(loss_before * 2)\n" in text


def test_a_number_that_is_added_to_under_another_name_is_logged_as_it_is_then():
    text = TOP + script(logged="same = loss\nsame += out.pow(2).mean()\nlog.append(loss.item())")
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))


def test_a_log_ahead_of_the_network_stays_as_it_is():
    text = assert_trains_the_same(script(ahead="print(y.size())\ny = y.view(-1)", logged="log.append(loss.item())"))
    assert "\n    print(y.size())\n    y = y.view(-1)\n" in text
