"""Models that rewritten loops train are prepared once, ahead of their optimizer, under the name they have there."""

import itertools
import textwrap

import pytest

from oomfix.rewrite.apply import apply_to
from oomfix.rewrite.options import Options
from oomfix.rules import all_rules
from oomfix.source import Source

LOOP = """
def train(network, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(network(x), y)
        loss.backward()
        optimizer.step()
"""


def prepared(text: str) -> list[tuple[str, str]]:
    """Each call of `memory.prepare` in the rewritten script, with the line that follows it."""
    source = Source.from_bytes("train.py", ("import torch\n" + textwrap.dedent(text)).encode())
    lines = [line.strip() for line in apply_to(source, all_rules(), Options("16gb")).text.splitlines()]
    return [(line, after) for line, after in itertools.pairwise(lines) if line.startswith("memory.prepare")]


def test_a_model_is_prepared_under_its_name_in_the_caller():
    text = LOOP + "net = Net().cuda()\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\ntrain(net, loader, opt)\n"
    assert prepared(text) == [("memory.prepare(net)", "opt = torch.optim.SGD(net.parameters(), lr=0.1)")]


def test_a_model_of_the_same_name_that_no_loop_trains_is_left_alone():
    text = LOOP + "other = Net()\nnet = Net().cuda()\nopt2 = torch.optim.SGD(other.parameters(), lr=0.1)\n"
    text += "train(net, loader, torch.optim.SGD(net.parameters(), lr=0.1))\n"
    assert [call for call, _ in prepared(text)] == ["memory.prepare(net)"]


@pytest.mark.parametrize(
    "given",
    [
        "[*net.parameters(), *criterion.parameters()]",
        '[{"params": net.encoder.parameters()}, {"params": net.decoder.parameters(), "lr": 1}]',
        "params=net.parameters()",
        "[p for p in net.parameters() if p.requires_grad]",
    ],
)
def test_parameters_are_found_in_groups_and_lists(given):
    text = LOOP + f"net = Net().cuda()\nopt = torch.optim.SGD({given}, lr=0.1)\ntrain(net, loader, opt)\n"
    assert [call for call, _ in prepared(text)] == ["memory.prepare(net)"]


@pytest.mark.parametrize(
    ("ahead", "given", "expected"),
    [
        ("pass", "detector.model.parameters()", "memory.prepare(detector.model)"),
        ("detector.load_state_dict(state)", "detector.model.parameters()", "memory.prepare(detector)"),
        ("pass", "detector.parameters()", "memory.prepare(detector)"),
    ],
)
def test_what_only_runs_a_forward_may_be_no_model_where_it_holds_one(ahead, given, expected):
    text = f"from detectors import Detector\ndetector = Detector()\n{ahead}\n"
    text += f"opt = torch.optim.SGD({given}, lr=0.1)\ntrain(detector, loader, opt)\n"
    assert [call for call, _ in prepared(LOOP.replace("network(x)", "network.forward(x)") + text)] == [expected]


def test_parameters_are_followed_through_a_name():
    text = LOOP + "net = Net().cuda()\nchosen = [p for p in net.parameters()]\n"
    text += "opt = torch.optim.SGD(chosen, lr=0.1)\ntrain(net, loader, opt)\n"
    assert prepared(text) == [("memory.prepare(net)", "opt = torch.optim.SGD(chosen, lr=0.1)")]


def test_asking_a_model_for_its_device_is_no_optimizer_of_it():
    text = LOOP + "net = Net().cuda()\ndevice = next(net.parameters()).device\noptimizer = make(device)\n"
    assert prepared(text + "train(net, loader, optimizer)\n") == []


def test_a_function_that_makes_the_optimizer_is_enough():
    text = LOOP + "net = Net().cuda()\noptimizer = make(args, net)\ntrain(net, loader, optimizer)\n"
    assert prepared(text) == [("memory.prepare(net)", "optimizer = make(args, net)")]


def test_a_model_that_makes_its_own_optimizer_is_prepared_first():
    text = LOOP + "net = Net().cuda()\nopt = net.configure_optimizers(0.1)\ntrain(net, loader, opt)\n"
    assert prepared(text) == [("memory.prepare(net)", "opt = net.configure_optimizers(0.1)")]


def test_a_model_is_prepared_ahead_of_an_if_whose_elifs_choose_the_optimizer():
    text = """
net = Net().cuda()
if given:
    opt = load(path)
elif adam:
    opt = torch.optim.Adam(net.parameters())
elif nesterov:
    opt = torch.optim.SGD(net.parameters(), nesterov=True)
"""
    assert prepared(LOOP + text + "train(net, loader, opt)\n") == [("memory.prepare(net)", "if given:")]


