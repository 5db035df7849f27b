"""Calls of what the file does not define: what they do with a graph is read off their names and uses."""

from __future__ import annotations

import pytest

TRUNCATED = """
    model = build().cuda()

    def train(loader):
        states = model.initial_states(20)
        for x, y in loader:
            {detaching}
            scores, states = model(x, states)
            loss = criterion(scores, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
"""


@pytest.mark.parametrize(
    "detaching",
    [
        "states = model.detach(states)",
        "states = model.detach_states(states)",
        "states = repackage_hidden(states)",
        "states = utils.stop_gradient(states)",
        "repackage_in_place(states)",
    ],
)
def test_a_function_named_after_detaching_takes_the_graph_off(report, detaching):
    assert ("OOM104", 7) not in report(TRUNCATED.format(detaching=detaching))


@pytest.mark.parametrize("passing", ["states = model.reorder(states)", "states = utils.attach(states)", "show(states)"])
def test_a_function_with_another_name_does_not(report, passing):
    assert ("OOM104", 7) in report(TRUNCATED.format(detaching=passing))


BUFFER = """
    import torch

    def train(net, x, y, optimizer):
        state = net.reset()
        outputs = {buffer}
        for i in range(x.size(1)):
            out, state = net(x[:, i], state)
            outputs[:, i] = out
        loss = criterion(outputs, y)
        {end}
        return loss.item()
"""


@pytest.mark.parametrize("buffer", ["torch.empty_like(y, device=device)", "torch.zeros(y.size())", "torch.zeros(3)"])
def test_a_backward_through_a_buffer_goes_through_what_was_written_into_it(report, buffer):
    assert report(BUFFER.format(buffer=buffer, end="loss.backward(); optimizer.step()")) == []


@pytest.mark.parametrize("buffer", ["torch.empty_like(y, device=device)", "torch.zeros(y.size())"])
def test_a_buffer_that_nothing_goes_back_through_saves_no_evaluation(report, buffer):
    code = BUFFER.format(buffer=buffer, end="net.eval()")
    assert ("OOM201", 7) in report(code)


LOSS_OBJECT = """
    class Trainer:
        def __init__(self, loss, model, optimizer, device):
            self.loss, self.model, self.optimizer = loss, model.to(device), optimizer

        def run(self, data, device):
            for x, y in data:
                out = self.model(x.to(device))
                loss = self.loss
                {reset}
                for i, step in enumerate(out):
                    loss.eval_batch(step, y[:, i])
                self.optimizer.zero_grad(set_to_none=True)
                loss.{method}()
                self.optimizer.step()
"""


@pytest.mark.parametrize("reset", ["loss.reset()", "pass"])
def test_an_object_that_is_given_outputs_and_has_a_backward_is_their_loss(report, reset):
    assert report(LOSS_OBJECT.format(reset=reset, method="backward")) == [("OOM202", 7)]


def test_an_object_without_a_backward_is_not(read):
    script = read(LOSS_OBJECT.format(reset="pass", method="show"))
    assert script.loops == []


def test_a_call_of_an_imported_class_is_no_forward(report):
    code = """
        import torch
        import othergrad

        @othergrad.Tensor.train()
        def train_other(): ...

        def generate_sequence(model, start):
            model.eval()
            for i in range(9):
                x = othergrad.Tensor(start).view(1, 1, 1)
                start = x.numpy()
            return start
    """
    assert report(code) == []


SUBCLASSED = """
    class Instructor:
        def __init__(self, loader):
            self.loader = loader
            self.classifier = None
            {filling}

        def train_epoch(self, model, optimizer):
            for batch in self.loader:
                pred = model.forward(batch["input"].cuda())
                loss = self.criterion(pred, batch["target"])
                loss.backward()
                optimizer.step()

        def run(self, optimizer):
            self.train_epoch(self.classifier, optimizer)
"""


