"""What a second loss alone is made of moves behind the backward of the first, where nothing sees the difference."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, parts_as_whole, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(8, 1))
second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(8, 1))
seen = [0]


def counted():
    seen[0] += 1
    return seen[0]


def slope(net, out):
    return net(out.expand(-1, 4)).detach().mean()


noise_like = torch.randn_like
mine = torch.optim.SGD(first.parameters(), lr=0.1)
other = torch.optim.SGD(second.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 1)) for _ in range(4)]
batches = iter(loader)
for x, y, target in loader:
    goal = target.clone()
    a_true = first(x)
    {between}
    # the second
    b_true = second(x)
    b_made = second(y)

    {behind}
    a_loss = F.mse_loss(a_true, goal) + a_true.square().mean()
    b_loss = F.mse_loss(b_true, goal) + b_made.square().mean()
    mine.zero_grad()
    other.zero_grad()
    a_loss.backward()
    {apart}
    b_loss.backward()
    mine.step()
    other.step()
    print(f"{{a_loss.item():.9f}} {{b_loss.item():.9f}} {{goal.sum().item():.9f}}")
"""
PLAIN = {"dropout": 0.0, "between": "pass", "behind": "pass", "apart": "pass"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.5},
        {"between": "a_true = a_true + 0.1 * first(y)"},
        {"behind": "print(f'{b_made.mean().item():.9f}')\n    scores = [b_true.sum().item()]"},
        {"behind": "b_made = b_made + 0.1 * torch.randn(len(y), 1)"},
        {"apart": "other.zero_grad()"},
    ],
    ids=str,
)
def test_two_losses_computed_ahead_of_both_backwards_are_functions_each(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    before = run(text)
    assert_same_bits(before, run(after.text, preset="off"))
    split = run(after.text)
    if not changes.get("dropout"):
        assert_close(before, split)
    assert split.calls_in_parts == 8


def test_what_moves_keeps_its_order_and_comments():
    text = rewritten(SCRIPT.format(**PLAIN).replace("    pass\n", "")).text
    assert (
        text[text.index("    def forward(") : text.index("    memory.step(mine")]
        == """\
    def forward(x, goal):
        a_true = first(x)

        a_loss = F.mse_loss(a_true, goal) + a_true.square().mean()
        return a_loss

    mine.zero_grad()
    other.zero_grad()
    a_loss = memory.forward_backward(forward, x, goal)

    def forward_2(x, y, goal):
        # the second
        b_true = second(x)
        b_made = second(y)
        b_loss = F.mse_loss(b_true, goal) + b_made.square().mean()
        return b_loss

    b_loss = memory.forward_backward(forward_2, x, y, goal)
"""
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"behind": "a_true = a_true + 0.1 * first(y)"},
        {"behind": "a_true = a_true + 0.1 * torch.randn(len(y), 1)"},
        {"behind": "goal = goal + b_made.detach().mean()"},
        {"behind": "goal.mul_(b_made.mean().item())"},
        {"behind": "a_true = a_true * b_made.item() if len(x) < 2 else a_true\n    goal = goal * 2"},
        {"behind": "second.eval()"},
        {"behind": "for p in second.parameters():\n        p.requires_grad = True"},
        {"behind": "b_true = b_true * (1 if first[0].bias.grad is None else first[0].bias.grad.norm())"},
        {"behind": "b_made = b_made * next(batches)[2]"},
        {"behind": "a_true = a_true * slope(first, a_true)"},
        {"behind": "a_true = a_true + noise_like(a_true)"},
        {"behind": "b_made = b_made * counted()\n    goal = goal * seen[0]"},
        {"behind": "b_made = b_made * seen[0]\n    goal = goal * counted()"},
        {"behind": "b_true.register_hook(lambda grad: grad * 2)"},
        {"apart": "b_loss = b_loss * first[0].bias.grad.norm()"},
        {"behind": "if b_made.mean() > 1e3:\n        continue"},
    ],
    ids=str,
)
def test_losses_that_may_see_the_difference_stay_in_place(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert after.text.index("b_true = ") < after.text.index("memory.backward(a_loss)")
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_losses_of_one_graph_stay_in_place():
    text = SCRIPT.format(**PLAIN | {"behind": "b_true = b_true + a_true"}).replace(
        "a_loss.backward()", "a_loss.backward(retain_graph=True)"
    )
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


STEP_BETWEEN = SCRIPT.replace("    mine.step()\n    other.step()", "    other.step()")
MINE = "mine = torch.optim.SGD(first.parameters(), lr=0.1)"


@pytest.mark.parametrize(
    "apart",
    [
        "mine.step()",
        "mine.step()\n    other.zero_grad()",
        "nn.utils.clip_grad_norm_(first.parameters(), 0.1)\n    mine.step()\n    other.zero_grad()",
        "mine.step()\n    goal = goal + first[0].bias.sum().item()",
    ],
)
def test_what_a_second_loss_is_made_of_moves_behind_the_step_of_another_network(apart):
    text = STEP_BETWEEN.format(**PLAIN | {"apart": apart})
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert after.text.index("memory.step(mine") < after.text.index("b_true = second(x)")
    assert parts_as_whole(text, after.text, after.text) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"b_true = second(x)": "b_true = second(x) * first[0].bias.detach().sum()"},
        {"b_true = second(x)": "weight = first[0].bias\n    b_true = second(x) * weight.detach().sum()"},
        {"b_true = second(x)": "b_true = second(x) * bias_of_first()"},
        {MINE: "mine = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)"},
        {MINE: f"second[0] = first[0]\n{MINE}"},
        {MINE: f"second[0].bias = first[0].bias\n{MINE}"},
    ],
    ids=str,
)
def test_what_may_read_a_network_that_is_stepped_stays_ahead_of_the_step(changes):
    text = STEP_BETWEEN.format(**PLAIN | {"apart": "mine.step()"})
    functions = "def bias_of_first():\n    return first[0].bias.detach().sum()\n\n\n"
    text = text.replace("seen = [0]", f"{functions}seen = [0]")
    for old, new in changes.items():
        text = text.replace(old, new)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert after.text.index("b_true = ") < after.text.index("memory.backward(a_loss)")


AHEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), {layer}])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Actor(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.mean = {body}, nn.Linear(4, 1)
        nn.init.normal_(self.mean.weight)

    def forward(self, x):
        return Normal(self.mean({seen}), 1.0)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(4), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)


actor = Actor(Block(4)).to("cpu")
critic = Critic()
mine = torch.optim.SGD(critic.parameters(), lr=0.1)
other = torch.optim.SGD(actor.parameters(), lr=0.1)
for x in torch.randn(4, 9, 4):
    action, target = x.sum(1, keepdim=True), x.prod(1, keepdim=True)
    policy = actor(x)
    log_prob = policy.log_prob(action)
    value_loss = F.mse_loss(critic({given}), target)
    policy_loss = -(log_prob * target).mean()
    mine.zero_grad()
    value_loss.backward()
    mine.step()
    other.zero_grad()
    policy_loss.backward()
    other.step()
    print(f"{{value_loss.item():.9f}} {{policy_loss.item():.9f}}")
"""
STEADY = {"layer": "nn.ReLU()", "body": "Block(4)", "seen": "self.body(x)", "given": "x"}
DRAWN = {"given": "F.dropout(x, 0.5)"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer": "nn.Sequential(nn.LayerNorm(width), nn.GELU())"}, {"seen": "F.dropout(self.body(x), 0.0)"}],
    ids=str,
)
def test_a_network_that_draws_nothing_may_run_behind_the_one_it_ran_ahead_of(changes):
    text = AHEAD.format(**STEADY | changes)
    after = rewritten(text)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": "nn.Dropout(0.5)"},
        {"layer": "nn.RReLU()"},
        {"layer": "nn.TransformerEncoderLayer(width, 1)"},
        {"body": "body", **DRAWN},
        {"seen": "F.dropout(self.body(x), 0.5)", **DRAWN},
        {"seen": "self.body(x + 0.1 * torch.randn_like(x))", **DRAWN},
        {"seen": "self.body(x + x.clone().normal_())", **DRAWN},
        {"given": "x + 0 * policy.mean.detach()", "layer": "nn.BatchNorm1d(width)"},
    ],
    ids=str,
)
def test_a_network_that_may_draw_and_one_that_is_seen_first_stay_ahead(changes):
    text = AHEAD.format(**STEADY | changes)
    after = rewritten(text)
    ahead = text[: text.index("policy = actor")].count("\n") + 1
    told = f"line {ahead} runs the network of a later loss ahead of an earlier one"
    [loop] = after.loops
    assert loop.rewrite == "in-place" and (loop.reason.endswith(told) or "policy" in changes.get("given", "")), (
        loop.reason
    )
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize("changes", [{}, {"layer": "nn.Dropout(0.5)"}], ids=str)
def test_backwards_that_share_their_lines_with_steps_get_lines_of_their_own(changes):
    text = AHEAD.format(**STEADY | changes)
    for joined in ("mine.zero_grad()\n    value_loss.backward()", "other.zero_grad()\n    policy_loss.backward()"):
        text = text.replace(joined, joined.replace("\n    ", "; "))
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place" if changes else "micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_network_whose_hook_draws_runs_where_it_did():
    hook = "lambda net, given: (F.dropout(given[0], 0.5),)"
    hooks = f"for net in (actor, critic):\n    net.register_forward_pre_hook({hook})\n"
    text = AHEAD.format(**STEADY).replace("mine = ", f"{hooks}mine = ")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


HANDED = """\
import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(0)


def train(batches, one, other, first, second):
    for x, y in batches:
        a = one(x)
        loss_a = F.l1_loss(a, y)
        b = other(x)
        loss_b = F.l1_loss(b, y)
        first.zero_grad()
        loss_a.backward()
        first.step()
        second.zero_grad()
        loss_b.backward()
        second.step()
        print(f"{{loss_a.item():.9f}} {{loss_b.item():.9f}}")


def run():
    left, right = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    of_left = optim.Adam(left.parameters(), lr=0.1)
    of_right = optim.Adam({of_right}.parameters(), lr=0.1)
    {call}


run()
"""
DATA = "[(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]"
CALL = f"train({DATA}, left, right, of_left, of_right)"


def test_optimizers_and_networks_that_a_function_is_given_are_those_of_its_calls():
    text = HANDED.format(of_right="right", call=CALL)
    after = rewritten(text, micro_batches=3)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"call": f"train({DATA}, left, left, of_left, of_right)"},
        {"call": f"train(*({DATA}, left, right, of_left, of_right))"},
        {"call": f"{CALL}\n    for function in (train,):\n        function({DATA}, right, right, of_right, of_left)"},
    ],
    ids=str,
)
def test_networks_that_a_function_may_be_given_twice_stay_ahead_of_the_step(changes):
    text = HANDED.format(**{"of_right": "right", "call": CALL} | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert after.text.index("b = other(x)") < after.text.index("memory.backward(loss_a)")
