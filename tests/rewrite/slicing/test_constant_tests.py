"""A name that a slice binds under a test of settings is its own, where no iteration can take it from the one before."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, parts_as_whole, rewritten, run

SCRIPT = """\
import argparse
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
args = argparse.Namespace(mixup={mixup}, smooth=True, lr=0.1)
settings = {{"mixup": {mixup}, "smooth": True}}
mixup, soft, seen = {mixup}, None, []
model, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def mixed(x, y):
    return (x + x.flip(1)) / 2, y, (y + 1) % 3


def train(args, settings, mixup):
    for epoch in range(2):
        for i, (x, y) in enumerate([(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(3)]):
            {ahead}
            {bound}
            {read}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{{loss.item():.9f}}")
            {behind}


train(args, settings, mixup)
"""
MIXED = "out = model(x)\nif {test}:\n    half, y_b = mixed(x, y)[0], mixed(x, y)[2]"
MIXED_LOSS = (
    "if {test}:\n    loss = F.cross_entropy(out, y) + F.cross_entropy(out, y_b)\n"
    "else:\n    loss = F.cross_entropy(out, y)"
)


def script(test="args.mixup", mixup=True, bound=MIXED, read=MIXED_LOSS, ahead="pass", behind="pass", read_test=None):
    parts = {"ahead": ahead, "behind": behind, "bound": bound, "read": read}
    parts = {name: text.replace("\n", "\n            ") for name, text in parts.items()}
    parts["bound"] = parts["bound"].replace("{test}", test)
    parts["read"] = parts["read"].replace("{test}", read_test or test)
    return SCRIPT.format(mixup=mixup, **parts)


@pytest.mark.parametrize("mixup", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"test": "args.mixup", "read_test": "args.mixup and args.smooth"},
        {"test": "mixup", "read_test": "args.mixup and i > 0"},
        {"test": 'settings["mixup"]', "read_test": 'settings["mixup"] and not epoch'},
        {"test": "mixup is True", "read_test": "settings['mixup'] and i"},
    ],
    ids=lambda changes: changes["test"],
)
def test_a_name_bound_under_a_test_of_settings_is_the_slices_own(changes, mixup):
    text = script(mixup=mixup, **changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, after.text) == 6


IN_EXCLUSIVE_BRANCHES = """\
out = model(x)
if args.smooth:
    loss = F.cross_entropy(out, y)
    if args.mixup == "hard":
        extra = F.cross_entropy(out, (y + 1) % 3)
    elif args.mixup:
        extra = out.square().mean()
    loss = loss + extra
else:
    if args.mixup:
        extra = out.abs().mean()
    loss = extra"""


def test_a_name_read_in_one_branch_ahead_of_its_binding_in_another_is_the_slices_own():
    text = script(bound=IN_EXCLUSIVE_BRANCHES, read="pass")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    before = run(text)
    assert_same_bits(before, run(after.text, preset="off"))
    assert_close(before, run(after.text))


@pytest.mark.parametrize(
    "changes",
    [
        {"test": "mixup", "read_test": "True", "behind": "mixup = not mixup"},
        {"read_test": "True", "behind": "args.mixup = i % 2 == 0"},
        {"read_test": "True", "behind": 'setattr(args, "mixup", i % 2 == 0)'},
        {"read_test": "True", "test": 'settings["mixup"]', "behind": 'settings["mixup"] = i % 2 == 0'},
        {"read_test": "True", "test": 'settings["mixup"]', "behind": "settings.update(mixup=i % 2 == 0)"},
        {"read_test": "True", "test": "not seen", "behind": "seen.append(i)"},
        {"read_test": "True", "test": "i == 0"},
        {"read_test": "True", "test": "epoch == 0"},
        {"read_test": "True", "test": "optimizer.wants", "ahead": "optimizer.wants = i == 0"},
        {"read_test": "True", "test": "y.sum() > 0", "ahead": "y = y * 0 + (i == 0)"},
        {"read_test": "True", "bound": "out = model(x)\nfor _ in range(1 - i):\n    y_b = mixed(x, y)[2]"},
        {
            "bound": "out = model(x)\nif i > 0:\n    x = x + y_b[:, None] * 0\n    out = model(x)",
            "read": MIXED_LOSS.replace("if {test}:", "if {test}:\n    y_b = mixed(x, y)[2]"),
        },
        {"read_test": "True", "bound": "out = model(x)\nif i == 0 and (y_b := mixed(x, y)[2]) is not None:\n    pass"},
    ],
    ids=lambda changes: changes.get("behind") or changes.get("test") or changes["bound"],
)
def test_a_name_that_may_be_that_of_an_iteration_before_keeps_the_loop_in_place(changes):
    text = script(**changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_test_that_a_function_changes_keeps_the_loop_in_place():
    text = script(test="first", read_test="True", behind="done()")
    text = text.replace(
        "def mixed", "first = True\n\n\ndef done():\n    global first\n    first = False\n\n\ndef mixed"
    )
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


OF_AN_OBJECT = """
class Trainer:
    def __init__(self, mixup):
        self.mixup = mixup

    def train(self):
"""


def of_an_object(**changes: str) -> str:
    """The script with its loop in a method, and a test of an attribute of the object."""
    text = script(test="self.mixup == True", read_test="self.mixup and i > 0", **changes)
    top, _, loop = text.partition("\n\ndef train(args, settings, mixup):\n")
    loop = textwrap.indent(loop.partition("\n\n\ntrain(")[0], "    ")
    return f"{top}\n{OF_AN_OBJECT}{loop}\n\n\nTrainer(mixup).train()\n"


@pytest.mark.parametrize("mixup", [True, False])
def test_an_attribute_that_an_object_is_made_with_is_a_setting(mixup):
    text = of_an_object(mixup=mixup)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, after.text) == 6


@pytest.mark.parametrize("change", ["self.mixup = i == 0", 'setattr(self, "mixup", i == 0)', "self.__dict__['i'] = i"])
def test_an_attribute_that_may_be_changed_is_none(change):
    text = of_an_object(mixup=True, behind=change)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))
