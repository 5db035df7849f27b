"""Classes whose bases are in other files: what they make and run tells whether they are networks."""

from __future__ import annotations

import pytest

TAGGER = """
    import torch
    from torch import nn
    {imports}

    class Tagger({base}):
        def {making}(self):
            self.embedding = nn.Embedding(100, 8)
            self.out = nn.Linear(8, 4)

        def forward(self, inputs):
            results = self.forward_step(inputs)
            results["loss"] = results["logits"].sum()
            return results

        def forward_step(self, inputs):
            results = dict(inputs)
            results["logits"] = self.out(self.embedding(inputs["tokens"]))
            return results

        def predict_step(self, inputs):
            results = self.forward_step(inputs)
            return results["logits"].argmax(dim=-1).detach().cpu().numpy()
"""


@pytest.mark.parametrize("imports, base", [("from base import *", "Base"), ("from .base import Base", "Base")])
@pytest.mark.parametrize("making", ["__init__", "set_layers", "_build", "create_layers", "init_layers"])
def test_a_class_that_makes_layers_for_its_forward_is_a_network_whatever_it_is_built_on(report, imports, base, making):
    assert report(TAGGER.format(imports=imports, base=base, making=making)) == []


PIX2PIX = """
    import torch
    from .base_model import BaseModel

    class Pix2Pix(BaseModel):
        def __init__(self, opt):
            self.netG = define_G(opt).cuda()
            self.criterion = {criterion}
            self.optimizer = torch.optim.Adam(self.netG.parameters())

        def forward(self):
            self.fake = self.netG(self.real)

        def optimize_parameters(self):
            self.forward()
            self.optimizer.zero_grad()
            self.loss = self.criterion(self.fake, self.target)
            self.loss.backward()
            self.optimizer.step()

    model = Pix2Pix(opt)
    for batch in loader:
        model.set_input(batch)
        model.optimize_parameters()
"""


@pytest.mark.parametrize("criterion", ["torch.nn.L1Loss()", "make_criterion()", "torch.nn.BCEWithLogitsLoss()"])
def test_criteria_make_no_network_of_what_trains_one(report, criterion):
    assert ("OOM202", 11) in report(PIX2PIX.format(criterion=criterion))


SCALED = """
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.temperature = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale(self.model(x))

        def scale(self, logits):
            return {scaled}

        def tune(self, logits, labels):
            optimizer = torch.optim.LBFGS([self.temperature], lr=0.01)

            def closure():
                loss = criterion(self.scale(logits), labels)
                loss.backward()
                return loss

            optimizer.step(closure)
            print(criterion(self.scale(logits), labels).item())
"""


@pytest.mark.parametrize(
    "scaled, found",
    [
        ("logits / self.temperature.unsqueeze(1).expand(logits.size(0), logits.size(1))", []),
        ("logits / self.temperature.clamp(1e-3)", []),
        ("logits * self.temperature.exp()", []),
        ("logits / self.temperature", []),
        ("self.model(logits)", [("OOM201", 24)]),
    ],
)
def test_what_a_method_computes_with_a_parameter_alone_runs_no_network(report, scaled, found):
    assert report(SCALED.format(scaled=scaled)) == found


@pytest.mark.parametrize(
    "method, found",
    [
        ("forward_encoder", [("OOM201", 7)]),
        ("forward_eval", [("OOM201", 7)]),
        ("forward_test", []),
        ("forward_generate_step", []),
        ("forward_inference", []),
    ],
)
def test_what_is_named_for_generation_may_turn_gradients_off_by_itself(report, method, found):
    code = f"""
        import torch
        from models import make

        model = make()
        def validate(loader):
            for x, y in loader:
                out = model.{method}(x)
                print((out.argmax(1) == y).sum().item())
    """
    assert report(code) == found
