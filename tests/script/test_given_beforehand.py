"""What is given some of its arguments before it is called, and what hands out the calls of others."""

from __future__ import annotations

import pytest

PARTIAL = """
    import torch
    from functools import partial

    def step(model, weight, x, y, log=None):
        return weight * torch.nn.functional.mse_loss(model(x), y)

    def train(model, loader, optimizer):
        model.cuda()
        total = 0
        run = {made}
        for x, y in loader:
            loss = {asked}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += {added}
"""


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        ("partial(step, model, 0.5)", "run(x.cuda(), y.cuda())"),
        ("partial(step, weight=0.5, model=model)", "run(x=x.cuda(), y=y.cuda())"),
        ("partial(partial(step, model), 0.5, log=loader)", "run(x.cuda(), y.cuda())"),
        ("partial(step, model)", "run(0.5, *(x.cuda(), y.cuda()))"),
        ("lambda x, y: partial(step, model)(0.5, x, y)", "run(x.cuda(), y.cuda())"),
    ],
)
def test_a_function_that_was_given_some_arguments_is_followed_with_all(report, made, asked):
    code = PARTIAL.format(made=made, asked=asked, added="loss")
    assert report(code) == [("OOM101", 16), ("OOM202", 5)]
    assert report(PARTIAL.format(made=made, asked=asked, added="loss.item()")) == [("OOM202", 5)]


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("partial(model, mask=None)", [("OOM202", 12)]),
        ("model.__call__", [("OOM202", 12)]),
        ("model.forward", [("OOM202", 12)]),
        ("torch.vmap(model)", [("OOM202", 12)]),
        ("lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)", [("OOM202", 10)]),
        ("partial(torch.nn.functional.gelu, approximate='tanh')", []),
        ("partial(model.normalize, mask=None)", []),
        ("model.normalize", []),
        ("torch.vmap(scale)", []),
    ],
)
def test_a_network_that_was_given_some_arguments_stays_one(report, made, found):
    code = PARTIAL.format(made=made, asked="torch.nn.functional.mse_loss(run(x.cuda()), y)", added="loss.item()")
    assert report(code) == found


@pytest.mark.parametrize(("called", "found"), [("model", [("OOM202", 4)]), ("scale", []), ("model.normalize", [])])
def test_what_map_calls_for_each_element_is_called(report, called, found):
    code = f"""
        def train(model, loader, optimizer):
            model.cuda().train()
            for xs, y in loader:
                outputs = list(map({called}, xs))
                sum(output.mean() for output in outputs).backward()
                optimizer.step()
    """
    assert report(code) == found


TRAINER = """
    import torch

    class Trainer:
        def __init__(self, net):
            self.net = net.cuda()
            self.kind = "first"

        def step_first(self, batch):
            loss = self.net(batch.cuda()).mean()
            loss.backward()
            self.optimizer.step()

        def step_second(self, batch):
            with torch.no_grad():
                return self.net(batch.cuda()).mean()

        def run(self, loader, kind):
            for batch in loader:
                {asked}
"""


@pytest.mark.parametrize(
    "asked",
    [
        "getattr(self, 'step_first')(batch)",
        "getattr(self, 'step_first', None)(batch)",
        "getattr(self, f'step_{kind}')(batch)",
        "getattr(self, 'step_' + kind)(batch)",
        "getattr(self, 'step_%s' % kind)(batch)",
    ],
)
def test_a_method_is_asked_for_by_its_name(read, report, asked):
    assert report(TRAINER.format(asked=asked)) == [("OOM202", 9)]
    assert [loop.line for loop in read(TRAINER.format(asked=asked)).loops] == [18]


@pytest.mark.parametrize(
    "asked",
    [
        "getattr(self, 'step_second')(batch)",
        "getattr(self, f'{kind}_step')(batch)",
        "getattr(self, kind)(batch)",
        "getattr(self.other, 'step_first')(batch)",
        "getattr(self, f'other_{kind}')(batch)",
    ],
)
def test_other_names_ask_for_something_else(read, asked):
    assert read(TRAINER.format(asked=asked)).loops == []


@pytest.mark.parametrize(("name", "found"), [("'loss'", [("OOM202", 5)]), ("'count'", []), ("name", [])])
def test_what_setattr_sets_is_read_by_its_name(report, name, found):
    code = f"""
        from types import SimpleNamespace

        def train(model, loader, optimizer, name):
            for x, y in loader:
                value = criterion(model(x.cuda()), y)
                result = SimpleNamespace()
                setattr(result, {name}, value)
                optimizer.zero_grad()
                result.loss.backward()
                optimizer.step()
    """
    assert report(code) == found
