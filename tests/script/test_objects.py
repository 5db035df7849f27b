"""What objects, entries and tensors hold for those that read them elsewhere."""

from __future__ import annotations

import pytest

STEPS = """
    import torch
    from torch.autograd import Variable

    def train(xs, target, decoder, optimizer):
        hidden = decoder.init_hidden()
        outputs = {holder}
        for t in range(5):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out, hidden = decoder(xs[t], hidden)
            {write}
        loss = masked_cross_entropy(outputs, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "holder",
    [
        "torch.zeros(5, 3, 7)",
        "Variable(torch.zeros(5, 3, decoder.size))",
        "torch.zeros(5, 3, 7).cuda(gpu)",
        "torch.zeros(5, 3, 7).to(xs.device)",
        "allocate(5)",
    ],
)
@pytest.mark.parametrize("write", ["outputs[t] = out", "outputs[t] = outputs[t] + out"])
def test_what_is_written_into_a_tensor_is_backpropagated_with_it(report, holder, write):
    assert report(STEPS.format(holder=holder, write=write)) == []


@pytest.mark.parametrize(
    "holder", ["torch.zeros(5, 3, 7)", "Variable(torch.zeros(5, 3, decoder.size))", "torch.zeros(5, 3, 7).cuda(gpu)"]
)
def test_the_loss_of_a_tensor_goes_through_the_forwards_whose_results_were_written_into_it(report, holder):
    code = STEPS.format(holder=holder, write="outputs[t] = out")
    code = code.replace('torch.autocast("cuda", dtype=torch.bfloat16)', "timer").replace("xs[t]", "xs[t].cuda()")
    loop = "\n    for xs, target in loader:\n        train(xs, target, decoder, optimizer)\n"
    assert report(code + loop) == [("OOM202", 9)]


@pytest.mark.parametrize(("entry", "found"), [("losses[0]", [("OOM202", 4)]), ("losses[i]", [("OOM202", 4)])])
def test_an_entry_of_a_tensor_is_backpropagated_with_it(report, entry, found):
    code = f"""
        for i, (x, y) in enumerate(loader):
            losses = torch.zeros(3)
            {entry} = 0.5
            {entry} = criterion(model(x.cuda()), y)
            losses.sum().backward()
            optimizer.step()
    """
    assert report(code) == found


def test_an_entry_of_a_tensor_that_is_added_to_itself_keeps_no_more_than_the_tensor(report):
    code = """
        import torch

        def evaluate(encoder, source):
            outputs = torch.zeros(10, encoder.size)
            for i in range(10):
                outputs[i] = outputs[i] + encoder(source[i])
            return outputs

        for x, y in loader:
            loss = criterion(encoder(x), y)
            loss.backward()
    """
    assert "OOM102" not in dict(report(code))


LOSSES = """
    import torch

    class Trainer:
        def losses(self, inputs, outputs):
            losses, total = {{}}, 0
            for scale in range(4):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = self.head(outputs[scale], inputs).mean()
                total += loss
                losses[f"loss/{{scale}}"] = {single}
            losses["loss"] = total / 4
            return losses

        def process(self, inputs):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                outputs = self.decoder(inputs)
            return outputs, self.losses(inputs, outputs)

        def run(self):
            for inputs in self.loader:
                outputs, losses = self.process(inputs)
                self.optimizer.zero_grad()
                losses["{used}"].backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize("single", ["loss", "loss.item()"])
def test_a_sum_that_is_an_entry_of_what_a_helper_returns_is_a_loss(report, single):
    assert report(LOSSES.format(single=single, used="loss")) == []


def test_a_dict_holds_the_graphs_of_all_its_entries(report):
    code = """
        history = []
        for x, y in loader:
            log = {}
            for name, head in heads:
                log[name] = criterion(model(x, name), y)
            log["total"] = criterion(model(x), y)
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            history.append(log)
    """
    assert ("OOM102", 10) in report(code)


def test_an_attribute_of_a_network_is_read_where_it_is_written(report):
    code = """
        class Trainer:
            def __init__(self, model):
                self.model = model.cuda()

            def train(self):
                for x, y in self.loader:
                    self.model.total = criterion(self.model(x), y)
                    self.model.total.backward()
                    self.optimizer.step()
                    self.kept.append(self.model.total)
    """
    assert sorted(report(code)) == [("OOM102", 10), ("OOM202", 7)]


