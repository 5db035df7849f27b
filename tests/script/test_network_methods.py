"""Methods of networks that change a part or read a tensor run nothing, and a copy is a network of its own."""

from __future__ import annotations

import pytest

GROWING = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone, self.head = backbone, Head()

        def forward(self, x):
            return self.head(self.backbone(x))

        def change(self, x):
            {change}

    net = Net(backbone).cuda()
    for task in tasks:
        net.change(task)
        for x, y in task:
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
"""
HELD = """
    import torch

    class Restorer(BaseModel):
        def optimize_parameters(self):
            self.out = self.net(self.x)
            self.criterion(self.out, self.y).backward()
            self.optimizer.step()

        def test(self):
            with torch.no_grad():
                self.out = self.net(self.x)

        def visuals(self):
            return {result}

        def validate(self, loader):
            for batch in loader:
                self.feed_data(batch)
                self.test()
                print(self.visuals())
"""
BUILT = """
    import torch

    for epoch in range(9):
        model.train()
        {call}
        for x, y in loader:
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
"""
EXTRACTED = """
    import torch

    class Trainer:
        def __init__(self, model, {name}):
            self.model, self.{name} = model.cuda(), {name}

        def train(self, loader):
            for batch in loader:
                parts = self.{name}(batch)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = self.loss(self.model(parts), parts)
                loss.backward()
                self.optimizer.step()
"""
COPIED = """
    import copy
    import torch
    from networks import UNet

    def train(loader):
        model = UNet().cuda()
        {before}
        average = copy.deepcopy(model){done}
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
        for x, y in val_loader:
            print(average(x).argmax(1))
"""


@pytest.mark.parametrize(
    "change",
    [
        "self.head.grow(len(x))",
        "self.head.grow(len(x)); self.seen = self.seen + 1",
        "self.seen = torch.zeros(4); self.seen = self.seen.to(self.device)",
    ],
)
def test_a_method_that_only_changes_a_part_is_no_forward(report, change):
    assert report(GROWING.format(change=change)) == []


@pytest.mark.parametrize("change", ["self.out = self.head(x)", "self.head.encode(x)", "return self.head.grow(x)"])
def test_a_method_that_runs_a_part_is_a_forward(report, change):
    assert report(GROWING.format(change=change)) == [("OOM201", 17)]


@pytest.mark.parametrize("result", ["self.out.detach()[0].cpu()", "{'out': self.out.detach()}", "self.out.numpy()"])
def test_a_method_that_reads_what_was_computed_is_no_forward(report, result):
    assert report(HELD.format(result=result)) == []


def test_a_method_that_computes_what_it_gives_is_a_forward(report):
    assert report(HELD.format(result="self.net(self.x)")) == [("OOM201", 20)]


def test_a_call_for_its_effect_that_is_given_nothing_is_no_part_of_a_network(report):
    assert report(BUILT.format(call="model.stop_backbone_bn()")) == []
    assert report(BUILT.format(call="features = model.backbone(images)")) == [("OOM201", 5)]


@pytest.mark.parametrize("call", ["model.grow_head(classes)", "model.add_block(8)", "out = model.freeze_stage(2)"])
def test_a_verb_before_the_name_of_a_part_runs_nothing(report, call):
    assert report(BUILT.format(call=call)) == []


WITHOUT_WEIGHTS = """
    import torch
    import torchaudio
    import torchvision
    from torch import nn
    from features import MelSpectrogram

    enc = {made}
    for x, y in loader:
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(enc(x.cuda())), y)
        loss.backward()
        optimizer.step()

    for x, y in test_loader:
        features = enc(x.cuda())
        with torch.no_grad():
            print(model(features))
"""


@pytest.mark.parametrize(
    "made",
    [
        "torchaudio.transforms.Resample(16000, 8000)",
        "torchaudio.transforms.MuLawEncoding().to('cuda')",
        "torchvision.transforms.v2.RandomCrop(3)",
        "MelSpectrogram(16000).to('cuda')",
        "nn.Sequential(torchaudio.transforms.MFCC(), nn.Softmax(dim=1)).cuda()",
    ],
)
def test_a_transform_without_weights_is_no_network(report, made):
    assert report(WITHOUT_WEIGHTS.format(made=made)) == []


@pytest.mark.parametrize("made", ["nn.Sequential(torchaudio.transforms.MFCC(), nn.Linear(3, 3))", "Encoder().cuda()"])
def test_what_has_weights_is_one(report, made):
    assert report(WITHOUT_WEIGHTS.format(made=made)) == [("OOM201", 15)]


@pytest.mark.parametrize("name", ["batch_extractor", "label_extractor", "data_generator", "train_batch_gen"])
def test_what_takes_a_batch_apart_is_no_network(report, name):
    assert report(EXTRACTED.format(name=name)) == []


def test_what_takes_features_out_is_a_network(report):
    assert report(EXTRACTED.format(name="feature_extractor")) == [("OOM202", 9)]


LEFT_OPEN = """
    import torch

    class Base(torch.nn.Module):
        def forward(self, x):
            {body}

        def fit(self, loader, optimizer):
            self.cuda()
            for x, y in loader:
                loss = criterion(self.{called}, y)
                loss.backward()
                optimizer.step()

        def predict(self, x):
            return self.{called}.argmax(1).cpu().numpy()

    class Head(Base):
        def __init__(self, body):
            super().__init__()
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x):
            return self.head(x)
