"""Guards that skip a batch whose loss is not finite, between forward and backward."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import TOP, apply

BATCHES = """\
    bad = loader[0][0].clone()
    bad[4, 1] = float("nan")
    loader = [*loader * 3, (bad, loader[0][1]), *loader * 3]
    """
LOOP = """\
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if torch.isnan(loss):
            print("skipped")
            continue
        loss.backward()
        optimizer.step()
        print(loss.item())
    """
NOT_FINITE = [
    "not torch.isfinite(loss)",
    "torch.isnan(loss).any()",
    "math.isnan(loss.item())",
    "torch.isnan(loss) or torch.isinf(loss)",
    "not loss.isfinite()",
    "torch.any(torch.isnan(loss))",
    "not torch.all(torch.isfinite(loss))",
    "bool(torch.isnan(loss)) or abs(loss.item()) == float('inf')",
    "torch.isnan(loss).any() == True",
    "torch.isnan(loss).sum() > 0",
    "loss == -math.inf or torch.isnan(loss)",
]


TOO_LARGE = ["loss > 40", "loss.item() >= 40.0", "float(loss) > 40 or torch.isnan(loss)", "loss.detach().cpu() > 4e1"]


def with_bad_batch(loop: str) -> str:
    return textwrap.dedent(BATCHES) + textwrap.dedent(loop)


@pytest.mark.parametrize("test", ["torch.isnan(loss)", *NOT_FINITE])
def test_a_skipped_batch_leaves_no_gradients_where_they_are_reset_first(test):
    text = assert_trains_the_same("import math\n" + with_bad_batch(LOOP.replace("torch.isnan(loss)", test)))
    call, guard = text.index("loss = memory.forward_backward(forward, x, y)"), text.index(f"if {test}:")
    assert text.index("optimizer.zero_grad()") < call < guard < text.index("continue")


@pytest.mark.parametrize("test", TOO_LARGE)
def test_a_batch_whose_loss_is_too_large_may_be_skipped(test):
    large = BATCHES.replace('float("nan")', "1e3")
    loop = LOOP.replace("torch.isnan(loss)", test)
    text = assert_trains_the_same(textwrap.dedent(large) + textwrap.dedent(loop))
    assert text.index("loss = memory.forward_backward(") < text.index(f"if {test}:")


def test_only_nan_differs_from_itself():
    assert_trains_the_same(with_bad_batch(LOOP.replace("torch.isnan(loss)", "loss != loss")))


def test_gradients_may_be_reset_behind_the_guard():
    loop = LOOP.replace("    optimizer.zero_grad()\n    ", "").replace(
        "loss.back", "optimizer.zero_grad()\n        loss.back"
    )
    text = assert_trains_the_same(with_bad_batch(loop))
    assert text.index("optimizer.zero_grad()") < text.index("forward_backward(") < text.index("continue")


@pytest.mark.parametrize("window", [1, 2])
def test_the_guard_may_reset_them_itself(window):
    text = assert_trains_the_same(
        with_bad_batch(f"""\
            for number, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y) / {window}
                if not torch.isfinite(loss):
                    optimizer.zero_grad()
                    continue
                loss.backward()
                if number % {window} == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                print(loss.item())
            """)
    )
    guard = text.index("isfinite")
    assert text.index("forward_backward(") < guard < text.index("optimizer.zero_grad()", guard) < text.index("continue")


@pytest.mark.parametrize("leave", ["break", "return"])
def test_a_guard_may_end_the_loop(leave):
    epoch = "def epoch():\n" + textwrap.indent(textwrap.dedent(LOOP.replace("continue", leave)), "    ")
    assert_trains_the_same(with_bad_batch(f"{epoch}\nepoch()\nepoch()\n"))


STAYS = "`continue` in line 11 stands between forward and backward"


RESET_LAST = LOOP.replace("    optimizer.zero_grad()\n    ", "").replace(
    ".step()", ".step()\n        optimizer.zero_grad()"
)


@pytest.mark.parametrize("leave", ["continue", "break", "return"])
def test_a_skip_resets_gradients_that_every_step_resets_behind_it(leave):
    epoch = "def epoch():\n" + textwrap.indent(textwrap.dedent(RESET_LAST.replace("continue", leave)), "    ")
    text = assert_trains_the_same(with_bad_batch(f"{epoch}\nepoch()\nepoch()\n"))
    assert f'print("skipped")\n            optimizer.zero_grad()\n            {leave}\n' in text
    assert text.count("zero_grad") == 1


@pytest.mark.parametrize("skip", ["if torch.isnan(loss): continue", "if torch.isnan(loss): print(1); continue"])
def test_a_skip_on_one_line_stays_there(skip):
    start, end = RESET_LAST.index("if torch"), RESET_LAST.index("loss.backward")
    text = assert_trains_the_same(with_bad_batch(f"{RESET_LAST[:start]}{skip}\n        {RESET_LAST[end:]}"))
    assert skip.replace("continue", "optimizer.zero_grad(); continue") in text


SECOND = "other = torch.optim.SGD(model.parameters(), lr=0.1)\n"
FIRST = """\
{0} = torch.optim.SGD([model.bias], lr=0.1)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    {0}.step()
    {0}.zero_grad()
