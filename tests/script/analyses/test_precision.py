"""Autocast around training forwards, under aliases, flags and decorators."""

from __future__ import annotations

import pytest

TRAIN = """
    import torch, contextlib
    from contextlib import ExitStack
    from functools import partial
    from torch.cuda.amp import autocast as ac
    {before}
    model = Net().cuda()
    for x, y in loader:
        {context}
            loss = criterion(model(x), y)
        {backward}
        optimizer.step()
"""


def train(context="if True:", before="pass", backward="scaler.scale(loss).backward()") -> str:
    return TRAIN.format(context=context, before=before, backward=backward)


def codes(found):
    return [code for code, _ in found if code in ("OOM202", "OOM304", "OOM305")]


@pytest.mark.parametrize(
    "parts",
    [
        {"context": "with ac():"},
        {"context": "with ac(enabled=args.amp):"},
        {"context": "with torch.autocast(device.type, enabled=args.amp):"},
        {"context": "with torch.amp.autocast('cuda'), timer():"},
        {"context": "with context:", "before": "context = ac() if args.amp else contextlib.nullcontext()"},
        {"context": "with context:", "before": "context = ac()"},
        {"context": "with opener():", "before": "opener = torch.autocast if args.amp else contextlib.suppress"},
        {"context": "with opener('cuda'):", "before": "opener = nothing if args.fp32 else torch.autocast"},
        {"context": "with opener():", "before": "opener = contextlib.suppress\n    if args.amp: opener = ac"},
        {"context": "with opener():", "before": "opener = partial(ac, dtype=dtype) if args.amp else nothing"},
        {"context": "with args.opener():", "before": "args.opener = ac if args.amp else contextlib.nullcontext"},
        {"context": "with opener():", "before": "opener = getattr(torch.cuda.amp, 'autocast')"},
        {"context": "with opener():", "before": "opener = (lambda: ac()) if args.amp else contextlib.nullcontext"},
        {"context": "with autocast():", "before": "autocast = elsewhere() if args.amp else contextlib.nullcontext"},
        {"context": "with held[precision]:", "before": "held = {'no': contextlib.nullcontext(), 'half': ac()}"},
        {"context": "with opener():", "before": "def opener():\n        return ac() if args.amp else nothing()"},
        {"context": "with ExitStack() as stack:\n            if amp: stack.enter_context(ac())"},
    ],
    ids=str,
)
def test_autocast_is_seen_in_every_spelling(report, parts):
    assert codes(report(train(**parts))) == []


@pytest.mark.parametrize(
    "parts",
    [
        {"backward": "loss.backward()"},
        {"context": "with contextlib.nullcontext():", "backward": "loss.backward()"},
        {"context": "with ac(enabled=False):", "backward": "loss.backward()"},
        {"context": "with torch.no_grad() if False else contextlib.nullcontext():", "backward": "loss.backward()"},
        {
            "context": "with opener():",
            "before": "opener = contextlib.suppress if quiet else contextlib.nullcontext",
            "backward": "loss.backward()",
        },
    ],
    ids=str,
)
def test_without_autocast_the_forward_is_reported(report, parts):
    assert codes(report(train(**parts))) == ["OOM202"]


def test_a_function_is_no_network_because_another_class_has_one_of_that_name(report):
    code = """
        import torch
        from attacks import fgsm_attack
        from augment import Augmentor

        class Plain:
            def __init__(self, model, kind):
                self.model = model.cuda()
                self.augmentor = None
                if kind == "fgsm":
                    self.augmentor = fgsm_attack

            def train(self, loader):
                for x, y in loader:
                    if self.augmentor:
                        x = self.augmentor(self.model, x, y)
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = criterion(self.model(x), y)
                    loss.backward()
                    self.optimizer.step()

        class Learned:
            def __init__(self):
                self.augmentor = Augmentor().cuda()
                self.optimizer = torch.optim.Adam(self.augmentor.parameters())
    """
    assert report(code) == []