"""


@pytest.mark.parametrize("body", ["raise NotImplementedError", "pass"])
def test_a_forward_that_others_fill_runs_the_network(report, body):
    found = [("OOM201", 15), ("OOM202", 10)]
    assert report(LEFT_OPEN.format(body=body, called="forward(x)")) == found


def test_a_forward_that_only_speaks_of_what_is_not_implemented_is_not_left_for_others(report):
    assert report(LEFT_OPEN.format(body="raise ValueError('NotImplemented for volumes')", called="forward(x)")) == []


def test_what_is_given_nothing_may_train_what_it_runs(report):
    assert report(LEFT_OPEN.format(body="pass", called="forward()")) == []


@pytest.mark.parametrize("done", [".eval().requires_grad_(False)", ".requires_grad_(False)"])
def test_freezing_a_copy_leaves_the_network_trained(report, done):
    assert report(COPIED.format(before="model.train()", done=done)) == [("OOM202", 10)]


def test_a_copy_of_a_frozen_network_is_frozen_too(report):
    code = COPIED.format(before="model.requires_grad_(False)", done="; model.requires_grad_(True)")
    assert report(code) == [("OOM202", 10)]


def test_a_copy_that_is_not_frozen_records_a_graph(report):
    assert report(COPIED.format(before="model.train()", done="")) == [("OOM201", 13), ("OOM202", 10)]


@pytest.mark.parametrize("made", ["dlib.get_frontal_face_detector()", "spacy.load('en_core_web_sm')"])
def test_a_model_of_another_library_records_no_graph(report, made):
    code = """
        import dlib
        import spacy
        import torch

        net.load_state_dict(torch.load("weights.pt", map_location="cpu"))
        net.eval()
        detector = {made}
        for image in images:
            print(detector(image), len(image))
    """
    assert report(code.format(made=made)) == []
    assert report(code.format(made="Detector()")) == [("OOM201", 9)]


@pytest.mark.parametrize("prepare", ["self.prepare_input(lr=self.x, size=self.x.size(0))", "n = self.x.numel()"])
def test_a_method_that_only_sets_what_comes_in_is_no_forward(report, prepare):
    code = """
        import torch

        class Restorer(BaseModel):
            def optimize_parameters(self):
                self.criterion(self.net(self.x), self.y).backward()
                self.optimizer.step()

            def feed(self, data):
                self.x = data["lr"].to(self.device)
                {prepare}

            def validate(self, loader):
                for batch in loader:
                    self.feed(batch)
    """
    assert report(code.format(prepare=prepare)) == []
    assert report(code.format(prepare="self.out = self.net(self.x)")) == [("OOM201", 14)]


@pytest.mark.parametrize(
    ("arguments", "statement", "quiet"),
    [("", "assert out.shape == (4, 2)", True), ("", "print(out)", False), ("loader", "assert out.any()", False)],
)
def test_functions_that_pytest_finds_are_unit_tests(report, arguments, statement, quiet):
    code = f"""
        import torch
        from networks import Net

        def test_shape({arguments}):
            net = Net().eval()
            out = net(torch.randn(4, 8))
            {statement}
    """
    assert report(code) == ([] if quiet else [("OOM201", 6)])


ASKED = """
    import torch
    from torch import nn
    from networks import Policy, Value

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy, self.value = Policy(), Value()

        def {name}(self, state):
            {body}

    agent = Agent()
    agent.load_state_dict(torch.load("agent.pt", map_location="cpu"))
    agent.eval()
    for state in states:
        print(agent.{name}(state))
