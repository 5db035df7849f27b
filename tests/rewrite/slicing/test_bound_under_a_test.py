"""What a slice binds under a test alone is bound under that test behind it, too; on other ways it stays what it was."""

import textwrap

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP

SCRIPT = """\
import argparse

args = argparse.Namespace(kind="soft", mixes={{"alpha": 0.5}})
hard, aux, often = False, 0.0, 2


def train(model, args, hard, often):
    {ahead}
    for number, (x, y) in enumerate(loader * 4):
        {between}
        {bound}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
        {behind}


train(model, args, hard, often)
"""
SOFT = """\
out = model(x)
loss = F.cross_entropy(out, y)
if {test}:
    aux = out.square().mean()
    loss = loss + aux
"""
READ = "if {test}:\n    print(aux.item() + 0.5)"


def script(bound: str, behind: str, ahead: str = "pass", between: str = "pass") -> str:
    parts = {"bound": bound, "behind": behind, "ahead": ahead, "between": between}
    margins = {"ahead": 4}
    parts = {name: textwrap.indent(text, " " * margins.get(name, 8)).strip() for name, text in parts.items()}
    return TOP + SCRIPT.format(**parts)


def assert_trains_the_same(text: str) -> str:
    after = rewritten(text)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3, precision="fp32").text) >= 4
    return after.text


@pytest.mark.parametrize(
    "test",
    ["args.kind == 'soft'", "args.kind == 'hard'", "args.mixes['alpha'] > 0", "not hard", "number % often == 1"],
)
def test_a_name_is_bound_behind_the_slice_where_it_is_inside(test):
    assert_trains_the_same(script(SOFT.format(test=test), READ.format(test=test)))


def test_what_was_bound_in_an_earlier_iteration_stays():
    text = assert_trains_the_same(script(SOFT.format(test="number % often == 0"), "print(aux.item() + 0.5)"))
    assert (
        """\
        loss, its_aux = memory.forward_backward(forward, x, y)
        if number % often == 0:
            aux = its_aux
"""
        in text
    )
    assert "return loss, aux if number % often == 0 else None" in text


IN_BRANCHES = """\
if often > 2:
    out = model(x)
    loss, first, share = F.cross_entropy(out, y), out, 0.5
elif args.kind == "soft":
    out = model(x * 2)
    loss, first, share = F.cross_entropy(out, y), out[:, 0], 0.25
else:
    out = model(x)
    loss = F.cross_entropy(out, y)
"""


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_tests_of_several_branches_are_joined(kind):
    behind = 'if often > 2 or args.kind == "soft":\n    print(first.sum().item() + share)'
    text = assert_trains_the_same(script(IN_BRANCHES, behind).replace('kind="soft"', f'kind="{kind}"'))
    assert "        if often > 2 or args.kind == 'soft':\n            first, share = its_first, its_share\n" in text


def test_a_name_of_the_last_branch_is_bound_where_no_test_holds():
    bound = SOFT.format(test="number > 1").replace("    aux", "    pass\nelse:\n    aux")
    assert "aux if not number > 1 else None" in assert_trains_the_same(script(bound, "print(aux.item() + 0.5)"))


def test_a_value_that_is_only_changed_keeps_its_test():
    bound = SOFT.format(test="not hard") + "if number > 1:\n    aux = aux + 1\n"
    assert_trains_the_same(script(bound, "print(aux.item() + 0.5)"))


@pytest.mark.parametrize(
    "again", ["aux /= often", "if number > 1:\n        aux = out.abs().mean()"], ids=["always", "not"]
)
@pytest.mark.parametrize("test", ["args.kind == 'soft'", "number % often == 1"])
def test_a_branch_may_bind_a_name_several_times(again, test):
    bound = SOFT.replace("    loss =", f"    {again}\n    loss =")
    assert_trains_the_same(script(bound.format(test=test), READ.format(test=test)))


def test_a_key_of_the_batch_may_be_asked_for():
    bound = SOFT.format(test="'y' in batch").replace("model(x)", "model(batch['x'])").replace(", y)", ", batch['y'])")
    assert_trains_the_same(script(bound, "print(aux.item() + 0.5)", between="batch = {'x': x, 'y': y}"))


BOUND_AGAIN = """\
if args.kind == "soft":
    with torch.no_grad():
        aux = model(x).sum()
print(aux.item() + 0.5)
"""


def test_another_value_behind_the_slice_is_never_given_to_it():
    bound = "out = model(x)\nif args.kind == 'soft':\n    aux = out.square().mean()\nloss = F.cross_entropy(out, y)\n"
    bound += "if args.kind != 'hard':\n    loss = loss + aux\n"
    assert "def forward(x, y):" in assert_trains_the_same(script(bound, BOUND_AGAIN))


NEAR_MISSES = {
    "the test is another one behind": SOFT.format(test="hard") + "hard = out.sum()\nloss = loss + hard\n",
    "it calls a function": SOFT.format(test="bool(args.kind)"),
    "it asks for rows": SOFT.format(test="x.shape[0] > 4"),
    "a loop may have no round": SOFT.replace("if {test}", "for _ in range(often)"),
    "a branch deletes it": SOFT.format(test="hard") + "    del aux\n",
    "two tests of a branch bind it": SOFT.format(test="hard:\n    if often > 3").replace("\n    aux", "\n        aux")
    + "    if often > 2:\n        aux = out.sum()\n",
    "two tests bind it": SOFT.format(test="hard") + "if often > 3:\n    aux = out.sum()\n    loss = loss + aux\n",
}


@pytest.mark.parametrize("bound", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_a_name_bound_on_ways_that_nothing_tells_stays(bound):
    after = rewritten(script(bound, "if loss < 0:\n    print(aux)"))
    assert [loop.rewrite for loop in after.loops] == ["in-place"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ahead": "if often > 2:\n    aux = torch.ones(1)"},
        {"behind": "aux = torch.ones(1)", "bound": "if number > 2:\n    loss = loss + aux\n"},
    ],
    ids=str,
)
def test_a_value_from_before_that_the_slice_may_read_stays(changes):
    bound = SOFT.format(test="hard") + changes.get("bound", "if often > 2:\n    loss = loss + aux\n")
    after = rewritten(
        script(bound, changes.get("behind", "if loss < 0:\n    print(aux)"), changes.get("ahead", "pass"))
    )
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
