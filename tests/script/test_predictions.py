"""Evaluations that are methods of a network, or functions that a flag chooses."""

from __future__ import annotations

import pytest

PREDICTING = """
    import torch

    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(3, 3)
            self.head = torch.nn.Linear(3, 3)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.head(out)

        {decorator}
        def {name}(self, x):
            out = self.forward(x)
            return {result}
"""


@pytest.mark.parametrize("name", ["predict", "predict_label", "al_test", "evaluate", "infer"])
@pytest.mark.parametrize("result", ["torch.max(out.data, 1)[1].item()", "out.argmax(1)", "out.detach().cpu()"])
def test_a_method_that_runs_its_network_for_numbers_needs_no_graph(report, name, result):
    code = PREDICTING.format(decorator="# as it is", name=name, result=result)
    assert report(code) == [("OOM201", 15)]


@pytest.mark.parametrize(
    ("decorator", "name", "result"),
    [
        ("@torch.no_grad()", "predict", "out.argmax(1)"),
        ("# as it is", "predict", "out"),
        ("# as it is", "predict", "out.softmax(-1)"),
        ("# as it is", "label", "out.argmax(1)"),
        ("# as it is", "predict_loss", "self.criterion(out, x)"),
    ],
)
def test_what_a_caller_may_backpropagate_is_left_alone(report, decorator, name, result):
    assert report(PREDICTING.format(decorator=decorator, name=name, result=result)) == []


CHOSEN = """
    import torch

    class Steps:
        def __init__(self, model, loss_fn, optimizer):
            self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
            self.train_step_fn = self._make_train_step()
            self.val_step_fn = self._make_val_step()

        def _make_train_step(self):
            def train_step(x, y):
                self.model.train()
                loss = self.loss_fn(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                return loss.item()
            return train_step

        def _make_val_step(self):
            def val_step(x, y):
                self.model.eval()
                return self.loss_fn(self.model(x), y).item()
            return val_step

        def _mini_batch(self, validation=False):
            if validation:
                loader, step = self.val_loader, self.val_step_fn
            else:
                loader, step = self.train_loader, self.train_step_fn
            losses = []
            for x, y in loader:
                losses.append(step(x, y))
            return sum(losses)

        def resume(self, checkpoint):
            self.model.load_state_dict(checkpoint)
            self.model.train()

        def train(self, epochs):
            for epoch in range(epochs):
                self._mini_batch()
                with {context}:
                    self._mini_batch(validation=True)
"""


def test_a_validation_step_is_judged_where_it_is_called(report):
    assert report(CHOSEN.format(context="torch.no_grad()")) == [("OOM202", 12)]


def test_a_validation_step_without_no_grad_is_found(report):
    assert ("OOM201", 21) in report(CHOSEN.format(context="self.timer()"))


ACTING = """
    import torch

    class Agent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.GRUCell(4, 4)
            self.meters = []

        def forward(self, x, state):
            return self.net(x, state)

        {decorator}
        def act(self, x, state):
            return self.policy(x, state)

        def policy(self, x, state):
            return self.net(x, state).relu()

        def update(self, x, state):
            self.policy(x, state).sum().backward()
            self.optimizer.step()

        def write_log(self, step):
            for meter in self.meters:
                print(step, meter.value)

    class Player:
        def __init__(self):
            self.agent = Agent()

        def evaluate(self, env):
            x, state = env.reset(), None
            while not env.done:
                state = self.agent.act(x, state)
                x = env.step(state)
            self.agent.write_log(env.steps)
"""


def test_a_method_decorated_with_no_grad_records_no_graph_for_its_callers(report):
    assert report(ACTING.format(decorator="@torch.no_grad()")) == []


def test_the_same_method_without_it_does(report):
    assert report(ACTING.format(decorator="# as it is")) == [("OOM104", 34), ("OOM201", 34)]