"""


@pytest.mark.parametrize("name", ["act", "predict", "test"])
@pytest.mark.parametrize("before", ["", "self.policy.eval(); "])
def test_a_method_that_asks_one_network_has_the_forward_where_it_calls_it(report, name, before):
    body = f"{before}return self.policy(state).argmax().item()"
    assert report(ASKED.format(name=name, body=body)) == [("OOM201", 11)]


SAMPLED = """
    import torch
    from torch import nn

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, state):
            return self.body(state), self.body(state)

        def sample(self, state):
            {body}
            return mean + torch.randn_like(mean) * std

    class Agent:
        def __init__(self):
            self.actor = Actor().to(device="cuda")
            self.optimizer = torch.optim.Adam(self.actor.parameters())

        def update(self, states):
            for state in states:
                with torch.no_grad():
                    target = self.actor.sample(state)
                loss = (self.actor.sample(state) - target).mean()
                loss.backward()
                self.optimizer.step()

        def {name}(self, state):
            return self.actor.sample(state).cpu().numpy()
"""


@pytest.mark.parametrize(
    "body",
    [
        "mean, std = self(state)",
        "mean, std = self.forward(state)",
        "mean = std = self.body(state)",
        "mean, std = self.body(state), self.body(state)",
    ],
)
def test_a_method_that_is_trained_through_is_the_forward_of_its_network(report, body):
    assert ("OOM202", 25) in report(SAMPLED.format(body=body, name="act"))


@pytest.mark.parametrize("body", ["mean, std = self(state)", "mean = std = self.body(state)"])
def test_a_method_that_only_acts_has_the_forward_where_it_calls_the_network(report, body):
    acting = SAMPLED.replace("loss = (self.actor.sample(state)", "loss = (self.actor(state)[0]")
    assert ("OOM201", 13) in report(acting.format(body=body, name="act"))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("act", "return self.value(self.policy(state)).argmax().item()"),
        ("features", "return self.policy(state)"),
    ],
)
def test_a_method_that_runs_several_parts_is_the_forward_of_the_whole(report, name, body):
    assert report(ASKED.format(name=name, body=body)) == [("OOM201", 17)]


@pytest.mark.parametrize(
    ("called", "found"),
    [("nets[i].decoder(z)", [("OOM201", 10)]), ("nets[i].history(z)", []), ("parts[i].decoder(z)", [])],
)
def test_a_part_of_one_network_among_several_is_one(report, called, found):
    code = f"""
        import torch
        nets = parts = [build(size) for size in sizes]
        for x, y in loader:
            for i in range(3):
                loss = criterion(nets[i](x), y)
                loss.backward()
                optimizers[i].step()
        for i in range(3):
            nets[i].eval()
            sample = {called}
            show(sample.detach().cpu().numpy())
    """
    assert report(code) == found


@pytest.mark.parametrize(
    ("term", "found"), [("ortho_loss()", [("OOM202", 3)]), ("ortho_loss(x)", [("OOM202", 3), ("OOM202", 4)])]
)
def test_a_loss_of_the_weights_alone_runs_no_network(report, term, found):
    code = f"""
        model = Net().cuda()
        for x, y in loader:
            loss = criterion(model(x), y)
            loss = loss + model.{term}
            loss.backward()
            optimizer.step()
    """
    assert report(code) == found


OWN_CLASS = """
    import torch
    from torch import nn

    class Agreement(nn.Module):
        def __init__(self, limit, encoder):
            super().__init__()
            {made}

        def forward(self, a, b):
            {gives}

    model = Net().cuda()
    agreement = Agreement(0.1, encoder)
    for x, y in loader:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        loss = agreement(out, y)
        loss.backward()
        optimizer.step()
    for x, y in test_loader:
        with torch.no_grad():
            out = model(x)
        print(agreement(out, y))
"""


@pytest.mark.parametrize(
    ("made", "gives"),
    [
        ("self.limit = limit", "return ((a - b).abs() / self.limit).mean()"),
        ("self.criterion = nn.KLDivLoss()", "return self.criterion(a.log(), b)"),
        ("pass", "return self.apart(a, b)\n\n        def apart(self, a, b):\n            return (a - b).abs()"),
    ],
)
def test_a_module_without_weights_is_no_network(report, made, gives):
    assert report(OWN_CLASS.format(made=made, gives=gives)) == []


@pytest.mark.parametrize(
    ("made", "gives"),
    [
        ("self.head = nn.Linear(3, 3)", "return (self.head(a) - b).mean()"),
        ("self.scale = nn.Parameter(torch.ones(3))", "return (self.scale * a - b).mean()"),
        ("self.encoder = encoder", "return distance(self.encoder, a, b)"),
    ],
)
def test_a_module_with_weights_is_one(report, made, gives):
    assert [code for code, _ in report(OWN_CLASS.format(made=made, gives=gives))] == ["OOM201", "OOM202"]


TWO_PARTS = """
    import torch

    def accuracy(model, loader):
        model.eval()
        right = 0
        for x, y in loader:
            out = model.{part}(x)
            right += (out.argmax(1) == y).sum().item()
        return right
