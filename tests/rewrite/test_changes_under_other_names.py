"""Lines between a network and its loss that write to a tensor of the loss under another name are lines of its slice."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import TOP

LOOP = """\
seen = {{}}
for x, y in loader * 3:
    y = y.clone()
    optimizer.zero_grad()
    out = model(x)
    {changes}
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.9f}}")
"""


def script(changes):
    return TOP + LOOP.format(changes=textwrap.indent(changes, "    ").strip())


@pytest.mark.parametrize(
    "changes",
    [
        "first = out\nfirst *= 2\nloss = F.cross_entropy(out, y)",
        "h = out.clone()\nv = h.view(-1)\nv[0] = 5.0\nloss = F.cross_entropy(h, y)",
        "w = y.view(-1)\nw[0] = 1 - w[0]\nloss = F.cross_entropy(out, y)",
        "row = out[0]\nrow.mul_(3)\nloss = F.cross_entropy(out, y)",
        "h = out.view(-1, 2)\nout.mul_(2)\nloss = F.cross_entropy(h, y)",
        "part = out.T[0]\nflat = part.data\nflat += 1\nloss = F.cross_entropy(out, y)",
        "given = {'target': y}\ngiven['target'].data[0] = 1 - y[0]\nloss = F.cross_entropy(out, **given)",
    ],
)
def test_what_is_written_under_another_name_is_written_ahead_of_the_loss(changes):
    text = script(changes)
    after = rewritten(text)
    assert_same_bits(run(text), run(after.text, preset="off"))
    parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)


def test_what_an_object_counts_that_the_loss_reads_as_well_is_no_view_of_it():
    text = TOP + textwrap.dedent("""\
        class Trainer:
            def __init__(self):
                self.model, self.totals = model, {"loss": 0.0}

            def step(self, x, y):
                optimizer.zero_grad()
                out = self.model(x)
                loss = F.cross_entropy(out, y)
                self.totals["loss"] += loss.item()
                loss.backward()
                optimizer.step()

        trainer = Trainer()
        for x, y in loader * 3:
            trainer.step(x, y)
        print(f"{trainer.totals['loss']:.9f}")
        """)
    assert parts_as_whole(text, rewritten(text).text, rewritten(text, micro_batches=3).text) == 3


@pytest.mark.parametrize(
    "changes",
    [
        "loss = F.cross_entropy(out, y)\nseen['loss'] = loss\nseen['count'] = len(x)",
        "loss = F.cross_entropy(out, y)\nshown = loss\nshown = shown.detach()\nhits = out.argmax(1)",
    ],
)
def test_what_holds_a_tensor_or_is_computed_of_it_is_another(changes):
    text = script(changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)