def test_an_attribute_that_the_file_leaves_at_none_is_filled_by_a_subclass(report):
    assert report(SUBCLASSED.format(filling="pass")) == [("OOM202", 9)]


@pytest.mark.parametrize(
    "base", ["LlamaForCausalLM", "ViTForImageClassification", "modeling.BertForTokenClassification"]
)
def test_a_class_that_extends_an_imported_model_is_a_network(report, base):
    code = f"""
        import torch
        from models import *

        class Critic({base}):
            def __init__(self, config):
                super().__init__(config)
                self.head = torch.nn.Linear(config.hidden_size, 1)

            def forward(self, ids):
                return self.head(self.model(ids)[0])

        def train(loader, several):
            unwrapped = judge.module if several else judge
            for ids, returns in loader:
                values = unwrapped(ids)
                loss = (values - returns).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        judge = Critic(config).to("cuda")
        train(loader, False)
    """
    assert report(code) == [("OOM202", 15)]


def test_a_class_under_the_name_of_what_it_makes_is_no_network_before(report):
    code = """
        import torch

        def load(paths):
            models = {}
            for path in paths:
                model = get_model(path)
                model = model(settings)
                model.load_state_dict(torch.load(path, map_location="cpu"))
                models[path] = model
            return models

        def generate(models):
            for model in models.values():
                model = model.to("cuda")
                model.eval()

        generate(load(paths))
    """
    assert report(code) == []


@pytest.mark.parametrize("weight", ["self.loss_weight", "self.value_loss_weighting", "loss_coef"])
def test_the_weight_of_a_loss_is_a_number(report, weight):
    code = f"""
        class Agent:
            def __init__(self, loss_weight, value_loss_weighting):
                self.loss_weight = loss_weight
                self.value_loss_weighting = value_loss_weighting

            def update(self, batches, loss_coef):
                total = 0
                for x, y in batches:
                    policy_loss, value_loss = self.losses(x, y)
                    loss = policy_loss + {weight} * value_loss
                    loss.backward()
                    self.optimizer.step()
                    total += {weight} * value_loss.item()
                return total
    """
    assert report(code) == []


@pytest.mark.parametrize("moved", ["mems = out.mems", "new_mems = out.mems; mems = new_mems"])
def test_the_memories_that_a_transformer_gives_are_detached_by_it(report, moved):
    code = f"""
        mems = None
        for x, y in loader:
            out = model(input_ids=x, mems=mems)
            {moved}
            criterion(out.logits, y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    """
    assert "OOM104" not in [found for found, _ in report(code)]


def test_weights_that_a_network_is_given_are_trained_through_it(report):
    code = """
        import copy
        import torch
        from networks import Learner, Meta

        def adapt(learner, meta, batches):
            weights, states = meta.start, [None]
            for x, y in batches:
                learner.copy_weights(weights)
                loss = criterion(learner(x), y)
                learner.zero_grad(set_to_none=True)
                loss.backward()
                weights, h = meta(gradients_of(learner), states[-1])
                states.append(h)
            return weights

        learner, meta = Learner().cuda(), Meta().cuda()
        target = copy.deepcopy(learner)
        optimizer = torch.optim.Adam(meta.parameters())
        for batches, x, y in tasks:
            weights = adapt(learner, meta, batches)
            target.transfer(weights)
            loss = criterion(target(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    """
    assert [found for found, _ in report(code) if found != "OOM202"] == []


ABBREVIATED = """
    class Trainer:
        def __init__(self):
            self.net = Net().cuda()
            self.ctc = {made}
            self.optimizer = Adam({parameters})

        def validate(self, loader):
            self.net.eval()
            for x, y in loader:
                value = self.ctc({given})
            return 0
"""


def test_an_abbreviation_of_a_loss_is_a_network_where_its_weights_are_trained(report):
    code = ABBREVIATED.format(made="Critic()", parameters="self.ctc.parameters()", given="x")
    assert report(code) == [("OOM201", 10)]