"""
GATHERED = {
    "a window": RESET_LAST.replace("optimizer.step()", "if x.sum() > 0:\n            optimizer.step()"),
    "a loop ahead": "for x, y in loader:\n    model(x).sum().backward()\n" + textwrap.dedent(RESET_LAST),
    "a caller elsewhere": "def epoch(model, loader, optimizer):\n"
    + textwrap.indent(textwrap.dedent(RESET_LAST), "    "),
    "an attack elsewhere": "from attacks import attack\n"
    + textwrap.dedent(RESET_LAST.replace("loss = F", "x = attack(model, x)\n        loss = F")),
    "an exception": "for x, y in loader:\n    try:\n"
    + textwrap.indent(textwrap.dedent(RESET_LAST).split("\n", 1)[1], "    ")
    + "    except ValueError:\n        print(1)\n",
    "another stage": FIRST.format("first") + textwrap.dedent(RESET_LAST),
    "another stage of the same name": FIRST.format("optimizer")
    + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    + textwrap.dedent(RESET_LAST),
    "another step": SECOND + textwrap.dedent(RESET_LAST.replace("r.step()", "r.step()\n        other.step()")),
    "another way out": RESET_LAST.replace(
        "loss.backward()", "loss.backward()\n        if x.sum() > 0:\n            continue"
    ),
}


@pytest.mark.parametrize("gathered", GATHERED.values(), ids=GATHERED)
def test_a_skip_keeps_gradients_that_something_else_has_left(gathered):
    form, reason = apply(gathered)[1][-1]
    assert form == "in-place" and reason.startswith("`continue` in line")


FINITE = [
    "torch.isfinite(loss)",
    "not torch.isnan(loss)",
    "torch.isnan(loss).all()",
    "not loss.isfinite().any()",
    "not torch.any(torch.isfinite(loss))",
    "torch.all(torch.isnan(loss))",
    "torch.isfinite(loss).sum() > 0",
    "torch.isnan(loss).any() == False",
    "loss == float('0')",
    "loss != float('inf')",
]


SMALL = ["loss > 0", "loss < 5", "loss > limit", "5 > loss", "loss != 0", "loss > 5 and skip", "0 < loss > 5"]


@pytest.mark.parametrize("test", ["len(x) == 0", "loss == 0", "loss is None", "skip", *SMALL, *FINITE])
def test_other_tests_may_guard_losses_without_a_graph(test):
    assert apply(LOOP.replace("torch.isnan(loss)", test))[1] == [("in-place", STAYS)]


def test_a_branch_besides_the_guard_stays():
    guard = "print(1)\n            continue\n        elif x.sum() > 0:\n            print(2)"
    assert apply(LOOP.replace('print("skipped")\n            continue', guard))[1] == [("in-place", STAYS)]


def test_gradients_of_parts_that_something_else_trains_stay():
    second = "other = torch.optim.SGD(model.parameters(), lr=0.1)\n" + textwrap.dedent(LOOP)
    _, loops = apply(second.replace("optimizer.step()", "optimizer.step()\n    other.step()"))
    assert loops == [("in-place", STAYS.replace("11", "12"))]


def test_a_search_for_anomalies_would_raise_in_the_backward():
    _, loops = apply("torch.autograd.set_detect_anomaly(True)\n" + textwrap.dedent(LOOP))
    assert loops == [("in-place", STAYS.replace("11", "12"))]


def test_a_step_behind_the_loop_would_apply_the_gradients_of_the_skipped_batch():
    behind = textwrap.dedent(LOOP.replace("continue", "break")) + "optimizer.step()\n"
    assert apply(behind)[1] == [("in-place", STAYS.replace("continue", "break"))]


@pytest.mark.parametrize("reader", ["print(model.weight.grad)", "norms = [p.grad.norm() for p in model.parameters()]"])
def test_gradients_that_are_read_behind_the_loop_are_those_of_the_last_backward(reader):
    assert apply(textwrap.dedent(LOOP) + f"{reader}\n")[1] == [("in-place", STAYS)]


NO_RESET_AHEAD = (
    LOOP.replace("    optimizer.zero_grad()\n    ", "")
    .replace('print("skipped")', "{reset}")
    .replace(".step()", ".step()\n        optimizer.zero_grad()")
)
LATER = """\
for x, y in loader[:2]:
    F.cross_entropy(model(x), y).backward()
    {first}
    optimizer.step()
