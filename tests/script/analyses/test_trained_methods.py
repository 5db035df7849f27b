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
            return action.{given}()[0]

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
OWN = {"acting": "sample", "given": "tolist", "between": "pass", "made": MADE, "step": "self.optimizer.step()"}
DETACHED = {"acting": "choose", "given": "detach().cpu().numpy"}
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
        DETACHED,
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


SEARCH = """
    import torch

    class Search:
        def explain(self, image, net, near):
            net.eval()
            scores = net.{first}(image)
            for step in range(100):
                if near:
                    wanted = net.compare(image + step)
                else:
                    wanted = net.{second}(image)
                {rest}
                wanted.square().mean().backward()
                self.optimizer.step()
            return scores.argmax().item()
"""


def test_all_that_a_backward_goes_through_may_be_one_method_on_several_branches(report):
    code = SEARCH.format(first="compare", second="compare", rest="pass")
    assert ("OOM201", 6) in report(code)


@pytest.mark.parametrize(
    "changed", [{"first": "describe"}, {"second": "describe"}, {"rest": "wanted = wanted + net.describe(image)"}]
)
def test_of_two_methods_either_may_turn_gradients_off(report, changed):
    code = SEARCH.format(**{"first": "compare", "second": "compare", "rest": "pass"} | changed)
    assert ("OOM201", 6) not in report(code)


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


ALONE = """
    import torch

    def fit(model, optimizer, loader):
        {asked}
        for x, y in loader:
            loss = model.{called}
            {more}
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("asked", "called", "more", "found"),
    [
        ("model.cuda().train()", "step(x, y)", "pass", []),  # another object may have that name
        ("model.cuda(); model.train()", "step(x, y)", "pass", [6]),
        ("model.cuda(); clip(model.parameters())", "step(x, y)['loss']", "pass", [6]),
        ("model.cuda(); model.train()", "step()", "pass", []),  # of the weights alone
        ("model.cuda(); model.train(); model.eval()", "step(x, y)", "pass", []),
        ("model.cuda()", "step(x, y)", "pass", []),
        ("model.cuda(); model.train()", "step(x, y)", "loss = loss + model(x).mean()", [7]),
    ],
)
def test_a_method_that_is_all_that_trains_a_network_is_its_forward(report, asked, called, more, found):
    code = ALONE.format(asked=asked, called=called, more=more)
    assert [line for code, line in report(code) if code == "OOM202"] == found


TOGETHER = """
    import torch

    def fit(encoder, model, optimizers, loader):
        {asked}
        for x, y in loader:
            feats = encoder(x.cuda())
            loss, stats = model.step(y, feats)
            {more}
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        {after}
"""
PLACED = "encoder.cuda(); model.cuda(); model.train()"


@pytest.mark.parametrize(
    ("asked", "more", "after", "found"),
    [
        (PLACED, "pass", "pass", [6, 7]),
        ("encoder.cuda(); clip(model.parameters())", "pass", "pass", [6, 7]),
        ("encoder.cuda(); model.train()", "pass", "pass", [6]),  # a loader may have that, too
        ("encoder.cuda(); model.cuda()", "pass", "pass", [6]),
        (PLACED, "loss = loss + model.prior(feats)", "pass", [6]),  # which of the two runs it?
        (PLACED, "pass", "print(model(x))", [6]),
        (f"{PLACED}; wrapped_net = wrap(model)", "loss = loss + wrapped_net(feats).mean()", "pass", [6, 8]),
    ],
)
def test_what_is_all_that_runs_a_trained_network_is_its_forward_beside_others(report, asked, more, after, found):
    code = TOGETHER.format(asked=asked, more=more, after=after)
    assert [line for code, line in report(code) if code == "OOM202"] == found


WRAPPED = """
    import torch

    class Trainer:
        def fit(self, model, optimizer, loader):
            {net}.cuda(); {net}.train()
            for x, y in loader:
                if self.distributed:
                    loss = {net}.module.{wrapped}(x, y)
                else:
                    loss = {net}.step(x, y)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                print({net}(x))
