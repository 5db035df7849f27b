"""Models of loops in place run in the preset's precision, where nothing else decides it."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten

TOP = """\
import torch
from torch import nn

net, critic = nn.Linear(4, 2).cuda(), nn.Linear(2, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


def loop_of(body: str) -> str:
    result = rewritten(TOP + textwrap.dedent(body))
    assert [loop.rewrite for loop in result.loops] == ["in-place"], result.loops
    assert rewritten(result.text).text == result.text
    return result.text[result.text.index("\nfor ") + 1 :]


def test_calls_of_models_go_through_the_manager_each_where_it_stands():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            self.fake = net(x)  # [batch, 2]
            score = critic(
                self.fake.detach(),
            ).mean()
            loss = critic(input=self.fake).mean() + net().sum() + score
            loss.backward()
            optimizer.step()
        """)
    assert text == textwrap.dedent("""\
        for x, y in loader:
            self.fake = memory.forward(net, x)  # [batch, 2]
            score = memory.forward(
                critic,
                self.fake.detach(),
            ).mean()
            loss = memory.forward(
                critic, input=self.fake
            ).mean() + memory.forward(net).sum() + score
            memory.backward(loss)
            memory.step(optimizer)
        """)


def test_an_average_that_is_given_the_network_is_no_call_of_it():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            self.fake = net(x)
            loss = critic(self.fake).mean()
            loss.backward()
            optimizer.step()
            ema_model(net)
        """)
    assert "memory.forward(net, x)" in text
    assert "\n    ema_model(net)\n" in text


def test_models_under_the_scripts_own_autocast_keep_their_call():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                self.fake = net(x)
            loss = critic(self.fake).mean()
            loss.backward()
            optimizer.step()
        """)
    assert "self.fake = net(x)" in text and "memory.forward(critic, self.fake)" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [(".cuda()", ""), ("import torch\n", "import torch\ngrad = torch.autograd.grad\ncreate_graph = True\n")],
)
def test_models_on_the_cpu_and_gradients_that_are_differentiated_again_keep_fp32(old, new):
    body = "for x, y in loader:\n    self.out = net(x)\n    self.out.sum().backward()\n    optimizer.step()\n"
    after = rewritten((TOP + body).replace(old, new))
    assert after.loops[0].rewrite == "in-place"
    assert "memory.backward(" in after.text and "memory.forward(" not in after.text


def test_models_of_other_loops_and_of_evaluation_keep_their_call():
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        for x, y in loader:
            self.out = net(x)
            self.out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for x, y in loader:
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            for x, y in loader:
                print(net(x))
        """)
    )
    assert [loop.rewrite for loop in result.loops] == ["in-place", "micro-batched"]
    assert result.text.count("memory.forward(") == 1


def test_a_method_that_computes_the_loss_too_keeps_its_call():
    text = loop_of("""\
        for x, y in loader:
            self.fake = net.encode(x)
            loss = net.forward_loss(x, y) + self.fake.sum()
            loss.backward()
            optimizer.step()
        """)
    assert "self.fake = memory.forward(net.encode, x)\n" in text
    assert "loss = net.forward_loss(x, y) + self.fake.sum()\n" in text


@pytest.mark.parametrize(
    ("taken", "wrapped"),
    [
        ("g = torch.autograd.grad(loss, net.weight)", False),
        ("g = torch.autograd.grad(outputs=loss, inputs=net.weight)", False),
        ("g = flat_grads(net(x).sum(), net).detach()", False),
        ("set_requires_grad(net, False)", True),
        ("norm = clip_grad(net.parameters())", True),
        ("log_gradients(net)", True),
        ("norm = monitor.mean_grad()", True),
        ("shown = policy_gradient(loss.detach(), y)", True),
    ],
)
def test_models_whose_gradients_the_script_takes_itself_keep_their_precision(taken, wrapped):
    """The manager scales the losses of backwards that it runs, and no others: in fp16 those gradients underflow."""
    text = loop_of(f"""\
        for x, y in loader:
            optimizer.zero_grad()
            self.fake = net(x)
            loss = self.fake.mean()
            loss.backward(retain_graph=True)
            {taken}
            optimizer.step()
        """)
    assert ("memory.forward(net, x)" in text) == wrapped


TRAINER = """\
import torch
from networks import Net, criterion


class Trainer:
    def __init__(self, rate):
        self.model = Net().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate)

    def optimize(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def predict(self, x):
        out = {call}
        return torch.softmax(out, 1), out

    def train(self, loader):
        for x, y in loader:
            _, out = self.predict(x)
            self.optimize(criterion(out, y))
{more}
    def validate(self, loader):
        with torch.no_grad():
            for x, y in loader:
                print(self.predict(x))
"""


@pytest.mark.parametrize(
    ("call", "wrapped"),
    [
        ("self.model(x)", "memory.forward(self.model, x)"),
        ("self.model.forward(x)", "memory.forward(self.model.forward, x)"),
        ("self.model.encode(x)", "memory.forward(self.model.encode, x)"),
    ],
)
def test_a_model_that_a_helper_of_the_loop_calls_goes_through_the_manager_there(call, wrapped):
    result = rewritten(TRAINER.format(call=call, more=""))
    assert [loop.rewrite for loop in result.loops] == ["in-place"]
    assert f"        out = {wrapped}\n" in result.text


def test_a_helper_that_a_micro_batched_loop_calls_too_keeps_its_call():
    more = """
    def warm_up(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            _, out = self.predict(x)
            loss = criterion(out, y)
            loss.backward()
            self.optimizer.step()
"""
    result = rewritten(TRAINER.format(call="self.model(x)", more=more))
    assert sorted(loop.rewrite for loop in result.loops) == ["in-place", "micro-batched"]
    assert "out = self.model(x)\n" in result.text


def test_parts_of_a_model_in_sight_keep_their_call():
    code = TRAINER.format(call="self.model(x)", more="").replace(
        "from networks import Net, criterion\n",
        "from networks import Encoder, criterion\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.encoder = Encoder()\n\n    def forward(self, x):\n"
        "        return self.encoder(x)\n",
    )
    text = rewritten(code).text
    assert "return self.encoder(x)\n" in text and "out = memory.forward(self.model, x)\n" in text
