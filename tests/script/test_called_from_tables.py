"""Functions, criteria and networks that dicts and lists hold, and that are called from there."""

from __future__ import annotations

import pytest

TABLE = """
    import torch

    def hinge(net, x, y):
        return (1 - y * net(x)).clamp(min=0).mean()

    def square(net, x, y):
        return ((y - net(x)) ** 2).mean()

    def count(net, x, y):
        return len(x)

    {made}

    def train(net, loader, optimizer, kind):
        net.cuda()
        total = 0.0
        for x, y in loader:
            loss = {asked}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += {added}
"""
BOTH = "LOSSES = {'hinge': hinge, 'square': square}"


@pytest.mark.parametrize(
    ("made", "asked", "lines"),
    [
        (BOTH, "LOSSES[kind](net, x, y)", [4, 7]),
        (BOTH, "LOSSES.get(kind)(net, x, y)", [4, 7]),
        (BOTH, "LOSSES['square'](net, x, y)", [7]),
        (BOTH, "LOSSES.get('hinge')(net, x, y)", [4]),
        (BOTH, "sum(weight * LOSSES[name](net, x, y) for name, weight in kind)", [4, 7]),
        (BOTH, "sum(function(net, x, y) for name, function in LOSSES.items())", [4, 7]),
        ("LOSSES = [hinge, square]", "sum(function(net, x, y) for function in LOSSES)", [4, 7]),
        ("LOSSES = {}; LOSSES['a'] = hinge; LOSSES['b'] = square", "LOSSES[kind](net, x, y)", [4, 7]),
        ("LOSSES = []; LOSSES.append(hinge)", "LOSSES[kind](net, x, y)", [4]),
        ("LOSSES = {'hinge': hinge, 'count': count}", "LOSSES['hinge'](net, x, y)", [4]),
    ],
)
def test_what_a_table_holds_is_called(report, made, asked, lines):
    found = [("OOM202", line) for line in lines]
    assert report(TABLE.format(made=made, asked=asked, added="loss")) == [("OOM101", 22), *found]
    assert report(TABLE.format(made=made, asked=asked, added="loss.item()")) == found


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        (BOTH, "LOSSES[kind]"),
        (BOTH, "sum(name for name in LOSSES)"),
        ("LOSSES = {'count': count}", "LOSSES[kind](net, x, y)"),
        ("LOSSES = {'hinge': 'hinge', 'square': 'square'}", "LOSSES[kind](net, x, y)"),
    ],
)
def test_nothing_is_called_where_a_table_holds_or_is_asked_for_something_else(report, made, asked):
    assert report(TABLE.format(made=made, asked=asked, added="0")) == []


LAYERS = """
    import torch

    def build(sizes):
        layers = []
        layers.append(torch.nn.{first})
        for size in sizes:
            layers.append(torch.nn.{second})
            layers.append(torch.nn.Dropout(0.1))
        layers.append(torch.nn.LogSoftmax())
        return torch.nn.Sequential(*layers)

    model = build([3, 4]).cuda()
    for x, y in loader:
        torch.nn.functional.nll_loss(model(x.cuda()), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("Linear(8, 8)", "ReLU()", [("OOM202", 14)]),
        ("ReLU()", "Linear(8, 8)", [("OOM202", 14)]),
        ("ReLU()", "Sigmoid()", []),
    ],
)
def test_a_list_of_layers_with_weights_and_without_makes_a_network(report, first, second, found):
    assert report(LAYERS.format(first=first, second=second)) == found


STEPS = """
    import torch

    class Trainer:
        def __init__(self, net):
            self.net = net.cuda()
            self.steps = {{"train": self.train_step, "val": self.{val}}}

        def train_step(self, batch):
            loss = self.net(batch.cuda()).mean()
            loss.backward()
            self.optimizer.step()
            return loss.item()

        def val_step(self, batch):
            return self.net(batch.cuda()).mean().item()

        def val_without_gradients(self, batch):
            with torch.no_grad():
                return self.net(batch.cuda()).mean().item()

        def run(self, loaders):
            for phase in ["train", "val"]:
                total = 0
                for batch in loaders[phase]:
                    total += self.steps[phase](batch)
"""


@pytest.mark.parametrize(
    ("val", "found"), [("val_step", [("OOM201", 15), ("OOM202", 9)]), ("val_without_gradients", [("OOM202", 9)])]
)
def test_each_phase_takes_its_own_step_from_a_table(read, report, val, found):
    found = sorted({*found, ("OOM201", 15)})  # nobody in sight asks for the one that is left
    assert report(STEPS.format(val=val)) == found
    assert [loop.line for loop in read(STEPS.format(val=val)).loops] == [24]


CRITERIA = """
    import torch

    criteria = {"a": torch.nn.MSELoss(), "b": torch.nn.L1Loss()}
    sums = {name: 0.0 for name in criteria}
    for x, y in loader:
        out = net(x.cuda())
        losses = {name: criterion(out{taken}, y.cuda()) for name, criterion in criteria.items()}
        loss = criteria["a"](out, y.cuda())
        loss.backward()
        optimizer.step()
        for name in losses:
            sums[name] += losses[name]