"""


@pytest.mark.parametrize("part", ["Q", "G1", "Fp", "D_2", "decoder"])
def test_a_part_that_is_named_by_a_letter_is_one_where_it_is_called(report, part):
    assert report(TWO_PARTS.format(part=part)) == [("OOM201", 7)]


@pytest.mark.parametrize("part", ["Scale", "GetQ", "history", "NAME", "to"])
def test_any_other_name_says_nothing_of_a_part(report, part):
    assert report(TWO_PARTS.format(part=part)) == []


def test_a_setting_that_is_named_by_a_letter_makes_no_network(report):
    code = """
        import torch
        from torch import nn

        class Scaled(nn.Module):
            def __init__(self, K):
                super().__init__()
                self.K = K

            def forward(self, x):
                return x * self.K

        scaled = Scaled(3)
        for x, y in val_loader:
            print(scaled(x).sum().item())
    """
    assert report(code) == []


CLONED = """
    import torch

    def adapt(learner, batch):
        x, y = batch
        error = criterion(learner(x.cuda()), y)
        learner.adapt(error)
        return criterion(learner(x.cuda()), y)

    maml = library.MAML(net, lr=0.1)
    optimizer = torch.optim.Adam(maml.parameters())
    for iteration in range(1000):
        optimizer.zero_grad()
        for batch in tasks:
            error = adapt(maml.{copied}(), batch)
            error.backward()
        optimizer.step()
"""


def test_a_clone_of_a_network_is_one(report):
    assert report(CLONED.format(copied="clone")) == [("OOM202", 5), ("OOM202", 7)]


def test_a_clone_without_gradients_holds_no_graph(report):
    code = """
        import torch
        kept = []
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                copied = loss.clone()
            kept.append(copied)
    """
    assert report(code) == []


NAMED_AFTER_A_LOSS = """
    import torch

    class Trainer:
        def __init__(self, {name}, optimizer):
            self.{name} = {name}.cuda()
            self.optimizer = optimizer

        def run(self, loader, mode="train"):
            for x, y in loader:
                out, losses = self.{name}(x, y)
                loss = losses.mean()
                if mode == "train":
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                print(loss.item())

        def fit(self):
            self.{name}.train()
            self.run(self.train_loader)
            self.{name}.eval()
            self.run(self.val_loader, mode="val")
"""


@pytest.mark.parametrize(
    "name", ["loss_model", "loss_net", "loss_network", "loss_predictor", "loss_pred_module", "model_with_loss", "model"]
)
def test_a_network_that_is_named_after_its_loss_is_one_by_its_uses(report, name):
    assert report(NAMED_AFTER_A_LOSS.format(name=name)) == [("OOM201", 10), ("OOM202", 10)]


@pytest.mark.parametrize("name", ["loss_fn", "criterion", "loss_module"])
def test_a_criterion_that_is_put_into_training_mode_is_none(report, name):
    assert report(NAMED_AFTER_A_LOSS.format(name=name)) == []


INVERSE = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def forward(self, x):
            return x + 1

        def backward(self, y):
            return y - 1

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.out = nn.Linear(4, 4)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

        def backward(self, z):
            for layer in reversed(self.layers):
                {undone}
            return z

    model = Flow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        print(model.backward(x))
"""


def test_a_method_that_inverts_a_network_is_no_backward_though_it_is_called_so(read):
    """Of normalising flows: what torch differentiates with gives nothing back."""
    loops = read(INVERSE.format(undone="z = layer.backward(z)")).loops
    assert [loop.line for loop in loops] == [29]
    assert 23 in [loop.line for loop in read(INVERSE.format(undone="layer.backward(z)")).loops]


@pytest.mark.parametrize(
    ("undone", "found"),
    [("z = layer.backward(z)", False), ("loss = layer.backward(loss)", True), ("layer.backward(z)", True)],
)
def test_what_takes_the_place_of_what_it_is_given_is_no_backward_of_layers_out_of_sight_either(read, undone, found):
    loops = read(f"""
        from torch import nn
        from layers import Layer

        class Flow(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(Layer() for _ in range(2))

            def forward(self, z, loss):
                for layer in self.layers:
                    {undone}
                return z, loss
    """).loops
    assert bool(loops) is found