def test_branches_that_choose_an_optimizer_are_preceded():
    text = (
        LOOP
        + """
net = Net().cuda()
if adam:
    opt = torch.optim.Adam(net.parameters())
elif nesterov:
    opt = torch.optim.SGD(net.parameters(), nesterov=True)
else:
    opt = torch.optim.SGD(net.parameters())
train(net, loader, opt)
"""
    )
    assert prepared(text) == [("memory.prepare(net)", "if adam:")]


def test_what_is_around_such_branches_may_make_the_model():
    text = """
        if __name__ == "__main__":
            net = Net().cuda()
            if adam:
                opt = torch.optim.Adam(net.parameters())
            elif nesterov:
                opt = torch.optim.SGD(net.parameters(), nesterov=True)
            else:
                opt = torch.optim.SGD(net.parameters())
            train(net, loader, opt)
    """
    assert prepared(LOOP + textwrap.dedent(text)) == [("memory.prepare(net)", "if adam:")]


def test_branches_that_make_the_model_prepare_it_each():
    text = (
        LOOP
        + """
if resume:
    net = load()
    opt = torch.optim.Adam(net.parameters())
else:
    net = Net()
    opt = torch.optim.Adam(net.parameters())
train(net, loader, opt)
"""
    )
    assert prepared(text) == [("memory.prepare(net)", "opt = torch.optim.Adam(net.parameters())")] * 2


@pytest.mark.parametrize(("makes", "ahead"), [("self.net = Net()", True), ("self.build()", True), ("pass", False)])
def test_branches_that_make_an_attribute_of_an_object_prepare_it_each(makes, ahead):
    text = f"""
        class Trainer:
            def __init__(self, adam, net):
                self.net = net
                if adam:
                    {makes}
                    self.opt = torch.optim.Adam(self.net.parameters())
                else:
                    self.opt = torch.optim.SGD(self.net.parameters())

            def build(self):
                self.net = Net()

            def fit(self, loader):
                for x in loader:
                    self.opt.zero_grad()
                    loss = self.net(x.cuda()).mean()
                    loss.backward()
                    self.opt.step()
    """
    followed = [f"self.opt = torch.optim.{kind}(self.net.parameters())" for kind in ("Adam", "SGD")]
    calls = [("memory.prepare(self.net)", line) for line in (followed if ahead else ["if adam:"])]
    assert prepared(textwrap.dedent(text)) == calls


def test_branches_that_make_an_item_prepare_it_each():
    text = """
        nets = {}
        if adam:
            nets["a"] = Net()
            opt = torch.optim.Adam(nets["a"].parameters())
        else:
            nets["a"] = Net()
            opt = torch.optim.SGD(nets["a"].parameters())
        train(nets["a"], loader, opt)
    """
    assert [after.split("(")[0] for _, after in prepared(LOOP + textwrap.dedent(text))] == [
        "opt = torch.optim.Adam",
        "opt = torch.optim.SGD",
    ]


def test_branches_that_make_the_model_are_each_preceded_ahead_of_their_own():
    text = """
        if resume:
            net = load()
            if adam:
                opt = torch.optim.Adam(net.parameters())
            else:
                opt = torch.optim.SGD(net.parameters())
        else:
            net = Net()
            opt = torch.optim.Adam(net.parameters())
        train(net, loader, opt)
    """
    assert prepared(LOOP + textwrap.dedent(text)) == [
        ("memory.prepare(net)", "if adam:"),
        ("memory.prepare(net)", "opt = torch.optim.Adam(net.parameters())"),
    ]


def test_a_network_that_trains_itself_is_prepared_by_who_calls_it():
    text = """
class Net(torch.nn.Module):
    def losses(self, x):
        return self.layer(x).mean()

    def train_loop(self, loader, optimizer):
        for x in loader:
            optimizer.zero_grad()
            loss = self.losses(x)
            loss.backward()
            optimizer.step()

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train_loop(loader, optimizer)
"""
    assert [call for call, _ in prepared(text)] == ["memory.prepare(model)"]


def test_a_trainer_that_is_given_its_model_prepares_it():
    text = """
class Trainer:
    def __init__(self, net):
        self.net = net.to("cuda")
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def epoch(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.net(x), y)
            loss.backward()
            self.optimizer.step()
"""
    assert [call for call, _ in prepared(text)] == ["memory.prepare(net)"]