"""


@pytest.mark.parametrize("reset", ["optimizer.zero_grad()", "model.zero_grad()"])
def test_what_a_skip_resets_itself_is_used_by_nothing_later(reset):
    later = LATER.format(first="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    after = rewritten(TOP + with_bad_batch(NO_RESET_AHEAD.format(reset=reset)) + later + "print(model.weight.grad)\n")
    assert after.loops[0].rewrite == "micro-batched"


@pytest.mark.parametrize("network", ["model.parameters()", "[*model.parameters(), extra]"])
def test_a_reset_of_the_network_counts_where_its_optimizer_steps_nothing_else(network):
    loop = LOOP.replace("optimizer.zero_grad()", "model.zero_grad()")
    made = f"extra = nn.Parameter(torch.zeros(2))\noptimizer = torch.optim.SGD({network}, lr=0.1)\n"
    text = (TOP + with_bad_batch(loop)).replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", made)
    after = rewritten(text.replace("model(x)", "model(x) + extra") if "extra]" in network else text)
    expected = "in-place" if "extra]" in network else "micro-batched"
    assert [loop.rewrite for loop in after.loops] == [expected]


@pytest.mark.parametrize(("first", "form"), [("optimizer.zero_grad()", "micro-batched"), ("pass", "in-place")])
def test_a_loop_behind_may_step_where_it_resets_first(first, form):
    later = LATER.format(first="pass").replace("    F.cross", f"    {first}\n    F.cross")
    after = rewritten(TOP + with_bad_batch(LOOP) + later)
    assert after.loops[0].rewrite == form


def test_a_reset_ahead_of_the_skip_is_none_for_what_stands_behind_it():
    epoch = "for _ in range(2):\n" + textwrap.indent(
        "optimizer.zero_grad()\n" + textwrap.dedent(LOOP.replace("continue", "break")) + "optimizer.step()\n", "    "
    )
    assert apply(epoch)[1] == [("in-place", STAYS.replace("continue", "break").replace("11", "13"))]
