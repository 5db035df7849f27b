"""Evaluation passes, and whether gradients are on in them."""

from __future__ import annotations

import pytest

from oomfix.audit import Auditor
from oomfix.rules import all_rules

VALIDATE = """
    import torch, contextlib

    {decorator}
    def validate(model, loader):
        model.eval()
        {before}
        {context}
            for x, y in loader:
                out = model(x)
        return 0

    {caller}
"""


def validation(decorator="", before="pass", context="if True:", caller="") -> str:
    return VALIDATE.format(decorator=decorator, before=before, context=context, caller=caller)


def test_a_validation_with_gradients_is_found(report):
    assert report(validation()) == [("OOM201", 9)]


@pytest.mark.parametrize(
    "parts",
    [
        {"decorator": "@torch.no_grad()"},
        {"decorator": "@torch.inference_mode()"},
        {"decorator": "@torch.no_grad"},
        {"decorator": "@torch.autograd.no_grad()"},
        {"decorator": "@torch.set_grad_enabled(False)"},
        {"before": "torch.set_grad_enabled(False)"},
        {"before": "guard = torch.no_grad()", "context": "with guard:"},
        {"before": "guard = torch.no_grad(); guard.__enter__()"},
        {"before": "torch.inference_mode().__enter__()"},
        {"before": "self.ctx.__enter__()"},
        {"before": "stack = contextlib.ExitStack(); stack.enter_context(self.no_grad)"},
        {"context": "with torch.no_grad():"},
        {"context": "with torch.inference_mode(), open('log') as log:"},
        {"context": "with torch.set_grad_enabled(False):"},
        {"context": "with torch.autocast('cuda'), torch.no_grad():"},
        {"caller": "with torch.no_grad():\n        validate(model, loader)"},
    ],
    ids=str,
)
def test_every_way_to_switch_gradients_off_is_seen(report, parts):
    assert report(validation(**parts)) == []


@pytest.mark.parametrize(
    "parts",
    [
        {"context": "with torch.enable_grad():"},
        {"context": "with torch.set_grad_enabled(True):"},
        {"context": "with torch.autocast('cuda'):"},
        {"decorator": "@timed"},
        {"before": "torch.no_grad()"},
        {"before": "guard = torch.no_grad(); guard.__enter__(); guard.__exit__(None, None, None)"},
        {"before": "guard = torch.enable_grad(); guard.__enter__()"},
        {"before": "database.__enter__()"},
    ],
    ids=str,
)
def test_what_does_not_switch_them_off_does_not_count(report, parts):
    assert report(validation(**parts)) == [("OOM201", 9)]


def test_a_flag_decides_by_the_call_that_passes_it(report):
    code = """
        def run(model, loader, optimizer=None):
            training = optimizer is not None
            for x, y in loader:
                loss = criterion(model(x), y)
                if training:
                    loss.backward()
                    optimizer.step()

        run(model, train_loader, optimizer)
        run(model, val_loader)
    """
    assert report(code) == [("OOM201", 4)]


def test_a_flag_that_guards_gradients_as_well_is_clean(report):
    code = """
        import torch
        def run(model, loader, train):
            with torch.set_grad_enabled(train):
                for x, y in loader:
                    loss = criterion(model(x), y)
                    if train:
                        loss.backward()

        run(model, train_loader, True)
        run(model, val_loader, False)
    """
    assert report(code) == []


def test_phases_without_a_grad_switch_are_found(report):
    code = """
        for epoch in range(10):
            for phase in ("train", "val"):
                model.train() if phase == "train" else model.eval()
                for x, y in loaders[phase]:
                    loss = criterion(model(x), y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
    """
    assert report(code) == [("OOM201", 5)]


def test_a_teacher_in_a_training_iteration_is_no_evaluation(report):
    code = """
        teacher.eval()
        for x, y in loader:
            target = teacher(x)
            loss = criterion(model(x), target)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


def test_a_generator_sample_for_the_discriminator_is_no_evaluation(report):
    code = """
        for real in loader:
            fake = G(z).detach()
            loss = D(fake).mean() - D(real).mean()
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


def test_validation_inside_the_training_loop_is_one(report):
    code = """
        for step, (x, y) in enumerate(train_loader):
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                model.eval()
                for vx, vy in val_loader:
                    print(criterion(model(vx), vy).item())
                model.train()
    """
    assert report(code) == [("OOM201", 8)]


def test_an_evaluation_helper_counts_where_its_forward_is_written(report):
    code = """
        import torch

        def forward_loss(model, batch):
            return criterion(model(batch.x), batch.y)

        def validate(model, loader):
            return sum(forward_loss(model, batch).item() for batch in loader)

        @torch.no_grad()
        def test(model, loader):
            return sum(forward_loss(model, batch).item() for batch in loader)

        for batch in loader:
            forward_loss(model, batch).backward()
        validate(model, loader)
        test(model, loader)
    """
    assert report(code) == [("OOM201", 4)]


ASKED = """
    import torch

    class Agent:
        def errors(self, batch):
            out = self.network(batch)
            return criterion(out, batch)

        def step(self, batch):
            loss = self.errors(batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()

        def {name}(self, data):
            {asked}

        def fit(self, loader):
            for batch in loader:
                self.step(batch)
                {call}
"""


def test_a_validation_in_a_training_iteration_may_ask_what_training_asks(report):
    code = ASKED.format(
        name="validation_statistics",
        asked="return self.errors(data).item()",
        call="self.log.append(self.validation_statistics(self.held_out))",
    )
    assert ("OOM201", 5) in report(code)


@pytest.mark.parametrize(
    ("name", "asked", "call"),
    [
        ("statistics", "return self.errors(data).item()", "self.log.append(self.statistics(self.held_out))"),
        # it trains, or somebody else may
        ("validation_step", "self.step(data)", "self.validation_step(self.held_out)"),
        ("validation_loss", "return self.errors(data)", "self.validation_loss(self.held_out).backward()"),
        ("validation_loss", "self.kept.append(self.errors(data))", "self.validation_loss(self.held_out)"),
    ],
)
def test_what_else_it_asks_may_be_trained(report, name, asked, call):
    assert ("OOM201", 5) not in report(ASKED.format(name=name, asked=asked, call=call))