@pytest.mark.parametrize("made", ["Criterion()", "build()"])
def test_an_abbreviation_of_a_loss_is_one_otherwise(report, made):
    assert report(ABBREVIATED.format(made=made, parameters="self.net.parameters()", given="x, y")) == []


@pytest.mark.parametrize("called", ["unwrap_model", "tools.clone_net", "push_model", "hub.is_model", "fuse_network"])
def test_what_is_done_to_a_network_is_no_forward(report, called):
    code = f"""
        def evaluate(model, args):
            inner = {called}(model)
            return inner.name
    """
    assert report(code) == []


@pytest.mark.parametrize("called", ["model", "self.net", "unwrapped_model", "isolated_network"])
def test_what_is_named_like_a_network_is_one(report, called):
    code = f"""
        def evaluate(self, loader, unwrapped_model, isolated_network, model):
            for x in loader:
                out = {called}(x)
            return 0
    """
    assert report(code) == [("OOM201", 3)]


def test_a_part_of_unknown_make_is_a_network_where_it_is_wrapped_as_one(report):
    code = """
        import torch
        from elsewhere import *

        class Total(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.backbone = BACKBONES[name](True)
                self.classifier = CLS(self.backbone.output_num(), 10)

        total = Total()
        backbone = torch.nn.DataParallel(total.backbone).cuda()
        classifier = torch.nn.DataParallel(total.classifier).cuda()
        for x, y in loader:
            found = backbone(x)
            loss = criterion(classifier.forward(found), y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 14), ("OOM202", 15)]


LOADED = """
    import torch

    def segment(loader):
        {unpacked} = torch.hub.load("owner/speech", "detector")
        find, collect = helpers
        for audio in loader:
            times = find(audio, detector)
            {line}
"""


@pytest.mark.parametrize(
    ("unpacked", "line", "evaluated"),
    [
        ("detector, helpers", "show(collect(times, audio))", False),
        ("detector, helpers", "show(detector(audio))", True),
        ("helpers, detector", "show(detector(audio))", True),
    ],
)
def test_what_a_hub_gives_beside_a_network_is_none(report, unpacked, line, evaluated):
    assert report(LOADED.format(unpacked=unpacked, line=line)) == ([("OOM201", 8)] if evaluated else [])


ATTRIBUTES = """
    from parts import *

    class Agent:
        def __init__(self, size):
            self.pi = Gaussian(size)
            self.value = State_Value_Module(size)

        def act(self, observation):
            return self.pi(observation).sample()

    class Learner:
        def __init__(self, agent):
            self.agent = agent
            self.l_enc = l2_loss
            self.optimizer = Adam(self.agent.pi.parameters())

        def learn(self, env, loader):
            observation = env.reset()
            for x, y in loader:
                action = self.agent.act(observation).cpu().numpy()
                observation, reward, done, _ = env.step(action)
                out = self.agent.value(x.cuda())
                loss = self.l_enc(out, y)
                loss.backward()
                self.optimizer.step()

    Learner(Agent(8)).learn(env, loader)
"""


def test_attributes_are_what_others_use_them_as_and_what_they_were_made_of(report):
    assert report(ATTRIBUTES) == [("OOM201", 9), ("OOM202", 22)]


@pytest.mark.parametrize(("name", "line"), [("tokenizer_encoder", []), ("text_encoder", [("OOM202", 5)])])
def test_a_tokenizer_is_no_network(report, name, line):
    assert (
        report(f"""
        model = Net().cuda()

        def epoch(model, loader, {name}):
            for text, y in loader:
                tokens = {name}(text)
                loss = criterion(tokens, y)
                loss.backward()
                optimizer.step()
    """)
        == line
    )


HANDED = """
    import torch
    from engines import Engine

    class Trainer:
        def run_model(self, batch):
            x, y = batch
            out = self.model(x)
            out["loss"] = criterion(out["logits"], y)
            return out

        def train(self):
            engine = Engine(lambda e, batch: self.step(batch))
            engine.run(self.loader)

        def step(self, batch):
            out = self.run_model(batch)
            out["loss"].backward()
            self.optimizer.step()

        def validate(self):
            validator = self.make_validator()
            self.model.eval()
            {context}
                validator.run(self.val_loader)
            {again}

        def make_validator(self):
            return Engine(lambda e, batch: self.run_model(batch))
