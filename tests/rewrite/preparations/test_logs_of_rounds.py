"""What a loop on the way to a loss logs of each round is logged by a loop of its own behind it."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
tasks = ["a", "b"]
body = nn.Linear(4, 6)
heads = nn.ModuleDict({{task: nn.Linear(6, 3) for task in tasks}})
model = nn.ModuleList([body, heads])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(7, 4), torch.randint(0, 3, (7, 2))) for _ in range(4)]
log, hits, total = {{task: [] for task in tasks}}, [0, 0], 0.0

for x, y in loader:
    optimizer.zero_grad()
    {context}
    hidden = torch.tanh(body(x))
    outputs = {{task: heads[task](hidden) for task in tasks}}
    loss = 0
    for {header}:
        # one of them
        one = F.cross_entropy({output}, y[:, {column}])
        {logged}
        loss = loss + one
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.9f}}")
print(sum(log["a"]), sum(log["b"]), hits, f"{{total:.9f}}")
"""
OVER_NAMES = {"header": "task in tasks", "output": "outputs[task]", "column": "tasks.index(task)"}
OVER_RANGE = {"header": "i in range(len(outputs))", "output": "outputs[tasks[i]]", "column": "i"}
OVER_OUTPUTS = {"header": "i, out in enumerate(outputs.values())", "output": "out", "column": "i"}
TO_LOG = "log[task].append(one.item())"


def script(logged=TO_LOG, over=OVER_NAMES, context="pass"):
    return SCRIPT.format(**over, logged=logged.replace("\n", "\n        "), context=context)


@pytest.mark.parametrize(
    ("over", "logged", "header"),
    [
        (OVER_NAMES, TO_LOG, "for task, one in zip(tasks, kept):"),
        ({**OVER_NAMES, "header": "_, task in enumerate(tasks)"}, TO_LOG, "in zip(enumerate(tasks), kept):"),
        ({**OVER_NAMES, "header": "task in heads.keys()"}, TO_LOG, "for task, one in zip(heads.keys(), kept):"),
        (OVER_OUTPUTS, "log[tasks[i]].append(one.item())", "for i, one in enumerate(kept):"),
        (OVER_OUTPUTS, "total += one.item()", "for one in kept:"),
        ({**OVER_NAMES, "header": 'task in ["a", "b"]'}, TO_LOG, 'for task, one in zip(["a", "b"], kept):'),
        ({**OVER_NAMES, "header": 'task in "a", "b"'}, TO_LOG, "for task, one in zip(('a', 'b'), kept):"),
        ({**OVER_NAMES, "header": "task in list(outputs)"}, TO_LOG, "for task, one in kept:"),
        ({**OVER_NAMES, "header": "i, (task, _) in enumerate(outputs.items())"}, TO_LOG, "for task, one in kept:"),
        (OVER_RANGE, "log[tasks[i]].append(one.item())", "for i, one in enumerate(kept):"),
        (OVER_RANGE, f"task = tasks[i]\n{TO_LOG}", "for one, task in kept:"),
        (OVER_RANGE, f"task = f'{{tasks[i]}}'\nif i < 2:\n    {TO_LOG}", "for i, (one, task) in enumerate(kept):"),
        (OVER_OUTPUTS, "right = (out.argmax(1) == y[:, i]).sum()\nhits[i] += right.item()", "for i, right in enum"),
        (
            OVER_NAMES,
            "right = (outputs[task].argmax(1) == y[:, 0]).sum()\n"
            "if len(x) > 2:\n    log[task].append(one.item())\n    log[task].append(right.item() / len(x))",
            "for task, (one, right) in zip(tasks, kept):",
        ),
    ],
    ids=[
        "names",
        "numbered names",
        "keys",
        "numbers",
        "a total",
        "written names",
        "a tuple",
        "made inside",
        "items",
        "a range",
        "taken out",
        "a text",
        "hits",
        "two values",
    ],
)
def test_what_each_round_logs_is_logged_behind_the_loop(over, logged, header):
    text = script(logged, over)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert header in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    split = run(after.text)
    assert_close(run(text), split)
    assert split.calls_in_parts == 4


def test_the_loop_that_logs_reads_as_if_written_by_hand():
    after = rewritten(script("# in order\nlog[task].append(one.item())  # a number"))
    assert (
        after.text[after.text.index("    def forward") : after.text.index("    memory.step")]
        == """\
    def forward(x, y):
        hidden = torch.tanh(body(x))
        outputs = {task: heads[task](hidden) for task in tasks}
        loss = 0
        kept = []
        for task in tasks:
            # one of them
            one = F.cross_entropy(outputs[task], y[:, tasks.index(task)])
            kept.append(one)
            loss = loss + one
        return loss, kept

    loss, kept = memory.forward_backward(forward, x, y)
    for task, one in zip(tasks, kept):
        # in order
        log[task].append(one.item())  # a number
"""
    )