def test_a_class_with_its_own_model_is_followed(report):
    code = """
        import torch

        class Trainer:
            def __init__(self, net):
                self.net = net

            def predict(self, x):
                return self.net(x)

            def evaluate(self, loader):
                self.net.eval()
                with torch.no_grad():
                    return [self.predict(x) for x in loader]
    """
    assert report(code) == []


def test_lightning_runs_its_own_evaluation(report):
    code = """
        import pytorch_lightning as pl

        class Model(pl.LightningModule):
            def training_step(self, batch, i):
                return self.loss(self.net(batch))

            def validation_step(self, batch, i):
                return self.loss(self.net(batch))
    """
    assert report(code) == []


@pytest.mark.parametrize(
    "held",
    [
        "with ctx:",
        "with amp_no_grad():",
        "with self.guard:",
        "with off():",
        "with ExitStack() as stack:",
    ],
)
def test_a_context_that_is_made_elsewhere_is_not_judged(report, held):
    code = f"""
        import torch
        from contextlib import ExitStack, contextmanager

        @contextmanager
        def off():
            with torch.no_grad():
                yield

        class Trainer:
            def validate(self, loader, ctx):
                self.model.eval()
                {held}
                    {"stack.enter_context(torch.no_grad())" if "Stack" in held else "pass"}
                    for x in loader:
                        print(self.model(x))
    """
    assert report(code) == []


@pytest.mark.parametrize(
    "freezing",
    [
        "net.requires_grad_(False)",
        "net.requires_grad_(requires_grad=False)",
        "for p in net.parameters(): p.requires_grad = False",
        "for p in net.parameters(): p.requires_grad_(requires_grad=False)",
    ],
)
def test_a_frozen_network_records_nothing(report, freezing):
    code = f"""
        import torch
        net = build()
        {freezing}
        net.eval()
        features = []
        for x in loader:
            features.append(net(x))
    """
    assert report(code) == []


def test_bookkeeping_methods_of_a_module_are_no_forwards(report):
    code = """
        from torch import nn

        class Net(nn.Module):
            def n_params(self):
                return sum(p.numel() for p in self.parameters())

            def load(self, path):
                self.load_state_dict(read(path))

            def evaluate(self, loader):
                self.eval()
                self.load("best")
                print(self.n_params())

        net = Net()
        net.eval()
        net.load("best")
        print(net.n_params())
    """
    assert report(code) == []


def test_an_object_that_is_called_runs_its_own_call(report):
    code = """
        import torch

        class Predictor:
            def __init__(self, model):
                self.model = model
                self.model.eval()

            def __call__(self, x):
                with torch.no_grad():
                    return self.forward(x)

            def forward(self, x):
                return self.model(x)

            def predict(self, x):
                return self(x)

        predictor = Predictor(torch.load("model.pt", map_location="cpu"))
        for x in loader:
            print(predictor(x))
    """
    assert report(code) == []


@pytest.mark.parametrize("grad", ["pass", "torch.set_grad_enabled(False)"])
def test_a_script_that_only_predicts_is_an_evaluation(grad):
    code = f"""
import torch
from transformers import AutoModelForCausalLM
{grad}
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
for prompt in prompts:
    print(model(prompt.cuda()).logits[:, -1].argmax())
"""
    findings = Auditor(all_rules()).audit("predict.py", code.encode()).findings
    assert [(finding.code, finding.line) for finding in findings] == ([("OOM201", 7)] if grad == "pass" else [])


@pytest.mark.parametrize(
    "called",
    [
        "self._log_and_throw(RuntimeError, 'bad')",
        "self._build(3)",
        "self._load(path)",
    ],
)
def test_what_a_constructor_calls_is_no_forward(report, called):
    code = f"""
        import torch
        from torch import nn

        class Wrapper(nn.Module):
            def __init__(self, module, path):
                super().__init__()
                self.module = module
                for parameter in module.parameters():
                    {called}

            def _log_and_throw(self, error, message):
                self.logger.set_error_and_log(message)
                raise error(message)

            def _build(self, n):
                self.heads = self.make_heads(n)

            def _load(self, path):
                self.reader.open(path)

            def forward(self, x):
                return self.module(x)

        def main(net):
            wrapper = Wrapper(net, "net.pt")
            wrapper.eval()
    """
    assert report(code) == []


@pytest.mark.parametrize(
    ("definition", "decorator"),
    [
        ("", "@quiet"),
        ("", "@quiet_if(True)"),
        ("from helpers import no_grad_pass", "@no_grad_pass"),
        ("from helpers import evaluating", "@evaluating"),
    ],
)
def test_a_decorator_that_switches_gradients_off_is_seen(report, definition, decorator):
    code = f"""
        import functools, torch
        {definition}

        def quiet(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                with torch.no_grad():
                    return function(*args, **kwargs)
            return wrapper

        def quiet_if(flag):
            def decorate(function):
                def wrapper(*args):
                    with torch.inference_mode():
                        return function(*args)
                return wrapper
            return decorate

        {decorator}
        def validate(model, loader):
            model.eval()
            return [model(x) for x in loader]
    """
    assert report(code) == []


@pytest.mark.parametrize("decorator", ["@timed", "@register('validate')"])
def test_a_decorator_that_does_not_is_no_cure(report, decorator):
    code = f"""
        import torch
        from helpers import register

        def timed(function):
            def wrapper(*args):
                with torch.no_grad():
                    warm_up()
                return function(*args)
            return wrapper

        {decorator}
        def validate(model, loader):
            model.eval()
            for x in loader:
                print(model(x))
    """
    assert report(code) == [("OOM201", 15)]


