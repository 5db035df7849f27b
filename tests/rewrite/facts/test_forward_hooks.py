"""What a forward hook changes would be that of a part of the batch, or of several runs, where the slice is lifted."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply

DEFINED = "def hook(module, given, output):\n    {does}\n\n\nmodel.register_forward_hook(hook)\n"
MADE = "def save(name):\n    def hook(module, given, output):\n        {does}\n\n    return hook\n\n\n"
LOOP = """\
for x, y in loader:
    {first}
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y){term}
    loss.backward()
    optimizer.step()
    {last}
"""


def loop(first="pass", term="", last="pass"):
    return LOOP.format(first=first, term=term, last=last)


@pytest.mark.parametrize(
    ("top", "body", "hook"),
    [
        (
            "seen = []\n" + DEFINED.format(does="seen.append(output)"),
            loop(first="seen.clear()", term=" + sum(one.mean() for one in seen)"),
            "the hook `hook`",
        ),
        (
            "seen = {}\n" + DEFINED.format(does="seen['out'] = output"),
            loop(last="print(seen['out'].mean())"),
            "the hook `hook`",
        ),
        (
            "seen = None\n" + DEFINED.format(does="global seen\n    seen = output"),
            loop(last="print(seen.mean())"),
            "the hook `hook`",
        ),
        (
            "seen = {}\n" + MADE.format(does="seen[name] = output") + "model.register_forward_hook(save('out'))\n",
            loop(last="print(seen['out'].mean())"),
            "the hook `hook`",
        ),
        (
            "seen = []\nmodel.register_forward_hook(lambda module, given, output: seen.append(output))\n",
            loop(first="seen.clear()", last="print(seen[0].mean())"),
            "a hook",
        ),
    ],
)
def test_what_a_hook_changes_and_more_than_the_slice_uses_keeps_the_loss_in_place(top, body, hook):
    lines = f"{TOP}{top}{body}".splitlines()
    line = lines.index("    seen.clear()") + 1 if "    seen.clear()" in lines else len(lines)
    told = f"{hook} changes seen whenever the network runs, and line {line} uses it"
    assert apply(top + body)[1] == [("in-place", told)]


@pytest.mark.parametrize(
    "text",
    [
        "seen = {}\n"
        + DEFINED.format(does="seen['out'] = output")
        + loop(term=" + seen['out'].mean()", last="print(loss.item())"),
        "seen = []\n" + loop() + DEFINED.format(does="seen.append(output)") + "model(loader[0][0])\nprint(seen)\n",
        "seen = []\n" + DEFINED.format(does="output = output * 2\n    return output") + loop(last="print(seen)"),
    ],
)
def test_what_the_slice_alone_uses_and_hooks_that_come_later_leave_it_lifted(text):
    assert apply(text)[1] == [("micro-batched", None)]


def test_what_a_hook_inside_of_a_method_keeps_in_its_object_is_the_runtimes_matter():
    text = """\
class Trainer:
    def __init__(self):
        def hook(module, given, output):
            self.seen = output.mean()

        model.register_forward_hook(hook)

    def fit(self):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print(self.seen)
"""
    assert apply(text)[1] == [("micro-batched", None)]


def test_a_loss_of_what_hooks_gather_trains_the_same():
    hook = DEFINED.format(does="seen.append(output)")
    text = f"{TOP}seen = []\n{hook}" + loop(first="seen.clear()", term=" + sum(one.mean() for one in seen)")
    assert_same_bits(run(text), run(rewritten(text, micro_batches=2).text))
