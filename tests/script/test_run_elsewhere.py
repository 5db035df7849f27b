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
        "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)",
        "torch.utils.checkpoint.checkpoint(lambda part: model(part), x)",
        "networks[name](x)",
        "model.fc(x)",
        "model.block_2(x)",
        "model.pi(x)",
        "model.q1(x, y)",
    ],
)
def test_what_runs_a_network_is_its_forward(report, call):
    before = "networks = {}" if "networks" in call else "pass"
    assert report(training(f"out = {call}", before=before)) == [("OOM202", 9)]


def test_checkpointing_what_is_out_of_sight_runs_no_network(report):
    assert report(training("out = torch.utils.checkpoint.checkpoint(step, x)", "loss = out.sum()")) == []


def test_a_container_that_is_not_named_like_networks_says_nothing(report):
    assert report(training("out = transforms[name](x)", "loss = out.sum()")) == []


@pytest.mark.parametrize(
    "loss",
    [
        "loss = Loss(out, y)",
        "model.get_loss(out, y); loss = model.loss",
        "terms.add(out, y); loss = terms.total()",
        "terms.compare(out, y); terms.compare(x, y); loss = terms.total().mean()",
        "terms.first(out, y); extra = terms.second(y); loss = extra + 1",
        "terms = ProtoLoss(3); terms.compute_loss(out, y); loss, accuracy = terms.loss, terms.accuracy",
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


@pytest.mark.parametrize(
    "loss",
    [
        "terms.add(out, y); loss = others.total().mean()",
        "terms.add(y, y); loss = terms.total().mean()",
        "meter.add(out, y); loss = meter.total().mean()",
        "terms = ProtoLoss(3); terms.compute_loss(y, y); loss = terms.loss",
        "self.add(out, y); loss = self.total().mean()",
    ],
)
def test_an_object_makes_no_loss_of_what_it_was_not_given(report, loss):
    assert report(training("out = model(x)", loss)) == []


def test_an_object_makes_a_loss_of_all_that_it_was_given(report):
    loss = "terms.compare(out, y); terms.compare(model(y), x); loss = terms.total().mean()"
    assert report(training("out = model(x)", loss)) == [("OOM202", 9), ("OOM202", 10)]


@pytest.mark.parametrize("made", ["actor_critic(env.space)", "actor_critic(env.space).to(device)"])
def test_a_network_is_known_by_its_layers(report, made):
    code = f"""
        import torch
        device = torch.device("cuda")
        ac = {made}
        for state, action, reward in loader:
            state = state.to(device)
            distribution, logp = ac.pi(state, action)
            loss = -(logp * reward).mean() + (ac.v(state) - reward).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 6), ("OOM202", 7)]


def test_what_is_moved_and_asked_by_its_layers_is_a_network(report):
    code = """
        import torch

        class Learner:
            def __init__(self, config):
                self.nets = config.build()
                self.nets.cuda()

            def fit(self):
                for x, y in self.data:
                    loss = (self.nets.q(x) - y).pow(2).mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
    """
    assert report(code) == [("OOM202", 10)]


@pytest.mark.parametrize("placed", ["model = to_gpu(model)", "model = to_gpu(model, 0)"])
def test_what_takes_the_place_of_a_network_is_that_network(report, placed):
    """Although the same function gives a loss elsewhere."""
    code = training("out = model.decoder(x)", "loss = to_gpu(criterion(out, y))", before=placed)
    assert report(code) == [("OOM202", 9)]


SOLVED = """
    import torch
    {imported}

    def fit(model, y0, t):
        for i in range(100):
            optimizer.zero_grad()
            loss = (odeint(model, y0, t) - y).abs().mean()
            loss.backward()
            optimizer.step()
        {after}
"""
PLOTTED = "solution = odeint(model, y0, t)\n        plot(t.numpy(), solution.detach().numpy())"


@pytest.mark.parametrize(
    ("imported", "after", "found"),
    [
        ("from torchdiffeq import odeint", PLOTTED, [("OOM201", 10)]),
        ("from torchdiffeq import odeint_adjoint as odeint", PLOTTED, [("OOM201", 10)]),
        ("odeint = solvers[name]", PLOTTED, [("OOM201", 10)]),
        ("from torchdiffeq import odeint", "return odeint(model, y0, t)", []),
        ("from scipy.integrate import odeint", PLOTTED, []),
    ],
)
def test_what_solves_an_equation_runs_its_network(report, imported, after, found):
    assert report(SOLVED.format(imported=imported, after=after)) == found