@pytest.mark.parametrize(
    "code",
    [
        """
        def build():
            network = torch.hub.load("a", "b").cuda().eval()
            for parameter in network.parameters():
                parameter.requires_grad_(False)
            return network

        net = build()
        for x in loader:
            kept.append(net(x))
        """,
        """
        def features(model, loader):
            model.eval()
            for name, parameter in model.named_parameters():
                parameter.requires_grad = False
            return [model(x) for x in loader]
        """,
        """
        class Features:
            def __init__(self):
                self.net = torch.hub.load("a", "b").eval().requires_grad_(False)
                self.kept = []

            def run(self, loader):
                self.net.eval()
                for x in loader:
                    self.kept.append(self.net(x))
        """,
        """
        def features(model, loader):
            model = model.eval().requires_grad_(False).cuda()
            return [model(x) for x in loader]
        """,
    ],
)
def test_a_network_frozen_where_it_is_made_records_nothing(report, code):
    assert report(code) == []


def test_a_network_frozen_elsewhere_or_thawed_again_records(report):
    code = """
        def frozen(model, loader):
            model.requires_grad_(False)
            return [model(x) for x in loader]

        def other(model, loader):
            model.eval()
            for x in loader:
                print(model(x))

        def thawed(model, loader):
            model.requires_grad_(False)
            train_head(model)
            model.requires_grad_(True)
            model.eval()
            for x in loader:
                print(model(x))
    """
    assert report(code) == [("OOM201", 8), ("OOM201", 16)]


def test_an_object_that_only_predicts_evaluates_when_it_is_called(report):
    code = """
        class Predictor:
            def __init__(self, path):
                self.model = torch.load(path, map_location="cpu")
                self.model.eval()

            def __call__(self, image):
                return self.model(image).argmax().item()

        class Perceptual:
            def __init__(self, network):
                self.network = network
                self.network.eval()

            def __call__(self, x):
                return self.network(x)
    """
    assert report(code) == [("OOM201", 7)]