@pytest.mark.parametrize(
    ("decorator", "found"), [("@torch.no_grad()", []), ("# as it is", [("OOM102", 12), ("OOM201", 12)])]
)
def test_so_it_is_for_an_object_that_is_made_elsewhere(report, decorator, found):
    code = f"""
        import torch

        class Agent:
            {decorator}
            def encode(self, x):
                return self.policy.sample(x)

        def collect(loader, agent):
            agent.eval()
            kept = []
            for x in loader:
                kept.append(agent.encode(x))
            return kept
    """
    assert report(code) == found


GENERATING = """
    import torch

    class Diffusion(torch.nn.Module):
        def __init__(self, text_encoder, unet, tokenizer):
            super().__init__()
            self.text_encoder, self.unet, self.tokenizer = text_encoder, unet, tokenizer

        def embed(self, prompt):
            ids = self.tokenizer(prompt)
            with torch.no_grad():
                return self.text_encoder(ids)

        def images_of(self, prompt, latents):
            text = self.embed(prompt)
            for t in range(50):
                {context}:
                    latents = latents - self.unet(latents, t, text)
            return latents.detach().cpu().numpy()

    diffusion = Diffusion(encoder, unet, tokenizer).to("cuda")
    diffusion.eval()
    for prompt in prompts:
        save(diffusion.images_of(prompt, noise()))
"""


def test_a_method_that_runs_all_its_networks_without_gradients_records_none(report):
    assert report(GENERATING.format(context="with torch.no_grad()")) == []


def test_a_method_that_runs_one_of_them_with_gradients_does(report):
    assert ("OOM201", 23) in report(GENERATING.format(context="if True"))


@pytest.mark.parametrize(("name", "found"), [("val_step", []), ("validate", [("OOM201", 5)])])
def test_what_a_framework_calls_may_be_called_without_gradients(report, name, found):
    code = f"""
        from runners import BaseRunner

        class Runner(BaseRunner):
            def {name}(self, batch):
                out = self.model(batch)
                self.meter.update((out - batch).abs().mean().item())

            def train_step(self, batch):
                self.model.train()
                self.model(batch).sum().backward()
                self.optimizer.step()
    """
    assert report(code) == found


@pytest.mark.parametrize("name", ["act", "select_action", "get_action"])
@pytest.mark.parametrize(
    ("result", "found"), [("action, dist.log_prob(action)", []), ("action.item()", [("OOM201", 8)])]
)
def test_a_policy_that_returns_what_a_loss_needs_is_asked_while_training(report, name, result, found):
    code = f"""
        import torch

        class Agent:
            def __init__(self):
                self.policy = torch.nn.Linear(4, 2)

            def {name}(self, state):
                dist = torch.distributions.Categorical(logits=self.policy(state))
                action = dist.sample()
                return {result}

            def learn(self, log_probs, returns):
                (-log_probs * returns).sum().backward()
                self.optimizer.step()
    """
    assert report(code) == found


@pytest.mark.parametrize("called", ["trainer._save_model(step)", "trainer.net.grow_network()"])
def test_saving_and_growing_run_no_network(report, called):
    code = f"""
        import torch

        def test(trainer, loader, step):
            trainer.net.eval()
            with torch.no_grad():
                for x in loader:
                    show(trainer.net(x))
            {called}
    """
    assert report(code) == []