def test_an_imported_function_that_a_network_keeps_is_no_method_of_it(report):
    code = """
        import torch
        from learners import Learner
        from losses import divergence

        class Bayesian(Learner):
            def __init__(self, backbone):
                super().__init__(backbone)
                self.loss_kl = divergence

            def train_loop(self, loader):
                optimizer = torch.optim.Adam(self.parameters())
                for x, y in loader:
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = criterion(self(x.cuda()), y)
                    for weight in self.head.weights:
                        loss = loss + self.loss_kl(weight.mu, weight.variance)
                    loss.backward()
                    optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize(("kind", "found"), [("Perplexity", []), ("Sampler", [("OOM201", 10)])])
def test_a_metric_that_is_moved_to_the_gpu_is_no_network(report, kind, found):
    code = f"""
        import torch
        from models import Autoencoder, {kind}

        judge = {kind}().to("cuda")
        model = Autoencoder().to("cuda")
        for x in loader:
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x.cuda())
                loss = criterion(out, x)
            print(judge(out.detach()).item())
            loss.backward()
            optimizer.step()
    """
    assert report(code) == found


def test_early_stopping_of_an_encoder_is_no_network(report):
    code = """
        import torch
        from tools import EarlyStopping

        def train(encoder, loader, optimizer):
            early_stopping_encoder = EarlyStopping(patience=3)
            for epoch in range(9):
                for x, y in loader:
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = criterion(encoder(x), y)
                    loss.backward()
                    optimizer.step()
                early_stopping_encoder(validate(encoder), encoder)
    """
    assert report(code) == []


def test_a_switch_that_happens_to_be_off_is_autocast(report):
    code = """
        import torch

        def fit(model, loader, optimizer, amp=False):
            model.cuda()
            for x, y in loader:
                with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                    loss = criterion(model(x), y)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()

        fit(model, loader, optimizer, amp=False)
    """
    assert report(code) == []


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ("with ac():", ["OOM304"]),
        ("with torch.autocast('cuda', torch.float16):", ["OOM304"]),
        ("with torch.autocast('cuda', dtype=torch.half):", ["OOM304"]),
        ("with torch.autocast('cuda', dtype=torch.bfloat16):", []),
        ("with torch.autocast('cuda', torch.bfloat16):", []),
        ("with torch.autocast('cpu'):", []),
        ("with torch.autocast('cuda', dtype=args.dtype):", []),
    ],
)
def test_float16_needs_a_scaler(report, context, found):
    assert codes(report(train(context=context, backward="loss.backward()"))) == found


def test_autocast_on_the_models_own_forward_counts(report):
    code = """
        import torch
        from torch import nn

        class Net(nn.Module):
            @torch.autocast("cuda", dtype=torch.bfloat16)
            def forward(self, x):
                return self.layer(x)

        model = Net().cuda()
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
    """
    assert report(code) == []


def test_the_fp32_branch_of_a_flag_is_a_choice(report):
    code = """
        import torch
        model = Net().cuda()
        for x, y in loader:
            if args.amp:
                with torch.autocast("cuda"):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
            else:
                loss = criterion(model(x), y)
                loss.backward()
            optimizer.step()
    """
    assert report(code) == []


SWITCHED = """
    import torch
    {top}

    def train(model, loader, optimizer):
        for x, y in loader:
            if {test}:
                with torch.autocast("cuda"):
                    loss = criterion(model(x.cuda()), y.cuda())
                scaler.scale(loss).backward()
            else:
                loss = criterion(model(x.cuda()), y.cuda())
                loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("top", "test", "found"),
    [
        ("AMP = False", "AMP", ["OOM202"]),
        ("AMP: bool = False", "AMP", ["OOM202"]),
        ("SCALER = None", "SCALER", ["OOM202"]),
        ("FP32 = True", "not FP32", ["OOM202"]),
        ("AMP = False", "AMP and torch.cuda.is_available()", ["OOM202"]),
        ("class CFG: amp = False", "CFG.amp", ["OOM202"]),
        ("AMP = True", "AMP", []),
        ("AMP = False", "AMP or torch.cuda.is_available()", []),
        ("AMP = False", "args.AMP", []),
        ("AMP = torch.cuda.is_available()", "AMP", []),
        ("AMP = False\n    AMP = args.amp", "AMP", []),
        ("AMP = False\n    def turn_on():\n        global AMP", "AMP", []),
        ("AMP = False\n    def run(AMP): pass", "AMP", []),
        ("try: from apex import AMP\n    except ImportError: pass\n    AMP = False", "AMP", []),
        ("class CFG: amp = False\n    CFG.amp = True", "CFG.amp", []),
    ],
)
def test_a_switch_of_the_file_that_is_off_leaves_no_choice(report, top, test, found):
    assert codes(report(SWITCHED.format(top=top, test=test))) == found