@pytest.mark.parametrize(("made", "lines"), [("nn.Linear(8, 2)", [15]), ("make_head(8, 2)", [])])
def test_a_class_of_another_base_that_makes_layers_for_its_forward_is_a_network(report, made, lines):
    code = f"""
        from torch import nn
        from elsewhere import Template, make_head

        class Learner(Template):
            def __init__(self):
                super().__init__()
                self.head = {made}
                self.cuda()

            def forward(self, x):
                return self.head(x)

            def fit(self):
                for x, y in loader:
                    loss = criterion(self.forward(x), y)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
    """
    assert [line for code, line in report(code) if code == "OOM202"] == lines


META = """
    import torch
    from torch import nn

    class Meta(nn.Module):
        def __init__(self, learner):
            super().__init__()
            self.learner = learner
            self.optimizer = torch.optim.Adam(self.learner.parameters())

        def forward(self, support, query):
            loss = self.learner(support).mean() + self.learner(query).mean()
            self.optimizer.zero_grad(set_to_none=True)
            {last}
            self.optimizer.step()
            return loss.item()

    meta = Meta(Learner()).cuda()
    for support, query in loader:
        print(meta(support, query))
"""


def test_a_forward_that_trains_by_itself_is_followed_where_it_is_called(read, report):
    code = META.format(last="loss.backward()")
    assert [loop.line for loop in read(code).loops] == [18]
    assert report(code) == [("OOM202", 11)]


def test_a_forward_that_does_not_is_one_forward_where_it_is_called(read):
    assert [forward.node.lineno for forward in read(META.format(last="pass")).trace.forwards.values()] == [19]


GRAPH = """
    import torch

    model, data = Net().to("cuda"), data.to("cuda")

    def test():
        model.eval()
        scores = model(data.x)
        for _, mask in data({asked}):
            print(scores[mask].argmax(1))
"""


def test_what_is_asked_for_its_parts_by_name_is_no_network(report):
    assert report(GRAPH.format(asked='"train_mask", "test_mask"')) == [("OOM201", 7)]


def test_what_is_moved_and_called_with_anything_else_is_one(report):
    assert report(GRAPH.format(asked="batch")) == [("OOM201", 7), ("OOM201", 8)]


@pytest.mark.parametrize("copied", ["clone", "clone_model", "deep_copy", "meta.clone_module"])
def test_what_a_function_copies_of_a_network_is_one(report, copied):
    code = f"""
        net = Net().cuda()
        optimizer = torch.optim.Adam(net.parameters())
        for task in tasks:
            learner = {copied}(net)
            error = criterion(learner(task.x), task.y)
            error.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 5)]


def test_what_a_function_makes_of_a_network_otherwise_is_none(report):
    code = """
        net = Net().cuda()
        optimizer = torch.optim.Adam(net.parameters())
        for task in tasks:
            weights = copy_weights(net)
            error = criterion(net(task.x, weights(task.y)), task.y)
            error.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 5)]


@pytest.mark.parametrize("method", ["log_prob", "neg_log_likelihood", "log_likelihood", "nll", "sentence_nll"])
def test_a_network_that_gives_a_likelihood_of_what_it_is_given_runs(report, method):
    assert report(LIKELIHOOD.format(called=f"{method}(x.cuda())")) == [("OOM202", 5)]


@pytest.mark.parametrize("called", ["log_probability_table(x)", "pruning_null(x)"])
def test_another_method_may_be_anything_where_the_network_itself_is_trained_beside_it(report, called):
    assert report(LIKELIHOOD.format(called=f"{called}.mean() + flow(x)")) == [("OOM202", 5)]
    assert report(LIKELIHOOD.format(called=called).replace("flow.parameters", "other.parameters")) == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("flow.parameters()", [("OOM202", 5)]),
        ("[weight for name, weight in flow.named_parameters() if 'scale' in name]", [("OOM202", 5)]),
        ("[weight for name, weight in flow.named_shapes() if 'scale' in name]", []),
    ],
)
def test_one_that_is_all_of_a_network_whose_parameters_are_trained_runs_it(report, given, found):
    assert report(LIKELIHOOD.format(called="outer_loop(x)").replace("flow.parameters()", given)) == found


LIKELIHOOD = """
    flow = Flow().cuda()
    optimizer = torch.optim.Adam(flow.parameters())
    for x in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = -flow.{called}.mean()
        loss.backward()
        optimizer.step()
"""


