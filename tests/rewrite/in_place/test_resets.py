"""Which resets of gradients go with the manager's step, and which stay."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import TOP, apply, loop_of


def test_a_step_keeps_gradients_that_the_script_never_resets():
    assert "memory.step(optimizer, zero_grad=False)" in loop_of("""\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)


def test_gradients_of_an_optimizer_from_elsewhere_are_still_reset_first():
    """A loop of another file may have left gradients behind; the first reset here drops them."""
    loop = "def train(model, loader, optimizer):\n    for x, y in loader:\n        optimizer.zero_grad()\n"
    loop += "        loss = model(x).sum()\n        loss.backward()\n        optimizer.step()\n"
    assert "        optimizer.zero_grad()\n" in rewritten(f"import torch\n\n{loop}").text
    made = "model = torch.nn.Linear(4, 2)\ntrain(model, [], torch.optim.SGD(model.parameters(), lr=0.1))\n"
    assert "zero_grad" not in rewritten(f"import torch\n\n{loop}\n\n{made}").text


@pytest.mark.parametrize(
    "comment",
    ["zero the gradients", "Set gradients in optimizer to 0", "梯度清零", "将梯度初始化为零", "勾配をゼロにする"],
)
def test_what_speaks_of_a_removed_reset_goes_with_it_and_other_comments_stay(comment):
    text = loop_of(f"""\
        for x, y in loader:
            # one step
            loss = F.cross_entropy(model(x), y)
            loss.backward()

            # compute the step
            optimizer.step()

            # {comment}
            optimizer.zero_grad()

            print(loss.item())
        """)
    assert text.endswith("""\
    loss = memory.forward_backward(forward, x, y)

    # compute the step
    memory.step(optimizer)

    print(loss.item())
""")


@pytest.mark.parametrize("comment", ["update the scale", "更新缩放因子", "6. 更新 scaler 的系数"])
def test_what_speaks_of_a_removed_update_of_a_scale_goes_with_it(comment):
    loop = f"""\
for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()

    # 更新参数
    scaler.step(optimizer)

    # {comment}
    scaler.update()

    print(loss.item())
"""
    text, _ = apply(f"scaler = torch.amp.GradScaler()\n{loop}")
    assert text.endswith("""\

    # 更新参数
    memory.step(optimizer)

    print(loss.item())
""")


@pytest.mark.parametrize(
    "body",
    [
        """\
        for number in range(6):
            try:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if number % 2:
                    raise FloatingPointError("diverged")
                loss.backward()
                optimizer.step()
            except FloatingPointError as error:
                print(error)
                continue
        """,
        """\
        def step(number):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            assert number % 2, "diverged"
            loss.backward()
            optimizer.step()

        for number in range(6):
            try:
                step(number)
            except (AssertionError, RuntimeError):
                pass
        """,
    ],
)
def test_gradients_of_a_batch_that_an_exception_skips_are_reset_ahead_of_the_next(body):
    text = TOP + "x, y = loader[0]\n" + textwrap.dedent(body)
    result = rewritten(text)
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(result.text, preset="off"))


@pytest.mark.parametrize("handler", ["except ValueError:\n    raise", "except KeyboardInterrupt:\n    pass"])
def test_exceptions_that_end_the_training_do_not_keep_a_reset(handler):
    body = "optimizer.zero_grad()\nloss = F.cross_entropy(model(x), y)\nloss.backward()\noptimizer.step()\n"
    loop = f"try:\n{textwrap.indent(body, '    ')}{handler}\n"
    assert "zero_grad" not in loop_of("for x, y in loader:\n" + textwrap.indent(loop, "    "))


def test_an_exception_around_all_of_the_training_does_not_keep_a_reset():
    body = "optimizer.zero_grad()\nloss = F.cross_entropy(model(x), y)\nloss.backward()\noptimizer.step()\n"
    loop = f"for x, y in loader:\n{textwrap.indent(body, '    ')}"
    text, _ = apply(f"try:\n{textwrap.indent(loop, '    ')}except RuntimeError:\n    print('diverged')\n")
    assert "zero_grad" not in text


def test_an_exception_in_another_function_of_the_same_name_does_not_keep_a_reset():
    body = "optimizer.zero_grad()\nloss = F.cross_entropy(model(x), y)\nloss.backward()\noptimizer.step()\n"
    text, _ = apply(
        f"def step(x, y):\n{textwrap.indent(body, '    ')}"
        "for x, y in loader:\n    step(x, y)\n    try:\n        display.step()\n    except OSError:\n        pass\n"
    )
    assert "zero_grad" not in text


