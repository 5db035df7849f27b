"""A policy that is asked what to do: an evaluation, unless something goes back through the answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oomfix.rules.base import holds
from oomfix.rules.eval_with_grad import EvalWithGrad
from oomfix.script import Script

Evaluations = Callable[[str], list[int]]


@pytest.fixture
def evaluations(read: Callable[[str], Script]) -> Evaluations:
    """The lines on which OOM201 is reported in a snippet."""
    return lambda code: [finding.line for finding in EvalWithGrad().check(read(code))]


EPISODE = """
    import torch

    def roll_out(actor, critic, env, memory):
        observation = env.reset()
        kept, rewards = [], []
        for t in range(100):
            {acting}
            rewards.append(reward)
        return rewards

    for episode in range(1000):
        rewards = roll_out(actor, critic, env, memory)
        loss = criterion(actor(batch), targets)
        loss.backward()
        optimizer.step()
"""
STEP = "\n            observation, reward, done, info = env.step(action)"


@pytest.mark.parametrize(
    "acting",
    [
        "action = actor(observation).argmax().item()" + STEP,
        "logits, state = actor(observation, state)\n            action = logits.argmax().item()" + STEP,
        "p = torch.softmax(actor(observation), 0)\n            action = choose(p.data.numpy())" + STEP,
        "q = actor(observation)\n            action = q.argmax().item() if epsilon < draw() else env.sample()" + STEP,
        "observation, reward, over = env.step(actor(observation).detach().numpy())",
        "p = actor(observation).detach().numpy()\n            action[0][1] = p[0] + noise" + STEP,
    ],
)
def test_what_is_done_in_an_environment_needs_no_gradients(evaluations, acting):
    assert evaluations(EPISODE.format(acting=acting)) == [7]


@pytest.mark.parametrize(
    "acting",
    [
        "with torch.no_grad():\n                action = actor(observation).argmax().item()" + STEP,
        # the value is kept for a loss
        "value = critic(observation)\n            kept.append(value)\n            action = env.pick()" + STEP,
        "p = actor(observation)\n            action = p.argmax().item()\n            memory.push(p[action])" + STEP,
        "p = actor(observation)\n            action = p.argmax().item()\n            kept.append(p)" + STEP,
        "p = actor(observation)\n            action = p.argmax().item()\n            remember(p)" + STEP,
        "p = actor(observation)\n            action = p.argmax().item()\n            yield p" + STEP,
        # a forward that the action does not come from
        "target = critic(observation).detach()\n            action = env.pick()" + STEP,
        # no environment: schedulers and optimizers step as well
        "action = actor(observation).argmax()\n            scheduler.step(action)\n            reward = 0",
        "loss, change = solver.step(actor(observation))\n            reward = 0",
    ],
)
def test_what_may_be_trained_through_or_does_not_act_is_left_alone(evaluations, acting):
    assert evaluations(EPISODE.format(acting=acting)) == []


def test_acting_in_the_loop_that_trains_is_one_too(evaluations):
    code = """
        import torch

        while True:
            q, state = model(observation, state)
            action = q.argmax().item()
            observation, reward, done, info = env.step(action)
            replay.insert(observation, action, reward, done)
            loss = criterion(model(replay.sample()), target(replay.next()).detach())
            loss.backward()
            optimizer.step()
    """
    assert evaluations(code) == [4]


def test_a_function_that_makes_one_step_acts_too(evaluations):
    """The loop may stand in another function, or in another file."""
    player = """
        import torch

        class Player:
            def play(self, net, epsilon):
                if draw() < epsilon:
                    action = self.env.any()
                else:
                    values = net(self.state)
                    action = int(torch.max(values, dim=1)[1].item())
                self.state, reward, done, info = self.env.step(action)
                return reward if done else None
    """
    training = """
        player = Player()
        while True:
            reward = player.play(model, epsilon)
            loss = criterion(model(batch), target(batch).max(1)[0].detach())
            loss.backward()
            optimizer.step()
    """
    assert evaluations(player + training) == [8]
    assert evaluations(player) == [8]


AGENT = """
    import torch

    class Agent:
        def __init__(self):
            self.policy = torch.nn.LSTM(8, 4)

        def {name}(self, x, hidden):
            out, hidden = self.policy(x, hidden)
            return {result}

        def update(self, batch, targets):
            loss = criterion(self.policy(batch), targets)
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("select_action", "out.argmax().item()"),
        ("chooseAction", "out.argmax().item()"),
        ("action_epsilon_greedy", "out.argmax().item()"),
        ("compute_actions", "out.argmax().item()"),
        ("select_action", "out.argmax()"),
        # the state that the policy wants back the next time
        ("select_action", "out.argmax().item(), hidden"),
        ("act", "out.detach().numpy(), (new_h, hidden)"),
    ],
)
def test_a_method_that_acts_is_known_by_its_name(evaluations, name, result):
    assert evaluations(AGENT.format(name=name, result=result)) == [8]


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("sample_action", "out.argmax(), out.log()"),
        ("get_actions", "out.argmax().item(), out.log(), hidden"),
        ("chooseAction", "out, hidden"),
        ("compute_action_loss", "out.argmax()"),
        ("reaction", "out.argmax()"),
        ("step_hidden", "out.argmax().item(), hidden"),
    ],
)
def test_a_method_whose_result_may_be_trained_through_is_left_alone(evaluations, name, result):
    assert evaluations(AGENT.format(name=name, result=result)) == []


