"""Slices that leave something behind in attributes: lifted where the runtime can put it back, else left in place."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply

SCRIPT = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.weight, self.seen = 1.0, 0
        self.history = {"loss": [], "size": []}

    def remember(self, loss, x):
        self.seen += 1
        self.history["loss"].append(loss.item())
        self.weight = sum(self.history["loss"][-3:]) / 3

    def loss(self, x):
        loss = self.layer(x).pow(2).mean()
        self.remember(loss, x)
        return self.weight * loss


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(6, 8, 4):
    optimizer.zero_grad()
    loss = model.loss(x)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f} {model.seen} {model.history['loss'][-1]:.10f} {len(model.history['loss'])}")
"""


def outcome(text: str) -> tuple[str, str | None, tuple[str, ...]]:
    (loop,) = rewritten(text).loops
    return loop.rewrite, loop.reason, loop.notes


def test_a_loss_that_depends_on_state_is_lifted_and_the_state_stays_what_it_was():
    rewrite, _, notes = outcome(SCRIPT)
    assert rewrite == "micro-batched"
    assert [note for note in notes if note.startswith("`remember` counts in self.seen: batches run whole")]
    after = rewritten(SCRIPT, micro_batches=2).text
    assert "loss = memory.forward_backward(forward, x, batch_size=1)\n" in after
    split = run(after)
    assert_same_bits(run(SCRIPT), split)
    assert split.calls_in_parts == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.seen += 1", "global total\n        total += 1"),
        ("self.seen += 1", "self.meter.count += 1"),
        ("self.seen += 1", "self.of_the_class += 1"),
        ("self.seen += 1", "self.meter.update(loss)"),
        ('{"loss": [], "size": []}', "Journal()"),
    ],
)
def test_what_the_runtime_cannot_put_back_keeps_the_loop_in_place(before, after):
    assert before in SCRIPT
    rewrite, reason, _ = outcome(SCRIPT.replace(before, after))
    assert rewrite == "in-place"
    assert reason is not None and reason.endswith("would do so for every part of a batch")


def test_state_of_an_object_with_many_attributes_keeps_it_in_place():
    many = "".join(f"        self.setting_{number} = {number}\n" for number in range(60))
    rewrite, _, _ = outcome(SCRIPT.replace("        self.history =", f"{many}        self.history ="))
    assert rewrite == "in-place"


def test_state_of_an_object_that_the_loop_does_not_name_keeps_it_in_place():
    rewrite, _, _ = outcome(SCRIPT.replace("model.loss(x)", "models[0].loss(x)"))
    assert rewrite == "in-place"


def test_state_between_two_losses_keeps_the_loop_in_place():
    text = textwrap.dedent("""\
    for x in torch.randn(6, 8, 4):
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        other = model.loss(x)
        other.backward()
        optimizer.step()
    """)
    rewrite, reason, _ = outcome(SCRIPT[: SCRIPT.index("for x")] + text)
    assert rewrite == "in-place"
    assert reason is not None and reason.endswith("which another loss may go through")


def test_a_method_of_a_tensor_is_none_of_the_files_that_takes_other_arguments():
    text = SCRIPT.replace("model.loss(x)", "model.layer(x).exp().log().mean()").replace(
        "remember(self, loss", "log(self, loss"
    )
    rewrite, _, notes = outcome(text.replace("self.remember", "self.log"))
    assert rewrite == "micro-batched"
    assert notes == ()


HELPER = """\
{top}
seen = []

def note(value):
    seen.append(value)

def loss_of(x, y, kept=[]):
    loss = F.cross_entropy(model(x), y)
    {adding}
    return loss / len(kept or [0])

for x, y in loader * 3:
    optimizer.zero_grad()
    mine = []
    loss = {called}
    loss.backward()
    optimizer.step()
    print(loss.item(), sum(seen), sum(mine))
"""


@pytest.mark.parametrize(
    ("adding", "called", "changed"),
    [
        ("seen.append(loss.item())", "loss_of(x, y)", "seen"),
        ("note(loss.item())", "loss_of(x, y)", "seen"),
        ("kept.append(loss.item())", "loss_of(x, y)", "kept"),
        ("kept.append(loss.item())", "loss_of(x, y, seen)", "seen"),
        ("kept.extend([loss.item()])", "loss_of(x, y, kept=seen)", "seen"),
        ("kept.append(loss.item())", "loss_of(x, y, mine)", None),
        ("own = []; own.append(loss.item())", "loss_of(x, y)", None),
        ("own = seen + [loss.item()]", "loss_of(x, y)", None),
    ],
)
def test_a_list_of_another_scope_that_a_function_adds_to_gets_one_entry_for_each_batch(adding, called, changed):
    text = HELPER.format(top=TOP, adding=adding, called=called)
    after = rewritten(text, micro_batches=3)
    reason = changed and f"line 22 changes {changed}, which was made outside of the slice"
    assert [(one.rewrite, one.reason) for one in after.loops] == [("in-place" if changed else "micro-batched", reason)]
    before = run(text)
    assert_same_bits(before, run(rewritten(text).text, preset="off"))
    assert_close(before, run(after.text))


