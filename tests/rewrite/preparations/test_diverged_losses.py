"""Backwards that are run only where the loss is finite: `if not torch.isnan(loss): loss.backward()`."""

import textwrap

import pytest

from tests.rewrite.facts.test_skipped_batches import with_bad_batch
from tests.rewrite.small_loops import apply, assert_trains_the_same

LOOP = """\
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    if {test}:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("stepped")
    print(loss.item())
"""
DROPPED = """\
    if {test}:
        memory.step(optimizer)
        print("stepped")
    else:
        optimizer.zero_grad()
    print(loss.item())
"""
FINITE = [
    "torch.isfinite(loss)",
    "not torch.isnan(loss)",
    "math.isfinite(loss.item())",
    "not (torch.isnan(loss) or torch.isinf(loss))",
    "not torch.isnan(loss).any() and not torch.isinf(loss).any()",
    "torch.isfinite(loss).all()",
]


@pytest.mark.parametrize("test", FINITE)
def test_a_backward_under_a_test_for_finite_losses_is_run_first_and_its_gradients_are_reset(test):
    text = assert_trains_the_same("import math\n" + with_bad_batch(LOOP.format(test=test)))
    assert text.endswith("    loss = memory.forward_backward(forward, x, y)\n" + DROPPED.format(test=test))


@pytest.mark.parametrize(
    "reset",
    ["    optimizer.zero_grad()\n    loss =", "    loss =", "    optimizer.zero_grad(set_to_none=True)\n    loss ="],
)
def test_the_reset_may_stand_ahead_of_the_loss_or_behind_the_step(reset):
    loop = LOOP.replace("        optimizer.zero_grad()\n", "").replace("    loss =", reset)
    if "zero_grad" not in reset:
        loop = loop.replace(".step()", ".step()\n        optimizer.zero_grad()")
    text = assert_trains_the_same(with_bad_batch(loop.format(test="not torch.isnan(loss)")))
    assert text.endswith(DROPPED.format(test="not torch.isnan(loss)"))


def test_what_stands_on_the_other_side_stays_there():
    other = '    else:\n        # too bad\n        print("skipped")\n    print(loss.item())'
    text = assert_trains_the_same(
        with_bad_batch(LOOP.format(test="torch.isfinite(loss)").replace("    print(loss.item())", other))
    )
    assert '    else:\n        optimizer.zero_grad()\n        # too bad\n        print("skipped"' in text


def test_the_backward_may_stand_on_the_other_side():
    text = assert_trains_the_same(
        with_bad_batch("""\
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                if torch.isnan(loss) or loss > 1e4:
                    print("skipped")
                else:
                    # into the weights
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            """)
    )
    assert "    # into the weights\n    loss = memory.forward_backward(forward, x, y)\n    if torch" in text
    assert (
        '        optimizer.zero_grad()\n        print("skipped")\n    else:\n        memory.step(optimizer)\n' in text
    )


def test_a_number_of_the_loss_may_be_asked():
    loop = LOOP.format(test="math.isfinite(value)").replace("    if ", "    value = loss.item()\n    if ")
    text = assert_trains_the_same("import math\n" + with_bad_batch(loop))
    assert "    value = loss.item()\n    if math.isfinite(value):\n        memory.step(optimizer)\n" in text


@pytest.mark.parametrize(
    "test",
    ["loss > 0", "torch.isnan(loss)", "loss < 1e4", "torch.isfinite(loss) or skip", "torch.isfinite(loss).any()"],
)
def test_losses_that_are_finite_as_well_may_have_no_graph(test):
    assert apply(LOOP.format(test=test))[1] == [("in-place", "the test in line 10 depends on the loss")]


KEPT = {
    "a window": LOOP.replace("optimizer.step()", "if x.sum() > 0:\n            optimizer.step()"),
    "gradients that nothing resets": LOOP.replace("        optimizer.zero_grad()\n", ""),
    "a search for anomalies": "torch.autograd.set_detect_anomaly(True)\n" + LOOP,
    "a step of another loop": LOOP + "for x, y in loader:\n    model(x).sum().backward()\n    optimizer.step()\n",
    "a look at gradients": LOOP.replace(
        "    print(loss", "    else:\n        print(model.weight.grad)\n    print(loss"
    ),
    "more ahead of the backward": LOOP.replace("        loss.back", "        print(1)\n        loss.back"),
    "a chain of tests": LOOP.replace("    print(loss", "    elif x.sum() > 0:\n        print(1)\n    print(loss"),
    "a caller elsewhere": "def train(model, loader, optimizer):\n" + textwrap.indent(LOOP, "    "),
}


@pytest.mark.parametrize("script", KEPT.values(), ids=KEPT)
def test_a_backward_stays_under_its_test(script):
    form, reason = apply(script.format(test="torch.isfinite(loss)"))[1][0]
    assert form == "in-place" and reason.endswith("depends on the loss")