def test_networks_frozen_one_by_one_stay_frozen_under_their_name(report):
    code = """
        import torch

        def load_teachers(paths):
            teachers = [load(path) for path in paths]
            for teacher in teachers:
                for parameter in teacher.parameters():
                    parameter.requires_grad = False
            return teachers

        teachers = load_teachers(paths)
        for x, y in loader:
            teacher = choose(teachers)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(x)
            loss = criterion(out, teacher(x))
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


def test_a_function_that_is_handed_out_runs_under_what_nobody_sees(report):
    code = """
        class Steps:
            def __init__(self, model):
                self.model = model
                self.validate = self.make_validation_step()

            def make_validation_step(self):
                def validation_step(x, y):
                    self.model.eval()
                    return self.criterion(self.model(x), y).item()
                return validation_step
    """
    assert report(code) == []


def test_a_whole_pass_that_is_handed_out_is_one_wherever_it_runs(report):
    code = """
        import torch

        def make_evaluation(loader, kind):
            if kind == "total":
                def evaluate(model):
                    with torch.no_grad():
                        for x in loader:
                            print(model(x).argmax(1))
            else:
                def evaluate(model):
                    for x in loader:
                        print(model(x).argmax(1))
            return evaluate
    """
    assert report(code) == [("OOM201", 12)]


def test_a_class_from_elsewhere_is_made_and_not_run(report):
    code = """
        import tinygrad

        tinygrad.Tensor.train()
        def generate(model, start):
            x = tinygrad.Tensor(start)
            return x
    """
    assert report(code) == []


def test_a_modules_own_prediction_is_an_evaluation(report):
    code = """
        import torch
        from torch import nn

        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.LSTM(8, 8)

            def forward(self, x):
                return self.rnn(x)[0]

            def predict(self, x):
                out = self.forward(x)
                return out.argmax(-1).item()

            def predict_quietly(self, x):
                with torch.no_grad():
                    return self(x).argmax(-1)

            def loss(self, x, y):
                return (self.forward(x) - y).pow(2).mean()
    """
    assert report(code) == [("OOM201", 13)]


def test_a_method_that_shares_its_name_with_one_of_torch_is_entered_before_what_it_calls(report):
    code = """
        class Trainer:
            def batches(self, loader):
                for x, y in loader:
                    print(self.criterion(self.model(x), y).item())

            def mode(self):
                self.model.train()

            def train(self, loader):
                with torch.no_grad():
                    self.batches(loader)
    """
    assert report(code) == []


def test_a_function_is_entered_before_what_it_calls_although_models_have_a_method_of_its_name(report):
    code = """
        def loss_of(model, loader):
            model.eval()
            return sum(criterion(model(x), y) for x, y in loader)

        def train(model, loader, optimizer):
            loss = loss_of(model, loader)
            loss.backward()
            optimizer.step()

        def validate(model):
            model.train()
    """
    assert report(code) == []


WITHIN_TRAINING = """
    import torch
    generator = torch.nn.Linear(3, 3)

    def {name}(noise):
        images = generator(noise)
        {end}

    for epoch in range(9):
        for x, noise in loader:
            loss = criterion(generator(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            {call}
"""


@pytest.mark.parametrize("name", ["save_samples", "plot_images", "show_progress", "display_generated"])
def test_a_function_that_shows_or_saves_what_a_network_makes_evaluates(report, name):
    code = WITHIN_TRAINING.format(name=name, end="utils.save_image(images, 'x.png')", call=f"{name}(noise)")
    assert report(code) == [("OOM201", 5)]


@pytest.mark.parametrize(
    ("name", "end", "call"),
    [
        ("make_samples", "keep(images)", "make_samples(noise)"),
        ("save_and_score", "return images.mean()", "save_and_score(noise).backward()"),
        ("resave_images", "store.put(images)", "resave_images(noise)"),
        ("save_model", "torch.jit.save(images)", "save_model(noise)"),
        ("save_last_checkpoint", "torch.jit.save(images)", "save_last_checkpoint(noise)"),
    ],
)
def test_a_function_with_another_name_or_with_a_backward_through_it_does_not(report, name, end, call):
    assert report(WITHIN_TRAINING.format(name=name, end=end, call=call)) == []


ACTING = """
    import torch

    class Agent:
        def __init__(self):
            self.actor = torch.nn.Linear(3, 3)

        def {name}(self, state):
            scores = self.actor(state)
            {end}

        def play(self, env):
            state = env.reset()
            while True:
                {use}
                loss = self.actor(self.memory.sample()).sum()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize("name", ["choose_action", "take_action", "pick_action", "select_action"])
def test_choosing_an_action_needs_no_gradients(report, name):
    use = f"state, reward, done, _ = env.step(self.{name}(state))"
    assert report(ACTING.format(name=name, end="return scores.argmax().item()", use=use)) == [("OOM201", 8)]


@pytest.mark.parametrize("name", ["choose_action", "take_action"])
def test_an_action_that_leaves_with_its_log_probability_may_be_trained_through(report, name):
    end = "dist = Categorical(logits=scores); return dist.sample(), dist.log_prob(0)"
    use = f"action, log_prob = self.{name}(state); done = self.memory.store(state, action.item(), log_prob)"
    assert report(ACTING.format(name=name, end=end, use=use)) == []


SAMPLED = """
    import torch
    generator = torch.nn.Linear(3, 3)

    for epoch in range(9):
        for i, (x, noise) in enumerate(loader):
            images = generator(noise)
            loss = criterion(images, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            {sampling}
"""


@pytest.mark.parametrize(
    "sampling",
    [
        "if i % 100 == 0: utils.save_image(generator(fixed), 'x.png')",
        "if i % 100 == 0: images = generator(fixed); utils.save_image(images.detach(), 'x.png')",
        "if i in shown: kept.append(generator(fixed).detach())",
        "if i == len(loader) - 1: utils.save_image(generator(fixed), 'x.png')",
        "if (i + 1) % 100 == 0 or i == len(loader) - 1: writer.add_images(generator(fixed))",
        "if i == 0: images = generator(fixed); utils.save_image(images.detach(), 'x.png')",
        "if done == batches: utils.save_image(generator(fixed).data, 'x.png')\n            done += 1",
    ],
)
def test_a_look_at_the_network_every_few_iterations_is_an_evaluation(report, sampling):
    assert report(SAMPLED.format(sampling=sampling)) == [("OOM201", 11)]


@pytest.mark.parametrize(
    "sampling",
    [
        "if i % 5 == 0: made = generator(noise); optimizer.zero_grad(); made.mean().backward(); optimizer.step()",
        "if i % 5 == 0: made = generator(noise).detach(); critic_loss = score(critic, made); critic_loss.backward()",
        "if i % 5 == 0: made = generator(noise).detach()\n            critic(made).backward()",
        "if i % 5 == 0: adversarial_step(generator(noise), optimizer)",
        "penalty = images - ema\n            if i % 5 == 0: ema = generator(fixed).detach()",
        "if warm: keep(generator(fixed))",
        "if x in shown: criterion(generator(fixed), x).backward()",
        "if kind in shown: keep(generator(fixed))",
        "if epoch == 0: keep(generator(fixed))",
        "if mode == 3: keep(generator(fixed))",
        "penalty = images - ema\n            if i == 0: ema = generator(fixed).detach()",
        "if i % 100 == 0:\n                with torch.no_grad(): utils.save_image(generator(fixed), 'x.png')",
    ],
)
def test_every_few_iterations_may_also_be_a_step_of_training(report, sampling):
    assert [line for code, line in report(SAMPLED.format(sampling=sampling)) if code == "OOM201"] == []


PHASES = """
    import torch
    model.cuda()
    for epoch in range(10):
        for phase in {phases}:
            for x, y in loaders[phase]:
                with torch.set_grad_enabled({grad}):
                    loss = criterion(model(x), y)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
"""


@pytest.mark.parametrize("phases", ["splits", "loaders", '["train", "val"] + extra'])
def test_a_loop_over_phases_evaluates_in_those_that_do_not_train(report, phases):
    assert report(PHASES.format(phases=phases, grad="True")) == [("OOM201", 7), ("OOM202", 7)]
    assert report(PHASES.format(phases=phases, grad='phase == "train"')) == [("OOM202", 7)]


TRAINED_BY_A_FLAG = """
    import torch

    def step(model, x, y, optimizer, {flag}):
        loss = model(x.cuda()).sum()
        if {condition}:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    for x, y in loader:
        step(model, x, y, optimizer, {here})
        {context}
            step(model, x, y, optimizer, {there})
"""


@pytest.mark.parametrize(
    ("flag", "condition", "here", "there"),
    [("validation", "not validation", "False", "True"), ("mode", 'mode == "fit"', '"fit"', '"look"')],
)
def test_a_step_that_a_flag_keeps_from_training_evaluates(report, flag, condition, here, there):
    parts = {"flag": flag, "condition": condition, "here": here, "there": there}
    assert report(TRAINED_BY_A_FLAG.format(**parts, context="if True:")) == [("OOM201", 4), ("OOM202", 4)]
    assert report(TRAINED_BY_A_FLAG.format(**parts, context="with torch.no_grad():")) == [("OOM202", 4)]


def test_one_helper_for_a_network_and_its_target_is_no_evaluation(report):
    code = """
        import torch

        def values(net, x):
            return net(x.cuda()).max(1)[0]

        def train(model, target, loader, optimizer):
            for x, y in loader:
                goal = y + values(target, x).detach()
                loss = (values(model, x) - goal).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """
    assert report(code) == [("OOM202", 4)]


def test_a_call_behind_the_training_loop_evaluates(report):
    code = """
        import torch

        def translate(word):
            return model(encode(word)).data.argmax(1)

        {first}
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(translate("man"))
    """
    assert report(code.format(first="pass")) == [("OOM201", 4)]
    assert report(code.format(first="pass").replace('print(translate("man"))', "pass")) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("predict_loss", []), ("sample_pair_loss", []), ("val_loss", [("OOM201", 4)]), ("predict", [("OOM201", 4)])],
)
def test_the_loss_of_a_prediction_is_no_evaluation(report, name, expected):
    assert (
        report(f"""
    import torch

    def {name}(predictor, x, y):
        out = predictor(x)
        return torch.nn.functional.mse_loss(out, y)
    """)
        == expected
    )


