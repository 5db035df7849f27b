"""Losses that take only numbers of an earlier one: further in, or of a teacher that recorded nothing."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

TOP = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
critic, actor, teacher = nn.Linear(6, 1), nn.Linear(4, 2), nn.Linear(4, 2)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
act = torch.optim.SGD(actor.parameters(), lr=0.1)
logs = []
"""
LATE_ACTOR = """\
for number, (x, a) in enumerate([(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]):
    value = critic(torch.cat([x, a], 1))
    judged = F.mse_loss(value, x[:, :1])
    judge.zero_grad()
    judged.backward()
    judge.step()
    {logged}
    if number % 2:
        done = actor(x)
        made = -critic(torch.cat([x, done], 1)).mean() + {added}
        act.zero_grad()
        made.backward()
        act.step()
        logs.append(made.item())
print(logs, f"{judged.item():.9f}")
"""


def split_alike(text):
    """The text after apply, all losses of which run in parts and train as before."""
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    before, split = run(text), run(after.text)
    assert_same_bits(before, run(after.text, preset="off"))
    assert_close(before, split)
    assert split.calls_in_parts == len(split.recording.steps)
    return after.text


@pytest.mark.parametrize("logged", ["logs.append(judged.item())", "logs.append((value * 2).mean().item())"])
@pytest.mark.parametrize("added", ["0", "len(logs) * 0.1", "value.detach().mean() * 0"])
def test_a_loss_in_a_branch_behind_another_may_log_and_read_its_numbers(logged, added):
    split_alike(TOP + LATE_ACTOR.replace("{logged}", logged).replace("{added}", added))


def test_a_parameter_that_a_loss_in_a_branch_goes_through_again_keeps_losses_in_place():
    """A view of a parameter saves nothing that the first backward could free."""
    text = TOP.replace("judge =", "offset = nn.Parameter(torch.zeros(2))\njudge =")
    text = text.replace("SGD(actor.parameters()", "SGD([offset, *actor.parameters()]")
    text += LATE_ACTOR.replace("{logged}", "pass").replace("{added}", "bias.sum()")
    text = text.replace(
        "    judged = F.mse_loss(value", "    bias = offset.view(1, 2)\n    judged = F.mse_loss(value + bias"
    )
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "goes through bias, made for the one in line" in (after.loops[0].reason or "")
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_loss_made_outside_of_the_branch_of_its_backward_does_not_begin_with_that_of_another():
    text = (
        TOP
        + """\
for number, x in enumerate([torch.randn(6, 4) for _ in range(4)]):
    out = actor(x)
    made = out.pow(2).mean()
    act.zero_grad()
    made.backward()
    act.step()
    judged = critic(torch.cat([x, out.detach()], 1)).mean()
    if number % 2:
        judge.zero_grad()
        judged.backward()
        judge.step()
    print(f"{made.item():.9f} {judged.item():.9f}")
"""
    )
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


TAUGHT = """\
for x in [torch.randn(6, 4) for _ in range(4)]:
    out = actor(x)
    with torch.no_grad():
        wanted = {teacher}
    made = F.mse_loss(out, wanted) - critic(torch.cat([x, out], 1)).mean()
    act.zero_grad()
    made.backward()
    act.step()
    judged = critic(torch.cat([x, out.detach()], 1)).mean() - critic(torch.cat([x, wanted], 1)).mean()
    judge.zero_grad()
    judged.backward()
    judge.step()
    print(f"{made.item():.9f} {judged.item():.9f}")
"""


def test_what_a_teacher_gave_for_one_loss_is_taken_by_the_next():
    text = split_alike(TOP + TAUGHT.replace("{teacher}", "teacher(x)"))
    assert "made, out, wanted = memory.forward_backward(forward, x)" in text


def test_a_teacher_that_records_a_graph_after_all_stays_ahead_of_both_losses():
    recorded = "def recorded(x):\n    with torch.enable_grad():\n        return teacher(x)\n\n\n"
    text = TOP.replace("SGD(critic.parameters()", "SGD([*teacher.parameters(), *critic.parameters()]") + recorded
    text += TAUGHT.replace("{teacher}", "recorded(x)").replace("(out, wanted)", "(out, wanted.detach())")
    after = split_alike(text).splitlines()
    assert after.index("        wanted = recorded(x)") < after.index("    def forward(out, wanted, x):")


IN_TURN = """\
temperature = torch.zeros((), requires_grad=True)
heat = torch.optim.SGD([temperature], lr=0.1)


def wanted_of(x):
    with {context}:
        return teacher(x)


for x in [torch.randn(6, 4) for _ in range(4)]:
    wanted = wanted_of(x)
    judged = F.mse_loss(critic(torch.cat([x, x[:, :2]], 1)), x[:, :1])
    judge.zero_grad()
    judged.backward()
    judge.step()
    done = actor(x)
    made = (done * temperature.exp().detach()).mean() - critic(torch.cat([x, done], 1)).mean()
    act.zero_grad()
    made.backward()
    act.step()
    cooled = (temperature.exp() * done.detach() * wanted).mean()
    heat.zero_grad()
    cooled.backward()
    heat.step()
    print(f"{judged.item():.9f} {made.item():.9f} {cooled.item():.9f}")
"""


def test_a_function_that_records_no_graph_may_run_ahead_of_losses_that_take_numbers_of_another():
    text = TOP + IN_TURN.replace("{context}", "torch.no_grad()")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "made, done = memory.forward_backward(forward_2, x)" in after.text
    split = run(after.text)
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), split)
    assert split.calls_in_parts >= 8


IN_TWO_WAYS = """\
half = {half}
for x, _ in [(torch.randn(6, 4), 0) for _ in range(4)]:
    if half:
        act.zero_grad()
        made = actor(x)
        loss = -critic(torch.cat([x, made], 1)).mean()
        loss.backward()
        act.step()
        judge.zero_grad()
        judged = critic(torch.cat([x, made.detach()], 1)).mean()
        judged.backward()
        judge.step()
    else:
        act.zero_grad()
        made = actor(x / 2)
        loss = -critic(torch.cat([x, made], 1)).mean()
        loss.backward()
        act.step()
        judge.zero_grad()
        judged = critic(torch.cat([x, made.detach()], 1)).mean()
        judged.backward()
        judge.step()
    print(f"{{loss.item():.9f}} {{judged.item():.9f}}")
"""


@pytest.mark.parametrize("half", [True, False])
def test_the_other_branch_of_a_test_reads_samples_for_itself(half):
    text = TOP + IN_TWO_WAYS.format(half=half)
    # branches that differ in nothing else become one
    assert split_alike(text).count("memory.forward_backward(") == 4