def test_lists_among_the_entries_are_lists_of_their_own(report):
    code = """
        class Network(nn.Module):
            def __init__(self, epochs, interval):
                log = {"sum": [], "test": []}
                for epoch in range(epochs):
                    loss = inner + beta * outer
                    test_loss = self.test_loss()
                    log["sum"].append(loss)
                    log["test"].append(test_loss)
                    if epoch % interval == 0:
                        loss.backward()
    """
    assert [line for code, line in report(code) if code == "OOM102"] == [7, 8]


def test_a_sum_returned_as_an_entry_may_be_a_loss_of_the_caller(report):
    code = """
        class Trainer:
            def __init__(self):
                self.head = self.head.to(self.device)

            def losses(self, inputs):
                losses, total = {}, 0
                for scale in range(4):
                    total += self.head(inputs, scale).mean()
                losses["loss"] = total
                return losses
    """
    assert "OOM101" not in dict(report(code))


def test_all_entries_of_a_dict_go_into_their_sum(report):
    code = """
        for x, y in loader:
            losses = {}
            for name in names:
                losses[name] = criterion(model(x.cuda(), name), y)
            losses["all"] = criterion(model(x), y)
            sum(losses.values()).backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 4), ("OOM202", 5)]


AGENT = """
    import torch
    from torch.distributions import Categorical
    from elsewhere import Actor, Buffer

    class Agent:
        def __init__(self):
            self.policy = Actor().cuda()
            self.buffer = Buffer()

        def select_action(self, state):
            distribution = Categorical(logits=self.policy(state))
            action = distribution.sample()
            self.buffer.actions.append({action})
            self.buffer.logprobs.append(distribution.log_prob(action))
            return action.item()

        def update(self):
            loss = -torch.cat(self.buffer.{read}).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.buffer.clear()

    def train(env, agent):
        for epoch in range(100):
            state = env.reset()
            for step in range(200):
                state, done = env.step(agent.select_action(state))
                if done:
                    agent.update()

    agent = Agent()
    train(env, agent)
"""


def test_every_method_sees_what_one_puts_into_a_buffer_of_its_object(report):
    assert report(AGENT.format(action="action", read="logprobs")) == [("OOM202", 11)]


def test_what_no_method_takes_out_of_a_buffer_is_kept(report):
    assert ("OOM102", 14) in report(AGENT.format(action="action", read="rewards"))


@pytest.mark.parametrize(
    ("action", "found"),
    [("distribution.sample()", False), ("distribution.rsample()", True), ("self.policy(state).sample()", False)],
)
def test_what_a_distribution_draws_has_no_graph(report, action, found):
    assert (("OOM102", 13) in report(AGENT.format(action=action, read="logprobs"))) is found


def test_what_a_method_keeps_of_its_own_forward_is_kept_there(report):
    code = """
        class Trainer:
            def __init__(self, model):
                self.model, self.latents = model, []

            def train(self):
                for x, y in self.loader:
                    loss = self.model(x).sum()
                    loss.backward()
                    self.optimizer.step()

            def inference(self):
                for x in self.loader:
                    self.latents.append(self.model(x))

        for run in range(3):
            trainer = Trainer(network)
            trainer.train()
            trainer.inference()
    """
    assert [line for code, line in report(code) if code == "OOM102"] == [13]


@pytest.mark.parametrize(
    ("returned", "found"), [("action + self.noise.draw()", []), ("self.actor(state)", [("OOM102", 12)])]
)
def test_what_a_module_makes_of_its_detached_output_has_no_graph_for_certain(report, returned, found):
    code = f"""
        import torch

        class Agent(torch.nn.Module):
            def __init__(self):
                self.actor, self.memory = Actor(), []

            def get_action(self, state):
                action = self.actor(state).detach().numpy()
                return {returned}

            def remember(self, state, action):
                self.memory.append((state, action))

            def learn(self):
                loss = -self.actor(torch.tensor(self.memory[0][0])).mean()
                loss.backward()
                self.optimizer.step()

        agent = Agent()
        for t in range(200):
            action = agent.get_action(state)
            agent.remember(state, action)
            agent.learn()
    """
    assert [finding for finding in report(code) if finding[0] == "OOM102"] == found


QAGENT = """
    from torch import nn

    class QAgent:
        def __init__(self, net):
            self.net = net.cuda()
            self.losses = []

        def learn(self, s, t):
            loss = nn.functional.mse_loss(self.net(s.cuda()), t)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss)

    def run(batches, {parameter}):
        for s, t in batches:
            {name}.{method}(s, t)