@pytest.mark.parametrize("shown", ["tqdm(loader)", "tqdm.tqdm(loader, total=len(loader))"])
def test_a_pass_over_a_loader_that_shows_its_progress_is_no_part_of_a_forward(report, shown):
    assert not report(f"""
        import torch

        class Model(torch.nn.Module):
            def evaluate_epoch(self, loader):
                self.eval()
                bar = {shown}
                for x, y in bar:
                    with torch.no_grad():
                        loss = self.score(x, y)
                    print(loss.item())

            def score(self, x, y):
                return self(x).sub(y).mean()

            def train_epoch(self, loader):
                for x, y in loader:
                    self.score(x, y).backward()

            def fit(self, loader, other):
                for epoch in range(10):
                    self.train_epoch(loader)
                    if other:
                        self.evaluate_epoch(other)
    """)


def test_a_look_now_and_then_may_take_several_rounds(report):
    found = report("""
        for i, x in enumerate(loader):
            loss = criterion(model(x))
            loss.backward()
            optimizer.step()
            if i % 100 == 0:
                z = noise()
                for _ in range(20):
                    z = model(z)
                save(z)
    """)
    assert found == [("OOM201", 8)]


def test_rounds_that_train_now_and_then_are_none(report):
    assert not report("""
        for i, x in enumerate(loader):
            loss = criterion(critic(x))
            loss.backward()
            optimizer.step()
            if i % 5 == 0:
                for _ in range(2):
                    fake = generator(noise())
                    loss = criterion(critic(fake))
                    loss.backward()
                    other.step()
    """)


def test_what_is_read_after_its_rounds_is_part_of_the_iteration(report):
    assert not report("""
        for i, x in enumerate(loader):
            if i % 100 == 0:
                for _ in range(20):
                    target = teacher(x)
            loss = criterion(model(x), target.detach())
            loss.backward()
            optimizer.step()
    """)


OWN_METHODS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            {forward}
            return x

        def fit(self, x, y):
            loss = nn.functional.mse_loss({run}, y)
            loss.backward()

        def scores(self, x):
            return torch.sum({run}, 0).argmax().item()

        def predict(self, x):
            return self.scores(x)

    net = Net()
    for x, y in loader:
        net.fit(x, y)
    answer = net.predict(other)
"""


@pytest.mark.parametrize("run", ["self.forward(x)", "self(x)"])
@pytest.mark.parametrize(
    "forward",
    [
        "for layer in self.layers: x = layer(x)",
        "for i, layer in enumerate(self.layers): x = layer(x)",
        "for i in range(3): x = self.layers[i](x)",
        "x = self.layers[0](x)",
    ],
)
def test_a_method_that_runs_the_network_through_another_is_no_forward_itself(report, forward, run):
    assert report(OWN_METHODS.format(forward=forward, run=run)) == [("OOM201", 18)]


def test_a_forward_without_layers_runs_no_network(report):
    code = OWN_METHODS.format(forward="for part in parts: x = part + x", run="self.forward(x)")
    assert report(code) == []


TRAINED_OUT_OF_SIGHT = """
    import torch

    def {name}(model, loader):
        model.{mode}()
        for x, y in loader:
            model(x)
            {rest}
"""


def test_a_network_in_training_mode_whose_backward_is_nowhere_in_sight_is_trained_elsewhere(report):
    assert report(TRAINED_OUT_OF_SIGHT.format(name="epoch", mode="train", rest="model.update(0.1)")) == []


@pytest.mark.parametrize(
    ("name", "mode", "rest", "line"),
    [
        ("epoch", "eval", "model.update(0.1)", 6),
        ("validate", "train", "print(y)", 6),
        ("epoch", "train", "for vx in val_loader: model(vx)", 7),
        ("epoch", "train", "pass\n    criterion(model(y), y).backward()", 6),
    ],
)
def test_training_mode_alone_does_not_make_a_pass_a_training(report, name, mode, rest, line):
    assert ("OOM201", line) in report(TRAINED_OUT_OF_SIGHT.format(name=name, mode=mode, rest=rest))


@pytest.mark.parametrize("keeps", ["", ", create_graph=True", ", retain_graph=True"])
def test_what_is_differentiated_by_its_input_is_no_evaluation(report, keeps):
    code = f"""
        import torch

        def residual(model, points):
            model.eval()
            x = points.requires_grad_(True)
            u = model(x)
            slope = torch.autograd.grad(u.sum(), x{keeps})[0]
            return (slope + u).pow(2).mean().item()

        def train(model):
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
            print(residual(model, grid))
    """
    assert ("OOM201", 6) not in report(code)
    assert ("OOM201", 6) in report(code.replace("torch.autograd.grad(u.sum(), x", "difference(x"))


STOPPED = """
    import torch

    for epoch in range(10):
        for x, y in loader:
            loss = criterion(model(x), y)
            {stop}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    print(model(first))