def test_a_comment_stays_with_its_optimizer():
    text = (
        LOOP + "net = Net().cuda()\n# the optimizer\nopt = torch.optim.SGD(net.parameters())\ntrain(net, loader, opt)\n"
    )
    assert prepared(text) == [("memory.prepare(net)", "# the optimizer")]


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        ("net = Net()\n\n# SGD\n", "net = Net()\n\nmemory.prepare(net)\n\n# SGD\n"),
        ("net = Net()\n# SGD\n", "net = Net()\nmemory.prepare(net)\n# SGD\n"),
        ("net = Net()\n\n", "net = Net()\n\nmemory.prepare(net)\n"),
    ],
)
def test_a_paragraph_keeps_its_comment_at_its_head(above, expected):
    """What stands between a blank line and the comment below it is a paragraph of its own."""
    made = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    source = Source.from_bytes("train.py", f"import torch\n{LOOP}{above}{made}train(net, loader, opt)\n".encode())
    assert f"\n{expected}{made}" in apply_to(source, all_rules(), Options("16gb")).text


def test_models_of_a_paragraph_are_prepared_together():
    loop = """
    import torch
    a, b = Net(), Net()

    # Adam for both
    one = torch.optim.Adam(a.parameters())
    two = torch.optim.Adam(b.parameters())
    for x, y in loader:
        one.zero_grad()
        two.zero_grad()
        loss = criterion(b(a(x)), y)
        loss.backward()
        one.step()
        two.step()
    """
    source = Source.from_bytes("train.py", textwrap.dedent(loop).encode())
    text = apply_to(source, all_rules(), Options("16gb")).text
    assert "\n\nmemory.prepare(a)\nmemory.prepare(b)\n\n# Adam for both\n" in text


@pytest.mark.parametrize(
    "made",
    [
        "opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]",
        "make = lambda net: torch.optim.SGD(net.parameters(), lr=0.1)",
        "chosen = [p for net in nets for p in net.parameters()]\nopt = torch.optim.SGD(chosen, lr=0.1)",
    ],
)
def test_a_name_that_only_a_comprehension_knows_is_not_prepared(made):
    assert prepared(LOOP.replace("network", "net") + f"nets = [Net()]\n{made}\nfor net in nets: pass\n") == []


def test_a_model_that_one_branch_alone_makes_is_not_prepared_behind_it():
    text = (
        LOOP
        + """
net = Net()
if two:
    other = Net()
    chosen = [*net.parameters(), *other.parameters()]
else:
    chosen = net.parameters()
opt = torch.optim.SGD(chosen, lr=0.1)
train(net, loader, opt)
train(other, loader, opt)
"""
    )
    assert [call for call, _ in prepared(text)] == ["memory.prepare(net)"]


def test_models_whose_optimizers_are_made_in_a_row_are_prepared_ahead_of_the_row():
    text = LOOP + "a, b = Net(), Net()\n# Adam for both\none = torch.optim.Adam(a.parameters())\n"
    text += "two = torch.optim.Adam(b.parameters())\ntrain(a, loader, one)\ntrain(b, loader, two)\n"
    assert prepared(text) == [("memory.prepare(a)", "memory.prepare(b)"), ("memory.prepare(b)", "# Adam for both")]
    between = text.replace("two =", "b = b.cuda()\ntwo =")
    assert prepared(between)[1] == ("memory.prepare(b)", "two = torch.optim.Adam(b.parameters())")


@pytest.mark.parametrize(
    ("comment", "follows"),
    [
        ("# rate = 0.1", "opt = "),
        ("# opt = torch.optim.SGD(net.parameters(), lr=0.1)", "# opt = "),
        ("# Adam at a rate of 0.1", "# Adam"),
    ],
)
def test_what_is_commented_out_and_belongs_to_the_line_above_stays_below_it(comment, follows):
    text = LOOP + f"net = Net()\nrate = 0.2\n{comment}\nopt = torch.optim.Adam(net.parameters(), rate)\n"
    (found,) = prepared(text + "train(net, loader, opt)\n")
    assert found[1].startswith(follows)


