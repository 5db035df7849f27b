"""Recurrent and memory states that are carried from one iteration into the next."""

from __future__ import annotations

import pytest

TRAINING = """
    import torch

    def update(loss, optimizer):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def train(model, loader, criterion, optimizer):
        {start}
        for x, y in loader:
            {forward}
            loss = criterion(out, y)
            update(loss, optimizer)
"""


@pytest.mark.parametrize(
    ("start", "forward"),
    [
        ("hidden = model.init_hidden(20)", "out, hidden = model(x, hidden)"),
        ("state = None", "out, state = model(x, state)"),
        ("h = c = None", "out, (h, c) = model(x, (h, c))"),
        ("mems = ()", "out, *mems = model(x, *mems)"),
        ("past = None", "out, past = model(x, past_key_values=past)"),
        ("cache = None", "result = model(x, cache=cache); out = result[0]; cache = result[1]"),
        ("memory = torch.zeros(1, 8)", "out, memory = model(x, memory * 0.9)"),
    ],
)
def test_a_state_with_its_graph_is_found_with_the_backward_in_a_helper(report, start, forward):
    found = report(TRAINING.format(start=start, forward=forward))
    assert [line for code, line in found if code == "OOM104"] == [11]


@pytest.mark.parametrize(
    ("start", "forward"),
    [
        ("hidden = model.init_hidden(20)", "out, hidden = model(x, hidden.detach())"),
        ("hidden = None", "out, hidden = model(x, hidden); hidden = hidden.detach()"),
        ("mems = ()", "out, *mems = model(x, *mems); mems = [m.detach() for m in mems]"),
        ("past = None", "out, past = model(x, None)"),
    ],
)
def test_a_state_without_its_graph_is_not(report, start, forward):
    found = report(TRAINING.format(start=start, forward=forward))
    assert [line for code, line in found if code == "OOM104"] == []


EVALUATION = """
    import torch

    def generate(model, source):
        hidden, outputs = None, []
        {before}
        for x in source:
            out, hidden = model(x, hidden)
            {after}
        return outputs

    def train(model, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(x)[0], y)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize("after", ["outputs.append(out.argmax().item())", "print(out.max())"])
def test_a_state_that_is_carried_where_nothing_is_backpropagated_is_found(report, after):
    assert report(EVALUATION.format(before="model.eval()", after=after)) == [("OOM104", 7), ("OOM201", 7)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.set_grad_enabled(False)", "outputs.append(out.argmax().item())"),
        ("model.eval()", "hidden = hidden.detach()"),
        ("model.eval()", "hidden = None"),
    ],
)
def test_a_state_without_a_graph_to_carry_is_not(report, before, after):
    assert "OOM104" not in dict(report(EVALUATION.format(before=before, after=after)))


def test_the_activations_of_one_layer_after_the_other_are_no_state(report):
    code = """
        def predict(layers, h):
            layers.eval()
            for layer in layers:
                h = layer(h)
            print(h.argmax())
    """
    assert "OOM104" not in dict(report(code))


def test_time_steps_that_are_backpropagated_together_are_one_iteration(report):
    code = """
        import torch

        def encode(encoder, source):
            hidden = encoder.init_hidden()
            for x in source:
                out, hidden = encoder(x, hidden)
            return out

        def rollout(policy, env, hidden=None):
            terms = []
            for t in range(100):
                action, hidden = policy(env.state, hidden)
                terms.append(action)
            return terms

        for source, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(encode(encoder, source), y)
            loss.backward()
            optimizer.step()
            hidden = None
            for x in source:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out, hidden = decoder(x, hidden)
                    loss = criterion(out, y)
            loss.backward()
    """
    assert report(code) == []


@pytest.mark.parametrize(
    ("before", "each", "found"),
    [
        ("hidden = None", "pass", [("OOM104", 8)]),
        ("pass", "hidden = None", []),
        ("hidden = None", "hidden = hidden if hidden is None else hidden.detach()", []),
    ],
)
def test_a_state_left_by_the_time_steps_of_one_batch_is_carried_into_the_next(report, before, each, found):
    code = f"""
        import torch
        {before}
        for source, target in loader:
            {each}
            loss = 0
            for x, y in zip(source, target):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out, hidden = model(x, hidden)
                    loss = loss + criterion(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    assert report(code) == found


def test_outputs_written_into_one_tensor_are_backpropagated_with_it(report):
    code = """
        import torch

        def step(net, x, y):
            outputs = torch.empty_like(y)
            hidden = net.reset()
            for i in range(x.size(1)):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out, hidden = net(x[:, i], hidden)
                outputs[:, i] = out
            loss = criterion(outputs, y)
            loss.backward()
            optimizer.step()

        for x, y in loader:
            step(net, x, y)
    """
    assert report(code) == []


@pytest.mark.parametrize(
    "detaching", ["model.detach(hidden)", "model.detach_states(hidden)", "helpers.repackage(hidden)"]
)
def test_a_method_that_is_named_for_it_detaches(report, detaching):
    code = f"""
        import helpers
        hidden = model.init_hidden(20)
        for x, y in loader:
            hidden = {detaching}
            out, hidden = model(x, hidden)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


KEPT_BY_A_MODULE = """
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out, self.state = nn.LSTM(8, 16), nn.Linear(16, 2), None

        def forward(self, x):
            out, state = self.lstm(x, self.state)
            self.state = {kept}
            return self.out(out)

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters())
    {before}
    for x, y in loader:
        {first}
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = criterion(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, [("OOM104", 11)]),
        ({"before": "model.state = zeros"}, [("OOM104", 11)]),
        ({"first": "model.state = None"}, [("OOM103", 22)]),
        ({"first": "model.state = [part.detach() for part in model.state]"}, [("OOM103", 22)]),
        ({"kept": "[part.detach() for part in state]"}, [("OOM103", 22)]),
    ],
)
def test_a_state_that_a_module_keeps_goes_into_the_next_forward(report, changes, found):
    code = KEPT_BY_A_MODULE.format(**{"kept": "state", "before": "pass", "first": "pass"} | changes)
    assert report(code) == found