@pytest.mark.parametrize(
    ("over", "logged"),
    [
        (OVER_NAMES, "one = one * 2\nlog[task].append(one.item())\none = one / 2"),
        (OVER_NAMES, "log[task].append(one.item())\nloss = loss + len(log[task]) * 0.01"),
        (OVER_NAMES, "loss += one\nlog[task].append(loss.item())\nloss -= one"),
        (OVER_NAMES, "same = one\nlog[task].append(same.item())"),
        (
            OVER_NAMES,
            "outputs[task] = one\nlog[task].append(one.item() + sum(o.sum().item() for o in outputs.values()))",
        ),
        (OVER_NAMES, "if len(log[task]) > 3:\n    break\nlog[task].append(one.item())"),
        ({**OVER_NAMES, "header": "task in iter(tasks)"}, TO_LOG),
        (OVER_NAMES, "log[task].append(heads[task](hidden.detach()).mean().item())"),
    ],
    ids=[
        "made anew",
        "read",
        "added to",
        "held elsewhere",
        "changed by rounds",
        "left",
        "gone",
        "runs a network",
    ],
)
def test_what_may_be_another_value_behind_the_loop_is_logged_within(over, logged):
    text = script(logged, over)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "kept" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_what_is_logged_under_autocast_is_logged_behind_it():
    text = script().replace("    loss = 0\n", '    with torch.autocast("cpu", enabled=False):\n        loss = 0\n')
    start, end = text.index("    for task in"), text.index("    loss.backward")
    text = text[:start] + "".join(f"    {line}\n" for line in text[start:end].splitlines()) + text[end:]
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "\n    for task, one in zip(tasks, kept):\n        log[task].append(one.item())\n" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    ("start", "adds", "end"),
    [
        ("None", "if loss is None:\n            loss = one\n        else:\n            loss += one", "pass"),
        ("None", "loss = one if loss is None else loss.add_(one)", "pass"),
        (
            "[]",
            "loss.append(one)",
            "first, *others = loss\n    for other in others:\n        first += other\n    loss = first",
        ),
        ("{}", "loss[task] = one", "loss = loss['a'].add_(loss['b'])"),
        ("[]", "loss.append(one)", "loss = total_of(loss)"),
        ("0", "one *= 2\n        loss = loss + one", "pass"),
        ("0", "F.relu(one, inplace=True)\n        loss = loss + one", "pass"),
    ],
    ids=["the first", "the first by a method", "of a list", "of a dict", "by a function", "of a view", "by a keyword"],
)
def test_what_is_changed_in_place_under_another_name_is_logged_within(start, adds, end):
    of_list = "def total_of(losses):\n    first = losses[0]\n    first += losses[1]\n    return first\n\n\nfor x, y in"
    text = script("seen = one.view(1)\nlog[task].append(seen.item())").replace("for x, y in", of_list)
    text = text.replace("loss = loss + one", adds).replace("    loss = 0\n", f"    loss = {start}\n")
    text = text.replace("    loss.backward()", f"    {end}\n    loss.backward()")
    after = rewritten(text)
    assert "kept" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize("losses", ["of adding", "adding none", "adding to a new one"])
def test_a_sum_that_is_no_logged_tensor_itself_may_be_changed_in_place(losses):
    text = script()
    if losses == "of adding":
        text = text.replace("loss = loss + one", "loss += one")
    elif losses == "adding none":
        text = text.replace("loss = loss + one", "loss = one if task == 'a' else loss + one")
    else:
        text = text.replace("loss = 0", "parts = []").replace("loss = loss + one", "parts.append(one)")
        text = text.replace("    loss.backward()", "    loss = sum(parts)\n    loss += 1.0\n    loss.backward()")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert "in zip(tasks, kept):" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


@pytest.mark.parametrize("taken", ["log[task]", "log.get(task)"])
@pytest.mark.parametrize("more", ["", "\nhits.append(one.item())"])
def test_what_is_logged_into_something_taken_out_of_another_object_is_logged_within(taken, more):
    text = script(f"scores = {taken}\nscores.append(one.item()){more}")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [
        ("in-place", "line 24 changes what log holds, made outside of the slice")
    ]
    assert_same_bits(run(text), run(after.text, preset="off"))


LOSS = """\
class Loss{base}:
    def {method}(self, out, y):
        self.entropy = F.cross_entropy(out, y).item()
        return F.cross_entropy(out, y) + 0.1 * out.pow(2).mean()


measured = Loss()

for x, y in loader:
"""