def test_a_helper_under_autocast_is_covered(report):
    code = """
        import torch
        def compute(model, batch):
            return criterion(model(batch.x), batch.y)

        for batch in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compute(model, batch)
            loss.backward()
    """
    assert report(code) == []


def test_one_finding_per_forward_call(report):
    code = """
        for real in loader:
            fake = netG(noise.cuda())
            (netD(fake) - netD(real.cuda())).mean().backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 2), ("OOM202", 3)]


def test_a_scaler_of_another_function_scales_nothing_here(report):
    code = """
        import torch

        def scaled(model, loader):
            scaler = torch.amp.GradScaler("cuda")
            for x, y in loader:
                with torch.autocast("cuda"):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        def plain(model, loader):
            for x, y in loader:
                with torch.autocast("cuda"):
                    loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
    """
    assert report(code) == [("OOM304", 15)]


@pytest.mark.parametrize(
    "context",
    [
        "ctx = model.no_sync() if i % 4 else contextlib.nullcontext()",
        "ctx = model.join()",
    ],
)
def test_a_context_of_the_data_parallel_wrapper_is_no_autocast(report, context):
    code = f"""
        import contextlib, torch
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(Net().cuda())
        for i, (x, y) in enumerate(loader):
            {context}
            with ctx:
                loss = criterion(model(x), y)
                loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 7)]


@pytest.mark.parametrize(
    ("before", "context"),
    [
        ("ctx = autocast_for(args)", "ctx"),
        ("c = helpers.maybe_autocast(args)", "c"),
        ("ctx = HalfPrecision()", "ctx"),
        ("pass", "HalfPrecision()"),
    ],
)
def test_a_context_made_by_what_is_named_or_built_for_autocast_is_not_judged(report, before, context):
    code = f"""
        import torch
        from helpers import autocast_for, helpers

        class HalfPrecision:
            def __enter__(self):
                self.context = torch.autocast("cuda", dtype=torch.bfloat16)
                self.context.__enter__()

            def __exit__(self, *problem):
                self.context.__exit__(*problem)

        {before}
        for x, y in loader:
            with {context}:
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize(
    ("made", "called"),
    [
        ("first, second = Critic().to(device), Critic().to(device)", "second"),
        ("first = Q().to(device); second = Q().to(device)", "second"),
        ("first, second = Q(), Q()", "second"),
        ("first = second = Q()", "second"),
        ("first = build_part(1); second = build_part(2)", "second"),
        ("first = make(Critic); enc = make(Critic)", "enc"),
        ("first = make(Critic); dec = make(Critic)", "dec"),
    ],
)
def test_a_second_network_is_one_although_nothing_asks_for_its_parameters(report, made, called):
    code = f"""
        device = "cuda"
        {made}
        optimizer = adam(first.parameters())
        for x, y in loader:
            loss = criterion(first(x), y) + criterion({called}(x), y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 5)]
    assert report(code.replace("criterion(first(x), y) + ", "")) == [("OOM202", 5)]