def test_a_marginal_likelihood_of_gpytorch_is_a_loss_and_no_network(report):
    code = """
        import gpytorch
        model = Regression(x, y, likelihood).cuda()
        bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        optimizer = torch.optim.Adam(model.parameters())
        for i in range(100):
            out = model(x)
            loss = -bound(out, y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 6)]


@pytest.mark.parametrize(("method", "found"), [("encode_batch", True), ("encode_batch_indices", False)])
def test_a_method_that_gives_indices_is_no_forward(report, method, found):
    reported = report(f"""
        import torch

        encoder = Encoder().cuda()
        optimizer = torch.optim.Adam(encoder.parameters())
        for batch in loader:
            codes = encoder.{method}(batch)
            encoder(codes).mean().backward()
            optimizer.step()
    """)
    assert (("OOM202", 6) in reported) is found


TRAINS_ITSELF = """
    import torch
    from base import BaseNet

    class Net(BaseNet):
        async def save_weights(self, path):
            await self.write(self.mymodel.state_dict(), path)

        def losses(self, x):
            return self.encode(x).mean()

        async def train(self):
            for x in self.loader:
                self.optimizer.zero_grad()
                loss = self.losses(x.cuda())
                loss.backward()
                self.optimizer.step()
            await self.save_weights(self.path)
"""


def test_the_forwards_of_a_network_that_trains_itself_stand_in_its_loss_and_saving_is_none(report):
    assert report(TRAINS_ITSELF) == [("OOM202", 9)]


DECODES = """
    import torch
    from torch import nn
    from decoding import unroll

    class Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 8), nn.Linear(8, 9)

        def forward(self, x):
            return unroll(self.head(x), self.rnn)

        def infer(self, x):
            return torch.argmax({run}, -1)
"""


def test_what_a_forward_hands_on_with_a_part_of_its_network_is_not_trained_there(report):
    assert report(DECODES.format(run="self.forward(x)")) == [("OOM201", 14)]
    assert report(DECODES.format(run="finetuned(self.head(x), self.rnn)")) == []


PREDICTING = """
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 3)

        def forward(self, x, y):
            return self.rnn(x, y)[0]

        {decorated}
        def predict(self, x, n):
            {body}

    def train(model, x, y):
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(x, y), y)
        loss.backward()
        optimizer.step()

    def evaluate(model, x, y):
        model.eval()
        scores = model.predict(x, 8)
        return (scores.argmax(1) == y).sum().item()
"""


@pytest.mark.parametrize(
    ("decorated", "body", "found"),
    [
        ("# as it is", "return self.rnn(x)[0]", [("OOM201", 24)]),
        ("@torch.no_grad()", "return self.rnn(x)[0]", []),
        ("# as it is", "with torch.inference_mode():\n                return self.rnn(x)[0]", []),
        ("# as it is", "return x[:n]", []),
    ],
)
def test_a_network_of_the_file_predicts_as_its_method_shows(report, decorated, body, found):
    assert report(PREDICTING.format(decorated=decorated, body=body)) == found


def test_an_object_that_switches_the_mode_of_its_networks_itself_runs_none(report):
    """The class it is made of is of another file, and is named like a network."""
    assert (
        report("""
        import torch
        from gans import Model as Base

        class Model(Base):
            def __init__(self):
                self.net = torch.nn.Linear(3, 3).cuda()

            def fit(self, loader):
                for x in loader:
                    self.train()
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = self.net(x).mean()
                    loss.backward()
                    optimizer.step()
                    self.eval()

            def train(self):
                self.net.train()

            def eval(self):
                self.net.eval()
    """)
        == []
    )


@pytest.mark.parametrize("run", ["agents.heads[i](x)", "agents.mapping(x)", "agents.synthesis(x)"])
def test_a_part_of_a_network_from_elsewhere_is_run_by_its_place_in_it(report, run):
    assert report(f"""
        import torch
        from nets import Agents

        agents = Agents().cuda()
        for x in loader:
            loss = 0
            for i in range(4):
                loss = loss + ({run}).mean()
            loss = loss + agents(x).mean()
            loss.backward()
            optimizer.step()
    """) == [("OOM202", 8), ("OOM202", 9)]


@pytest.mark.parametrize("run", ["agents.names[i].lower()", "agents.sizes[i]"])
def test_what_a_network_has_in_its_lists_is_not_run_by_asking_for_it(report, run):
    assert report(f"""
        import torch
        from nets import Agents

        agents = Agents().cuda()
        for x in loader:
            print([{run} for i in range(4)])
            loss = agents(x).mean()
            loss.backward()
            optimizer.step()
    """) == [("OOM202", 7)]


@pytest.mark.parametrize("name", ["loader", "train_dataloader"])
def test_a_loader_that_a_network_makes_is_no_forward(report, name):
    code = f"""
        import torch
        from project import Walks

        model = Walks(edges).cuda()
        batches = model.{name}(batch_size=8, shuffle=True)
        for first, second in batches:
            loss = model.loss(first.cuda(), second.cuda())
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 7)]