"""


@pytest.mark.parametrize(
    "stop", ["raise Exception", "raise SystemExit('look at the shapes')", "print(loss); raise KeyboardInterrupt"]
)
def test_a_raise_left_over_in_a_loop_hides_nothing_behind_it(report, stop):
    assert report(STOPPED.format(stop=stop)) == [("OOM201", 11)]


@pytest.mark.parametrize("stop", ["if loss.isnan(): raise ValueError", "assert loss < 1e3", "pass"])
def test_a_raise_that_a_test_decides_is_none(report, stop):
    assert report(STOPPED.format(stop=stop)) == [("OOM201", 11)]


def test_what_stands_behind_a_raise_outside_of_loops_never_runs(report):
    code = """
        import torch

        def evaluate(model, loader):
            raise NotImplementedError("moved to evaluation.py")
            for x, y in loader:
                print(model(x).argmax(1))
    """
    assert report(code) == []


@pytest.mark.parametrize("name", ["greedy_decode", "beam_search", "caption_by_beam_search"])
def test_what_decodes_a_sentence_evaluates_the_encoder_too(report, name):
    assert report(DECODING.format(name=name)) == [("OOM201", 4), ("OOM201", 7)]


def test_what_another_function_encodes_may_be_trained_through(report):
    assert ("OOM201", 4) not in report(DECODING.format(name="unroll"))


DECODING = """
    import torch

    def {name}(model, source, length):
        memory = model.encode(source)
        words = torch.ones(1, 1)
        for i in range(length):
            out = model.decode(memory, words)
            words = torch.cat([words, out[:, -1].argmax(1, keepdim=True)], 1)
        return words

    model.eval()
"""


DETACHED = """
    import torch

    for x, y in loader:
        features = backbone({given}).detach()
        loss = criterion(head(features), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    backbone.eval()
"""


@pytest.mark.parametrize(
    "given", ["x.to(dev)", "x.to(device=dev)", "x.cuda(dev)", "torch.cat([x, torch.ones(1, device=dev)])"]
)
def test_a_device_is_no_data_of_a_development_set(report, given):
    assert report(DETACHED.format(given=given)) == []


@pytest.mark.parametrize("given", ["dev_x.to(device)", "dev", "torch.cat([x, dev])", "val_x.to(dev)"])
def test_data_is(report, given):
    assert report(DETACHED.format(given=given)) == [("OOM201", 4)]


@pytest.mark.parametrize(("parts", "found"), [("split(x, device)", [("OOM202", 7)]), ("dev_loader", [("OOM201", 6)])])
def test_a_loop_that_names_a_device_is_over_no_development_set(report, parts, found):
    code = f"""
        import torch

        for x, y in loader:
            scores = []
            for part in {parts}:
                scores.append(teacher(part).detach())
            loss = criterion(student(x), torch.cat(scores))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        teacher.eval()
    """
    assert report(code) == found


SHARED_SAMPLES = """
    import torch

    class Trainer:
        def generate(self, noise):
            return self.g_net(noise)

        def train_generator(self, noise):
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.criterion(self.d_net(self.generate(noise)))
            loss.backward()
            self.g_optimizer.step()

        def {name}(self, noise):
            {used}

        def train(self):
            for noise in self.loader:
                self.train_generator(noise.cuda())
                self.{name}(noise.cuda())
"""
FOR_THE_DISCRIMINATOR = """with torch.autocast("cuda", torch.bfloat16):
                loss = self.criterion(self.d_net(self.generate(noise).detach()))
            loss.backward()
            self.d_optimizer.step()"""


def test_samples_that_training_also_goes_through_are_no_evaluation(report):
    assert report(SHARED_SAMPLES.format(name="train_critic", used=FOR_THE_DISCRIMINATOR)) == []
    shown = SHARED_SAMPLES.format(name="show_samples", used="save_image(self.g_net(noise).cpu())")
    assert report(shown) == [("OOM201", 14)]


STARRED = """
    import torch

    def losses(net, x, y, state=None):
        if state is not None:
            return criterion(net(x, state), y)
        return criterion(net(x), y)

    for batch in loader:
        loss = losses(net.cuda(), {given})
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("given", "found"), [("*batch", [5, 6]), ("batch[0], *batch[1:]", [5, 6]), ("x, y", [6])])
def test_what_a_star_gives_may_be_for_a_parameter_with_a_default(report, given, found):
    assert report(STARRED.format(given=given)) == [("OOM202", line) for line in found]


LOADED = """
    import torch

    net = torch.load("net.pt", map_location="cpu")
    net.{moved}
    {mode}
    out = net(x)
    image = out.reshape(3, 8)
"""


@pytest.mark.parametrize("moved", ["cuda()", "to(device)"])
@pytest.mark.parametrize(("mode", "found"), [("net.eval()", [("OOM201", 6)]), ("net.train()", [])])
def test_a_network_that_is_loaded_whole_has_the_mode_that_it_is_switched_to(report, moved, mode, found):
    assert report(LOADED.format(moved=moved, mode=mode)) == found


MODE_ASKED = """
    import torch
    from torch import nn

    def run_epoch(net, loader, optimizer):
        trains = net.training
        for x, y in loader:
            loss = criterion(net(x), y)
            if trains:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()

    net = nn.Linear(4, 2)
    run_epoch(net.train(), loader, optimizer)
    print(run_epoch({given}, validation_loader, optimizer))
"""


@pytest.mark.parametrize(("given", "found"), [("net.eval()", [("OOM201", 7)]), ("net.train()", []), ("net", [])])
def test_a_network_knows_the_mode_that_it_was_switched_to(report, given, found):
    assert report(MODE_ASKED.format(given=given)) == found


SAID_BY_AN_OBJECT = """
    import torch

    class Trainer:
        def validate(self):
            self.switch("{flag}")
            for batch in self.validation_loader:
                self.errors(batch)

        def errors(self, batch):
            if self.{flag}:
                return self.criterion(self.model(batch["x"]), batch["y"])
            with torch.no_grad():
                return self.criterion(self.model(batch["x"]), batch["y"])
"""


@pytest.mark.parametrize(("flag", "found"), [("training", []), ("fancy", [("OOM201", 11)])])
def test_the_branch_of_an_object_that_says_it_trains_evaluates_nothing(report, flag, found):
    assert report(SAID_BY_AN_OBJECT.format(flag=flag)) == found


UNFINISHED = """
    import torch
    model.load_state_dict(torch.load("last.pt", map_location="cpu"))
    if {flag}:
        for epoch in range(9):
            for x, y in {loader}:
                guess = model(x)
                loss = criterion(guess, y) / 2
"""


