"""`train()` and `eval()` of networks around a loss."""

import pytest

from tests.rewrite.small_loops import apply, assert_trains_the_same

LOOP = """\
fine = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
for x, y in loader * 3:
    {ahead}
    out = model(x)
    {between}
    loss = {loss}
    {last}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), fine.training)
"""


def loop(ahead="pass", between="pass", last="pass", loss="F.cross_entropy(fine(out), y)") -> str:
    return LOOP.format(ahead=ahead, between=between, last=last, loss=loss)


def test_a_network_switched_in_a_branch_stays_ahead_of_what_it_is_given_to():
    given = loop("model.train()\n    if fine:\n        model.train()").replace("model(x)", "runs['go'](model, x)")
    text = assert_trains_the_same(f"runs = dict(go=lambda network, x: network(x))\n{given}")
    assert text.index("if fine:") < text.index("def forward(")


@pytest.mark.parametrize("switch", ["fine.eval()", "fine.train()"])
def test_a_network_switched_right_ahead_of_the_backward_is_switched_behind_it(switch):
    text = assert_trains_the_same(loop(last=switch))
    assert text.index("memory.forward_backward(") < text.index(switch)


@pytest.mark.parametrize("loss", ["F.cross_entropy(fine(out), y)", "F.cross_entropy(fine(out.abs()), y)"])
def test_a_network_that_nothing_runs_behind_its_switch_is_switched_behind_the_backward(loss):
    text = assert_trains_the_same(loop(between="model.train()", loss=loss))
    assert text.index("memory.forward_backward(") < text.index("model.train()")


@pytest.mark.parametrize(
    ("switch", "loss"),
    [
        ("fine.eval()", "F.cross_entropy(fine(out), y)"),
        ("model.train()", "F.cross_entropy(scaled(out), y)"),
        ("model.train()", "criterion(out, y)"),
        ("whole.train()", "F.cross_entropy(fine(out), y)"),
    ],
)
def test_a_network_switched_ahead_of_what_may_look_at_its_mode_keeps_the_loss_in_place(switch, loss):
    """One that runs again, a function of the file, a criterion of another file, a network with the other in it."""
    ahead = "def scaled(out):\n    return out if model.training else out * 2\n\n\nwhole = nn.Sequential(model, fine)\n"
    text = LOOP.replace("for x, y", f"{ahead}for x, y", 1).format(ahead="pass", between=switch, last="pass", loss=loss)
    _, loops = apply("from losses import criterion\n" + text)
    assert loops[0][0] == "in-place"
    assert "switches layers or gradients between forward and backward" in str(loops[0][1])


@pytest.mark.parametrize("switch", ["fine.requires_grad_(False)", "if loss > 9:\n        fine.eval()"])
def test_what_else_is_switched_ahead_of_the_backward_keeps_the_loss_in_place(switch):
    _, loops = apply(loop(last=switch))
    assert loops[0] == ("in-place", "line 14 switches layers or gradients between forward and backward")


OWN = """\
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def train(self, batch):
        return F.cross_entropy(self.layer(batch[0]), batch[1])


net = Own()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for batch in loader * 3:
    loss = net.train(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def test_a_method_that_computes_the_loss_under_the_name_of_a_switch_is_part_of_it():
    assert "        loss = net.train(batch)\n" in assert_trains_the_same(OWN)
