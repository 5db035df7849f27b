"""Methods of networks of other files: which of them leave gradients on, as the training in sight shows."""

from __future__ import annotations

import pytest

AGENT = """
    import torch

    class Agent:
        def __init__(self, actor, critic, rate):
            self.actor, self.critic = actor.cuda(), critic.cuda()
            {made}
            self.q_optimizer = torch.optim.Adam(self.critic.parameters(), lr=rate)

        def select_action(self, state):
            state = torch.as_tensor(state).cuda()
            action, _ = self.actor.{acting}(state)
            return action.detach().cpu().numpy()[0]

        def update(self, states, actions, targets):
            q_loss = torch.nn.functional.mse_loss(self.critic(states, actions), targets)
            q_loss.backward()
            self.q_optimizer.step()
            drawn, chance = self.actor.sample(states)
            {between}
            loss = (0.2 * chance - self.critic(states, drawn)).mean()
            loss.backward()
            {step}
"""
MADE = "self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=rate)"
OWN = {"acting": "sample", "between": "pass", "made": MADE, "step": "self.optimizer.step()"}
HELD = {"made": "self.actor.train()", "step": "self.actor.optimizer.step()"}


MADE_ELSEWHERE = {"made": "self.optimizer = make_optimizer('adam', self.actor.parameters(), lr=rate)"}
NAMED = {"made": "self.optimizer = make_optimizer('adam', params=self.actor.parameters())"}


@pytest.mark.parametrize("changed", [{}, HELD, MADE_ELSEWHERE, NAMED])
def test_a_method_that_is_all_a_step_of_its_network_can_come_from_records_a_graph(report, changed):
    assert report(AGENT.format(**OWN | changed)) == [("OOM201", 11)]


@pytest.mark.parametrize(
    "changed",
    [
        {"acting": "choose"},  # another method may turn gradients off
        {"between": "other = self.actor(states)\n            chance = chance + other"},  # the step may come from that
        {"made": "self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()])"},
        {"made": "self.optimizer = make_optimizer(self.actor, rate)"},
        {"made": "self.optimizer = make_optimizer(self.actor.parameters(), self.critic.parameters())"},
        {"made": "self.optimizer = torch.optim.Adam(self.critic.parameters(), lr=rate)"},
        {"step": "pass"},
        {"step": "other_loss(self).backward()\n            self.optimizer.step()"},
        {"made": f"{MADE}\n            self.chances = Chances(self.actor)", "between": "chance = self.chances(states)"},
    ],
)
def test_any_other_method_may_turn_gradients_off(report, changed):
    assert [one for one in report(AGENT.format(**OWN | changed)) if one[1] == 11] == []


def test_so_it_does_where_the_loss_was_split(report):
    """What `apply` has made of the loop says as much as the loop did: the other findings are mended after that."""
    code = """
        import torch
        from oomfix import runtime

        memory = runtime.preset("16gb")

        class Agent:
            def __init__(self, actor, critic):
                self.actor, self.critic = actor.cuda(), critic.cuda()
                self.optimizer = torch.optim.Adam(self.actor.parameters())

            def select_action(self, state):
                action, _ = self.actor.sample(torch.as_tensor(state).cuda())
                return action.detach().cpu().numpy()[0]

            def update(self, states):
                def forward(states):
                    drawn, chance = self.actor.sample(states)
                    return (0.2 * chance - self.critic(states, drawn)).mean()

                memory.forward_backward(forward, states)
                memory.step(self.optimizer)
    """
    assert report(code) == [("OOM201", 12)]


TRAINING = """
    import torch
    from networks import Body, Head

    body, head = Body().cuda(), Head().cuda()
    optimizer = torch.optim.Adam({stepped}.parameters())
    for x, y in loader:
        out = body.{called}
        loss = criterion(head(out), y)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("stepped", "called", "found"),
    [
        ("body", "compute(x)", [("OOM202", 7), ("OOM202", 8)]),
        ("body", "compute(body.prior(x))", [("OOM202", 8)]),
        ("body", "compute()", [("OOM202", 8)]),  # of the weights alone
        ("head", "compute(x)", [("OOM202", 8)]),
    ],
)
def test_what_a_step_can_only_come_from_is_a_forward_of_training(report, stepped, called, found):
    assert report(TRAINING.format(stepped=stepped, called=called)) == found


@pytest.mark.parametrize("criterion", ["WassersteinLoss(critic)", "self.make(critic)"])
def test_samples_for_a_criterion_that_hides_a_network_may_be_without_gradients(report, criterion):
    """All that the backward goes through in sight is the generator, but what is stepped is what the criterion holds."""
    code = f"""
        import torch

        class Trainer:
            def __init__(self, critic):
                self.criterion = {criterion}
                self.optimizer = make_optimizer(critic.cuda())

            def fit(self, generator, loader):
                generator.eval()
                for x in loader:
                    loss = self.criterion(x, generator.sample(len(x)))
                    loss.backward()
                    self.optimizer.step()
    """
    assert report(code) == []
