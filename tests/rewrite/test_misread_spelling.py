"""Calls whose names look like a step, a change in place, or several losses, and are none of these."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP, apply, assert_trains_the_same

LOOP = """\
class Metrics:
    def __init__(self):
        self.seen = []

    def step(self, *values, **named):
        self.seen.append((len(values), len(named)))

metrics = early = Metrics()
for x, y in loader * 3:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    {between}
    {backward}
    optimizer.step()
    print(loss.item(), metrics.seen)
"""


def loop(between: str = "pass", backward: str = "loss.backward()") -> str:
    return LOOP.format(between=between, backward=backward)


@pytest.mark.parametrize("told", ["loss=loss", "loss", "1", "{'loss': loss}"])
def test_metrics_whose_step_is_told_a_loss_are_no_optimizer(told):
    text = assert_trains_the_same(loop(f"metrics.step({told})"))
    assert text.index("forward_backward(") < text.index(f"metrics.step({told})")


@pytest.mark.parametrize("step", ["metrics.step()", "early.step(loss)", "metrics.step(optimizer)"])
def test_a_step_that_is_told_nothing_or_of_another_object_keeps_the_loss_in_place(step):
    _, loops = apply(loop(step))
    assert loops[0][0] == "in-place" and loops[0][1].startswith("line 19")


@pytest.mark.parametrize("given", ["(loss,)", "[loss]", "loss"])
def test_a_functional_backward_of_one_tensor_is_its_method(given):
    text = assert_trains_the_same(loop(backward=f"torch.autograd.backward({given})"))
    assert "autograd" not in text


@pytest.mark.parametrize("given", ["(loss, other)", "losses", "[*losses]", "loss, torch.ones(())", "tensors=loss"])
def test_a_functional_backward_of_more_than_one_tensor_stays(given):
    two = "other = loss * 2; losses = [loss, other]"
    _, loops = apply(loop(two, f"torch.autograd.backward({given})"))
    assert loops[0] == ("none", "`torch.autograd.backward` in line 20 may differentiate several tensors")


FITTED = """\
class Fitted:
    def fit(self):
        self.model_ = nn.Linear(4, 2)
        self.shift = torch.zeros(2)
        optimizer = torch.optim.SGD(self.model_.parameters(), lr=0.1)
        for x, y in loader * 3:
            out = self.model_(x)
            {more}
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())

Fitted().fit()
"""


def test_a_network_whose_name_ends_in_an_underscore_is_no_change_in_place():
    assert_trains_the_same(FITTED.format(more="out = out * 2"))


def test_a_method_whose_name_does_is_one():
    _, loops = apply(FITTED.format(more="out = out + self.shift.add_(1)"))
    assert loops == [("in-place", "line 15 changes self.shift, which was made outside of the slice")]


CRITIC = """\
critic = nn.Linear(2, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in loader * 3:
    for _ in range(2):
        score = critic(x[:, :2]).mean() - critic(model(x).detach()).mean()
        {reset}
        score.backward()
        critic_optimizer.step()
    model.zero_grad()
    loss = critic(model(x)).mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("reset", ["critic.zero_grad()", "critic_optimizer.zero_grad()"])
def test_a_network_whose_gradients_an_inner_loop_resets_is_not_changed_by_that(reset):
    text = TOP + CRITIC.format(reset=reset)
    after = rewritten(text)
    assert [found.rewrite for found in after.loops] == ["micro-batched"] * 2
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)