def test_where_an_optimizer_steps_a_backward_runs_out_of_sight(evaluations):
    code = """
        import torch

        for i in range(1000):
            for part in range(4):
                loss = model(next(batches), replay_backward=True)
            optimizer.step()
            optimizer.zero_grad()
            for x in {loader}:
                seen = model(x).detach()
    """
    assert evaluations(code.format(loader="val_loader")) == [9]
    assert evaluations(code.format(loader="other")) == []
    assert evaluations(code.format(loader="other").replace("optimizer.step()", "pass")) == [5, 9]


def test_a_state_that_leaves_what_does_not_act_may_be_trained_through(evaluations):
    code = """
        import torch

        class Reader:
            def read(self, chunk, hidden):
                for x in chunk:
                    out, hidden = self.network(x, hidden)
                return out.argmax().item(), hidden
    """
    assert evaluations(code) == []
    assert evaluations(code.replace("def read(", "def act(")) == [6]


@pytest.mark.parametrize("name", ["data", "kept"])
def test_what_a_policy_keeps_to_be_trained_on_is_trained_through(evaluations, name):
    """A list of a class that is called `data` is no tensor without its graph."""
    code = f"""
        import torch
        from torch import nn

        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.{name} = []
                self.layer = nn.Linear(4, 2)

            def forward(self, x):
                return self.layer(x).softmax(0)

            def keep(self, entry):
                self.{name}.append(entry)

            def learn(self):
                for reward, likely in self.{name}[::-1]:
                    (-torch.log(likely) * reward).backward()
                self.{name} = []

        policy = Policy()
        for episode in range(100):
            observation, over = env.reset(), False
            while not over:
                likely = policy(observation)
                action = likely.multinomial(1)
                observation, reward, over = env.step(action.item())
                policy.keep((reward, likely[action]))
            policy.learn()
    """
    assert evaluations(code) == []


@pytest.mark.parametrize(("helper", "found"), [("to_numpy", [6]), ("tensor2numpy", [6]), ("to_tensor", [])])
def test_arrays_that_an_imported_helper_makes_leave_no_graph(evaluations, helper, found):
    code = f"""
        import torch
        from project import tools

        class Policy(torch.nn.Module):
            def get_action(self, observation):
                actions = self.forward(tools.from_numpy(observation))
                return tools.{helper}(actions.sample())

            def forward(self, x):
                return torch.distributions.Categorical(logits=self.net(x))

            def update(self, observations, actions):
                loss = -self(observations).log_prob(actions).mean()
                loss.backward()
                self.optimizer.step()
    """
    assert evaluations(code) == found


