"""Resets and gradients stay where another file is given the network, and may read or leave gradients."""

import sys
import textwrap
import types

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP

EPOCHS = """\
import copy, io, pprint

def validate(net):
    with torch.no_grad():
        return sum(F.cross_entropy(net(x), y).item() for x, y in loader)

class Best:
    def __init__(self, net):
        self.net = net
    def keep(self):
        torch.save(self.net, io.BytesIO())

def report(score):
    print("score", score)

def validated(net):
    return net, validate(net)

def run_network(x):
    return model(x)

def handed_on(function, *given):
    return function(*given)

best = Best(model)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    BEHIND
    print(loss.item())
"""


LIBRARY = """\
NET = None

def seen():
    return gradients_of(NET)

def gradients_of(net):
    return sum(p.grad.abs().sum().item() for p in net.parameters() if p.grad is not None)

NETS = {}
def keep(net):
    NETS["net"] = net
    return net
def optimizer_of(given):
    import torch
    weights = given if isinstance(given, list) else list(given.parameters())
    NETS["weights"] = torch.nn.ParameterList(weights)
    return torch.optim.SGD(weights, lr=0.1)
def seen_of_all():
    return sum(gradients_of(net) for net in NETS.values())

class Kept:
    def __init__(self, net):
        self.net = net
    def seen(self):
        return gradients_of(self.net)

class Base:
    def seen(self):
        return gradients_of(self.net)
    def more(self):
        (self.net(self.batch) ** 2).mean().backward()
        return 0.0
    def nothing(self):
        return 0.0
"""


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    """Another file, which is not read."""
    library = types.ModuleType("library")
    exec(LIBRARY, library.__dict__)
    monkeypatch.setitem(sys.modules, "library", library)


@pytest.mark.parametrize(
    "behind",
    [
        "validate(model)",
        "best.keep()",
        "torch.save(model, io.BytesIO())",
        "average = copy.deepcopy(model)",
        "print(type(model), isinstance(model, nn.Module))",
        "wrapped = nn.DataParallel(model)",
        "pprint.pformat({'state': model.state_dict(), 'size': len(y) if model is not None else 0})",
        "score = validate(model); report(score)",
        "print('{}'.format(sum(p.numel() for p in model.parameters())), 'x'.join([str(model)]))",
    ],
)
def test_a_reset_goes_where_all_that_is_given_the_network_is_in_sight(behind):
    text = TOP + EPOCHS.replace("BEHIND", behind)
    after = rewritten(text)
    assert "zero_grad" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    "behind",
    [
        "validate_elsewhere(model)",
        "validate_elsewhere(net=[model])",
        "validate_elsewhere(lambda x: model(x))",
        "nn.DataParallel(model).eval()",
        "validate_elsewhere(nn.DataParallel(model))",
        "elsewhere.validate(model)",
        "validate_elsewhere(best)",
        "validate_elsewhere(best.net)",
        "copies = [model]\n    validate_elsewhere(copies)",
        "wrapped = nn.DataParallel(model)\n    validate_elsewhere(wrapped)",
        "net, score = validated(model)\n    validate_elsewhere(net)",
        "other: nn.Module = model\n    validate_elsewhere(other)",
        "if (other := model): validate_elsewhere(other)",
        "for other in (model, best.net): validate_elsewhere(other)",
        "for _, other in enumerate([model]): validate_elsewhere(other)",
        "for other in {'student': model}.values(): validate_elsewhere(other)",
        "[validate_elsewhere(other) for other in [model]]",
        "with contextlib.nullcontext(model) as other: validate_elsewhere(other)",
        "setattr(validate_elsewhere, 'net', model)",
        "kept.net = model\n    validate_elsewhere(kept)",
        "kept['net'] = model\n    validate_elsewhere(kept)",
        "other = model if epoch else best.net\n    validate_elsewhere(other)",
        "forward = model.forward\n    validate_elsewhere(forward)",
        "validate_elsewhere(run_network)",
        "validate_elsewhere(model[0])",
        "validate_elsewhere(layer)",
        "handed_on(validate_elsewhere, 0, model)",
        "model.train_on(loader)",
    ],
)
def test_a_reset_stays_where_another_file_is_given_the_network(behind):
    top = TOP.replace("model = nn.Linear(4, 2)", "layer = nn.Linear(4, 2)\nmodel = nn.Sequential(layer)")
    text = "from elsewhere import validate_elsewhere\n" + top + EPOCHS.replace("BEHIND", behind)
    text = rewritten(text).text
    assert ("optimizer.zero_grad()" in text) is ("eval" not in behind)
    assert "memory.step(optimizer)" in text


@pytest.mark.parametrize(
    "given", ["model.named_parameters()", "model", "list(model.parameters())", "weights", "trainable"]
)
@pytest.mark.parametrize("reset", ["ahead", "behind"])
def test_gradients_stay_for_what_may_read_them_behind_the_step(given, reset):
    """Out of sight: `plot_gradients(model.named_parameters())` of another file."""
    text = TOP + textwrap.dedent(f"""\
        import types
        library = types.ModuleType("library")
        exec('''
        def look(given):
            given = given.parameters() if hasattr(given, "parameters") else given
            tensors = [one[1] if isinstance(one, tuple) else one for one in given]
            print(sum(float(tensor.grad.abs().sum()) for tensor in tensors))
        ''', library.__dict__)
        weights = list(model.parameters())
        trainable = [weight for weight in model.parameters() if weight.requires_grad]
        for x, y in loader:
            {"optimizer.zero_grad()" if reset == "ahead" else "pass"}
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            library.look({given})
            {"optimizer.zero_grad()" if reset == "behind" else "pass"}
        """)
    after = rewritten(text)
    assert "memory.step(optimizer, zero_grad=False)" in after.text
    before = run(text)
    assert_same_bits(before, run(after.text, preset="off"))