SUMS = """\
{top}
class Meter:
    def __init__(self):
        self.total = 0.0

    def update(self, value):
        self.total = self.total + value

def loss_of(out, y, kept):
    loss = F.cross_entropy(out, y)
    {adding}
    return loss

for phase in ["train", "val"]:
    kept = {made}
    for x, y in loader * 3:
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            loss = loss_of(model(x), y, kept)
            if phase == "train":
                loss.backward()
                optimizer.step()
        print({shown})
"""


@pytest.mark.parametrize(
    ("adding", "made", "shown"),
    [
        ('kept["loss"] += loss.item() * len(y)', '{"loss": 0.0}', 'kept["loss"]'),
        ('kept["loss"] = loss.item()', "{}", 'kept["loss"]'),
        ("kept.update(loss=loss.item())", "{}", 'kept["loss"]'),
        ("kept.update(loss.item())", "Meter()", "kept.total"),
    ],
)
def test_what_a_function_counts_in_an_argument_is_counted_once_for_each_batch(adding, made, shown):
    text = SUMS.format(top=TOP, adding=adding, made=made, shown=shown)
    after = rewritten(text, micro_batches=3)
    assert [one.rewrite for one in after.loops] == ["in-place"]
    before = run(text)
    assert_same_bits(before, run(rewritten(text).text, preset="off"))
    assert_close(before, run(after.text))


def test_a_sum_of_a_functions_own_keeps_no_loss_in_place():
    text = HELPER.format(
        top=TOP, adding="own = {}; own['loss'] = loss.item(); own['loss'] += 1", called="loss_of(x, y)"
    )
    assert [one.rewrite for one in rewritten(text).loops] == ["micro-batched"]


FILLED = """\
from collections import defaultdict

import torch
from torch import nn
from losses import calc_loss, weighted

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{made}
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    loss = {loss}
    loss.backward()
    optimizer.step()
print(kept)
"""


@pytest.mark.parametrize(
    "made",
    ["kept = defaultdict(float)", "kept = {}", "kept = []", "kept = dict()", "kept: list = []", "kept, other = {}, 1"],
)
def test_what_is_made_empty_and_given_to_a_function_of_another_file_is_there_to_be_filled(made):
    (loop,) = rewritten(FILLED.format(made=made, loss="calc_loss(out, y, kept)")).loops
    assert (loop.rewrite, loop.reason) == ("in-place", "line 13 changes kept, which was made outside of the slice")


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        ("kept = {'a': 1.0}", "weighted(out, y, kept)"),
        ("kept = [0.3, 0.7]", "weighted(out, y, kept)"),
        ("kept = []", "nn.functional.cross_entropy(out, y) * len(kept)"),
    ],
)
def test_what_a_loss_only_reads_leaves_it_micro_batched(made, loss):
    (loop,) = rewritten(FILLED.format(made=made, loss=loss)).loops
    assert loop.rewrite == "micro-batched"


AGENT = """\
import torch
from torch import nn

moves = 0


class Agent:
    def __init__(self):
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def learn(self, x, y):
        q = {value}
        loss = (q - y).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def cpu(self):
        {change}


agent = Agent()
for x, y in zip(torch.randn(6, 8, 4), torch.randn(6, 8, 2)):
    print(agent.learn(x, y))
"""


def test_a_method_asked_of_what_a_network_has_just_given_changes_nothing_else():
    """`self.model(x).cpu()` is a tensor's method, although the agent has one of that name, which moves the model."""
    text = AGENT.format(value="self.model(x).cpu()", change="self.model.cpu()")
    assert outcome(text) == ("micro-batched", None, ())
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))
    assert_close(run(text), run(rewritten(text, micro_batches=3, precision="fp32").text), 1e-5)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ("self.model(x).cpu()", "global moves; moves += 1"),  # whosever method it is
        ("(self.cpu(), self.model(x))[1]", "self.model.cpu()"),
        ("self.model(find().cpu() or x)", "self.model.cpu()"),
    ],
)
def test_a_method_that_may_change_what_was_there_before_keeps_the_loss_in_place(value, change):
    assert outcome(AGENT.format(value=value, change=change))[0] == "in-place"


def test_the_line_that_changes_something_is_named_and_not_the_block_around_it():
    _, forms = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            if args.weighted:
                out = model(x)
                if args.weights is None:
                    args.weights = torch.ones(len(out))
                loss = F.cross_entropy(out, y) * args.weights.mean()
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    line = TOP.count("\n") + 6
    assert forms == [("in-place", f"line {line} changes args, which was made outside of the slice")]