def test_a_batch_that_is_skipped_between_forward_and_backward_leaves_no_gradients():
    text = TOP + textwrap.dedent("""\
        x, y = loader[0]
        for number in range(6):
            try:
                loss = F.cross_entropy(model(x), y)
                if number % 2:
                    raise ValueError("diverged")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            except ValueError as error:
                print(error)
        """)
    result = rewritten(text)
    reason = "line 13 may skip the batch between forward and backward"
    assert [(loop.rewrite, loop.reason) for loop in result.loops] == [("in-place", reason)]
    assert_same_bits(run(text), run(result.text, preset="off"))


def test_a_comment_above_a_reset_that_goes_stays_with_what_follows():
    body = """\
        for x, y in loader:
            # loss
            optimizer.zero_grad()

            {}loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=flag)
            optimizer.step()
        """
    assert "    # loss\n    loss = F.cross" in loop_of(body.format(""))
    assert "    # loss\n\n    # of classes\n    loss = F.cross" in loop_of(body.format("# of classes\n            "))


def test_a_loss_whose_function_alone_resets_gradients_stays_in_place():
    """What the step before left in them would be added to those of the loss."""
    body = """\
def loss_of(x, y):
    optimizer.zero_grad()
    return F.cross_entropy(model(x), y)

for x, y in loader * 4:
    {ahead}
    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
    alone, beside = (TOP + body.format(ahead=ahead) for ahead in ("pass", "optimizer.zero_grad()"))
    assert [loop.rewrite for loop in rewritten(alone).loops] == ["in-place"]
    assert [loop.rewrite for loop in rewritten(beside).loops] == ["micro-batched"]
    for text in (alone, beside):
        assert_close(run(text), run(rewritten(text, micro_batches=3).text))


def test_gradients_that_are_to_be_zero_are_not_freed():
    """Momentum and weight decay go on with a gradient of zero, and not with none."""
    text = TOP.replace("lr=0.1", "lr=0.1, momentum=0.9") + textwrap.dedent("""\
        nets = nn.ModuleList([model, nn.Linear(4, 2)])
        optimizer.add_param_group({"params": nets[1].parameters()})
        for i, (x, y) in enumerate(loader * 6):
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(nets[i % 2](x), y)
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(rewritten(text, micro_batches=3).text))


def test_a_reset_ahead_stays_where_a_later_loop_goes_on_with_the_last_gradients():
    text = """\
import torch
from torch import nn

torch.manual_seed(0)
first, second = nn.Linear(3, 4), nn.Linear(4, 1)
make = torch.optim.SGD(first.parameters(), lr=0.1)
judge = torch.optim.SGD(second.parameters(), lr=0.1)
for x in torch.randn(4, 6, 3):
    make.zero_grad()
    second(first(x)).mean().backward()
    make.step()
    judge.zero_grad()
    second(first(x).detach()).pow(2).mean().backward()
    judge.step()
for x in torch.randn(4, 6, 3):
    second(first(x).detach()).mean().backward()
    judge.step()
    judge.zero_grad()
    print(second.weight.sum().item())
"""
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"] * 2
    assert "memory.step(make)" in after.text and "memory.step(judge, zero_grad=False)" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert (
        "memory.step(judge)"
        in rewritten(
            text.replace(
                "    second(first(x).detach()).mean()", "    judge.zero_grad()\n    second(first(x).detach()).mean()"
            )
        ).text
    )


BY_HAND = """\
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if {test}:
            optimizer.zero_grad()
        elif model.weight.grad is not None:
            for parameter in model.parameters():
                parameter.grad{data}.zero_()
        loss.backward()
        optimizer.step()
        print(loss.item())
    """


def test_gradients_whose_norm_is_taken_behind_the_training_are_left_by_its_steps():
    """A validation that logs the norm of what the last step has left behind."""
    text = assert_trains_the_same("""\
        for x, y in loader * 2:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for x, y in loader:
                norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
                print(F.cross_entropy(model(x), y).item(), norm.item())
        """)
    assert "optimizer.zero_grad()" in text
    assert "memory.step(optimizer, zero_grad=False)" in text


@pytest.mark.parametrize("test", ["optimizer is None", "optimizer is not None"])
@pytest.mark.parametrize("data", ["", ".data"])
def test_gradients_that_branches_reset_by_hand_are_reset_ahead_of_the_loss(test, data):
    text = assert_trains_the_same(BY_HAND.format(test=test, data=data))
    assert text.index("zero_()") < text.index("loss = memory.forward_backward(")


def test_gradients_that_only_a_look_at_the_loss_resets_keep_it_in_place():
    _, loops = apply(BY_HAND.format(test="loss < 1", data=""))
    assert loops == [("in-place", "line 10 changes gradients, and shares names with lines ahead of it")]