@pytest.mark.parametrize(
    ("flag", "loader", "found"),
    [
        ("args.do_train", "batches", []),
        ("train", "batches", []),
        ("options.is_training", "train_loader", []),
        ("args.do_train", "val_loader", [("OOM201", 6)]),
        ("not args.do_train", "batches", [("OOM201", 6)]),
        ("args.restored", "batches", [("OOM201", 6)]),
    ],
)
def test_a_pass_that_a_flag_says_to_train_is_no_evaluation(report, flag, loader, found):
    assert report(UNFINISHED.format(flag=flag, loader=loader)) == found


@pytest.mark.parametrize("called", ["net", 'getattr(net, "module", net)', 'getattr(net, "module", other)'])
def test_what_a_wrapped_network_holds_is_a_network(report, called):
    found = report(f"""
        import torch
        from torch import nn

        net = nn.DataParallel(nn.Linear(4, 2))
        other = None
        for x, y in loader:
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
        net.eval()
        inner = {called}
        print(inner(x).argmax())
    """)
    assert found == ([] if "other" in called else [("OOM201", 12)])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("logger.update({'loss': criterion(out, y)})", [7]),
        ("self.logger_val.update({'loss': criterion(out, y)}, 8)", [7]),
        ("kept.update({'out': out})", [7]),
        ("agent.update({'loss': criterion(out, y)})", []),
    ],
)
def test_terms_for_a_log_or_a_dict_are_none_for_a_loss(report, given, found):
    code = f"""
        import torch

        def validate(model, loader):
            model.eval()
            for x, y in loader:
                kept = {{}}
                out = model(x)
                {given}
                steps.append(kept)
    """
    assert [line for code, line in report(code) if code == "OOM201"] == found


@pytest.mark.parametrize(("made", "found"), [("AveragedModel(model)", [("OOM201", 11)]), ("average_of(model)", [])])
def test_an_average_of_a_network_is_one(report, made, found):
    code = f"""
        import torch
        from torch.optim.swa_utils import AveragedModel

        model = Net()
        slow = {made}
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            slow.update_parameters(model)
        for x, y in test_loader:
            print(slow(x).argmax(1))
    """
    assert report(code) == found


TWICE = """
    import torch

    class Player:
        def __init__(self, model):
            self.model, self.chances = model.cuda(), []
            self.optimizer = torch.optim.Adam(model.parameters())

        def evaluate(self, board):
            try:
                {tried}
                chance = Categorical(out).log_prob(board)
            except RuntimeError:
                print("once more")
                {again}
                chance = Categorical(out).log_prob(board)
            {kept}
            return int(out.argmax())

        def update(self, reward):
            loss = -torch.cat(self.chances).sum() * reward
            loss.backward()
            self.optimizer.step()
"""
TRIED = {"tried": "out = self.model(board)", "again": "out = self.model(board)", "kept": "self.chances.append(chance)"}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"again": "out = self.spare_model(board)"}, [14]),
        ({"kept": "pass"}, [10, 14]),  # what was tried is not trained either
    ],
)
def test_what_a_handler_makes_once_more_for_training_is_no_evaluation(report, changed, found):
    assert [line for code, line in report(TWICE.format(**TRIED | changed)) if code == "OOM201"] == found


RESIDUAL = """
    import torch

    def evaluate(model, physics, grid):
        model.eval()
        x = grid.detach().{leaf}
        u = model(x)
        print({read})
"""


@pytest.mark.parametrize(
    ("leaf", "read", "found"),
    [
        ("requires_grad_(True)", "physics.residual(x, u).mean().item()", []),
        ("requires_grad_(True)", "physics.residual(u=u, x=x).mean().item()", []),
        ("requires_grad_(False)", "physics.residual(x, u).mean().item()", [6]),
        ("requires_grad_(True)", "physics.residual(grid, u).mean().item()", [6]),
        ("requires_grad_(True)", "torch.cat([x, u]).mean().item()", [6]),
        ("requires_grad_(True)", "torch.dist(x, u).item()", [6]),
    ],
)
def test_what_leaves_with_an_input_that_asks_for_gradients_is_differentiated(report, leaf, read, found):
    assert [line for _, line in report(RESIDUAL.format(leaf=leaf, read=read))] == found


@pytest.mark.parametrize(
    ("imported", "backward", "found"),
    [
        ("import mxnet", "loss.backward()", []),
        ("import numpy as np", "error = net.backward(loss)", []),
        ("import numpy as np", "loss.backward()", [7]),
        ("import torch, numpy as np", "error = net.backward(loss)", [7]),
    ],
)
def test_what_other_libraries_and_layers_in_numpy_evaluate_keeps_no_graph_of_torch(imported, backward, found):
    code = f"""
{imported}

def train(net, loader):
    for x, y in loader:
        loss = criterion(net(x), y)
        {backward}
    print(criterion(net(x), y).item())
"""
    findings = Auditor(all_rules()).audit("train.py", code.lstrip().encode()).findings
    assert [finding.line for finding in findings if finding.code == "OOM201"] == found


ATTRIBUTED = """
    import torch
    from project import Explainer, intercept

    def explain(net, loader):
        features = intercept(net)
        with Explainer(net) as explainer:
            for x, y in loader:
                _ = explainer.forward(x.cuda())
                {read}

    def train(net, loader):
        for x, y in loader:
            criterion(net(x), y).backward()
            optimizer.step()
"""


@pytest.mark.parametrize("read", ["kept.append(features.get().grad.cpu())", "assert x.grad is not None"])
def test_a_forward_that_leaves_gradients_is_no_evaluation(report, read):
    assert ("OOM201", 8) not in report(ATTRIBUTED.format(read=read))


@pytest.mark.parametrize("read", ["kept.append(features.get().cpu())", "x.grad = None", "y.gradient.mean()"])
def test_one_that_leaves_none_is(report, read):
    assert ("OOM201", 8) in report(ATTRIBUTED.format(read=read))


