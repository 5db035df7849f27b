"""A helper that runs the backward of a loss it is given is written out where it is called."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP

HELPER = """
{decorator}
def update(loss, opt, clip=None, {more}):
    \"\"\"One step.\"\"\"
    opt.zero_grad()
    # through all of it
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    {line}
    opt.step()  # the end


for x, y in loader * 3:
    out = model(x)
    total = F.cross_entropy(out, y)
    {call}
    print(f"{{total.item():.9f}}")
"""


def script(call="update(total, optimizer)", line="pass", more="_=0", decorator="# updates"):
    return TOP + HELPER.format(call=call, line=line, more=more, decorator=decorator)


def assert_written_out(text):
    """The text after apply, which trains the same whole and in three parts, without the helper."""
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "def update" not in after.text
    before = run(text)
    assert_same_bits(before, run(after.text, preset="off"))
    split = run(after.text)
    assert split.calls_in_parts
    assert_close(before, split)
    return after


@pytest.mark.parametrize(
    ("call", "clips"),
    [
        ("update(total, optimizer)", None),
        ("update(total, optimizer, clip=0.1)", "if 0.1:\n        memory.unscale_(optimizer)\n"),
        ("update(opt=optimizer, loss=total, clip=limit)", "if limit:\n        memory.unscale_(optimizer)\n"),
    ],
)
def test_the_helper_stands_in_the_place_of_its_call(call, clips):
    text = f"limit = 0.1\n{script(call)}"
    after = assert_written_out(text)
    assert after.loops[0].notes[-1] == "`update` is written out where it was called"
    assert after.loops[0].line == text.splitlines().index("for x, y in loader * 3:") + 1
    tail = after.text[after.text.index("    total = memory.forward_backward(forward, x, y)\n") :]
    assert "    # through all of it\n    total = memory.forward_backward" in after.text
    assert (clips in tail) if clips else ("clip_grad_norm_" not in tail)
    assert "    memory.step(optimizer)  # the end\n" in tail


def test_branches_for_mixed_precision_are_written_out_together():
    branches = """
import sys

scaler = torch.amp.GradScaler("cuda", enabled=False)


class Trainer:
    def __init__(self):
        self.amp, self.optimizer = "--amp" in sys.argv, optimizer

    def _update(self, loss):
        if self.amp:
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
        else:
            loss.backward()
            self.optimizer.step()

    def fit(self):
        for x, y in loader * 3:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", enabled=self.amp):
                total = F.cross_entropy(model(x), y)
            self._update(total)
            print(f"{total.item():.9f}")


Trainer().fit()
"""
    text = TOP + branches
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "_update" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))
    public = rewritten(text.replace("_update(", "update("))
    assert [loop.rewrite for loop in public.loops] == ["in-place"]


@pytest.mark.parametrize(
    "changes",
    [
        {"line": "loss = loss / 2"},
        {"line": "out = 3"},
        {"line": "x = clip"},
        {"call": "update(total * 1, optimizer)"},
        {"call": "seen = update(total, optimizer)"},
        {"call": "update(total, optimizer); print(1)"},
        {"call": "update(*[total, optimizer])"},
        {"call": "step = update\n    step(total, optimizer)"},
        {"line": "return loss.item()"},
        {"line": "global total"},
        {"more": "*rest"},
        {"decorator": "@torch.enable_grad()"},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_a_helper_that_may_mean_something_else_there_stays(changes):
    text = script(**changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "def update" in after.text
    if "step = update" not in text and "return" not in text:
        assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_helper_that_reads_a_name_of_the_file_stays_where_a_function_has_one_of_its_own():
    text = script(line="print(limit)").replace(
        "for x, y in loader * 3:", "def fit():\n    limit = 2\n    for x, y in loader:"
    )
    head, loop = text.split("    for x, y in loader:\n")
    text = f"limit = 1\n{head}    for x, y in loader:\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    text += "\n\nif __name__ == '__main__':\n    fit()\n"
    assert [loop.rewrite for loop in rewritten(text).loops] == ["in-place"]
    assert [loop.rewrite for loop in rewritten(text.replace("limit = 2", "other = 2")).loops] == ["micro-batched"]


def test_a_function_that_other_files_may_import_stays():
    text = script().replace("for x, y in loader * 3:", "def fit():\n    for x, y in loader:")
    head, loop = text.split("    for x, y in loader:\n")
    text = f"{head}    for x, y in loader:\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    assert [loop.rewrite for loop in rewritten(text).loops] == ["in-place"]
    assert [loop.rewrite for loop in rewritten(text.replace("update(", "_update(")).loops] == ["micro-batched"]