HELD_BY_A_LIST = """
    import torch
    from networks import Policy

    class Agent:
        def __init__(self, size):
            self.actor = Policy(size).cuda()

        def {name}(self, observation):
            action = self.actor(observation)
            return action + 0.1

    class Agents:
        def __init__(self, sizes):
            self.agents = []
            for size in sizes:
                self.agents.append(Agent(size))

        def choose(self, state):
            actions = []
            for i, agent in enumerate(self.agents):
                {taken}
                actions.append(action)
            return actions

        def learn(self, batch, targets):
            for agent, x in zip(self.agents, batch):
                loss = criterion(agent.actor(x), targets)
                loss.backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize(
    "taken",
    [
        "action = agent.get_action(state[i]).squeeze(0).detach().cpu().numpy().tolist()",
        "action = agent.get_action(state[i]).argmax(-1)",
        "action = agent.get_action(observation=state[i]).data.cpu().numpy()[0]",
        "chosen = agent.get_action(state[i]); action = chosen.detach().cpu().numpy()",
        "chosen = agent.get_action(state[i]); print(chosen.argmax().item()); action = chosen.cpu().detach()",
    ],
)
def test_an_action_that_all_callers_take_off_the_graph_needs_none(evaluations, taken):
    assert evaluations(HELD_BY_A_LIST.format(name="get_action", taken=taken)) == [9]


@pytest.mark.parametrize(
    "taken",
    [
        "action = agent.get_action(state[i])",
        "action = agent.get_action(state[i]).squeeze(0)",
        "chosen = agent.get_action(state[i]); action = chosen.detach(); self.last = chosen",
        "action = agent.get_action(state[i]).item(); self.last = agent.get_action(state[i])",
        "action = agent.get_action",
    ],
)
def test_an_action_that_one_of_them_keeps_may_be_trained_through(evaluations, taken):
    assert evaluations(HELD_BY_A_LIST.format(name="get_action", taken=taken)) == []


COLLECTED = """
    import torch

    policy = Net()
    optimizer = torch.optim.Adam(policy.parameters())
    saved = {made}

    def select_action(state):
        chances = torch.distributions.Categorical(policy(state).softmax(1))
        action = chances.sample()
        {kept}
        return action.item()

    for episode in range(100):
        state, rewards = env.reset(), []
        for t in range(1000):
            state, reward, done, info = env.step(select_action(state))
            rewards.append(reward)
        loss = {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {cleared}
"""


@pytest.mark.parametrize(
    ("made", "kept", "loss", "cleared"),
    [
        ("[]", "saved.append(chances.log_prob(action))", "-torch.cat(saved).sum() * sum(rewards)", "del saved[:]"),
        ("[]", "saved.append(chances.log_prob(action))", "sum(-one for one in saved)", "saved.clear()"),
        (
            "{'chance': []}",
            "saved['chance'].append(chances.log_prob(action))",
            "-torch.cat(saved['chance']).sum()",
            "saved['chance'] = []",
        ),
    ],
    ids=["a list", "term by term", "a dict of lists"],
)
def test_what_an_action_leaves_in_a_global_list_for_the_loss_needs_its_graph(report, made, kept, loss, cleared):
    assert report(COLLECTED.format(made=made, kept=kept, loss=loss, cleared=cleared)) == []


def test_a_global_list_of_which_no_loss_is_made_keeps_every_graph(report):
    code = COLLECTED.format(
        made="[]", kept="saved.append(chances.log_prob(action))", loss="criterion(policy(x), y)", cleared="pass"
    )
    assert ("OOM102", 10) in report(code)


@pytest.mark.parametrize(("drawn", "found"), [("torch.normal(mean, deviation)", [5]), ("mean + deviation", [])])
def test_nothing_is_trained_through_a_draw_that_a_caller_gets(evaluations, drawn, found):
    code = f"""
    import torch

    class Agent:
        def select_action(self, state):
            mean, deviation = self.actor(state)
            return {drawn}

        def update(self, x, y):
            loss = criterion(self.actor(x), y)
            loss.backward()
            self.optimizer.step()
    """
    assert evaluations(code) == found


ROLLOUT = """
    import torch

    class Agent:
        def rollout(self, env, steps):
            states, actions, chances = [], [], []
            state = env.reset()
            for _ in range(steps):
                distribution, value = self.net(state)
                action = distribution.{drawn}()
                chances.append(distribution.log_prob(action){kept})
                states.append(state)
                actions.append(action)
                state, reward, done, info = env.step(action.cpu().numpy())
            return states, actions, chances

        def update(self, states, actions, chances):
            with torch.autocast("cuda", torch.bfloat16):
                loss = surrogate(self.net(states), actions, chances)
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("drawn", "kept", "found"),
    [
        ("sample", ".detach()", [("OOM201", 8)]),
        ("sample", "", []),
        ("rsample", ".detach()", []),
    ],
)
def test_a_sample_of_what_has_log_probabilities_carries_no_graph(report, drawn, kept, found):
    assert [one for one in report(ROLLOUT.format(drawn=drawn, kept=kept)) if one[0] == "OOM201"] == found


HELPER = """
    import torch

    net = Net().cuda()

    def pick(state):
        if random.random() > 0.1:
            return {given}
        return {other}

    for episode in range(100):
        while not done:
            {taken} = pick(state)
            state, reward, done, _ = env.step({done})
            {after}
            loss = torch.nn.functional.mse_loss(net(replay.states), replay.targets)
            loss.backward()
            optimizer.step()
"""
DRAWN = {"given": "net(state).max(1)[1].view(1, 1)", "other": "torch.zeros(1, 1).long()", "taken": "action"}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"done": "action.item()", "after": "replay.push(state, action, reward)"}, [7]),
        ({"done": "guess()", "after": "replay.push(state, reward)"}, []),  # what it gives goes nowhere
        (
            {"given": "net(state)", "other": "start", "done": "action.argmax().item()", "after": "kept.append(action)"},
            [],
        ),
    ],
)
def test_a_function_is_asked_for_the_action_that_the_loop_does(evaluations, changed, found):
    assert evaluations(HELPER.format(**DRAWN | changed)) == found