STEPS_TWICE = """
    import torch
    model = torch.nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in first:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    for x, y in second:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        {between}
        print(loss.item())
"""


@pytest.mark.parametrize(("between", "evaluates"), [("optimizer.step()", False), ("pass", True)])
def test_a_loop_that_steps_runs_its_backward_out_of_sight(report, between, evaluates):
    assert (("OOM201", 11) in report(STEPS_TWICE.format(between=between))) is evaluates


SAMPLES = """
    import torch
    for epoch in range(9):
        for i, (x, noise) in enumerate(loader):
            loss = criterion(generator(noise), x)
            loss.backward()
            optimizer.step()
            if i % 100 == 0:
                fake = generator(fixed)
                save_image(fake.detach(), "fake.png")
            {behind}
"""


@pytest.mark.parametrize(
    ("behind", "lines"),
    [
        ("pass", [8]),
        ("if i == 7:\n                fake = x * 2\n                kept.append(fake)", [8]),
        ("with torch.no_grad():\n                fake = generator(noise)\n            kept.append(fake)", [8]),
        ("kept.append(fake)", []),
        ("if i == 7:\n                fake = x\n            kept.append(fake)", []),
        ("try:\n                kept.append(fake)\n            except NameError:\n                fake = x", []),
    ],
)
def test_a_sample_under_a_name_that_is_bound_anew_ahead_of_the_next_read_is_a_look(report, behind, lines):
    assert [line for code, line in report(SAMPLES.format(behind=behind)) if code == "OOM201"] == lines


REFINED = """
    import torch

    def refine(net, x, y, mixed):
        for _ in range(10):
            out = net(x)
            {other}
            {train}

    net = torch.nn.Linear(4, 2).cuda()
    for x, y in loader:
        refine(net, x, y, mixed=True)
        refine(net, x, y, mixed=False)
"""
TRAIN = "loss.backward(); optimizer.step()"
EITHER = "loss = criterion(net(x + noise) if mixed else out, y)"


@pytest.mark.parametrize(
    ("other", "train", "lines"),
    [
        (EITHER, TRAIN, []),
        ("loss = criterion(out, y)", f"if not mixed: {TRAIN}", [5]),
        (EITHER, f"if not mixed: {TRAIN}", [5, 6]),
    ],
)
def test_a_forward_beside_the_one_that_its_function_backpropagates_is_no_evaluation(report, other, train, lines):
    found = report(REFINED.format(other=other, train=train))
    assert [line for code, line in found if code == "OOM201"] == lines


TRIED_BESIDE = """
    import torch
    for x, y in train_loader:
        hidden = torch.zeros(8)
        for t in range(10):
            out, hidden = rnn(x[:, t], hidden)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        {other}, hidden = next(others), torch.zeros(8)
        for t in range(10):
            out, hidden = rnn({other}[:, t], hidden)
        {use}
"""


@pytest.mark.parametrize(
    ("other", "use", "lines"),
    [
        ("x_val", "losses.append(criterion(out, y).data)", [11]),
        ("x_val", "criterion(out, y).backward()", []),
        ("x_more", "losses.append(criterion(out, y).data)", []),
    ],
)
def test_steps_through_validation_data_in_a_training_iteration_evaluate(report, other, use, lines):
    found = report(TRIED_BESIDE.format(other=other, use=use))
    assert [line for code, line in found if code == "OOM201"] == lines


@pytest.mark.parametrize(
    ("name", "evaluates"),
    [
        ("critic_val", False),
        ("get_critic_val_log_prob", False),
        ("state_val", False),
        ("val", True),
        ("batch_val", True),
    ],
)
def test_the_value_of_a_critic_is_no_validation(report, name, evaluates):
    code = f"""
    import torch

    class Agent:
        def {name}(self, state):
            return torch.min(self.critic(state), self.other_critic(state))
    """
    assert (("OOM201", 5) in report(code)) is evaluates


DERIVED = """
    import torch
    from networks import Network

    def train(data, steps):
        model = Network().cuda()
        x = torch.tensor(data, {flag})
        for step in range(steps):
            loss = criterion(model.{method}x[:8]), y)
            loss.backward()
            optimizer.step()
        print(criterion(model.{method}x), y).item())
"""


@pytest.mark.parametrize(
    ("flag", "method", "lines"),
    [
        ("requires_grad=True", "step_of(", []),
        ("dtype=torch.float32", "step_of(", [11]),
        ("dtype=torch.float32", "time_derivative(", []),
        ("requires_grad=True", "forward(", [11]),
    ],
)
def test_a_method_out_of_sight_may_differentiate_by_what_it_is_given_for_that(report, flag, method, lines):
    found = report(DERIVED.format(flag=flag, method=method))
    assert [line for code, line in found if code == "OOM201"] == lines


TRIED_OUT = """
    import torch

    def sample_fake(size):
        noise = torch.randn(size, 8).cuda()
        return generator(noise)

    {before}
    for real in loader:
        optimizer.zero_grad()
        {loss}.backward()
        optimizer.step()
    {after}
"""
TRAINED_ON_SAMPLES = "critic(sample_fake(len(real))).mean()"


@pytest.mark.parametrize(
    ("before", "loss", "after", "lines"),
    [
        ("print(sample_fake(2).shape)", TRAINED_ON_SAMPLES, "pass", []),
        ("print(sample_fake(2).shape)", "critic(real).mean()", "pass", [5]),
        ("pass", TRAINED_ON_SAMPLES, "print(sample_fake(2).mean())", [5]),
        ("for _ in range(3): print(sample_fake(2).mean())", TRAINED_ON_SAMPLES, "pass", [5]),
    ],
)
def test_one_call_ahead_of_a_training_through_the_same_function_tries_it_out(report, before, loss, after, lines):
    found = report(TRIED_OUT.format(before=before, loss=loss, after=after))
    assert [line for code, line in found if code == "OOM201"] == lines
