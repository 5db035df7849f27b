"""What a branch on the way to a loss logs is logged by a branch of its own behind it."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

SCRIPT = """\
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
args = SimpleNamespace(aux=True, weight=0.5)
config = {{"aux": True}}
model = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(7, 4), torch.randint(0, 3, (7,)), torch.randn(7, 2)) for _ in range(6)]
log, total, limit = defaultdict(list), 0.0, [0.5]


def log_value(name, value):
    log[name].append(value)


for step, (x, y, t) in enumerate(loader):
    optimizer.zero_grad()
{computes}
    {end}
    print(f"{{loss.item():.9f}}")
print({{name: f"{{sum(values):.9f}}" for name, values in log.items()}}, f"{{total:.9f}}", limit)
"""
AUX = "aux = F.mse_loss(model[2](hidden), t)"
ADDS = f"    {AUX}\n    loss = loss + args.weight * aux"
INNER = textwrap.indent(ADDS, "    ")
TRAINS = "loss.backward()\noptimizer.step()"
COMPUTES = """\
hidden = torch.tanh(model[0](x))
loss = F.cross_entropy(model[1](hidden), y)
first = loss
# the second one
{branch}
"""


def script(branch, around="", end=TRAINS):
    computes = COMPUTES.format(branch=branch)
    computes = f"{around}\n{textwrap.indent(computes, '    ')}" if around else computes
    return SCRIPT.format(computes=textwrap.indent(computes, "    "), end=end.replace("\n", "\n    "))


def forms(text):
    return [(loop.rewrite, loop.reason) for loop in rewritten(text).loops]


def assert_split(text):
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"], after.loops
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)
    return after.text


@pytest.mark.parametrize(
    ("branch", "behind"),
    [
        (f"if args.aux:\n{ADDS}\n    log['aux'].append(aux.item())", "if args.aux:"),
        (f"if step > 2:\n{ADDS}\n    log['aux'].append(aux.item())\nelse:\n    total += 1", "if step > 2:"),
        (f"if step < 2:\n    loss *= 2\nelse:\n{ADDS}\n    log['aux'].append(aux.item())", "if not step < 2:"),
        (f"if config.get('aux', False):\n{ADDS}\n    total += aux.item() * len(x)", "if config.get('aux', False):"),
        (f"if args.aux:\n{ADDS}\n    log_value('aux', aux.item())", "if args.aux:"),
        (f"if args.aux:\n    log['first'].append(first.item())\n{ADDS}", "if args.aux:"),
        (f"if step < 2:\n    loss *= 2\nelif step < 4:\n{ADDS}\n    total += aux.item()", "elif step < 4:"),
        (f"if args.aux:\n{ADDS}\n    if step % 2:\n        log['odd'].append(aux.item())", "        if step % 2:"),
        (f"if args.aux:\n    if step > 1:\n{INNER}\n        log_value('aux', aux.item())", "        if step > 1:"),
    ],
    ids=["a setting", "with an else", "only else", "a get", "a function", "ahead", "elif", "a test inside", "nested"],
)
def test_what_a_branch_logs_is_logged_behind_the_call(branch, behind):
    text = assert_split(script(branch))
    assert behind in text[text.index("forward_backward(") :]


def test_what_is_printed_in_a_branch_is_printed_once():
    text = assert_split(script(f"if args.aux:\n{ADDS}\n    print(f'aux {{aux.item():.6f}}')"))
    assert "print" not in text[text.index("def forward(") : text.index("forward_backward(")]


def test_a_name_that_only_the_branch_binds_is_nothing_elsewhere():
    text = assert_split(script(f"if step % 2:\n{ADDS}\n    log['aux'].append(aux.item())"))
    assert "        aux = None\n        # the second one\n" in text and "forward_backward(forward, x, y, t)" in text


def test_branches_at_the_end_of_an_autocast_block_are_logged_behind_it():
    around = "with torch.autocast('cpu', enabled=False):"
    assert_split(script(f"if args.aux:\n{ADDS}\n    log['aux'].append(aux.item())", around=around))


def test_branches_ahead_of_a_test_around_the_backward_are_seen():
    end = "if args.aux:\n    loss.backward()\n    optimizer.step()"
    assert_split(script(f"if args.aux:\n{ADDS}\n    log['aux'].append(aux.item())", end=end))


def test_a_number_that_later_lines_change_in_place_is_read_where_it_was():
    logs = "    log['first'].append(first.item())\n    loss += aux\n    log['aux'].append(aux.item())"
    text = script(f"if args.aux:\n    {AUX}\n{logs}")
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))


@pytest.mark.parametrize(
    "branch",
    [
        f"if limit[0] > 0.2:\n{ADDS}\n    limit[0] = limit[0] * 0.9\n    log['aux'].append(limit[0])",
        f"if log['aux'][-1:] != [3]:\n{ADDS}\n    log['aux'].append(len(log['aux']))",
        f"if torch.rand(1) < 0.5:\n{ADDS}\n    log['aux'].append(aux.item())",
        f"if (n := step) > 2:\n{ADDS}\n    log['aux'].append(aux.item() + n)",
        f"if args.aux:\n    {AUX}\n    limit.append(1)\n    loss = loss + aux * len(limit)",
        f"if args.weight < 0.6:\n{ADDS}\n    args.weight = args.weight * 0.9\n    log['aux'].append(aux.item())",
        f"if loss > 1:\n    {AUX}\n    loss += aux\n    log['aux'].append(aux.item())",
        f"if step % 2:\n{ADDS}\nif step > 1:\n    loss = loss * 1.5\n    log['aux'].append(aux.item())",
    ],
    ids=["a limit", "its log", "a draw", "a walrus", "read by the loss", "a setting", "the loss", "of another step"],
)
def test_near_misses_train_the_same(branch):
    text = script(branch)
    before = run(text)
    assert_same_bits(before, run(rewritten(text).text, preset="off"))
    split = run(rewritten(text, micro_batches=3).text)
    assert split.numbers == pytest.approx(before.numbers, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("branch", "reason"),
    [
        (f"if torch.rand(1) < 0.5:\n{ADDS}\n    log['aux'].append(aux.item())", "changes log"),
        (f"if loss > 1:\n    {AUX}\n    loss += aux\n    log['aux'].append(aux.item())", "changes log"),
        (f"if args.aux:\n    {AUX}\n    limit.append(1)\n    loss = loss + aux * len(limit)", "changes limit"),
    ],
)
def test_a_test_that_may_come_out_otherwise_behind_it_keeps_its_logs(branch, reason):
    [(form, told)] = forms(script(branch))
    line = script(branch)[: script(branch).rindex("append(")].count("\n") + 1
    assert form == "in-place" and told == f"line {line} {reason}, which was made outside of the slice"


def test_logs_of_branches_are_rewritten_once():
    text = rewritten(script(f"if args.aux:\n{ADDS}\n    log['aux'].append(aux.item())")).text
    assert rewritten(text).text == text


AUTOCAST = "with torch.autocast('cpu', enabled=False):"


def test_lines_behind_a_branch_in_an_autocast_block_are_passed():
    branch = f"if args.aux:\n{ADDS}\n    log['aux'].append(aux.item())\nloss = loss * 0.5"
    text = assert_split(script(branch, around=AUTOCAST))
    assert text.index("loss = loss * 0.5") < text.index("log['aux'].append")


def test_lines_behind_a_branch_in_an_autocast_block_that_change_what_it_logs_are_not_passed():
    branch = f"if args.aux:\n{ADDS}\n    log['aux'].append(aux.item())\naux = loss * 0.5\nloss += aux"
    text = script(branch, around=AUTOCAST)
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))


METER = """\
class Meter:
    sum = 0.0

    def update(self, value):
        self.sum += value


meter = Meter()


"""


def test_what_a_meter_counts_in_itself_is_nothing_that_the_network_reads():
    text = script(f"if args.aux:\n{ADDS}\n    meter.update(aux.item())", end=f"{TRAINS}\nlog['sum'] = [meter.sum]")
    assert_split(text.replace("def log_value", f"{METER}def log_value"))


PICTURE = """\
    picture = x.t().reshape(-1)
    picture = picture / picture.norm()
    log['first'].append(picture.sum().item())"""


@pytest.mark.parametrize("branch", [f"if step < 2:\n{ADDS}\n{PICTURE}", f"if step < 2:\n{PICTURE}"])
def test_what_is_computed_for_logs_alone_goes_with_them(branch):
    text = script(f"{branch}\nloss = loss * 2", AUTOCAST)
    after = assert_split(text)
    assert "return loss\n" in after
    assert after.index("picture = x.t()") > after.index("memory.forward_backward(")


def test_what_the_loss_reads_as_well_stays_with_it():
    computes = "    size = hidden.abs().mean()\n    log['first'].append(size.item())\n    loss = loss + size"
    after = assert_split(script(f"if step < 9:\n{computes}", AUTOCAST))
    assert after.index("size = hidden") < after.index("memory.forward_backward(")