@pytest.mark.parametrize(
    ("used", "found"),
    [("pass", []), ("model.to(self.device)", [("OOM202", 10)]), ("model.cuda()", [("OOM202", 10)])],
)
def test_a_device_that_nothing_is_moved_to_is_not_used(report, used, found):
    code = f"""
        import torch

        class Trainer:
            def __init__(self, model):
                self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                {used}

            def fit(self, loader):
                for x, y in loader:
                    loss = self.criterion(self.model(x), y)
                    loss.backward()
                    self.optimizer.step()
    """
    assert report(code) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = x.float()  # .to(device)", []),
        ("# model.cuda()", []),
        ('print("#1")  # on the GPU', []),
        ("x = to_gpu(x)  # moved", ["OOM202"]),
        ('log("# of gpus")', ["OOM202"]),
        ('log("""don\'t # of gpus""")', ["OOM202"]),
        ("x = x.to(device)", ["OOM202"]),
    ],
)
def test_a_device_that_only_a_comment_names_is_not_used(report, line, found):
    code = f"""
        for x, y in loader:
            {line}
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """
    assert codes(report(code)) == found


def test_a_loss_object_that_is_fed_and_backpropagated_carries_the_graph(report):
    code = """
        class Trainer:
            def batch(self, x, y):
                loss = self.loss
                out = self.model(x.cuda())
                loss.reset()
                loss.eval_batch(out, y)
                loss.backward()
                self.optimizer.step()

            def fit(self, loader):
                for x, y in loader:
                    self.batch(x, y)
    """
    assert report(code) == [("OOM202", 4)]


@pytest.mark.parametrize(
    "code",
    [
        """
        class Trainer:
            def __init__(self):
                self.classifier = None

            def fit(self, loader):
                for x, y in loader:
                    loss = self.loss_of(self.classifier, x.cuda(), y)
                    loss.backward()
                    self.optimizer.step()

            def loss_of(self, model, x, y):
                return self.criterion(model.forward(x), y)
        """,
        """
        from project import MindForCausalLM

        class Critic(MindForCausalLM):
            def __init__(self):
                super().__init__()

        critic = Critic().cuda()
        for x, y in loader:
            loss = criterion(critic(x), y)
            loss.backward()
            optimizer.step()
        """,
    ],
)
def test_a_network_from_elsewhere_is_one(report, code):
    assert [found[0] for found in report(code)] == ["OOM202"]