"""


@pytest.mark.parametrize(
    ("context", "again", "recorded"),
    [
        ("with torch.no_grad():", "", False),
        ("if self.val_loader:", "", True),
        ("with torch.no_grad():", "validator.run(self.test_loader)", True),
    ],
)
def test_an_engine_calls_what_it_was_handed_where_it_runs(read, context, again, recorded):
    script = read(HANDED.format(context=context, again=again))
    validating = [
        forward
        for forward in script.trace.forwards.values()
        if "make_validator" in {function.name for function in forward.site.functions}
    ]
    assert validating
    assert any(forward.records_graph for forward in validating) is recorded


@pytest.mark.parametrize(("given", "found"), [("", []), ("x", [("OOM201", 4)])])
def test_what_is_only_named_like_a_network_and_given_nothing_makes_one(report, given, found):
    code = f"""
        def evaluate(model_fun, loader):
            results = []
            for x in loader:
                results.append(model_fun({given}).argmax(1))
            loss.backward()
    """
    assert [finding for finding in report(code) if finding[0] == "OOM201"] == found


LEFT_ON_AN_ARGUMENT = """
    import torch

    class Replay:
        def on_task_ends(self, trainer):
            trainer.encoder.eval()
            with torch.no_grad():
                self.kept = [trainer.encoder(x) for x in trainer.sample()]

        def before_backward(self, trainer):
            penalty = 0
            for x, before in zip(trainer.sample(), self.kept):
                now = trainer.encoder(x)
                penalty += (now - before).norm()
            {left}
"""


@pytest.mark.parametrize(
    "left",
    [
        "trainer.loss += penalty",
        "trainer.loss = trainer.loss + penalty",
        "trainer.losses['replay'] = penalty",
        "trainer.state.loss = penalty",
    ],
)
def test_what_an_object_given_from_elsewhere_gets_is_backpropagated_there(report, left):
    assert report(LEFT_ON_AN_ARGUMENT.format(left=left)) == []


@pytest.mark.parametrize("left", ["trainer.loss = penalty.item()", "print(penalty)", "loss = penalty"])
def test_what_stays_in_a_method_is_not(report, left):
    assert ("OOM201", 12) in report(LEFT_ON_AN_ARGUMENT.format(left=left))


COUNTED = """
    import torch
    model = torch.nn.Linear(3, 3)
    for x, y in train_loader:
        criterion(model(x), y).backward()
        optimizer.step()
    {mode}
    for x, y in test_loader:
        out = model(x)
        {count}
"""


@pytest.mark.parametrize("mode", ["model.eval()", "pass"])
@pytest.mark.parametrize(
    "count",
    [
        "accuracy.update(out, y)",
        "self.metrics.add_batch(out, y)",
        "coco_evaluator.update({image.item(): boxes for image, boxes in zip(y, out)})",
    ],
)
def test_what_counts_hits_backpropagates_nothing(report, mode, count):
    assert report(COUNTED.format(mode=mode, count=count)) == [("OOM201", 8)]


@pytest.mark.parametrize("count", ["agent.update({'out': out})", "learner.update([part for part in out])"])
def test_what_is_updated_with_terms_may_be_trained(report, count):
    assert report(COUNTED.format(mode="model.eval()", count=count)) == []


WRITTEN_INTO = """
    actor, critic = Actor().cuda(), Critic().cuda()
    optimizer = torch.optim.Adam(actor.parameters())
    for states, actions in loader:
        joint = actions.clone()
        joint[{index}] = actor(states)
        loss = -critic(states, joint).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("index", [":, 0", "0, :", "..., 2:"])
