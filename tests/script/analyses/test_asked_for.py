"""A method of a network that training and evaluation share: gradients are turned off where the evaluation calls it."""

from __future__ import annotations

import pytest

SHARED = """
    import torch

    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.head(x)

        def loss(self, x, y):
            return torch.nn.functional.cross_entropy(self(x), y)

        def both(self, x, y):
            return self.loss(x, y), 0

    model = Tagger()
    for x, y in train_loader:
        loss = model.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for x, y in val_loader:
        print({call})
"""


@pytest.mark.parametrize("call", ["model.loss(x, y).item()", "model.both(x, y)[0].item()"])
def test_a_shared_method_is_reported_where_the_evaluation_calls_it(report, call):
    line = 25 if "loss" in call else 15
    assert report(SHARED.format(call=call)) == [("OOM201", line)]


def test_a_method_that_only_evaluation_calls_is_reported_where_it_runs_the_network(report):
    code = SHARED.format(call="model.loss(x, y).item()").replace("model.loss(x, y)\n", "(model(x) - y).mean()\n")
    assert report(code) == [("OOM201", 12)]


def test_a_shared_function_of_no_network_is_reported_where_it_runs_one(report):
    code = """
        import torch

        class Steps:
            def loss(self, x, y):
                return criterion(self.model(x), y)

            def fit(self):
                for x, y in self.train_loader:
                    loss = self.loss(x, y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                self.model.eval()
                for x, y in self.val_loader:
                    print(self.loss(x, y).item())
    """
    assert report(code) == [("OOM201", 5), ("OOM202", 5)]