@pytest.mark.parametrize(
    "given",
    [
        "chain(net.parameters(), head.parameters() if head.trains() else [])",
        "[*net.parameters(), *([] if head is None else head.parameters())]",
        "list(net.parameters()) + (head and list(head.parameters()) or [])",
    ],
)
@pytest.mark.parametrize("held", ["{}", "(lambda: {})()"])
def test_what_a_condition_asks_for_before_it_takes_its_parameters_may_be_no_model(given, held):
    train = LOOP.replace("network(x)", "head(network(x))").replace("(network,", "(network, head,")
    made = "net, head = Net().cuda(), make_head()\nchosen = given\nopt = torch.optim.SGD(chosen, lr=0.1)\n"
    made = made.replace("given", held.format(given))
    assert [call for call, _ in prepared(f"{train}{made}train(net, head, loader, opt)\n")] == ["memory.prepare(net)"]


def test_a_model_that_an_if_asks_for_before_it_takes_its_parameters_may_be_none():
    train = LOOP.replace("network(x)", "head(network(x))").replace("(network,", "(network, head,")
    made = "net, head = Net().cuda(), make_head()\nchosen = list(net.parameters())\n"
    made += "if head is not None:\n    chosen = chosen + list(head.parameters())\n"
    made += "opt = torch.optim.SGD(chosen, lr=0.1)\ntrain(net, head, loader, opt)\n"
    assert [call for call, _ in prepared(train + made)] == ["memory.prepare(net)"]


@pytest.mark.parametrize("test", ["hasattr(net, 'module')", "args.parallel"])
def test_a_model_whose_own_parameters_are_taken_either_way_is_prepared(test):
    made = f"net = Net().cuda()\nopt = torch.optim.SGD(net.module.parameters() if {test} else net.parameters(), lr=1)\n"
    assert "memory.prepare(net)" in [call for call, _ in prepared(f"{LOOP}{made}train(net, loader, opt)\n")]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("net = Net(); {made}", "net = Net(); memory.prepare(net)\n{made}"),
        ("net = Net(\n    4\n    ); {made}", "net = Net(\n    4\n    ); memory.prepare(net)\n{made}"),
        ("net = Net()\n{made}; i = 0", "net = Net()\nmemory.prepare(net)\n{made}; i = 0"),
        ("if True: net = Net(); {made}", "if True: net = Net(); {made}"),
        ("if True:\n    net = Net(); {made}", "if True:\n    net = Net(); memory.prepare(net)\n    {made}"),
    ],
)
def test_an_optimizer_that_shares_its_line_is_preceded_too(written, expected):
    """On the line of an `if`, nothing else has room."""
    made = "opt = torch.optim.SGD(net.parameters(), lr=0.1)"
    script = f"import torch\n{LOOP}\n{written.format(made=made)}\ntrain(net, loader, opt)\n"
    text = apply_to(Source.from_bytes("train.py", script.encode()), all_rules(), Options("16gb")).text
    compile(text, "train.py", "exec")
    assert f"\n{expected.format(made=made)}\n" in text


KNOWN_BY_NAME = """
model = Other()
other = torch.optim.SGD(model.parameters(), lr=0.1)
net = Net().cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
TRAINING = """
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("definition", "call"),
    [
        ("class Trainer:\n    def fit(self, model, optimizer):", "Trainer().fit(net, opt)"),
        ("class Trainer:\n    def fit(self, model, optimizer):", "Trainer.fit(trainer, net, opt)"),
        ("class Trainer:\n    def train(self, model, optimizer):", "Trainer().train(net, opt)"),
        ("class Trainer:\n    @staticmethod\n    def fit(model, optimizer):", "Trainer().fit(net, opt)"),
        ("class Trainer:\n    @classmethod\n    def fit(cls, model, optimizer):", "Trainer.fit(net, opt)"),
        ("if True:\n    def fit(loader, *, model, optimizer):", "fit(loader, model=net, optimizer=opt)"),
        ("if True:\n    def fit(model, /, optimizer):", "fit(net, optimizer=opt)"),
    ],
)
def test_a_model_is_followed_to_its_caller_however_it_is_given(definition, call):
    assert [made for made, _ in prepared(definition + TRAINING + KNOWN_BY_NAME + call)] == ["memory.prepare(net)"]


@pytest.mark.parametrize("made", ["Trainer(net, opt)", "Trainer(optimizer=opt, network=net)", "Careful(net, opt)"])
def test_a_model_is_followed_through_what_makes_an_object(made):
    text = """
class Trainer:
    def __init__(self, network, optimizer):
        self.model, self.optimizer = None, optimizer
        self.model = network

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()


class Careful(Trainer):
    pass
"""
    assert [call for call, _ in prepared(text + KNOWN_BY_NAME + f"{made}.fit(loader)")] == ["memory.prepare(net)"]