"""


@pytest.mark.parametrize("net", ["model", "self.net"])
@pytest.mark.parametrize(("wrapped", "found"), [("step", [8, 10]), ("other", [])])
def test_a_method_of_a_network_is_the_same_behind_what_distributes_it(report, net, wrapped, found):
    code = WRAPPED.format(net=net, wrapped=wrapped)
    assert [line for code, line in report(code) if code == "OOM202"] == found


def test_what_a_loader_draws_is_no_forward(report):
    """Nothing of it is on a device: `train()` chooses between two sets of data."""
    code = """
        import torch

        def fit(model, loader):
            loader.train()
            for step in range(100):
                x, y = loader.draw(8)
                loss = criterion(model(x.cuda()), y)
                loss.backward()
                optimizer.step()
    """
    assert report(code) == [("OOM202", 7)]


COLLECTED = """
    import torch

    class Learner:
        def __init__(self, net, optimizer):
            self.net, self.optimizer = net.cuda(), optimizer

        def evaluate(self, states):
            values = self.net.{asked}(states)
            return [value.detach().cpu().numpy() for value in values]

        def fit(self, loader):
            for states, returns in loader:
                chances = self.net(states)
                values = self.net.judge(states)
                {name} = []
                for value in values:
                    {name}.append({term})
                loss = torch.stack({name}).mean() - chances.mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
"""
TERM = {"asked": "judge", "name": "value_losses", "term": "(returns - value).square().mean()"}


def test_what_alone_makes_a_term_of_the_collected_losses_is_a_forward(report):
    assert report(COLLECTED.format(**TERM)) == [("OOM201", 8), ("OOM202", 13), ("OOM202", 14)]


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"asked": "guess"}, ("OOM201", 8)),
        ({"name": "kept"}, ("OOM202", 14)),
        ({"term": "(returns - value).square().mean() + chances.mean()"}, ("OOM202", 14)),
    ],
)
def test_what_is_collected_otherwise_or_with_other_terms_may_hold_no_graph(report, changed, missing):
    assert missing not in report(COLLECTED.format(**TERM | changed))


TERMS = """
    import torch.nn.functional as F

    def train(model, teacher, loader, optimizer):
        model.cuda()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            {term}
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("term", "lines"),
    [
        ("loss = loss + F.mse_loss(model.concepts(x), teacher)", [6, 7]),
        ("loss = loss + F.mse_loss(model.concepts(x)[0], teacher.concepts(x).detach())", [6, 7]),
        ("loss = loss + F.mse_loss(model.concepts(x), model.wanted(x))", [6]),  # one of them may have no graph
        ("print(F.mse_loss(model.concepts(x), teacher))", [6]),
        ("loss = loss * model.concepts(x)", [6]),
    ],
)
def test_a_method_whose_results_alone_a_criterion_of_the_loss_is_given_runs_the_network(report, term, lines):
    assert [line for code, line in report(TERMS.format(term=term)) if code == "OOM202"] == lines


@pytest.mark.parametrize(
    ("called", "lines"),
    [("self.value_head.forward_mean(x)", [8]), ("self.values.forward_mean(x)", []), ("self.value_head.mean(x)", [])],
)
def test_a_method_named_after_the_forward_of_what_is_named_like_a_network_runs_it(report, called, lines):
    script = f"""
        import torch
        class Agent:
            def __init__(self, value_head):
                self.value_head = value_head
                self.values = value_head.values
            def train(self, loader, optimizer):
                for x, y in loader:
                    loss = ({called} - y.cuda()).square().mean()
                    loss.backward()
                    optimizer.step()
    """
    assert [line for code, line in report(script) if code == "OOM202"] == lines


LIKELIHOOD = """
    import torch

    def train(flow, teacher, loader, optimizer):
        for x, y in loader:
            loss = 0.1 * flow.{name}(x).sum() + teacher(x).sum()
            loss.backward()
            optimizer.step()

    def test(flow, loader):
        flow.eval()
        for x, y in loader:
            print(flow.{name}(x).mean())
"""


@pytest.mark.parametrize(("name", "lines"), [("log_prob", [12]), ("nll", [12]), ("sample", []), ("divergence", [])])
def test_a_likelihood_that_is_backpropagated_records_a_graph_in_an_evaluation_too(report, name, lines):
    assert [line for code, line in report(LIKELIHOOD.format(name=name)) if code == "OOM201"] == lines