"""


@pytest.mark.parametrize("parameter", ["agent", "q_agent", "agent: QAgent", "agent: 'QAgent'"])
def test_a_parameter_stands_for_an_object_of_the_class_that_it_is_named_after(read, report, parameter):
    code = QAGENT.format(parameter=parameter, name=parameter.split(":")[0], method="learn")
    assert [loop.line for loop in read(code).loops] == [15]
    assert report(code) == [("OOM102", 12), ("OOM202", 9)]


@pytest.mark.parametrize(
    ("parameter", "cls"),
    [
        *(("agent", f"QAgent{edition}") for edition in ("PyTorch", "Torch", "_torch", "V2", "2")),
        *(("agent2", "QAgent2"), ("agent: QAgentV2", "QAgentV2")),
    ],
)
def test_the_library_and_the_version_may_be_left_out_of_the_name_of_a_class(read, parameter, cls):
    code = QAGENT.format(parameter=parameter, name=parameter.split(":")[0], method="learn")
    assert [loop.line for loop in read(code.replace("class QAgent", f"class {cls}")).loops] == [15]


@pytest.mark.parametrize(
    ("parameter", "method"),
    [("agent: Other", "learn"), ("player", "learn"), ("t", "learn"), ("agent", "act"), ("agent: QAgent", "act")],
)
def test_any_other_parameter_is_out_of_sight(read, parameter, method):
    code = QAGENT.format(parameter=parameter, name=parameter.split(":")[0], method=method)
    assert read(code).loops == []


def test_a_parameter_named_after_two_classes_is_out_of_sight(read):
    code = QAGENT.format(parameter="agent", name="agent", method="learn")
    other = "    class OtherAgent:\n        def learn(self, s, t): self.net(s).backward()\n\n    def run("
    assert read(code.replace("    def run(", other)).loops == []


TEMPLATE = """
    import torch

    class Base:
        {decorator}
        def validate(self, loader):
            for batch in loader:
                self.validate_batch(batch)

        def train(self, loader):
            for batch in loader:
                self.train_batch(batch)

        def validate_batch(self, batch):
            raise NotImplementedError

    class Learner(Base):
        def validate_batch(self, batch):
            x, y = batch
            self.metric(self.model(x), y)

        def train_batch(self, batch):
            self.criterion(self.model(batch)).backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("decorator", "found"), [("@torch.no_grad()", [("OOM202", 22)]), ("@logged", [("OOM201", 19), ("OOM202", 22)])]
)
def test_a_method_runs_where_the_method_that_its_class_inherits_calls_it(report, decorator, found):
    assert report(TEMPLATE.format(decorator=decorator)) == found


def test_the_loop_of_an_inherited_method_trains_by_the_methods_of_the_class(read):
    assert [loop.line for loop in read(TEMPLATE.format(decorator="@logged")).loops] == [10]


RESUMED = """
    import os
    import torch

    class Agent:
        def __init__(self):
            self.net = torch.nn.Linear(3, 3).to(device)
            self.optimizer = torch.optim.Adam(self.net.parameters())

        def update(self, x, y):
            loss = (self.net(x) - y).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    if os.path.exists("agent.pt"):
        agent = {saved}
    else:
        agent = {fresh}
    for x, y in buffer:
        agent.update(x, y)
"""


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        ('torch.load("agent.pt", map_location="cpu")', "Agent()"),
        ("Agent()", 'torch.load("agent.pt", map_location="cpu")'),
    ],
)
def test_what_was_saved_is_what_the_script_makes_otherwise(read, report, saved, fresh):
    code = RESUMED.format(saved=saved, fresh=fresh)
    assert report(code) == [("OOM202", 10)]
    assert [loop.line for loop in read(code).loops] == [19]


@pytest.mark.parametrize("fresh", ["agents.make()", "3"])
def test_what_was_saved_is_out_of_sight_where_nothing_says_what_it_is(read, fresh):
    code = RESUMED.format(saved='torch.load("agent.pt", map_location="cpu")', fresh=fresh)
    assert not read(code).loops


