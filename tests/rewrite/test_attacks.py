"""Losses of inputs that another backward has made: adversarial training, the attack in the loop or in a function."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP

ON_ITS_OWN_GRADIENTS = """\
def attacked(net, x, y):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(net(x), y)
    net.zero_grad()
    loss.backward()
    return (x + 0.1 * x.grad.sign()).detach()

for x, y in loader * 3:
    harder = attacked(model, x, y)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(harder), y) + F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""

IN_THE_LOOP = """\
for x, y in loader * 3:
    moved = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        wrong = F.cross_entropy(model(x + moved), y)
        wrong.backward()
        moved.data = moved.data + 0.1 * moved.grad.sign()
        moved.grad.zero_()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x + moved.detach()), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""

BY_FUNCTIONAL_GRADIENTS = """\
for x, y in loader * 3:
    harder = x.clone().requires_grad_(True)
    for _ in range(2):
        wrong = F.cross_entropy(model(harder), y)
        (gradient,) = torch.autograd.grad(wrong, harder)
        harder = (harder + 0.1 * gradient.sign()).detach().requires_grad_(True)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(harder), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


IN_STEPS_OF_A_FUNCTION = """\
def attacked(net, samples, labels):
    samples = samples.clone()
    labels = labels.to("cpu")
    for _ in range(2):
        samples.requires_grad = True
        scores = net(samples)
        wrong = F.cross_entropy(scores, labels)
        net.zero_grad()
        wrong.backward()
        samples = (samples + 0.1 * samples.grad.sign()).detach()
    return samples

for x, y in loader * 3:
    harder = attacked(model, x, y)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(harder), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("body", [ON_ITS_OWN_GRADIENTS, IN_THE_LOOP, BY_FUNCTIONAL_GRADIENTS])
def test_an_attack_stays_ahead_of_the_loss_and_of_the_reset_of_gradients(body):
    after = rewritten(TOP + body)
    assert {loop.rewrite for loop in after.loops} == {"micro-batched"}
    before = run(TOP + body)
    assert_same_bits(before, run(after.text, preset="off"))
    split = run(rewritten(TOP + body, micro_batches=3).text)
    assert split.calls_in_parts >= 3
    assert_close(before, split)


def test_what_the_steps_of_an_attack_compare_with_is_cut_as_their_samples_are():
    after = rewritten(TOP + IN_STEPS_OF_A_FUNCTION)
    assert "memory.forward_backward(forward, samples, labels)" in after.text
    before = run(TOP + IN_STEPS_OF_A_FUNCTION)
    assert_same_bits(before, run(after.text, preset="off"))
    split = run(rewritten(TOP + IN_STEPS_OF_A_FUNCTION, micro_batches=3).text)
    assert split.calls_in_parts == 9
    assert_close(before, split)


def test_an_attack_whose_graph_the_loss_goes_through_is_part_of_it():
    body = BY_FUNCTIONAL_GRADIENTS.replace("(wrong, harder)", "(wrong, harder, create_graph=True)")
    after = rewritten(TOP + body.replace(".detach().requires_grad_(True)", ""))
    assert after.text.index("def forward(") < after.text.index("for _ in range(2)")


def test_a_network_that_another_backward_goes_through_later_is_part_of_the_loss():
    after = rewritten(
        TOP
        + """\
encoder = nn.Linear(4, 4)
for x, y in loader:
    h = encoder(x)
    loss = F.cross_entropy(model(h), y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    h.mean().backward()
    optimizer.step()
"""
    )
    assert [loop.rewrite for loop in after.loops] == ["in-place"]


OUT_OF_SIGHT = """\
import types
library = types.ModuleType("library")
exec('''
import torch.nn.functional as F
class Attack:
    def __init__(self, net):
        self.net = net
    def __call__(self, x, y):
        x = x.clone().requires_grad_()
        F.cross_entropy(self.net(x), y).backward()
        return (x + 0.1 * x.grad.sign()).detach()
''', library.__dict__)
attack = library.Attack(model)

for x, y in loader * 3:
    harder = {attacked}(x, y)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(harder), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("attacked", ["attack", "library.Attack(model)"])
def test_gradients_are_reset_behind_an_attack_out_of_sight(attacked):
    text = TOP + OUT_OF_SIGHT.replace("{attacked}", attacked)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    "behind", ["harder = attack(x, y)", "library.Attack(model)(x, y)", "harder = handed_on(model, x, y)"]
)
@pytest.mark.parametrize("margin", ["    ", ""])
def test_gradients_are_reset_ahead_of_the_loss_where_something_out_of_sight_may_leave_some(behind, margin):
    """In the loop, or once behind it: the first batch of the next epoch must not get those gradients."""
    text = TOP + OUT_OF_SIGHT.replace("    harder = {attacked}(x, y)\n", "").replace("model(harder)", "model(x)")
    loop = text.index("for x, y in")
    epoch = f"{text[loop:]}{margin}{behind}\n".replace("\n", "\n    ")
    own = "def handed_on(net, x, y):\n    return library.Attack(net)(x, y)\n\n"
    text = f"{text[:loop]}{own}for epoch in range(2):\n    {epoch}".rstrip() + "\n"
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "optimizer.zero_grad()" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


PENALTY = """\
def penalty(x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, {kept})
    return slope.norm(dim=1).mean()

for x, y in loader:
    steep = penalty(x)
    noise = torch.rand_like(x)
    loss = F.cross_entropy(model(x + noise), y) + steep
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("kept", ["create_graph=True", "create_graph=kept", "**{'create_graph': True}"])
def test_a_network_whose_gradient_keeps_its_graph_runs_in_the_function(kept):
    text = rewritten(TOP + PENALTY.format(kept=kept)).text
    assert text.index("def forward(x, y):") < text.index("steep = penalty(x)")


def test_a_network_whose_gradient_keeps_no_graph_runs_ahead_of_it():
    text = rewritten(TOP + PENALTY.format(kept="create_graph=False")).text
    assert text.index("steep = penalty(x)") < text.index("def forward(x, noise, y, steep):")


UNDER_AUTOCAST = """\
for x, y in loader * 3:
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=False):
        harder = x.clone().detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(harder), y), harder)
        harder = (harder + 0.1 * gradient.sign()).detach()
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(harder), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def test_an_attack_on_a_copy_under_autocast_is_split_with_the_loss():
    after = rewritten(TOP + UNDER_AUTOCAST, micro_batches=2)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    before = run(TOP + UNDER_AUTOCAST)
    assert_same_bits(before, run(rewritten(TOP + UNDER_AUTOCAST).text, preset="off"))
    split = run(after.text)
    assert split.calls_in_parts
    assert_close(before, split)


def test_gradients_switched_on_for_the_batch_itself_stay_in_place():
    text = TOP + UNDER_AUTOCAST.replace("harder = x.clone().detach()", "harder = x")
    assert [loop.rewrite for loop in rewritten(text).loops] == ["in-place"]
