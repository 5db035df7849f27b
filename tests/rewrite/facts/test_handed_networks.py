"""What is out of sight and handed a network between backward and step sees no scaled gradients."""

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP

HANDED = """\
from hooks import hook, stats

for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    {between}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("stats.add(model)", "line 14 hands `model` to `stats.add`, which may look at gradients"),
        (
            "skip = hook.post_backward(loss, optimizer=optimizer)",
            "hands `optimizer` to `hook.post_backward`, which may",
        ),
        ("for one in hook:\n        one.check(model=model)", "line 15 hands `model` to `one.check`, which may look"),
        ("stats.add(model.named_parameters())", "hands `model` to `stats.add`, which may look at gradients"),
    ],
)
def test_what_is_out_of_sight_and_handed_a_network_before_its_step_sees_no_scaled_gradients(between, reason):
    result = rewritten(f"{TOP}{HANDED.format(between=between)}")
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    (note,) = result.loops[0].notes
    assert note.startswith("losses are not scaled, so no fp16: line ") and reason in note


@pytest.mark.parametrize(
    "between",
    [
        "adjust_learning_rate(optimizer, 3)",
        "torch.save(model, 'model.pt')",
        "save_checkpoint(model, optimizer)",
        "print(type(model), len(list(model.parameters())))",
        "accuracy = evaluate(model, loader)",
        "show(model)",
    ],
)
def test_what_reads_no_gradients_may_be_handed_a_network_before_its_step(between):
    show = "def show(model):\n    print(model)\n\n"
    result = rewritten(f"{TOP}{show}{HANDED.format(between=between)}")
    assert "no-fp16" not in result.text and "unscale_" not in result.text


def test_what_is_handed_a_network_ahead_of_its_backward_or_behind_its_step_sees_no_scale():
    loop = HANDED.format(between="pass").replace("    loss = F", "    stats.add(model)\n    loss = F")
    assert "no-fp16" not in rewritten(f"{TOP}{loop}    stats.add(model)\n").text