UNSEEN_PARTS = """
    import torch
    from layers import Overtone

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.overtone = Overtone(3)

        def generate(self, n):
            {context}
                out = self.overtone.unroll(n)
            return out{more}

        def do_generate(self, n):
            print(self.generate(n).argmax().tolist())
"""


@pytest.mark.parametrize(
    ("context", "more", "found"),
    [
        ("with torch.no_grad():", "", []),
        ("if True:", "", [("OOM201", 15)]),
        ("with torch.no_grad():", " + self.head.correct(out)", [("OOM201", 15)]),
    ],
)
def test_a_method_that_asks_its_parts_without_gradients_records_none(report, context, more, found):
    """What the parts are asked for is in another file, and named like nothing in particular."""
    assert report(UNSEEN_PARTS.format(context=context, more=more)) == found


@pytest.mark.parametrize(
    ("name", "arguments", "statement", "quiet"),
    [
        ("TestLayer", "self", "assert out.shape == x.shape", True),
        ("TestLayer", "self, loader", "assert out.shape == x.shape", False),
        ("TestLayer", "self", "print(out)", False),
        ("Tester", "self", "assert out.shape == x.shape", False),
        ("Trainer", "self", "assert out.shape == x.shape", False),
        ("TestLoop", "self", "assert out.any()\n\n            def __init__(self):\n                self.x = 3", False),
    ],
)
def test_methods_that_pytest_finds_are_unit_tests(report, name, arguments, statement, quiet):
    code = f"""
        import torch
        from layers import Layer

        class {name}:
            def test_shape({arguments}):
                model = Layer().eval()
                out = model(x)
                {statement}
    """
    assert report(code) == ([] if quiet else [("OOM201", 7)])


COUNTED = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone
            self.head = torch.nn.Linear(3, 1)

        def remember(self):
            {changed}

        def learn(self, loss):
            loss.backward()

        def check(self, best, loss):
            self.remember()

        def discriminate(self, loaders, mode):
            for x, y in zip(data[mode], loaders[mode]):
                stop, best = self.check(best, y)
                log(stop)
"""


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("self.backbone.reset()", False),
        ("self.backbone.reset(torch.zeros(8))", True),
        ("self.backbone.forward()", True),
        ("self.kept = self.backbone.reset()", True),
    ],
)
def test_a_part_that_a_statement_gives_nothing_is_changed_and_not_run(report, changed, found):
    assert report(COUNTED.format(changed=changed)) == ([("OOM201", 20)] if found else [])


REFERENCE = """
    import torch
    from layers import Layer

    class TestLayer:
        def test_sum(self):
            layer = Layer()
            total = torch.zeros(8)
            for part in range(layer.size):
                total = total + layer.parts[part](x)
                {trained}
            assert torch.allclose(layer(x), total)
            assert all(weight.grad is None for weight in layer.parameters())
"""


@pytest.mark.parametrize(
    ("trained", "found"), [("pass", []), ("layer(x).sum().backward(); optimizer.step()", ["OOM101"])]
)
def test_what_a_unit_test_adds_up_is_no_leak_unless_it_trains(report, trained, found):
    findings = report(REFERENCE.format(trained=trained))
    assert [code for code, _ in findings if code in ("OOM101", "OOM102")] == found


PROBED = """
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.main = torch.nn.Conv2d(3, 8, size)
            {probe}

        def size_of(self, shape):
            return self.main(torch.zeros(shape))[0].shape

        def forward(self, x):
            return self.main(x)

    def train(size, loader, optimizer):
        net = Encoder(size).cuda()
        for x in loader:
            net(x).mean().backward()
            optimizer.step()
        return net

    train(3, small, optimizer)
    net = train(5, large, optimizer)
    print(net.main(x))
