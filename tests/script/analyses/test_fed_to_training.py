"""What a forward gives to an update without a graph is a part of training, and no evaluation."""

from __future__ import annotations

import pytest

UPDATE = """
    import torch

    def train(policy, env, optimizer):
        for iteration in range(100):
            x, y, gain = collect(env)
            {ahead}
            for epoch in range(10):
                new = policy(x).log_softmax(-1)
                loss = criterion(new, y, {read})
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize(
    ("ahead", "read"),
    [
        ("old = policy(x).log_softmax(-1).detach()", "old"),
        ("old = policy(x).detach().cpu().numpy(); chance = old[y]", "torch.tensor(chance)"),
        ("first, value = policy(x), 0; value += first.detach()", "value"),
    ],
)
def test_what_an_update_compares_with_is_no_evaluation(report, ahead, read):
    assert ("OOM201", 6) not in report(UPDATE.format(ahead=ahead, read=read))


@pytest.mark.parametrize(
    "ahead",
    [
        "old = policy(x).log_softmax(-1).detach()",
        "new = policy(x).detach()",  # bound again by the update before it is read
        "loss = criterion(policy(x), y).item(); gain = gain if loss > 1 else 0",
    ],
)
def test_what_it_does_not_read_is_one(report, ahead):
    assert ("OOM201", 6) in report(UPDATE.format(ahead=ahead, read="gain"))


def test_what_acts_is_one_whatever_is_kept_of_it(report):
    ahead = "out = policy(x); x, reward, done, info = env.step(out.argmax()); old = out.detach()"
    assert ("OOM201", 6) in report(UPDATE.format(ahead=ahead, read="old"))


SURROGATE = """
    import torch

    class Agent:
        def step(self, x, y, gain):
            old = self.policy(x).detach()
            new = self.policy(x)
            surrogate = ((new - {read}).exp() * gain).mean()
            self.apply(torch.autograd.grad(surrogate, self.policy.parameters()))

        def update(self, x, target):
            for step in range(5):
                loss = criterion(self.critic(x), target)
                loss.backward()
                self.optimizer.step()

        def run(self):
            for iteration in range(100):
                x, y, gain = self.collect()
                self.step(x, y, gain)
                value = self.critic(x).detach()
                self.update(x, {given})
"""


@pytest.mark.parametrize(("read", "given", "found"), [("old", "value", []), ("1", "gain", [5, 20])])
def test_what_is_differentiated_or_handed_to_an_update_is_none(report, read, given, found):
    findings = report(SURROGATE.format(read=read, given=given))
    assert [line for code, line in findings if code == "OOM201"] == found


LOSS_BEFORE = """
    import torch

    class Agent:
        def {name}(self, batch):
            return criterion(self.policy(batch.x), batch.y)

        def update(self, batch):
            before = self.{name}(batch).item()
            for step in range(80):
                loss = self.{name}(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            return before

        def learn(self):
            for batch in self.batches:
                self.update(batch)
            {after}
"""


def test_the_loss_before_an_update_is_part_of_it(report):
    found = report(LOSS_BEFORE.format(name="compute_loss", after="pass"))
    assert ("OOM201", 5) not in found


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("compute_loss", "print(sum(self.compute_loss(batch).item() for batch in self.val_batches))"),
        ("validation_loss", "pass"),
    ],
)
def test_a_loss_of_a_validation_is_none(report, name, after):
    assert ("OOM201", 5) in report(LOSS_BEFORE.format(name=name, after=after))


KEPT_BY_LAYERS = """
    import torch

    def stylize(model, image, style_losses):
        optimizer = torch.optim.LBFGS([image.requires_grad_()])
        rounds = [0]
        while rounds[0] < 300:
            def closure():
                optimizer.zero_grad()
                model(image)
                score = 0
                for style in style_losses:
                    score += style.backward()
                rounds[0] += 1
                return score
            optimizer.step(closure)
"""


def test_a_forward_for_the_losses_that_layers_keep_is_trained(report):
    assert ("OOM201", 9) not in report(KEPT_BY_LAYERS)


def test_so_is_one_for_layers_that_were_made_around_what_a_network_gave(report):
    made = "style_losses = [StyleLoss(model(image).clone()) for _ in range(4)]"
    kept = KEPT_BY_LAYERS.replace("optimizer = torch", f"{made}\n        optimizer = torch", 1)
    assert ("OOM201", 10) not in report(kept)
    assert ("OOM201", 10) in report(kept.replace("style.backward()", "style(model(image)).backward()"))