def test_a_script_that_only_acts_is_read(report):
    """Evolution: what is best in the environment is kept, and no backward runs."""
    code = """
        import torch

        def fitness(policy, env):
            state, total, done = env.reset(), 0, False
            while not done:
                state, reward, done, _ = env.step(policy(torch.tensor(state)).argmax().item())
                total += reward
            return total
    """
    assert any(holds(code.encode(), need) for need in EvalWithGrad.needs)
    assert report(code) == [("OOM201", 6)]


REMEMBERED = """
    import torch

    class Agent:
        def __init__(self):
            self.critic = torch.nn.Linear(8, 4)

        def {name}(self, state, action):
            values = self.critic(state)
            {end}

        def learn(self, state, target):
            loss = criterion(self.critic(state), target)
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("evaluate_actions", "self.values = values"),
        ("evaluate_action", "self.values = values"),
        ("append_sample", "self.memory.add(values.data[0][action], state)"),
        ("store_sample", "self.memory.add(values.data[0][action], state)"),
    ],
)
def test_what_keeps_experience_or_asks_for_it_again_is_part_of_training(evaluations, name, end):
    assert evaluations(REMEMBERED.format(name=name, end=end)) == []


@pytest.mark.parametrize("name", ["evaluate_policy", "sample_actions", "save_samples"])
def test_what_is_named_alike_is_none(evaluations, name):
    assert evaluations(REMEMBERED.format(name=name, end="print(values.argmax())")) == [8]


UNREAD = """
    import torch

    class Agent:
        def train(self):
            for t in range(1000):
                {asked}
                action = self.choose(state)
                {step}
                self.remember(state, action, reward)
                loss = criterion(self.net(self.replay()), targets)
                loss.backward()
                self.optimizer.step()
                {later}
"""
STEPS = "state, reward, done, info = self.env.step(action)"


@pytest.mark.parametrize("asked", ["q_values = self.net(state)", "q_values = self.net.forward(state)"])
def test_values_that_nobody_reads_beside_a_step_of_the_environment_are_of_no_loss(evaluations, asked):
    assert evaluations(UNREAD.format(asked=asked, step=STEPS, later="pass")) == [6]


@pytest.mark.parametrize(
    ("asked", "step", "later"),
    [
        ("q_values = self.net(state)", STEPS, "penalize(q_values)"),
        ("self.q_values = self.net(state)", STEPS, "pass"),
        ("q_values, extra = self.net(state)", STEPS, "pass"),
        ("q_values = self.net(state)", "reward = self.simulate(action)", "pass"),
        ("with torch.no_grad(): q_values = self.net(state)", STEPS, "pass"),
    ],
)
def test_values_that_are_read_or_kept_or_asked_for_without_an_environment_may_be(evaluations, asked, step, later):
    assert evaluations(UNREAD.format(asked=asked, step=step, later=later)) == []


ONE_ANSWER = """
    import torch

    net = Net().cuda()
    optimizer = torch.optim.Adam(net.parameters())

    def learn():
        states, targets = replay.sample(64)
        loss = torch.nn.functional.mse_loss(net(states), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for episode in range(100):
        answer = env.reset()
        while not answer.over:
            action = net(answer.observation){made}
            {step}
            learn()
"""


@pytest.mark.parametrize(
    "step",
    [
        "answer = env.step(action)",
        "answer = env.step(action)[brain_name]",
        "answer = self.env.step(action)",
        "reward = train_envs.step(action)",
        "answer, over = environment.step(action)",
    ],
)
def test_an_environment_may_answer_with_one_object(evaluations, step):
    assert evaluations(ONE_ANSWER.format(made=".detach().cpu().numpy()", step=step)) == [16]


@pytest.mark.parametrize(
    "step",
    [
        "answer = env.step(guess())",
        "answer = sampler.step(action)",
        "answer = env.step()",
        "answer = env.render(action)",
        "answer = env.step(action); answer.cost.backward()",  # an environment may be differentiable
    ],
)
def test_other_steps_ask_for_no_action(evaluations, step):
    made = "" if "backward" in step else ".detach().cpu().numpy()"
    assert evaluations(ONE_ANSWER.format(made=made, step=step)) == []