DEVICE = """
    import torch

    class Learner:
        def __init__(self, net{default}):
            {assigned}
            self.net = net.to(device)

        def learn(self, loader, optimizer):
            for x, y in loader:
                loss = criterion(self.net(x), y)
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize(
    "assigned",
    [
        "device = 'cpu'",
        "device = torch.device('cpu')",
        "device = torch.device('mps' if torch.backends.mps.is_available() else 'cpu')",
        "device = 'mps' if torch.backends.mps.is_available() else 'cpu'",
    ],
)
def test_a_script_that_sets_another_device_is_left_alone(report, assigned):
    assert codes(report(DEVICE.format(default="", assigned=assigned))) == []


@pytest.mark.parametrize("default", [", device='cpu'", ",\n                device='cpu',\n                lr=1e-3"])
def test_a_default_of_a_parameter_is_for_the_caller_to_change(report, default):
    assert codes(report(DEVICE.format(default=default, assigned="self.device = device"))) == ["OOM202"]


MADE = """
    import torch
    model = {made}
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
"""


@pytest.mark.parametrize(
    "made",
    [
        "Net().cuda().half()",
        "Net().bfloat16().to('cuda')",
        "models.Net(3).to('cuda', dtype=torch.bfloat16)",
        "Net().to('cuda', torch.float16).train()",
    ],
)
def test_a_network_made_in_sixteen_bits_needs_no_autocast(report, made):
    assert report(MADE.format(made=made)) == []


@pytest.mark.parametrize(
    "made", ["Net().cuda().float()", "Net().to('cuda', dtype=torch.float32)", "Net(torch.zeros(3).half()).cuda()"]
)
def test_a_network_made_in_full_precision_does(report, made):
    assert report(MADE.format(made=made)) == [("OOM202", 4)]


@pytest.mark.parametrize(
    ("before", "backward", "found"),
    [
        ("pass", "loss.backward()", ["OOM304"]),
        ("pass", "(loss * 1024).backward()", []),
        ("pass", "(2.0**16 * loss).backward()", []),
        ("pass", "(loss * 0.5).backward()", ["OOM304"]),
        ("pass", "(loss * loss_scale).backward()", []),
        ("import apex", "with apex.scale_loss(loss) as scaled: scaled.backward()", []),
        ("scaler = make()", "loss.backward()", []),
        ("grad_scale = 1024", "loss.mul(grad_scale).backward()", []),
        ("data_scaler = preprocessing.StandardScaler().fit(train)", "loss.backward()", ["OOM304"]),
        ("scaler = MinMaxScaler()", "loss.backward(); scaler.inverse_transform(x)", ["OOM304"]),
        ("fabric = lightning.Fabric()", "fabric.backward(loss)", []),
        ("pass", "loss.backward(); loss_scalar = loss.item()", ["OOM304"]),
        ("pass", "optimizer.backward(loss)", []),
        ("trainer = make()", "trainer.optim.backward(loss)", []),
        ("pass", "loss.backward(torch.ones_like(loss))", ["OOM304"]),
    ],
)
def test_what_scales_the_gradients_of_fp16(report, before, backward, found):
    code = train(context="with torch.autocast('cuda', torch.float16):", before=before, backward=backward)
    assert codes(report(code)) == found


ADVERSARIES = """
    import torch
    scaler = torch.amp.GradScaler("cuda")
    for real in loader:
        with torch.autocast("cuda"):
            fake = generator(torch.randn(64, 100))
            g_loss = criterion(discriminator(fake))
        {generator}
        g_optimizer.step()
        with torch.autocast("cuda"):
            d_loss = criterion(discriminator(fake.detach()))
        {discriminator}
        d_optimizer.step()
