"""Networks whose own code runs a backward: a step behind it says whether it trains, or asks for gradients of inputs."""

from __future__ import annotations

import pytest

FUSED = """
    import torch

    class Fused(torch.nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone
            self.encoders = torch.nn.ModuleList([torch.nn.Conv2d(8, 4, 1) for _ in range(3)])
            {setting}

        def forward(self, images):
            logits = self.backbone(images)
            logits.backward(torch.ones_like(logits))
            tokens, total = [], torch.zeros(1)
            for gradient, encode in zip(self.gradients, self.encoders):
                token = encode(gradient)
                tokens.append(token)
                total += token.mean()
            return {{"tokens": tokens, "total": total}}

    model = Fused(backbone)
    maps = model(images)
    print(maps["total"].shape)
"""


@pytest.mark.parametrize("setting", ["pass", "self.eval()"])
def test_what_a_forward_collects_behind_a_backward_for_gradients_is_part_of_it(report, setting):
    assert report(FUSED.format(setting=setting)) == []


def test_a_forward_that_steps_trains_and_what_follows_in_it_evaluates(report):
    code = """
        import torch

        class Learner(torch.nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net
                self.optimizer = torch.optim.Adam(net.parameters())

            def forward(self, batches, test_batches):
                for batch in batches:
                    self.net(batch).mean().backward()
                    self.optimizer.step()
                for batch in test_batches:
                    print(self.net(batch).mean().item())

        Learner(net)(loader, test_loader)
    """
    assert report(code) == [("OOM201", 14)]


def test_a_forward_that_differentiates_is_evaluated_with_gradients_on(report):
    code = """
        import torch

        class Energy(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(3, 1)

            def forward(self, positions):
                positions.requires_grad_()
                energy = self.net(positions).sum()
                energy.backward()
                return energy, -positions.grad

        def validate(model, loader):
            model.eval()
            for positions, target in loader:
                energy, forces = model(positions)
                print((forces - target).abs().mean().item())

        validate(Energy(), loader)
    """
    assert report(code) == []


RESIDUAL = """
    import torch

    def residual_loss(model, x, edge):
        x = x.requires_grad_(True)
        u = model(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        border = model(edge)
        return (slope ** 2).mean() + (border ** 2).mean()

    {ends}
"""


@pytest.mark.parametrize(
    "shown",
    [
        "print(residual_loss(model, x, edge).item())",
        "history.append(residual_loss(model, x, edge).item())",
        "with open('loss.txt', 'w') as file:\n            file.write(str(float(residual_loss(model, x, edge))))",
    ],
)
def test_a_loss_that_asks_for_gradients_of_inputs_is_looked_at_with_gradients_on(report, shown):
    ends = f"""
    def train(model, x, edge, history, optimizer):
        for epoch in range(100):
            loss = residual_loss(model, x, edge)
            loss.backward()
            optimizer.step()
        {shown}
    """
    assert [one for one in report(RESIDUAL.format(ends=ends.strip())) if one[0] == "OOM201"] == []


def test_what_is_attacked_in_a_test_is_evaluated_all_the_same(report):
    code = """
        import torch

        def test(model, loader):
            model.eval()
            for x, y in loader:
                x.requires_grad_()
                gradient = torch.autograd.grad(criterion(model(x), y), x)[0]
                attacked = x + 0.1 * gradient.sign()
                right = (model(attacked).argmax(1) == y).sum().item()
    """
    assert report(code) == [("OOM201", 9)]


ADAPTING = """
    import torch

    class Adapting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def adapt(self, x, labels):
            loss = criterion(self.head(x), labels)
            for weight, grad in zip(self.head.parameters(), torch.autograd.grad(loss, list(self.head.parameters()))):
                weight.fast = weight - 0.1 * grad

        def forward(self, x):
            return self.head(self.body(x))

        def scores(self, x, labels):
            {ahead}
            return self.forward(x)

        def train_loop(self, loader, optimizer):
            for x, y in loader:
                optimizer.zero_grad(set_to_none=True)
                criterion(self.scores(x, y), y).backward()
                optimizer.step()

        def correct(self, x, y):
            scores = self.scores(x, y)
            return (scores.argmax(1) == y).sum().item()

        def test_loop(self, loader):
            print(sum(self.correct(x, y) for x, y in loader))
"""


@pytest.mark.parametrize(("ahead", "found"), [("self.adapt(x, labels)", []), ("pass", [("OOM201", 27)])])
def test_an_evaluation_cannot_do_without_gradients_for_what_adapts_on_its_way(report, ahead, found):
    assert [one for one in report(ADAPTING.format(ahead=ahead)) if one[0] == "OOM201"] == found
