"""Loops with several backwards, and backwards that several loops share."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP, apply

GAN = """\
critic = nn.Linear(2, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in loader:
    critic_optimizer.zero_grad()
    fake = model(x)
    critic(fake.detach()).mean().backward()
    critic_optimizer.step()
    optimizer.zero_grad()
    loss = -critic(fake).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("second", ["critic(fake)", "critic(again)"])
def test_backwards_through_one_forward_stay_in_place_and_keep_their_gradient_resets(second):
    loss = GAN.replace("critic(fake)", second).replace("    loss =", "    again = fake * 2\n    loss =")
    text, forms = apply(loss.replace("    optimizer.zero", "    model.zero"))
    assert forms == [("in-place", "it has 2 backwards (line 13, line 18); one goes through what another has computed")]
    assert "memory.backward(critic(fake.detach()).mean())\n" in text
    assert "critic_optimizer.zero_grad()\n" in text and "    model.zero_grad()\n" in text


def test_backwards_with_forwards_of_their_own_become_functions_each():
    text, forms = apply(GAN.replace("critic(fake)", "critic(model(x))"))
    assert forms == [("micro-batched", None)]
    assert text.endswith("""\
for x, y in loader:
    critic_optimizer.zero_grad()

    def forward(x):
        fake = model(x)
        return critic(fake.detach()).mean()

    memory.forward_backward(forward, x)
    memory.step(critic_optimizer)
    optimizer.zero_grad()

    def forward_2(x):
        loss = -critic(model(x)).mean()
        return loss

    memory.forward_backward(forward_2, x)
    memory.step(optimizer)
""")


def test_a_loss_that_takes_only_numbers_of_an_earlier_one_is_its_own():
    _, forms = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            first = F.cross_entropy(model(x), y)
            first.backward()
            print(first.item())
            if first > 0:
                second = F.cross_entropy(model(x + 1), y)
                second.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]


def test_loops_that_share_their_backward_have_one_form():
    _, forms = apply("""\
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        for x, y in loader:
            step(x, y)
        for i in range(3):
            step(*loader[i])
        """)
    assert forms == [("micro-batched", None)] * 2


def test_the_backward_of_an_optimizer_stays_beside_that_of_the_loss_unscaled():
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if args.fp16:
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        """)
    )
    assert [loop.rewrite for loop in result.loops] == ["in-place"]
    assert result.loops[0].notes[0].endswith("`optimizer.backward` in line 12 scales the loss by itself")
    assert "    if args.fp16:\n        optimizer.backward(loss)\n" in result.text
    assert "    else:\n        memory.backward(loss)\n" in result.text