"""


@pytest.mark.parametrize(
    ("generator", "discriminator", "lines"),
    [
        ("scaler.scale(g_loss).backward()", "d_loss.backward()", [10]),
        ("g_loss.backward()", "scaler.scale(d_loss).backward()", [5]),
        ("scaler.scale(g_loss).backward()", "scaler.scale(d_loss).backward()", []),
        ("scaler.scale(g_loss).backward()", "loss = scaler.scale(d_loss); loss.backward()", []),
        ("scaler.scale(g_loss).backward()", "(d_loss * 65536).backward()", []),
        ("scaler.scale(g_loss).backward() if amp else g_loss.backward()", "scaler.scale(d_loss).backward()", []),
        ("scaler.scale(g_loss).backward()", "d_optimizer.backward(d_loss)", []),
    ],
)
def test_a_scaler_of_one_loss_scales_no_other(report, generator, discriminator, lines):
    found = report(ADVERSARIES.format(generator=generator, discriminator=discriminator))
    assert [line for code, line in found if code == "OOM304"] == lines


def test_float16_of_a_decorator_needs_a_scaler(report):
    found = report("""
        import torch

        @torch.autocast("cuda")
        def loss_of(model, x, y):
            out = model(x).requires_grad_(True)
            return torch.nn.functional.mse_loss(out, y)

        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
    """)
    assert found == [("OOM304", 5)]


@pytest.mark.parametrize("activation", ["LeakyReLU(0.1)", "SiLU()", "Softplus()", "MaxPool3d(2)"])
def test_a_module_without_parameters_is_no_network(report, activation):
    assert not report(f"""
        import torch
        act = torch.nn.{activation}
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(x.cuda())
            act(out - y).mean().backward()
            optimizer.step()
    """)


def test_an_activation_with_a_parameter_is_one(report):
    assert report("""
        import torch
        act = torch.nn.PReLU()
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(x.cuda())
            act(out - y).mean().backward()
            optimizer.step()
    """) == [("OOM202", 6)]


@pytest.mark.parametrize(("given", "found"), [("critic", [8]), ("criterion", []), ("function", [])])
def test_an_attribute_is_what_the_name_of_its_value_says(report, given, found):
    lines = report(f"""
        class Trainer:
            def __init__(self, model, optimizer, {given}):
                self.model, self.optimizer = model, optimizer
                self.crit = {given}

            def run(self, loader):
                for x in loader:
                    loss = self.crit(x.cuda()).mean()
                    loss.backward()
                    self.optimizer.step()
    """)
    assert [line for code, line in lines if code == "OOM202"] == found


@pytest.mark.parametrize(("holder", "lines"), [("self.buffer", [4]), ("self.terms", [4, 9])])
def test_what_a_replay_buffer_gives_back_is_trained_without_the_graph_that_went_in(report, holder, lines):
    found = report(f"""
        class Agent:
            def learn(self):
                batch = {holder}.get()
                loss = criterion(self.critic(batch.to(device)), batch["value"])
                loss.backward()
                self.optimizer.step()
            def run(self, env, state):
                while True:
                    value = self.critic(state.to(device))
                    {holder}.add(state, value)
                    state = env.step(value)
                    self.learn()
    """)
    assert [line for code, line in found if code == "OOM202"] == lines


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mask = torch.arange(6, device=x.device)", []),
        ("mask = torch.arange(6, dtype=x.dtype, device = labels.device)[None]", []),
        ("mask = torch.arange(6, device=self.device)", ["OOM202"]),
        ("mask = torch.arange(6, device=args.device)", ["OOM202"]),
        ("mask = torch.arange(6, device=device)", ["OOM202"]),
        ("mask = torch.arange(6, device=torch.device(name))", ["OOM202"]),
    ],
)
def test_the_device_of_another_tensor_names_none(report, line, found):
    code = f"""
        import torch

        model = Net()
        for x, y in loader:
            {line}
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """
    assert codes(report(code)) == found


def test_a_network_that_trains_what_it_holds_in_its_own_forward(report):
    code = """
        import torch
        from torch import nn

        class Adapted(nn.Module):
            def __init__(self, model, optimizer, steps=1):
                super().__init__()
                self.model = model.cuda()
                self.optimizer = optimizer
                self.steps = steps

            def forward(self, x):
                for _ in range(self.steps):
                    outputs = self.adapt(x)
                return outputs

            def adapt(self, x):
                outputs = self.model(x)
                outputs.softmax(1).log().sum(1).mean().backward()
                self.optimizer.step()
                return outputs
    """
    assert report(code) == [("OOM202", 17)]


@pytest.mark.parametrize(
    ("scalers", "found"),
    [
        (["torch.cuda.amp.GradScaler(enabled=False)"], ["OOM202"]),
        (["torch.amp.GradScaler('cuda', enabled=False)"], ["OOM202"]),
        (["torch.cuda.amp.GradScaler(enabled=args.amp)"], []),
        (["torch.cuda.amp.GradScaler()"], []),
        (["torch.cuda.amp.GradScaler(enabled=False)", "torch.cuda.amp.GradScaler()"], []),
    ],
)
def test_a_scaler_that_is_off_speaks_of_no_autocast_elsewhere(report, scalers, found):
    made = "\n".join(f"    scaler = {made}" for made in scalers)
    code = f"""
    import torch

    model = Net().cuda()
{made}
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """
    assert codes(report(code)) == found


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("torch.autocast(kind, dtype=kinds[0]) if on else torch.autocast(kind, enabled=False)", []),
        ("torch.autocast(kind, dtype=torch.bfloat16) if on else torch.autocast(kind, enabled=False)", []),
        ("torch.autocast(kind, dtype=dtypes[name], enabled=False)", ["OOM202"]),
        ("torch.autocast(kind, enabled=False) if on else nullcontext()", ["OOM202"]),
    ],
)
def test_autocast_on_one_side_of_a_flag_that_is_off_on_the_other_counts(report, made, found):
    code = f"""
        import torch
        from contextlib import nullcontext

        model = Net().cuda()
        context = {made}
        for x, y in loader:
            with context:
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """
    assert codes(report(code)) == found


@pytest.mark.parametrize(("method", "found"), [("init", []), ("register_float_function", ["OOM202"])])
def test_the_first_interface_of_apex_decides_the_precision_too(report, method, found):
    code = f"""
        from apex import amp

        handle = amp.{method}(settings)
        for x, y in loader:
            loss = criterion(model(x.cuda()), y.cuda())
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    """
    assert codes(report(code)) == found


@pytest.mark.parametrize(
    ("imported", "found"),
    [
        ("from apex.fp16_utils import FP16_Optimizer", []),
        ("from apex.optimizers import FP16_Optimizer", []),
        ("from project import FP16_Optimizer", ["OOM202"]),
        ("from apex.optimizers import FusedAdam as FP16_Optimizer", ["OOM202"]),
    ],
)
def test_an_optimizer_of_apex_that_keeps_weights_twice_decides_the_precision_too(report, imported, found):
    code = f"""
        {imported}

        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        for x, y in loader:
            loss = criterion(model(x.cuda()), y.cuda())
            optimizer.backward(loss)
            optimizer.step()
    """
    assert codes(report(code)) == found


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("FSDP(Net().cuda(), mixed_precision=MixedPrecision(param_dtype=dtype))", []),
        ("FSDP(Net().cuda(), mixed_precision=fsdp.MixedPrecision(param_dtype=dtype))", []),
        ("FSDP(Net().cuda())", ["OOM202"]),
    ],
)
def test_mixed_precision_that_is_imported_in_vain_decides_nothing(report, model, found):
    code = f"""
        from torch.distributed import fsdp
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

        model = {model}
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """
    assert codes(report(code)) == found


@pytest.mark.parametrize(("asked", "found"), [("bundle.model.eval()", ["OOM202"]), ("bundle.mean()", [])])
def test_the_device_of_what_holds_a_network_may_be_a_gpu(report, asked, found):
    code = f"""
        def fit(student, bundle, loader, optimizer):
            device = bundle.device
            student = Student().to(device)
            {asked}
            for x, y in loader:
                loss = criterion(student(x.to(device)), y)
                loss.backward()
                optimizer.step()
    """
    assert codes(report(code)) == found


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("scaler = DataScaler(mean, deviation, columns)", [("OOM202", 9)]),
        ("loss_scaler(mean, optimizer, parameters=model.parameters())", []),
    ],
)
def test_an_object_that_scales_data_is_made_of_no_loss(report, made, found):
    code = f"""
        import torch
        from project import DataScaler, loss_scaler

        state = torch.load("state.pth", map_location="cpu")
        mean, deviation = state["mean"], state["deviation"]
        {made}
        model.cuda()
        for x, y in loader:
            loss = criterion(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
    """
    assert report(code) == found


def test_losses_scaled_in_one_loop_say_nothing_of_another(report):
    code = """
        import torch

        def pretrain(model, loader, optimizer):
            for x, y in loader:
                loss = criterion(model(x.cuda()), y)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()

        def train(model, loader, optimizer, scaler):
            for x, y in loader:
                loss = criterion(model(x.cuda()), y)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    """
    assert [found for found in report(code) if found[0] == "OOM202"] == [("OOM202", 5)]
