"""What stands in the place of the call of a helper: the branches that run, with all comments."""

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.preparations.test_inlined_helpers import CLASS, HELPER, assert_written_out, script
from tests.rewrite.small_loops import TOP

BRANCHES = """
    if clip is not None and clip > 0:
        # gradients are clipped
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    # nothing is clipped
    elif not _:
        # but said

        print("no clip")  # here
    else:
        print("neither")
"""


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("", "    # but said\n\n    print('no clip')  # here\n    memory.step"),
        (", _=1", "    print('neither')\n    memory.step"),
        (", _=limit", "    if not limit:\n        # but said\n\n        print('no clip')  # here\n    else:\n"),
        (
            ", 0.1",
            "    memory.unscale_(optimizer)\n    # gradients are clipped\n"
            "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    memory.step",
        ),
        (", limit", "    if limit is not None and limit > 0:\n        memory.unscale_(optimizer)\n        # gradients"),
    ],
    ids=["the second", "the last", "the second is a question", "the first", "the first is a question"],
)
def test_of_branches_that_constants_decide_only_the_one_that_runs_is_written_out(given, lines):
    text = f"limit = 0.1\n{script(f'update(total, optimizer{given})')}"
    old = text[text.index("    if clip:") : text.index("    opt.step")]
    after = assert_written_out(text.replace(old, f"{BRANCHES.strip(chr(10))}\n"))
    assert lines in after.text.replace('"', "'")
    assert ("None" in after.text) == ("None" in lines)
    assert ("# nothing is" in after.text) == ("0.1)" not in lines)


@pytest.mark.parametrize(("wanted", "left"), [("clip", "pass"), ("not clip", "print(2)")])
def test_a_branch_that_is_all_of_a_block_leaves_it_something_to_do(wanted, left):
    text = script(line=f"for k in range(2):\n        # twice\n        if {wanted}:\n            print(2)")
    after = assert_written_out(text)
    assert f"    for k in range(2):\n        # twice\n        {left}\n    memory.step" in after.text


def test_an_optional_scaler_that_is_not_given_leaves_nothing_behind():
    scaled = "scaler.scale(loss).backward()\n        scaler.step(opt)\n        scaler.update()"
    plain = "loss.backward()\n        opt.step()"
    text = TOP + HELPER.format(call="update(total, optimizer)", line="pass", more="scaler=None", decorator="# updates")
    start, end = text.index("    # through all"), text.index("\n\n\nfor x, y")
    text = f"{text[:start]}    if scaler is not None:\n        {scaled}\n    else:\n        {plain}{text[end:]}"
    after = assert_written_out(text)
    assert "scaler" not in after.text


@pytest.mark.parametrize(
    ("call", "comments"),
    [
        ("update(total, optimizer)  # one step", ["# one step"]),
        (
            "update(\n        total,  # of a batch\n        optimizer,\n    )  # one step",
            ["# of a batch", "# one step"],
        ),
    ],
)
def test_comments_of_a_call_stand_above_what_is_written_out(call, comments):
    after = assert_written_out(script(call))
    above = "".join(f"    {comment}\n" for comment in comments)
    assert f"\n\n{above}    # through all of it\n    total = memory" in after.text


def test_all_comments_of_a_helper_go_with_its_lines():
    text = script().replace('step."""\n', 'step."""\n    # -----\n    # first\n\n')
    text = text.replace("# the end\n", "# the end\n\n    # opt.zero_grad()\n\n    # really\n")
    after = assert_written_out(text)
    assert "    # -----\n    # first\n\n    # through all of it\n    total = memory" in after.text
    assert "# the end\n\n    # opt.zero_grad()\n\n    # really\n    print" in after.text


def test_a_helper_at_the_end_of_a_class_or_file_goes_with_the_blank_lines_before_it():
    head, method = CLASS.format(line="pass", more="").split("    def _update")
    method, rest = method.split("    def count")
    body, end = rest.split("\n\n\n", 1)
    text = f"{TOP}{head}    def count{body}\n\n    def _update{method.rstrip()}\n\n\n{end.strip()}\n"
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert after.text.endswith('        print(f"{total.item():.9f}")\n\n\nTrainer().fit()\n')
    _, helper, loop = script().partition("# updates")[2].partition("def update")
    helper, loop = loop.split("\n\n\n")
    loop = "def fit():\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    text = f"{TOP}\n\n{loop}\n\ndef _update{helper}\n".replace("        update(", "        _update(")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert after.text.endswith('        print(f"{total.item():.9f}")\n')


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("if clip: print(2)", ""),
        ("if clip:\n        print(2)\n    else: print(3)", "    if None:\n        print(2)\n    else: print(3)\n"),
        ("if clip: print(2)\n    else:\n        print(3)", "    print(3)\n"),
        (
            "if not clip: print(2)\n    else:\n        print(3)",
            "    if not None: print(2)\n    else:\n        print(3)\n",
        ),
    ],
)
def test_a_branch_on_the_line_of_its_question_goes_or_stays_there(line, left):
    text = script(line=line)
    start, end = text.index("    if clip:\n        nn."), text.index(f"    {line}")
    after = assert_written_out(text[:start] + text[end:])
    assert after.text.endswith(f'y)\n{left}    memory.step(optimizer)  # the end\n    print(f"{{total.item():.9f}}")\n')