def test_what_is_written_into_columns_of_a_tensor_is_backpropagated_with_it(report, index):
    assert report(WRITTEN_INTO.format(index=index)) == [("OOM202", 5), ("OOM202", 6)]


@pytest.mark.parametrize("index", ["row", "0, 1"])
def test_an_entry_of_what_may_be_a_dict_is_lost_out_of_sight(report, index):
    assert report(WRITTEN_INTO.format(index=index)) == [("OOM202", 6)]


WRAPPED_LOSS = """
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from losses import Criterion

    class Trainer:
        def __init__(self, model, optimizer, loader):
            self.model, self.optimizer, self.loader = model.cuda(), optimizer, loader
            self.compute_loss = Criterion(model).cuda()
            {wrapped}

        def train(self):
            for x, y in self.loader:
                loss = self.compute_loss({given}, y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
"""
WRAP = "self.compute_loss = DDP(self.compute_loss)"


def test_a_loss_whose_parameters_are_trained_on_several_gpus_is_a_network(report):
    assert report(WRAPPED_LOSS.format(wrapped=WRAP, given="x.cuda()")) == [("OOM202", 13)]


@pytest.mark.parametrize(
    ("wrapped", "given", "found"),
    [
        ("self.model = DDP(self.model)", "x.cuda()", []),
        # it stays a loss where a network gives it outputs
        (WRAP, "self.model(x.cuda())", [("OOM202", 13)]),
    ],
)
def test_any_other_loss_is_none(read, report, wrapped, given, found):
    code = WRAPPED_LOSS.format(wrapped=wrapped, given=given)
    assert report(code) == found
    assert "self.compute_loss" not in {forward.path for forward in read(code).trace.forwards.values()}


SHOWN = """
    import torch

    def {name}(model, loader, callbacks, optimizer):
        {mode}
        for x, y in loader:
            out = model(x)
            loss = criterion(out, y)
            for callback in callbacks:
                {shown}

    model = Net().cuda()
    torch.nn.init.zeros_(model.generator.parameters())
    for x, y in train_loader:
        criterion(model(x), y).backward()
        optimizer.step()
    {name}(model, loader, callbacks, optimizer)
"""
STEP = "callback.on_step(model, out, loss)"


@pytest.mark.parametrize("shown", [STEP, "x = loss_fn(out, y, model.generator)", "x, n = compute_loss(model, out, y)"])
def test_what_an_evaluation_shows_with_its_network_is_not_trained(report, shown):
    assert ("OOM201", 6) in report(SHOWN.format(name="validate", mode="model.eval()", shown=shown))


@pytest.mark.parametrize(
    ("name", "mode", "shown"),
    [
        ("run", "model.eval()", STEP),
        ("validate", "pass", STEP),
        ("validate", "model.eval()", "callback.adapt(model, out, loss)"),
        ("validate", "model.eval()", "x = callback.on_step(model, out, loss)"),
        ("validate", "pass", "x = loss_fn(out, y, model.generator)"),
        ("validate", "other.eval()", "x = loss_fn(out, y, model.generator)"),
        ("run", "model.eval()", "x = loss_fn(out, y, model.generator)"),
    ],
)
def test_what_may_be_trained_in_one_is_left_alone(report, name, mode, shown):
    assert ("OOM201", 6) not in report(SHOWN.format(name=name, mode=mode, shown=shown))


LOGGED = """
    import torch

    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        quality = compare(model(x), y)
        {logged}
        model.train()
"""


@pytest.mark.parametrize(
    "logged",
    ["tools.message(opt, 'quality {}'.format(quality))", "tools.message(opt, f'{quality}')", "tools.message(quality)"],
)
def test_a_text_that_tells_a_result_backpropagates_nothing(report, logged):
    assert ("OOM201", 8) in report(LOGGED.format(logged=logged))


