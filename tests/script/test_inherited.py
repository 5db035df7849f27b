"""Methods that a class has from another one of the file, called by `super()`."""

from __future__ import annotations

import pytest

TESTER = """
    import torch

    class Base:
        def __init__(self, network):
            self.network = network.cuda()

        def score_all(self, loader):
            return [self.answer(x) for x in loader]

        def answer(self, x):
            return x

    class Tester(Base):
        def score_all(self, loader):
            {around}return {called}.score_all(loader)

        def answer(self, x):
            out = self.network(x)
            return out, out.mean()

    def test(network, loader):
        network.eval()
        for one, target in Tester(network).score_all(loader):
            print(one.argmax(1).eq(target))
"""


@pytest.mark.parametrize("called", ["super()", "super(Tester, self)"])
def test_the_method_of_the_base_is_followed_with_the_object_of_the_class(report, called):
    assert report(TESTER.format(around="", called=called)) == [("OOM201", 18)]


@pytest.mark.parametrize("called", ["super()", "other"])
def test_what_is_around_the_call_is_around_what_the_base_runs(report, called):
    code = TESTER.format(around="with torch.no_grad():\n                ", called=called)
    assert report(code) == []


CONSTRUCTED = """
    import torch

    class Base:
        def __init__(self, network):
            self.solver = {made}

    class Tester(Base):
        def __init__(self, network):
            super().__init__(network)
            self.solver.eval()

        def answer(self, x):
            return self.solver(x).argmax(1).tolist()
"""


@pytest.mark.parametrize(("made", "runs"), [("torch.nn.Linear(8, 2)", True), ("torch.nn.CrossEntropyLoss()", False)])
def test_a_constructor_of_the_base_makes_what_the_class_has(read, made, runs):
    assert bool(read(CONSTRUCTED.format(made=made)).trace.forwards) is runs


BUILT = """
    import torch
    from torch import nn
    from library import Trainer

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            return self.head(x)

        def learn(self, x, y):
            loss = nn.functional.cross_entropy(self.forward(x), y)
            loss.backward()
            self.optimizer.step()

    {base}

    class Mine(Trainer):
        def __init__(self, loader, {parameter}):
            {constructed}

        def run(self):
            for x, y in self.loader:
                self.model.learn(x, y)

    def main():
        mine = Mine(loader, {given})
        mine.{started}()

    main()
"""
KEEPING = """class Trainer:
        def __init__(self, loader, model=None):
            self.loader, self.model = loader, model
"""


@pytest.mark.parametrize("started", ["run", "start"])
@pytest.mark.parametrize(
    ("base", "parameter", "constructed", "given"),
    [
        (KEEPING, "net", "super().__init__(loader, net)", "Net().cuda()"),
        (KEEPING, "net", "super(Mine, self).__init__(loader, model=net)", "net=Net().cuda()"),
        (KEEPING, "net", "Trainer.__init__(self, loader, net)", "Net().cuda()"),
        ("", "model", "super().__init__(loader, model)", "Net().cuda()"),
        ("", "net", "super().__init__(loader, model=net, epochs=3)", "Net().cuda()"),
        ("", "model", "super(Mine, self).__init__(loader, model)", "model=Net().cuda()"),
    ],
)
def test_what_a_base_is_constructed_with_is_known_to_its_methods(read, base, parameter, constructed, given, started):
    code = BUILT.format(base=base, parameter=parameter, constructed=constructed, given=given, started=started)
    script = read(code)
    assert [len(loop.forwards) for loop in script.loops] == [1]


@pytest.mark.parametrize(
    ("parameter", "constructed", "given"),
    [
        ("net", "super().__init__(loader, net)", "Net().cuda()"),
        ("model", "super().__init__(loader)", "Net().cuda()"),
        ("model", "super().__init__(loader, model)", "build()"),
        ("model", "super().__init__(loader, model); self.model = wrap(model.config)", "Net().cuda()"),
    ],
)
def test_what_a_base_out_of_sight_may_not_keep_under_a_name_is_not_known(read, parameter, constructed, given):
    code = BUILT.format(base="", parameter=parameter, constructed=constructed, given=given, started="run")
    assert read(code).loops == []


@pytest.mark.parametrize(("other", "loops"), [("", 1), ("Mine(loader, Other())", 0)])
def test_an_object_that_is_made_in_two_ways_is_not_known_by_one(read, other, loops):
    code = BUILT.format(
        base="class Other: pass",
        parameter="model",
        constructed="super().__init__(loader, model)",
        given=f"Net())\n        {other}\n        print(mine",
        started="start",
    )
    assert len(read(code).loops) == loops


def test_settings_of_one_object_do_not_decide_what_its_class_does_elsewhere(report):
    code = """
        import torch

        class Runner:
            def __init__(self, net, train=True):
                self.net, self.train = net, train

            def evaluate(self, loader):
                for x in loader:
                    if not self.train:
                        print(self.net(x).argmax(1))

        Runner(torch.nn.Linear(3, 3), train=True).start()
    """
    assert report(code) == [("OOM201", 10)]


def test_a_method_of_a_base_runs_where_one_of_the_class_asks_for_it(report):
    code = """
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(3, 3)

            def forward(self, x):
                return self.head(x)

        class Runner:
            def __init__(self):
                self.net = Net()

            def step(self, x, y):
                return criterion(self.net(x), y)

        class Tester(Runner):
            @torch.no_grad()
            def step(self, x, y):
                return super().step(x, y)

            def test(self, loader):
                for x, y in loader:
                    print(self.step(x, y).item())
    """
    assert report(code) == []
    assert report(code.replace("            @torch.no_grad()\n", "")) == [("OOM201", 16)]


MEMBER = """
    from abc import ABC, abstractmethod
    import torch

    class Member(torch.nn.Module, ABC):
        def fit(self, loader):
            for x, y in loader:
                out = self.shape(self.forward(x.cuda()))
                loss = self.judge({given}, y)
                loss.backward()
                self.optimizer.step()

        @abstractmethod
        def forward(self, x):
            {forward}

        def shape(self, out):
            {shape}

        @abstractmethod
        def judge(self, out, y):
            raise NotImplementedError
"""


@pytest.mark.parametrize("shape", ['"""Softmax, or not."""', "raise NotImplementedError", "pass"])
@pytest.mark.parametrize("forward", ['"""Logits."""', "pass"])
def test_what_classes_elsewhere_fill_makes_something_of_what_it_is_given(report, forward, shape):
    assert report(MEMBER.format(given="out", forward=forward, shape=shape)) == [("OOM202", 7)]


def test_what_is_detached_before_goes_nowhere_by_that(report):
    assert report(MEMBER.format(given="out.detach()", forward="pass", shape="pass")) == []


VISUALIZED = """
    import torch
    from torch import nn

    class TunedModel({base}):
        def __init__(self, network):
            {opening}
            self.network = network

    class Visualizer(TunedModel):
        def show(self, x):
            return self.network(x)

    def test(network, loader):
        network.eval()
        visualizer = Visualizer(network)
        for x in loader:
            print(visualizer(x))
"""


def test_a_base_of_the_file_says_itself_whether_it_is_a_network(report):
    assert report(VISUALIZED.format(base="object", opening="pass")) == []
    assert report(VISUALIZED.format(base="nn.Module", opening="super().__init__()")) == [("OOM201", 17)]