def test_what_is_loaded_or_computed_has_no_graph_for_certain(report):
    code = """
        import torch

        outs = []
        for x, y in loader:
            if cached:
                out = torch.load("out.pt", map_location="cpu")
            else:
                out = net(x)
            outs.append(out)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []
    alone = code.replace('torch.load("out.pt", map_location="cpu")', "net(x[0])")
    assert report(alone) == [("OOM102", 9)]


@pytest.mark.parametrize("call", ["self(x)", "self.__call__(x)", "self.forward(x)"])
def test_a_network_is_run_by_each_way_to_call_it(report, call):
    code = f"""
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 3)

            def forward(self, x):
                return self.layer(x)

            def run_epoch(self, loader):
                for x, y in loader:
                    self.optimizer.zero_grad()
                    loss = self.criterion({call}, y.cuda())
                    loss.backward()
                    self.optimizer.step()
    """
    assert report(code) == [("OOM202", 14)]


SHOWN = """
    import torch

    class Runner:
        def __init__(self, model, optimizer):
            self._model, self.optimizer = model, optimizer

        {decorator}
        def model(self):
            return {returned}

        def fit(self, loader):
            for x, y in loader:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = criterion(self.model(x), y)
                loss.backward()
                self.optimizer.step()

        def test(self, loader):
            self.model.eval()
            return [criterion(self.model(x), y).item() for x, y in loader]
"""


@pytest.mark.parametrize(
    ("decorator", "returned"),
    [
        ("@property", "self._model"),
        ("@functools.cached_property", "self._model"),
        ("@property", "load(self._model)"),
        ("@property", "self.model"),
    ],
)
def test_a_property_is_what_it_shows(report, decorator, returned):
    assert report(SHOWN.format(decorator=decorator, returned=returned)) == [("OOM201", 20)]


def test_a_property_that_can_be_set_is_what_it_shows(report):
    setter = "@model.setter\n        def model(self, model):\n            self._model = model\n\n        def fit"
    code = SHOWN.format(decorator="@property", returned="self._model").replace("def fit", setter)
    assert report(code) == [("OOM201", 24)]


SHARED = """
    import torch

    class Base:
        def train(self, loader):
            for batch in loader:
                self.compute(batch).backward()
                self.optimizer.step()

        def validate(self, loader):
            self.model.eval()
            {switch}
                for batch in loader:
                    print(self.compute(batch).item())

    class Learner(Base):
        def compute(self, batch):
            with torch.autocast("cuda", torch.bfloat16):
                return self.criterion(self.model(batch))
"""


@pytest.mark.parametrize(
    ("switch", "found"),
    [
        ("with timer():", [("OOM201", 18)]),
        ("with torch.no_grad():", []),
    ],
)
def test_each_inherited_method_that_calls_a_method_is_a_way_to_it(report, switch, found):
    assert report(SHARED.format(switch=switch)) == found


HELD = """
    import torch
    from .base import {base}

    class Pix2Pix({base}):
        def __init__(self, options):
            super().__init__(options)
            self.generator = make_generator(options)
            self.optimizer = torch.optim.Adam(self.generator.parameters())

        def forward(self{given}):
            self.fake = self.generator(self.real)
            return self.fake

        def fit(self, loader):
            for batch in loader:
                self.real = batch.cuda()
                {forward}
                self.optimizer.zero_grad()
                criterion(self.fake, batch).backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("given", "forward", "line"),
    [
        ("", "self.forward()", 11),
        (", batch", "self.forward(batch)", 17),
    ],
)
def test_an_object_that_trains_the_networks_it_holds_is_none(report, given, forward, line):
    assert report(HELD.format(base="BaseModel", given=given, forward=forward)) == [("OOM202", line)]


def test_a_network_of_torch_that_trains_what_it_holds_is_one(report):
    code = HELD.format(base="Module", given="", forward="self()").replace("from .base", "from torch.nn")
    assert report(code) == [("OOM202", 17)]


@pytest.mark.parametrize("kept", ["self.fake = self.generator(batch)", "self.fake = blend(self.generator(batch))"])
def test_what_such_an_object_keeps_of_a_test_is_not_trained_by_its_callers(report, kept):
    code = f"""
        import torch
        from .base import BaseModel

        class Pix2Pix(BaseModel):
            def __init__(self, options):
                super().__init__(options)
                self.generator = make_generator(options)
                self.optimizer = torch.optim.Adam(self.generator.parameters())

            def test(self, batch):
                {kept}

            def optimize_parameters(self, batch):
                criterion(self.generator(batch), batch).backward()
                self.optimizer.step()
    """
    assert report(code) == [("OOM201", 11)]