def test_a_result_that_is_given_with_an_optimizer_may_be_backpropagated(report):
    assert ("OOM201", 8) not in report(LOGGED.format(logged="tools.message(opt, quality)"))


BUILT = """
    import torch

    def evaluate(name, image, config):
        model_cls = CHOICES[name]
        model = model_cls({given})
        return model.size
"""


@pytest.mark.parametrize(("given", "found"), [("**config", []), ("size=8, depth=2", []), ("image", [("OOM201", 5)])])
def test_a_class_among_several_makes_a_network_of_its_settings(report, given, found):
    assert report(BUILT.format(given=given)) == found


MADE = """
    import torch

    def evaluate(model, loaders, settings):
        for loader in loaders:
            made = model({given})
            {used}
        return 0
"""


@pytest.mark.parametrize("used", ["fit(loader, torch.optim.Adam(made.parameters()))", "made.train()", "made.eval()"])
def test_what_is_asked_for_its_parameters_is_a_network_that_is_made(report, used):
    assert report(MADE.format(given="settings", used=used)) == []


@pytest.mark.parametrize("used", ["show(made)", "made.mean()"])
def test_what_is_used_as_a_result_is_none(report, used):
    assert report(MADE.format(given="settings", used=used)) == [("OOM201", 5)]


@pytest.mark.parametrize("filled", ["made", "made.module"])
def test_what_is_given_a_state_is_a_network_that_is_made(report, filled):
    code = f"""
    import torch
    from project import *

    made = models.resnet18(norm_layer=norm).cuda()
    made = torch.nn.DataParallel(made)
    {filled}.load_state_dict(state)
    """
    assert report(code) == []


OPTIONS = """
    import torch
    from project import save, Net

    def run(opt, loader, held_out):
        net = Net().cuda()
        optimizer = torch.optim.Adam(net.parameters())
        for epoch in range({epochs}):
            for x, y in loader:
                loss = criterion(net(x.cuda()), y.cuda())
                loss.backward()
                optimizer.step()
            net.eval()
            for x, y in held_out:
                out = net(x.cuda())
                save(x, out, opt, epoch)
            net.train()
"""


@pytest.mark.parametrize("epochs", ["opt.epochs", "opt.training['epochs']", "int(opt.epochs)"])
def test_options_that_are_handed_over_are_no_optimizer(report, epochs):
    assert ("OOM201", 14) in report(OPTIONS.format(epochs=epochs))


@pytest.mark.parametrize(
    "epochs", ["9", "opt.count()", "len(opt.param_groups)", "opt.epochs if opt.step() else opt.zero_grad()"]
)
def test_what_may_be_an_optimizer_may_train_on_what_it_is_handed_over_with(report, epochs):
    assert ("OOM201", 14) not in report(OPTIONS.format(epochs=epochs))


WATCHED = """
    import torch
    from project import *

    def run(net, loader, held_out):
        optimizer = torch.optim.Adam(net.parameters())
        for epoch in range(9):
            for x, y in loader:
                loss = criterion(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            net.eval()
            total = 0
            for x, y in held_out:
                total += criterion(net(x), y)
            {after}
            net.train()
"""


@pytest.mark.parametrize(
    "after",
    [
        "early_stopping(total, net)",
        "self.early_stopper(total / len(held_out), net)",
        "save_best_model(net, total)",
        "save_checkpoint(net, optimizer, epoch, total)",
        "manager.checkpoint(net, total)",
    ],
)
def test_what_stops_early_or_saves_a_network_does_not_train_it(report, after):
    assert ("OOM201", 15) in report(WATCHED.format(after=after))


@pytest.mark.parametrize("after", ["update(total, net)", "weights = early_weights(total, net)", "saver(net, total)"])
def test_another_call_may_train_a_network_on_the_loss_that_it_is_given(report, after):
    assert ("OOM201", 15) not in report(WATCHED.format(after=after))
