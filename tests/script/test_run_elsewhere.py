"""Networks that something else than a plain call of their name runs, and losses that come back another way."""

from __future__ import annotations

import pytest

TRAINING = """
    import torch
    from elsewhere import *
    from elsewhere import Loss, Bound, build

    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    {before}
    for x, y in loader:
        {forward}
        {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def training(forward: str, loss: str = "loss = torch.nn.functional.mse_loss(out, y)", before: str = "pass") -> str:
    return TRAINING.format(forward=forward, loss=loss, before=before)


@pytest.mark.parametrize(
    "call",
    [
        "torch.nn.parallel.data_parallel(model, x, [0, 1])",
        "data_parallel(model, x)",
        "torch.func.functional_call(model, weights, (x,))",
        "networks[name](x)",
        "model.fc(x)",
        "model.block_2(x)",
    ],
)
def test_what_runs_a_network_is_its_forward(report, call):
    before = "networks = {}" if "networks" in call else "pass"
    assert report(training(f"out = {call}", before=before)) == [("OOM202", 9)]


def test_a_container_that_is_not_named_like_networks_says_nothing(report):
    assert report(training("out = transforms[name](x)", "loss = out.sum()")) == []


@pytest.mark.parametrize(
    "loss",
    [
        "loss = Loss(out, y)",
        "model.get_loss(out, y); loss = model.loss",
        "parts = model.get_parts(out); loss = model.get_lossfunc(parts, y)",
        "y['out'] = out; loss = criterion(**y)",
        "loss = torch.mean(out.type(torch.cuda.FloatTensor) - y)",
    ],
)
def test_a_loss_finds_its_forward_however_it_comes_back(report, loss):
    assert report(training("out = model(x)", loss)) == [("OOM202", 9)]


def test_entries_that_hold_no_graph_leave_their_holder_without_one(report):
    code = training("y['out'] = model(x).detach()", "kept.append(y); loss = model(x).sum()", before="kept = []")
    assert report(code) == [("OOM202", 10)]


def test_an_object_around_a_network_runs_it_where_its_result_is_backpropagated(report):
    code = training("loss = -bound(x)", "pass", before="bound = Bound(model, samples=3)")
    assert report(code) == [("OOM202", 9)]


def test_an_object_around_a_network_that_gives_data_is_no_network(report):
    code = training("x = attack(x)", "loss = model(x).sum()", before="attack = Attack(model)")
    assert report(code) == [("OOM202", 10)]


def test_a_network_made_under_a_lower_case_name_is_no_forward(report):
    code = """
        import torch

        class Agent:
            def train(self, loader, qnet):
                for x, y in loader:
                    loss = self.net(x).sum()
                    loss.backward()
                    self.optimizer.step()
                self.net = qnet(channels=3)
                self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
                self.net.cuda()
    """
    assert report(code) == [("OOM202", 6)]


def test_a_helper_that_returns_nothing_yet_is_a_helper_that_returns_a_graph(report):
    code = """
        import torch

        def fit(model, batch, optimizer):
            if len(batch) < 10:
                return 0, 0
            loss = model(batch.cuda()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss, len(batch)

        def train(model, loader, optimizer):
            total, seen = 0, 0
            for batch in loader:
                loss, n = fit(model, batch, optimizer)
                total += loss
                seen += n
            print(total / seen)
    """
    assert report(code) == [("OOM101", 16), ("OOM202", 6)]


def test_an_entry_among_several_targets_takes_its_graph_along(read):
    code = """
        import torch
        outs = {}
        for name, x in parts:
            outs[name], _ = model(x)
        loss = sum(outs.values())
        loss.backward()
    """
    trace = read(code).trace
    assert set(trace.forwards) <= trace.backpropagated