"""


@pytest.mark.parametrize(("taken", "found"), [("", [("OOM101", 12)]), (".detach()", [])])
def test_what_criteria_of_a_dict_give_carries_the_graph_of_what_they_are_given(report, taken, found):
    assert report(CRITERIA.replace("{taken}", taken)) == [*found, ("OOM202", 6)]


HEADS = """
    import torch
    from project import build

    class Agent:
        def __init__(self, names, device):
            self.heads = {{name: build(name) for name in names}}
            {asked}

        def update(self, loader, device):
            for x, y, name in loader:
                loss = torch.nn.functional.mse_loss(self.heads[{name}](x.cuda()), y.cuda())
                loss.backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize(
    "asked",
    [
        "self.optimizers = {name: torch.optim.SGD(head.parameters()) for name, head in self.heads.items()}",
        "self.optimizer = torch.optim.SGD([p for head in self.heads.values() for p in head.parameters()])",
        "for head in self.heads.values(): head.train()",
    ],
)
@pytest.mark.parametrize("name", ["name", "'first'"])
def test_entries_of_which_each_is_asked_for_its_weights_are_networks(report, asked, name):
    assert report(HEADS.format(asked=asked, name=name)) == [("OOM202", 11)]


@pytest.mark.parametrize(
    "asked",
    [
        "for name in self.heads.keys(): name.train()",
        "for head in self.heads.values(): head.reset()",
        "for name, head in self.heads.items(): name.train()",
    ],
)
def test_entries_that_are_asked_for_something_else_may_be_functions(report, asked):
    assert report(HEADS.format(asked=asked, name="name")) == []


CONTEXTS = """
    import contextlib
    import torch

    CONTEXTS = {held}
    net.cuda()
    for phase in ["train", "val"]:
        for x, y in loaders[phase]:
            with {asked}:
                loss = criterion(net(x.cuda()), y.cuda())
            if phase == "train":
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        ("{'train': torch.enable_grad(), 'val': torch.no_grad()}", "CONTEXTS[phase]"),
        ("{'train': torch.enable_grad(), 'val': torch.no_grad()}", "CONTEXTS.get(phase)"),
        ("{'train': contextlib.nullcontext, 'val': torch.no_grad}", "CONTEXTS[phase]()"),
        ("{'train': contextlib.nullcontext, 'val': lambda: torch.no_grad()}", "CONTEXTS[phase]()"),
    ],
)
def test_each_phase_takes_its_own_context_from_a_table(report, held, asked):
    assert report(CONTEXTS.format(held=held, asked=asked)) == [("OOM202", 9)]
    without = held.replace("torch.no_grad", "contextlib.nullcontext")
    assert report(CONTEXTS.format(held=without, asked=asked)) == [("OOM201", 9), ("OOM202", 9)]


def test_one_of_several_contexts_may_be_autocast(report):
    code = """
        import contextlib
        import torch

        half = {"off": contextlib.nullcontext, "on": lambda: torch.autocast("cuda", dtype=torch.bfloat16)}
        for x, y in loader:
            with half[settings.half]():
                loss = criterion(net(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


REGISTRY = """
    import torch

    class Registry:
        def __init__(self):
            self.table = {{}}

        def register(self, name):
            def wrap(function):
                self.table[name] = {stored}
                return function
            return wrap

        def get(self, name):
            return self.table[name]

    TABLE, LOSSES = {{}}, Registry()

    def register(function):
        TABLE[function.__name__] = {stored}
        return function

    {decorator}
    def hinge(net, x, y):
        return (1 - y * net(x)).clamp(min=0).mean()

    def train(net, loader, optimizer, kind):
        net.cuda()
        for x, y in loader:
            loss = {asked}(net, x, y)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("decorator", "asked", "found"),
    [
        ("@LOSSES.register('hinge')", "LOSSES.get(kind)", [("OOM202", 24)]),
        ("@register", "TABLE[kind]", [("OOM202", 24)]),
        ("@register", "LOSSES.get(kind)", []),
        ("@LOSSES.register('hinge')", "TABLE[kind]", []),
    ],
)
def test_decorators_put_functions_into_tables(report, decorator, asked, found):
    assert report(REGISTRY.format(decorator=decorator, asked=asked, stored="function")) == found
    assert report(REGISTRY.format(decorator=decorator, asked=asked, stored="function.__doc__")) == []