@pytest.mark.parametrize("method", ["forward", "__call__", "measure"])
def test_what_a_loss_leaves_behind_in_a_round_is_logged_within(method):
    loss = LOSS.format(base="(nn.Module)" if method == "forward" else "", method=method)
    called = "measured.measure(" if method == "measure" else "measured("
    text = script("log[task].append(one.item() + measured.entropy)").replace("for x, y in loader:\n", loss)
    text = text.replace("one = F.cross_entropy(", f"one = {called}")
    after = rewritten(text)
    assert "kept" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    other = rewritten(text.replace("one.item() + measured.entropy", "one.item()"))
    assert "in zip(tasks, kept):" in other.text


SEEN = """\
passing = (i for i in range(99))
share = {"of": 1.0}


def weigh(task):
    return 1 / (1 + sum(log[task]))


def share_more():
    share["of"] += 0.5


def drawn():
    return torch.rand(1).item()


class Noted:
    def __enter__(self):
        self.open = True
        return self

    def __exit__(self, *error):
        self.open = False

    def write(self, number):
        assert self.open
        log["a"].append(number)


for x, y in loader:
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"loss + one": "loss + one * weigh(task)"},
        {"loss + one": "loss + one * share['of']", "item())\n": "item())\n        share_more()\n"},
        {"one.item())": "one.item() + drawn())", "body(x)": "F.dropout(body(x))"},
        {"in tasks:": "in zip(tasks, passing):", "task in zip": "task, i in zip", "item())": "item() + i)"},
        {"    for task": "    with Noted() as noted:\n     for task", "log[task].append": "noted.write"},
    ],
    ids=["read by a function", "changed by a function", "drawn", "gone", "closed"],
)
def test_what_functions_see_and_what_is_gone_behind_the_loop_is_logged_within(changes):
    text = script().replace("for x, y in loader:\n", SEEN)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    after = rewritten(text)
    assert "kept" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_loops_on_the_way_to_two_losses_keep_lists_of_their_own():
    text = script().replace(
        "    loss.backward()\n    optimizer.step()\n",
        """\
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = 0
    for task in tasks:
        two = F.cross_entropy(heads[task](torch.tanh(body(x + 1))), y[:, 0])
        log[task].append(two.item())
        loss = loss + two
    loss.backward()
    optimizer.step()
""",
    )
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "for task, two in zip(tasks, kept_2):" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


def test_what_is_logged_behind_a_loop_that_logs_is_no_part_of_the_loss():
    text = script().replace("    loss.backward()", "    log['a'].append(loss.item())\n    loss.backward()")
    assert [loop.rewrite for loop in rewritten(text).loops] == ["micro-batched"]
    before = run(text)
    assert_same_bits(before, run(rewritten(text).text, preset="off"))
    assert_close(before, run(rewritten(text, micro_batches=3).text))


def test_what_only_some_rounds_compute_is_logged_by_these():
    logged = "if len(task) == 1:\n    extra = one.square()\n    one = one + extra\n    log[task].append(extra.item())"
    text = script(logged)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"], after.loops
    before = run(text)
    assert_same_bits(before, run(after.text, preset="off"))


@pytest.mark.parametrize("preset", ["off", ""])
def test_the_number_of_a_round_that_is_read_behind_another_loop_is_that_of_the_other(preset):
    second = "    for i in range(3):\n        loss = loss + i * outputs['a'].square().mean()\n    loss.backward()"
    text = script("log[tasks[i]].append(one.item())", OVER_RANGE).replace("    loss.backward()", second)
    text = text.replace("    optimizer.step()", "    optimizer.step()\n    total += i")
    assert_same_bits(run(text), run(rewritten(text).text, preset=preset))


SKIPPED = """\
one = one.square()
{first}
if task == "a" and len(log["a"]) < 2:
    continue
extra = one.sqrt()
log[task].append(extra.item())"""


@pytest.mark.parametrize(("first", "form"), [("pass", "micro-batched"), ("total += one.item()", "in-place")])
def test_rounds_that_go_on_with_the_next_log_nothing(first, form):
    text = script(SKIPPED.format(first=first)).replace('len(log["a"]) < 2', "len(y) > 99")
    assert [loop.rewrite for loop in rewritten(text).loops] == [form]
    before = run(text)
    assert_same_bits(before, run(rewritten(text).text, preset="off"))
    assert_close(before, run(rewritten(text, micro_batches=3).text))


def test_what_one_line_binds_is_logged_in_the_order_of_the_line():
    names = ["one", "third", "first", "fourth", "second"]
    text = SCRIPT.replace("    one = F.cross_entropy", f"    {', '.join(names)} = losses_of")
    text = text.replace(
        "\nfor x, y",
        "\ndef losses_of(out, y):\n    one = F.cross_entropy(out, y)\n"
        "    return one, one * 3, one * 1, one * 4, one * 2\n\nfor x, y",
        1,
    )
    adds = "\n".join(f"log[task].append({name}.item())" for name in sorted(names))
    result = rewritten(text.format(**OVER_NAMES, logged=adds.replace("\n", "\n        "), context="pass"))
    assert f"kept.append(({', '.join(names)}))" in result.text
