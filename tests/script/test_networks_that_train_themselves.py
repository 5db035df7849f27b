"""Classes that are networks by their base and hold their own training: which of their methods are forwards."""

from __future__ import annotations

import pytest

TRAINED = """
    import torch

    class Translator(torch.nn.Module):
        def __init__(self, encoder, decoder):
            super().__init__()
            self.encoder, self.decoder = encoder.cuda(), decoder.cuda()
            self.optimizer = torch.optim.Adam(self.parameters()){part}

        {forward}

        def latent(self, tokens):
            state = None
            for token in tokens:
                out, state = self.encoder(token, state)
            return state

        def {helper}(self, x, y):
            return torch.nn.functional.mse_loss(self.decoder(self.latent(x)), y)

        def predict(self, x):
            return self.decoder(self.latent(x)).argmax(1)

        def fit(self, loader):
            for x, y in loader:
                loss = self.{helper}(x, y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
"""
OWN = {"part": "", "forward": "pass", "helper": "run_batch"}
FORWARD = "def forward(self, x): return self.decoder(self.latent(x))"


@pytest.mark.parametrize("part", ["", "; self.dropout = torch.nn.Dropout(0.1)", "; self.names = {}"])
def test_what_such_a_class_asks_of_itself_is_followed_to_the_networks_in_it(report, part):
    found = report(TRAINED.format(**OWN | {"part": part}))
    assert [line for code, line in found if code == "OOM202"] == [14, 18]


@pytest.mark.parametrize(
    "changed",
    [
        {"forward": FORWARD},  # the class is one network
        {"part": "; self.head = torch.nn.Linear(8, 8)"},
        {"helper": "forward_batch"},
    ],
)
def test_what_a_network_with_a_forward_or_layers_asks_of_itself_is_one(report, changed):
    found = report(TRAINED.format(**OWN | changed))
    assert [line for code, line in found if code == "OOM202"] == [25]


def test_a_state_of_a_line_that_training_goes_back_through_is_carried_for_it(report):
    assert "OOM104" not in {code for code, _ in report(TRAINED.format(**OWN))}


def test_a_state_of_a_pass_that_only_predicts_is_carried_for_nothing(report):
    code = TRAINED.format(**OWN).replace("self.decoder(self.latent(x)), y)", "self.decoder(x), y)")
    assert ("OOM104", 14) in report(code)


OWN_LOSS = """
    import torch
    from networks import Network

    {model}
    for x, y in loader:
        optimizer.zero_grad()
        {forward}
        model.backward({given})
        optimizer.step()
"""


@pytest.mark.parametrize("model", ["model = Network().cuda()", "model.cuda().train()"])
@pytest.mark.parametrize(
    ("forward", "given", "lines"),
    [
        ("logits, _ = model(x, y)", "", [7]),
        ("logits = other_model(x, y)", "", []),
        ("with torch.no_grad(): logits = model(x, y)", "", []),
    ],
)
def test_a_network_that_keeps_its_loss_goes_backwards_through_its_forward(report, model, forward, given, lines):
    found = report(OWN_LOSS.format(model=model, forward=forward, given=given))
    assert [line for code, line in found if code == "OOM202"] == lines