AS_ARRAY = """
    import torch

    class Surrogate:
        def __init__(self, layers, optimizer):
            self.net = torch.nn.Sequential(*layers)
            self.optimizer = optimizer

        def __call__(self, x):
            return {returned}

        def fit(self, loader):
            for x, y in loader:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = (self.net(x) - {target}).pow(2).mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("self.net(x).detach().numpy()", [("OOM201", 9)]),
        ("self.net(torch.as_tensor(x)).detach().cpu().numpy()", [("OOM201", 9)]),
        ("self.net(x).mean().item()", [("OOM201", 9)]),
        ("self.net(x).tolist()", [("OOM201", 9)]),
        ("self.net(x).detach()", []),
        ("self.net(x).detach() + 1", []),
        ("self.net(x)", []),
        ("(self.net(x), x.numpy())", []),
        ("self.scale(self.net(x), x.numpy())", []),
    ],
)
def test_a_network_that_is_asked_for_numbers_needs_no_graph(report, returned, found):
    assert report(AS_ARRAY.format(returned=returned, target="y")) == found


def test_numbers_that_a_training_iteration_asks_for_may_be_a_target(report):
    code = AS_ARRAY.format(returned="self.net(x).detach().numpy()", target="torch.as_tensor(self(x))")
    assert report(code) == []


GIVING_ARRAYS = """
    import numpy as np
    import torch
    import torch.nn.functional as F

    class VAE(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Linear(8, 2)
            self.decoder = torch.nn.Linear(2, 8)

        def forward(self, x):
            return self.decoder(self.encoder(x))
        {training}

        def {name}(self, z):
            z = torch.as_tensor(z)
            out = self.decoder(z)
            {rest}
"""
TRAINING = """
        def fit(self, loader, optimizer):
            for x, _ in loader:
                optimizer.zero_grad()
                (self.decoder(self.encoder(x)) - x).pow(2).mean().backward()
                optimizer.step()
"""
LINE = 16


@pytest.mark.parametrize("training", ["", TRAINING], ids=["trained elsewhere", "trained here"])
@pytest.mark.parametrize(
    "rest",
    [
        "return out.cpu().detach().numpy()",
        "return out.argmax(1).cpu().numpy()",
        "out = F.softmax(out, dim=-1)\n            return out.detach().cpu().numpy()",
        "images = out.view(-1, 2, 4).data\n            return images.tolist()",
        "return np.asarray(out.detach().cpu())",
        "images = out.detach().cpu().numpy()\n            return [image.tolist() for image in images]",
        "image = out.detach().numpy()[0]\n            return image.reshape(2, 4).astype('uint8')",
        "return out.argmax(1).numpy(), z.numpy()",
    ],
)
def test_a_method_of_a_network_that_gives_arrays_needs_no_graph(report, training, rest):
    code = GIVING_ARRAYS.format(training=training, name="from_prior", rest=rest)
    line = LINE + 1 + training.count("\n")
    assert [found for found in report(code) if found[0] == "OOM201"] == [("OOM201", line)]


@pytest.mark.parametrize(
    "rest",
    [
        "return out",
        "return out, out.detach().numpy()",
        "slope = gradient_of(out, z)\n            return slope.detach().numpy()",
        "slope = torch.autograd.grad(out.sum(), z)[0]\n            return slope.numpy()",
        "self.last = out\n            return out.detach().numpy()",
        "return z.numpy()",
        "return int(np.prod(out.size()))",
        "table = np.zeros(8)\n            return table",
    ],
)
def test_what_may_be_differentiated_before_it_is_given_away_is_left_alone(report, rest):
    assert report(GIVING_ARRAYS.format(training="", name="from_prior", rest=rest)) == []


TAKEN_WITHIN = """
    import numpy as np
    import torch

    class Robot:
        def __init__(self, path):
            self.model = torch.load(path, map_location="cpu")

        def control(self, state):
            out = self.model(torch.as_tensor(state))
            {rest}
"""


@pytest.mark.parametrize(
    "rest",
    [
        "self.motor.move(out.detach().numpy())",
        "left, right = out.detach().cpu().numpy()\n            return drive(left, right)",
        "boxes, scores = out[0].data.numpy(), out[1].data.numpy()\n            return nms(boxes, scores)",
        "out = out.softmax(-1)\n            for command in out.tolist():\n                self.send(command)",
        "command = np.argmax(out.detach().numpy())\n            return {'command': command}",
    ],
)
def test_what_becomes_an_array_in_its_function_needs_no_graph(report, rest):
    assert report(TAKEN_WITHIN.format(rest=rest)) == [("OOM201", 9)]


@pytest.mark.parametrize(
    "rest",
    [
        "return out",
        "self.last = out\n            return out.detach().numpy()",
        "self.update(out)\n            return out.detach().numpy()",
        "return {'command': out.detach().numpy(), 'out': out}",
        "return out.shape",
        "spectrum = out.cpu()\n            plot(spectrum.numpy())",
        "return int(np.prod(out.size()))",
        "size = out.view(1, -1).shape[1]\n            return np.zeros(size)",
        "self.critic(out, state).backward()\n            print(out.detach().numpy())",
        "slope = torch.func.grad(self.model)(out)\n            return out.detach().numpy()",
        "yield out\n            print(out.detach().numpy())",
    ],
)
def test_what_may_go_elsewhere_beside_its_array_is_left_alone(report, rest):
    assert [found for found in report(TAKEN_WITHIN.format(rest=rest)) if found[1] == 9] == []


UNPACKED = """
    import torch

    def targets({network}, batch):
        states, rewards = batch
        values = {network}(states)
        rewards += values.detach().cpu().numpy()
        return torch.as_tensor(rewards)
{training}
"""
UPDATED = """
    for x, y in loader:
        criterion(net(x), y).backward()
        optimizer.step()
"""


def test_a_method_that_is_named_after_training_makes_targets(report):
    code = TAKEN_WITHIN.format(rest="print(np.amax(self.critic.train_step(out.detach()).numpy()))")
    assert [line for _, line in report(code)] == [9]
    assert report(code.replace("def control", "def train")) == []


@pytest.mark.parametrize(("training", "found"), [("", [("OOM201", 5)]), (UPDATED, [])])
def test_a_function_that_is_given_the_network_may_make_targets_for_what_trains(report, training, found):
    assert report(UNPACKED.format(network="net", training=training)) == found


DECODING = """
    import torch

    class Translator(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Encoder(), Decoder()

        def forward(self, x, y):
            return self.decoder(y, self.encoder(x))

        def {name}(self, x):
            state, token, tokens = self.encoder(x), START, []
            for _ in range(20):
                scores = self.decoder(token, state)
                token = scores.argmax(-1)
                tokens.append(token)
            {end}
    {rest}
    model.eval()
"""


@pytest.mark.parametrize("name", ["infer", "predict", "generate", "sample"])
@pytest.mark.parametrize("end", ["return torch.stack(tokens)", "return [int(token) for token in tokens]"])
def test_a_method_that_runs_the_parts_of_its_network_for_tokens_needs_no_graph(report, name, end):
    found = report(DECODING.format(name=name, end=end, rest=""))
    assert [line for code, line in found if code == "OOM201"] == [12, 14]


@pytest.mark.parametrize(
    ("name", "end", "rest"),
    [
        # whoever calls it may train through what it gives, or leaves on its object
        ("generate", "return scores", ""),
        ("generate", "return torch.stack(tokens), scores.log_softmax(-1)", ""),
        ("generate", "self.scores = scores", ""),
        ("forward_step", "return torch.stack(tokens)", ""),
        ("validation_step", "return torch.stack(tokens)", ""),
        ("inference_forward", "x[:] = scores\n            return x", ""),
        # the only call of it is made without gradients
        ("generate", "return tokens", "with torch.no_grad(): Translator().generate(x)"),
    ],
)
def test_a_method_that_may_be_part_of_training_is_left_alone(report, name, end, rest):
    assert "OOM201" not in {code for code, _ in report(DECODING.format(name=name, end=end, rest=rest))}


def test_a_method_of_a_network_that_only_scales_is_no_forward(report):
    code = """
        import torch

        class Table(torch.nn.Module):
            def forward(self, x):
                return self.layer(x)

            def _scaled(self, x):
                return self.scaler.transform(x)

            def predict(self, x):
                x = self._scaled(x)
                with torch.no_grad():
                    return self(x).argmax(-1)
    """
    assert report(code) == []


@pytest.mark.parametrize(
    ("draw", "found"),
    [("policy(state).sample()", []), ("torch.distributions.Categorical(policy(state)).sample()", [("OOM201", 4)])],
)
def test_what_a_distribution_of_torch_draws_holds_no_graph(report, draw, found):
    code = f"""
        import torch

        def select_action(policy, state, memory):
            action = {draw}
            memory.actions.append(action)
            return action.item()
    """
    assert [place for place in report(code) if place[0] == "OOM201"] == found


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("argmax(dim=1).cpu().numpy()", [("OOM201", 10)]),
        ("argmax(dim=1).tolist()", [("OOM201", 10)]),
        ("detach().cpu().numpy()", [("OOM201", 10)]),
        # torch refuses: gradients are off somewhere
        ("cpu().numpy()", []),
        ("softmax(dim=1).numpy()", []),
    ],
)
def test_numbers_of_classes_are_asked_of_what_has_a_graph(report, asked, found):
    reported = report(f"""
        import torch

        model = Net().cuda()
        for epoch in range(50):
            with torch.autocast("cuda"):
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        predicted = model(others).{asked}
        print((predicted == labels).mean())
    """)
    assert [one for one in reported if one[0] == "OOM201"] == found


POSES = """
    import torch

    class Trainer:
        def __init__(self, config):
            self.pose_net, self.optimizer = build(config)
            for net in config.nets:
                net.train()

        def {name}(self, images):
            return self.pose_net(images)

        def step(self, images):
            {step}

        def train(self, loader):
            for images in loader:
                self.step(images)
"""


@pytest.mark.parametrize(
    ("name", "step", "found"),
    [
        ("predict_poses", "warp(self.predict_poses(images)).mean().backward()", []),
        ("poses_of", "warp(self.poses_of(images)).mean().backward()", []),
        ("predict_poses", "warp(self.pose_net(images)).mean().backward()", [10]),  # training does not ask for it
    ],
)
def test_what_training_predicts_with_is_no_evaluation_for_its_name(report, name, step, found):
    assert [line for code, line in report(POSES.format(name=name, step=step)) if code == "OOM201"] == found


KEPT = [("OOM102", 8), ("OOM201", 7)]


@pytest.mark.parametrize(
    ("name", "found"), [("sample_trajectory", []), ("generate_paths", []), ("sample_images", KEPT)]
)
def test_experience_that_is_sampled_may_be_for_a_loss(report, name, found):
    code = f"""
        import torch

        class Agent:
            def {name}(self, env, state):
                chances = []
                for t in range(100):
                    chance, value = self.policy(state)
                    chances.append(chance)
                return chances
    """
    assert report(code) == found


ATTRIBUTION = """
    import torch

    class Attribution:
        def __init__(self, model):
            self.model = model

        def {name}(self, outputs, inputs):
            {body}

        def predict_logits(self, x):
            logits = self.model(x)
            return logits[:, 0], torch.softmax(logits, 1)
"""


@pytest.mark.parametrize(
    "body",
    [
        "outputs.sum().backward(); return inputs.grad",
        "total = outputs.sum(); total.backward(inputs=inputs); return inputs.grad",
        "return torch.autograd.grad(outputs, inputs)[0]",
        "return torch.autograd.grad(outputs=outputs, inputs=inputs, create_graph=True)[0]",
    ],
)
def test_what_a_class_predicts_that_takes_gradients_of_inputs_may_be_differentiated(report, body):
    assert report(ATTRIBUTION.format(name="input_gradients", body=body)) == []


@pytest.mark.parametrize(
    "body",
    ["outputs.sum().backward(); self.optimizer.step()", "return inputs.grad", "torch.autograd.grad(self.loss, inputs)"],
)
def test_one_that_takes_none_only_predicts(report, body):
    assert report(ATTRIBUTION.format(name="update", body=body)) == [("OOM201", 11)]