def test_a_reset_stays_where_the_network_comes_from_another_file():
    loop = "def train(model, loader):\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    loop += "    for x, y in loader:\n        optimizer.zero_grad()\n        loss = model(x).sum()\n"
    loop += "        loss.backward()\n        optimizer.step()\n"
    assert "optimizer.zero_grad()" in rewritten(f"import torch\n\n{loop}").text
    assert "optimizer.zero_grad()" in rewritten(f"import torch\n\n{loop}\ndef main(net):\n    train(net, [])\n").text
    assert "optimizer.zero_grad()" in rewritten(f"import torch\nfrom nets import net\n\n{loop}\ntrain(net, [])\n").text
    assert "zero_grad" not in rewritten(f"import torch\n\n{loop}\ntrain(torch.nn.Linear(4, 2), [])\n").text
    trainer = "class Trainer:\n    def __init__(self, model):\n        self.model = model\n"
    trainer += "        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    def train(self, loader):\n"
    trainer += "        for x, y in loader:\n            self.optimizer.zero_grad()\n"
    trainer += (
        "            loss = self.model(x).sum()\n            loss.backward()\n            self.optimizer.step()\n"
    )
    assert "zero_grad()" in rewritten(f"import torch\n\n{trainer}").text
    assert "zero_grad" not in rewritten(f"import torch\n\n{trainer}\nTrainer(torch.nn.Linear(4, 2)).train([])\n").text


def test_gradients_stay_for_what_says_that_it_reads_them_once_an_epoch():
    text = "from elsewhere import plot_gradients\n" + TOP + EPOCHS.replace("BEHIND", "plot_gradients(model)")
    assert "memory.step(optimizer, zero_grad=False)" in rewritten(text).text


INHERITED = """\
import torch
import torch.nn.functional as F
from torch import nn
from library import Base


class Trainer(Base):
    def __init__(self):
        self.net = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.batch = torch.randn(6, 4)

    def own(self):
        return 1.0

    def fit(self):
        for _ in range(6):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(self.batch), torch.tensor([0, 1, 1, 0, 1, 0]))
            loss.backward()
            self.optimizer.step()
            print(loss.item(), BEHIND)


Trainer().fit()
"""


@pytest.mark.parametrize("behind", ["self.seen()", "self.more()", "super().more()", "self.nothing()"])
def test_a_method_of_a_base_in_another_file_may_read_gradients_and_leave_some(behind):
    text = INHERITED.replace("BEHIND", behind)
    after = rewritten(text)
    assert "self.optimizer.zero_grad()" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize("base", ["", "(object)", "(nn.Module)", "(Own)"])
def test_methods_of_a_class_whose_bases_are_in_sight_keep_no_reset(base):
    text = INHERITED.replace("BEHIND", "self.own()").replace("class Trainer(Base):", f"class Trainer{base}:")
    text = text.replace("class Trainer", "class Own:\n    pass\n\n\nclass Trainer")
    text = text.replace("    def __init__(self):\n", "    def __init__(self):\n        super().__init__()\n")
    after = rewritten(text)
    assert "zero_grad" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize("place", ["ahead", "behind"])
def test_gradients_stay_for_a_file_that_holds_the_network(place):
    text = (
        "import library\n"
        + TOP
        + textwrap.dedent(f"""\
        library.NET = model
        for x, y in loader * 4:
            {"optimizer.zero_grad()" if place == "ahead" else "pass"}
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print(library.seen())
            {"optimizer.zero_grad()" if place == "behind" else "pass"}
        """)
    )
    after = rewritten(text)
    assert "optimizer.zero_grad()" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    "kept",
    [
        "library.NETS['net'] = model",
        "NETS['net'] = model",
        "model = library.keep(model)",
        "library.keep(model)",
        "optimizer = library.optimizer_of(model)",
        "library.optimizer_of(list(model.parameters()))",
    ],
)
@pytest.mark.parametrize("reset", ["ahead", "behind"])
def test_gradients_stay_for_a_file_that_was_given_the_network(kept, reset):
    text = (
        "import library\nfrom library import NETS\n"
        + TOP
        + textwrap.dedent(f"""\
        {kept}
        for x, y in loader * 4:
            {"optimizer.zero_grad()" if reset == "ahead" else "pass"}
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print(loss.item(), library.seen_of_all())
            {"optimizer.zero_grad()" if reset == "behind" else "pass"}
        """)
    )
    after = rewritten(text)
    assert "optimizer.zero_grad()" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_gradients_stay_for_an_object_that_another_file_made_of_the_network():
    text = (
        "from library import Kept\n"
        + TOP
        + textwrap.dedent("""\
        kept = Kept(model)
        for x, y in loader * 4:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print(loss.item(), kept.seen())
        """)
    )
    after = rewritten(text)
    assert "memory.step(optimizer, zero_grad=False)" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