"""


@pytest.mark.parametrize("probe", ["self.size = self.size_of((1, 3, 8, 8))", "pass"])
def test_a_constructor_that_asks_how_large_a_part_makes_things_evaluates_nothing(report, probe):
    """Also where another network of its class has been trained before."""
    assert [line for code, line in report(PROBED.format(probe=probe)) if code == "OOM201"] == [24]


@pytest.mark.parametrize(
    ("asked", "found"),
    [("self.encode(state)", [("OOM201", 20)]), ("self.scaled(state)", [("OOM201", 14)])],
)
def test_a_method_of_its_own_that_runs_a_part_is_another_network_that_it_asks(report, asked, found):
    code = f"""
        import torch

        class Agent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
                self.register_buffer("scale", torch.ones(3))

            def encode(self, state):
                return torch.relu(self.encoder(state))

            def act(self, state):
                state = {asked}
                return self.head(state).argmax().item()

            def scaled(self, state): return state / self.scale

        agent = Agent()
        for state in test_states:
            print(agent.act(state))
    """
    assert report(code) == found


HANDED_ON = """
    import torch
    from project import Policy

    class Agent(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.policy = Policy(config)
            self.value = torch.nn.Linear(3, 1)

        def {name}(self, state):
            return self.policy.{asked}(state)

    agent = Agent(config).cuda()
    for state in test_loader:
        print(agent.{name}(state))
"""


@pytest.mark.parametrize("name", ["evaluate", "act", "initial_hidden", "mask_hidden"])
def test_a_method_that_asks_another_network_for_the_same_says_nothing_of_gradients(report, name):
    assert report(HANDED_ON.format(name=name, asked=name)) == []


@pytest.mark.parametrize(("name", "asked"), [("forward", "forward"), ("encode", "encode"), ("evaluate", "forward")])
def test_one_that_runs_it_does(report, name, asked):
    assert [code for code, _ in report(HANDED_ON.format(name=name, asked=asked))] == ["OOM201"]


META_TEST = """
    import torch

    class Meta(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def adapted_accuracy(self, x, y, query, target):
            weights = list(self.net.parameters())
            for step in range(5):
                loss = torch.nn.functional.cross_entropy(self.net(x, weights), y)
                gradients = torch.autograd.grad(loss, weights{more})
                weights = [w - 0.1 * g for w, g in zip(weights, gradients)]
            out = self.net(query, weights)
            return {returned}

    optimizer = torch.optim.Adam(net.parameters())
"""
CORRECT = "torch.eq(out.argmax(1), target).sum().item()"


@pytest.mark.parametrize("more", ["", ", create_graph=False", ", retain_graph=True"])
def test_a_method_that_adapts_weights_by_itself_is_no_part_of_a_forward(report, more):
    assert report(META_TEST.format(more=more, returned=CORRECT)) == [("OOM201", 14)]


@pytest.mark.parametrize(
    ("more", "returned"),
    [
        (", create_graph=True", CORRECT),
        (", create_graph=second_order", CORRECT),
        ("", "torch.nn.functional.cross_entropy(out, target)"),
    ],
)
def test_one_whose_steps_have_a_graph_or_that_gives_a_loss_may_be(report, more, returned):
    assert report(META_TEST.format(more=more, returned=returned)) == []


def test_products_that_a_backward_by_hand_asks_for_adapt_no_weights(report):
    assert report(META_TEST.format(more=", grad_outputs=ones", returned=CORRECT)) == []


WAY_BACK = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width, width))

        def forward(self, x):
            return x @ self.weight

        def {method}(self, x):
            return x @ self.weight.transpose(0, 1)

    def test(loader):
        net = Net(8).cuda().eval()
        for x in loader:
            with torch.no_grad():
                print(net(x))
            print(net.{method}(x))
"""


def test_a_way_back_that_is_written_by_hand_is_no_forward(report):
    assert report(WAY_BACK.format(method="attention_backward")) == []
    assert report(WAY_BACK.format(method="attention_forward")) == [("OOM201", 20)]


TRAINING_ITSELF = """
    import torch
    from torch import nn

    class Learner(nn.Module):
        def __init__(self, net, loaders, optimizer):
            super().__init__()
            self.net, self.optimizer = net.cuda(), optimizer
            self.trained, self.validated = loaders

        def {name}(self, epoch):
            loss = self.measure()
            self.history[epoch] = loss / len(self.validated)
            self.net.train()

        def measure(self):
            self.net.eval()
            with torch.no_grad():
                return sum(criterion(self.net(x.cuda()), y).item() for x, y in self.validated)

        def learn(self):
            for epoch in range(9):
                for x, y in self.trained:
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = criterion(self.net(x.cuda()), y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    if self.is_time(epoch):
                        {call}
"""


@pytest.mark.parametrize("name", ["eval_all_tasks", "validate_once"])
def test_an_evaluation_that_a_network_calls_for_its_effect_is_no_part_of_its_forward(report, name):
    assert report(TRAINING_ITSELF.format(name=name, call=f"self.{name}(epoch=epoch)")) == []
