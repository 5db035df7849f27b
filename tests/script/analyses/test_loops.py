"""Which loops train, and what is known of each."""

from __future__ import annotations

import pytest

HEADERS = [
    "for x, y in loader:",
    "for i, (x, y) in enumerate(loader):",
    "for i, (x, y) in enumerate(tqdm(loader, desc='train'), start=1):",
    "for (x, y), _ in zip(loader, range(100)):",
    "for batch in (bar := tqdm(loader)):",
    "while step < 1000:",
    "for step in range(1000):",
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_loop_with_a_backward_trains_whatever_its_header(read, header):
    script = read(f"""
        for epoch in range(10):
            {header}
                out = model(x)
                loss = criterion(out, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """)
    (loop,) = script.loops
    assert (loop.line, loop.end_line) == (2, 7)
    facts = loop.to_json()
    assert (facts["forwards"], facts["backwards"], facts["steps"]) == ([3], [6], [7])
    assert facts["optimizers"] == ["optimizer"]
    assert (facts["amp"], facts["accumulation"], facts["framework"]) == ("none", None, None)


def test_an_epoch_loop_over_a_helper_with_its_own_loop_does_not_train(read):
    script = read("""
        def train_epoch(model, loader):
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()

        for epoch in range(10):
            train_epoch(model, loader)
    """)
    assert [loop.line for loop in script.loops] == [2]


def test_the_loop_around_a_helper_that_runs_the_backward_trains(read):
    script = read("""
        def step(x, y):
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        for epoch in range(10):
            for x, y in loader:
                step(x, y)
    """)
    (loop,) = script.loops
    assert loop.line == 8
    assert loop.to_json()["forwards"] == [2]


def test_a_method_that_runs_the_backward_makes_its_callers_loop_train(read):
    script = read("""
        class Trainer:
            def __init__(self, model, optimizer):
                self.model = model
                self.optimizer = optimizer

            def step(self, x, y):
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(x), y)
                loss.backward()
                self.optimizer.step()

            def fit(self, loader):
                for x, y in loader:
                    self.step(x, y)
    """)
    (loop,) = script.loops
    assert loop.line == 13
    assert loop.to_json()["optimizers"] == ["self.optimizer"]


def test_a_loop_over_losses_is_part_of_the_iteration(read):
    script = read("""
        for x, y in loader:
            outputs = model(x)
            losses = [criterion(out, y) for out in outputs]
            for loss in losses:
                loss.backward(retain_graph=True)
            optimizer.step()
    """)
    assert [loop.line for loop in script.loops] == [1]


def test_an_inner_loop_that_runs_its_own_forward_trains_too(read):
    script = read("""
        for real in loader:
            for _ in range(n_critic):
                d_loss = D(G(z).detach()).mean() - D(real).mean()
                d_loss.backward()
                optimizer_D.step()
            g_loss = -D(G(z)).mean()
            g_loss.backward()
            optimizer_G.step()
    """)
    assert [loop.line for loop in script.loops] == [1, 2]


def test_a_closure_for_lbfgs_trains_in_the_loop_that_steps(read):
    script = read("""
        for step in range(100):
            def closure():
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
    """)
    assert [loop.line for loop in script.loops] == [1]


@pytest.mark.parametrize(
    ("backward", "framework"),
    [
        ("accelerator.backward(loss)", "accelerate"),
        ("self.accelerator.backward(loss)", "accelerate"),
        ("fabric.backward(loss)", "fabric"),
        ("model_engine.backward(loss)", "deepspeed"),
        ("loss.backward()", None),
        ("scaler.scale(loss).backward()", None),
        ("(loss / 4).backward()", None),
        ("loss.mean().backward()", None),
        ("torch.autograd.backward(loss)", None),
        ("loss.backward(torch.ones_like(loss))", None),
    ],
)
def test_every_form_of_backward_is_one(read, backward, framework):
    script = read(f"""
        import torch
        for x, y in loader:
            loss = criterion(model(x), y)
            {backward}
            optimizer.step()
    """)
    (loop,) = script.loops
    assert loop.framework == framework
    assert loop.to_json()["backwards"] == [4]
    assert loop.to_json()["forwards"] == [3]


def test_a_loop_rewritten_for_the_runtime_is_still_a_training_loop(read):
    script = read("""
        from oomfix import runtime
        memory = runtime.preset("16gb")
        for x, y in loader:
            def forward(x, y):
                out = model(x)
                return criterion(out, y), out
            loss, out = memory.forward_backward(forward, x, y)
            memory.step(optimizer)
            total += loss
    """)
    (loop,) = script.loops
    assert loop.line == 3
    assert loop.to_json()["forwards"] == [5]
    assert loop.framework == "oomfix"


@pytest.mark.parametrize(
    ("guard", "window"),
    [
        ("if (i + 1) % 4 == 0:", "4"),
        ("if i % args.accum == args.accum - 1:", "args.accum"),
        ("if (i + 1) % self.steps == 0 or i + 1 == len(loader):", "self.steps"),
        ("if epoch > 3:", None),
        ("if not torch.isnan(loss):", None),
    ],
)
def test_a_step_that_waits_for_every_kth_batch_makes_a_window(read, guard, window):
    script = read(f"""
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / k
            loss.backward()
            {guard}
                optimizer.step()
                optimizer.zero_grad()
    """)
    assert script.loops[0].to_json()["accumulation"] == window


def test_a_continue_guard_makes_a_window(read):
    script = read("""
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / 8).backward()
            if (i + 1) % 8:
                continue
            optimizer.step()
            optimizer.zero_grad()
    """)
    assert script.loops[0].to_json()["accumulation"] == "8"


def test_a_generator_that_steps_every_few_batches_is_no_accumulation(read, report):
    code = """
        for i, real in enumerate(loader):
            d_loss = -D(real).mean() + D(G(z).detach()).mean()
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()
            if i % 5 == 0:
                g_loss = -D(G(z)).mean()
                g_optimizer.zero_grad()
                g_loss.backward()
                g_optimizer.step()
    """
    assert read(code).loops[0].window is None
    assert report(code) == []


def test_micro_batches_in_an_inner_loop_make_a_window(read, report):
    code = """
        while step < steps:
            for micro_step in range(gradient_accumulation_steps):
                loss = criterion(model(x), y)
                loss.backward()
                x, y = get_batch()
            optimizer.step()
            optimizer.zero_grad()
    """
    (loop,) = read(code).loops
    assert (loop.line, loop.to_json()["accumulation"]) == (2, "gradient_accumulation_steps")
    assert report(code) == [("OOM301", 4)]


def test_amp_is_named_by_its_dtype(read):
    template = """
        import torch
        for x, y in loader:
            with {context}:
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
    """
    for context, dtype in {
        "torch.autocast('cuda')": "float16",
        "torch.autocast('cuda', dtype=torch.bfloat16)": "bfloat16",
        "torch.autocast('cpu')": "bfloat16",
        "torch.autocast('cuda', dtype=dtype)": "unknown",
        "torch.autocast('cuda', enabled=False)": "none",
    }.items():
        assert read(template.format(context=context)).loops[0].autocast == dtype, context


def test_a_function_chosen_by_a_flag_is_followed_whichever_it_is(read):
    script = read("""
        def amp_update(x, y):
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()

        def plain_update(x, y):
            criterion(model(x), y).backward()

        update = amp_update if args.amp else plain_update
        for x, y in loader:
            update(x, y)
            optimizer.step()
    """)
    (loop,) = script.loops
    assert (loop.line, loop.to_json()["backwards"]) == (10, [4, 7])


def test_an_optimizer_that_a_wrapped_network_makes_steps_the_loop(read):
    script = read("""
        if ddp:
            model = DDP(model, device_ids=[rank])
        raw_model = model.module if ddp else model
        optimizer = raw_model.configure_optimizers(lr=0.1)
        for step in range(10):
            for micro_step in range(4):
                loss = model(x) / 4
                loss.backward()
            optimizer.step()
    """)
    (loop,) = script.loops
    assert [step.optimizer for step in loop.later_steps] == ["optimizer"]


def test_a_function_that_another_one_makes_and_hands_out_is_entered(read):
    script = read("""
        def training(model, optimizer):
            def prepare(x):
                return x

            def step(batches):
                optimizer.zero_grad()
                for x, y in batches:
                    criterion(model(prepare(x)), y).backward()
                optimizer.step()
            return step
    """)
    assert [loop.line for loop in script.loops] == [7]


@pytest.mark.parametrize(
    ("hook", "rest", "lines"),
    [
        ("layer.register_full_backward_hook(look)", "pass", []),
        ("layer.register_forward_hook(look)", "pass", [4]),
        ("features.register_hook(look)", "pass", []),
        ("layer.register_forward_hook(lambda *made: made[-1].register_hook(look))", "pass", []),
        ("weight.register_hook(clamp)", "optimizer.step()", [4]),
        ("layer.register_full_backward_hook(look)", "optimizer.step()", [4]),
        ("layer.register_full_backward_hook(look)", "optimize(model)", [4]),
        ("layer.register_full_backward_hook(look)", "w.data -= 0.1 * w.grad", [4]),
        ("layer.register_full_backward_hook(look)", "w.data.add_(w.grad, alpha=-0.1)", [4]),
        ("layer.register_full_backward_hook(look)", "w.data = w - 0.1 * w.grad", [4]),
        ("layer.register_full_backward_hook(look)", "saliency += image.grad.abs()", []),
        ("layer.register_full_backward_hook(look)", "print('optimal')", []),
    ],
)
def test_a_backward_for_hooks_that_read_gradients_trains_nothing(read, hook, rest, lines):
    code = f"""
        model = build().cuda()
        {hook}
        model.eval()
        for image in images:
            model(image).max().backward()
            {rest}
    """
    assert [loop.line for loop in read(code).loops] == lines


REFINED = """
    import torch

    def fit(net, epochs):
        optimizer = torch.optim.Adam(net.parameters())
        for epoch in range(epochs):
            optimizer.zero_grad()
            net(points).pow(2).mean().backward()
            optimizer.step()
        refiner = torch.optim.LBFGS(net.parameters())

        def closure():
            refiner.zero_grad()
            loss = net(points).pow(2).mean()
            loss.backward()
            return loss

        {refine}

    for seed in range(5):
        {made}
        fit(net, 1000)
"""


@pytest.mark.parametrize("refine", ["refiner.step(closure)", "closure(); refiner.step()"])
@pytest.mark.parametrize(
    "made", ["net = Net().cuda()", "net = networks.PINN(width=seed)", "torch.manual_seed(seed); net = Net()"]
)
def test_a_loop_over_whole_trainings_is_no_batch_loop_although_a_backward_stands_behind_theirs(read, refine, made):
    assert [loop.line for loop in read(REFINED.format(refine=refine, made=made)).loops] == [5]


def test_it_is_none_under_whatever_name_the_network_is_handed_over(read):
    code = REFINED.format(refine="refiner.step(closure)", made="model = Net()").replace(
        "fit(net, 1000)", "fit(model, 9)"
    )
    assert [loop.line for loop in read(code).loops] == [5]


@pytest.mark.parametrize("made", ["net = net.train()", "net = source.clone()", "batch = Batch(seed)"])
def test_a_loop_that_goes_on_with_its_network_trains(read, made):
    assert [loop.line for loop in read(REFINED.format(refine="refiner.step(closure)", made=made)).loops] == [5, 19]


def test_a_loop_over_seeds_whose_network_takes_one_step_trains(read):
    code = """
        import torch

        for seed in range(5):
            net = Net()
            net(points).pow(2).mean().backward()
            optimizer.step()
    """
    assert [loop.line for loop in read(code).loops] == [3]


@pytest.mark.parametrize(
    ("stepped", "lines"),
    [("for opt in opts:\n            opt.step()", [8]), ("for _ in range(3):\n            other.step()", [])],
)
def test_a_step_behind_the_loop_of_each_optimizer_is_one_of_the_loop(read, stepped, lines):
    script = read(f"""
        for step in range(9):
            for part in range(4):
                loss = criterion(net(batch[part]), target)
                loss.backward()
            clip(net)

            {stepped.replace("            ", "                ")}
    """)
    (loop,) = script.loops
    assert [step.node.lineno for step in {id(one.node): one for one in loop.later_steps}.values()] == lines


RETRIED = """
    def step(x, y):
        while True:
            try:
                loss = criterion(model(x), y)
                {backward}
                {ended}
            except RuntimeError:
                x, y = x.cpu(), y.cpu()
    {rest}
"""
BATCHES = "for x, y in loader:\n        step(x, y)"


@pytest.mark.parametrize(
    ("backward", "ended", "rest", "lines"),
    [
        ("loss.backward()", "break", BATCHES, [9]),
        ("loss.backward()", "return loss", BATCHES, [9]),
        ("loss.backward()", "break", "pass", [2]),  # whoever calls it goes over the batches
        ("loss.backward()", "optimizer.step()", BATCHES, [2]),
        ("optimizer.step()", "break", "for x, y in loader:\n        criterion(model(x), y).backward()", [9]),
    ],
)
def test_a_loop_that_tries_one_batch_again_is_part_of_the_iteration(read, backward, ended, rest, lines):
    code = RETRIED.format(backward=backward, ended=ended, rest=rest)
    assert [loop.line for loop in read(code).loops] == lines


UNTIL_DONE = """
    for batch in loader:
        {before}
        while not done:
            try:
                criterion(model(batch[:size]), target).backward()
                {behind}
            except RuntimeError:
                size = size // 2
"""


@pytest.mark.parametrize(
    ("behind", "line"),
    [
        ("optimizer.step(); done = True", 1),
        ("optimizer.step()", 3),
        ("optimizer.step(); done = reached(size)", 3),
        ("optimizer.step(); finished = True", 3),
    ],
)
def test_a_loop_that_runs_until_a_batch_is_done_is_part_of_the_iteration(read, behind, line):
    code = UNTIL_DONE.format(before="done = False", behind=behind)
    assert [loop.line for loop in read(code).loops] == [line]


STYLE = """
    import torch

    def transfer(source, steps):
        image = source.clone().requires_grad_(True)
        {kept}
        adam = torch.optim.Adam([image])
        for step in range(steps):
            loss = distance(net(image))
            loss.backward()
            adam.step()
        optimizer = torch.optim.LBFGS({optimized})

        def closure():
            loss = distance(net(image))
            loss.backward()
            return loss

        optimizer.step(closure)

    for source in sources:
        transfer(source, 9)
"""


@pytest.mark.parametrize(
    ("kept", "optimized", "lines"),
    [
        ("pass", "[image]", [7]),
        ("pass", "(image,)", [7]),
        ("pass", "[shared]", [7, 20]),
        ("pass", "net.parameters()", [7, 20]),
        ("optimizer = torch.optim.LBFGS(net.parameters())", "[image]", [7, 20]),
    ],
)
def test_a_loop_over_tensors_that_are_optimized_one_by_one_is_no_batch_loop(read, kept, optimized, lines):
    assert [loop.line for loop in read(STYLE.format(kept=kept, optimized=optimized)).loops] == lines


SIDE_BY_SIDE = """
    import torch

    for epoch in range(10):
        for step, (x, y) in enumerate({source}):
            {batch}
            for {each}:
                loss = criterion({run}, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history.append(loss.item())
            {more}
"""
EACH = "net, optimizer, history in zip(nets, optimizers, histories)"


@pytest.mark.parametrize(
    ("batch", "run"),
    [("pass", "net(x)"), ("inputs = torch.autograd.Variable(x)", "net(inputs)"), ("x = x.cuda()", "net(x, epoch)")],
)
def test_the_loop_around_networks_that_train_on_the_same_batch_is_told(read, batch, run):
    (loop,) = read(SIDE_BY_SIDE.format(source="loader", batch=batch, each=EACH, run=run, more="pass")).loops
    assert (loop.line, loop.end_line, loop.node.lineno) == (4, 12, 6)
    assert [forward.node.lineno for forward in loop.forwards] == [7]


@pytest.mark.parametrize(
    ("each", "run", "more"),
    [
        ("net, part in zip(nets, x.chunk(2))", "net(part)", "pass"),
        ("part in x.chunk(2)", "net(part)", "pass"),
        ("_ in range(5)", "net(x)", "pass"),
        ("net, data in zip(nets, loaders)", "net(next(data))", "pass"),
        (EACH, "net(x)", "for part in x: other(part).backward()"),
    ],
)
def test_any_other_loop_in_a_loop_is_told_itself(read, each, run, more):
    code = SIDE_BY_SIDE.format(source="loader", batch="pass", each=each, run=run, more=more)
    assert 4 not in [loop.line for loop in read(code).loops]
