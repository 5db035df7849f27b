"""`memory.loss`: what something else runs the backward of gets the gradients of the whole batch, however it is cut."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard

SAMPLES = 12


def batch(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (SAMPLES,), generator=generator)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def trained(through, take_backward, dtype=torch.float32, steps=6, every=1):
    """The parameters and losses after some steps; `through` gives the loss of a forward and its batch."""
    model = network(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu") if take_backward is scaled else None
    losses = []

    def forward(x, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
            return F.cross_entropy(model(x), y)

    for step in range(steps):
        loss = through(forward, *batch(step, dtype))
        losses.append(loss.detach())
        take_backward(loss / every, scaler)
        if (step + 1) % every == 0:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return [*model.state_dict().values(), torch.stack(losses)]


def plain(loss, scaler):
    loss.backward()


def scaled(loss, scaler):
    scaler.scale(loss).backward()


def directly(forward, *batch, **named):
    return forward(*batch, **named)


@pytest.mark.parametrize("take_backward", [plain, scaled])
@pytest.mark.parametrize("every", [1, 4])
def test_gradients_of_whole_batches_are_bitwise_those_of_their_own_backward(take_backward, every):
    expected = trained(directly, take_backward, every=every)
    memory = runtime.preset("16gb")
    found = trained(memory.loss, take_backward, every=every)
    assert all(map(torch.equal, found, expected))


def test_a_division_by_three_rounds_at_the_first_call_only():
    model = network()

    def gradient(loss):
        (loss / 3).backward()
        found, model[0].weight.grad = model[0].weight.grad, None
        return found

    def forward(x, y):
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb")
    pairs = [(gradient(memory.loss(forward, *batch(n))), gradient(forward(*batch(n)))) for n in range(4)]
    torch.testing.assert_close(*pairs[0], rtol=1e-5, atol=1e-8)
    assert all(torch.equal(*pair) for pair in pairs[1:])


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_of_parts_are_those_of_the_whole_batch(every):
    expected = trained(directly, plain, torch.float64, every=every)
    memory = runtime.preset("16gb", micro_batches=4)
    found = trained(memory.loss, plain, torch.float64, every=every)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert "4 micro-batches" in str(memory.report())


def test_half_precision_keeps_gradients_that_underflow_without_a_scale():
    model = network()

    def forward(x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            return F.cross_entropy(model(x), y) * 1e-6

    def gradient(loss):
        torch.amp.GradScaler("cpu").scale(loss).backward()
        found, model[0].weight.grad = model[0].weight.grad, None
        return found

    expected = gradient(forward(*batch(1)))
    memory = runtime.preset("16gb", micro_batches=2)
    found = gradient(memory.loss(forward, *batch(1)))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-5)
    assert found.count_nonzero() == expected.count_nonzero() > 0


def test_an_overflow_reaches_the_scaler_which_skips_the_step():
    def steps_skipped(through):
        model, scaler = network(), torch.amp.GradScaler("cpu")
        before, skipped = model[0].weight.detach().clone(), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

        def forward(x, y):
            with torch.autocast("cpu", dtype=torch.float16):
                return F.cross_entropy(model(x), y) * 1e4

        while torch.equal(model[0].weight, before):
            scaler.scale(through(forward, *batch(1))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += 1
        return skipped - 1

    # the scale that made it overflow is known one call late
    assert steps_skipped(runtime.preset("16gb").loss) == steps_skipped(directly) + 1 > 2


def test_a_batch_that_runs_out_of_memory_goes_on_in_parts(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def forward(x):
        return model(x).pow(2).mean()

    x = torch.randn(512, 64)
    forward(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    memory = runtime.preset("16gb")
    with SimulatedCard(budget_bytes=1_500_000), caplog.at_level(logging.WARNING, "oomfix"):
        loss = memory.loss(forward, x)
        loss.backward()
    assert "goes on in" in caplog.text
    assert memory.report().retries > 0
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-8)


def test_gradients_wait_for_their_backward():
    model = network(torch.float64)
    reference = copy.deepcopy(model)

    def loss_of(model, x, y):
        return F.cross_entropy(model(x), y)

    def penalty(model):
        return 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())

    earlier = [torch.randn_like(parameter) for parameter in model.parameters()]
    for one, other, gradient in zip(model.parameters(), reference.parameters(), earlier, strict=True):
        one.grad, other.grad = gradient.clone(), gradient.clone()
    memory = runtime.preset("16gb", micro_batches=3)
    loss = memory.loss(lambda x, y: loss_of(model, x, y), *batch(1, torch.float64))
    assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), earlier))
    (2 * loss + penalty(model)).backward()
    (2 * loss_of(reference, *batch(1, torch.float64)) + penalty(reference)).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)


def test_each_call_passes_its_own_gradients_on():
    model = network(torch.float64)
    reference = copy.deepcopy(model)

    def forward(x, y):
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb", micro_batches=3)
    one, other = memory.loss(forward, *batch(1, torch.float64)), memory.loss(forward, *batch(2, torch.float64))
    (2 * one - 3 * other).backward()
    for factor, seed in ((2, 1), (-3, 2)):
        x, y = batch(seed, torch.float64)
        (factor * F.cross_entropy(reference(x), y)).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-13)


def test_what_is_returned_beside_the_loss_is_that_of_the_whole_batch():
    model, (x, y) = network(), batch(1)

    def forward(x, y):
        out = model(x)
        return {"loss": F.cross_entropy(out, y), "out": out}

    result = runtime.preset("16gb", micro_batches=4).loss(forward, x, y)
    assert result["loss"].requires_grad and not result["out"].requires_grad
    torch.testing.assert_close(result["out"], model(x).detach())


def test_a_second_backward_is_refused():
    model = network()
    loss = runtime.preset("16gb").loss(lambda x, y: F.cross_entropy(model(x), y), *batch(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_an_input_with_a_graph_gets_its_gradient():
    encoder, head = network(torch.float64), nn.Linear(4, 4).double()
    reference = copy.deepcopy(encoder), copy.deepcopy(head)
    x, y = batch(1, torch.float64)
    memory = runtime.preset("16gb", micro_batches=3)
    (3 * memory.loss(lambda h, y: F.cross_entropy(head(h), y), encoder(x), y)).backward()
    (3 * F.cross_entropy(reference[1](reference[0](x)), y)).backward()
    for model, expected in zip((encoder, head), reference, strict=True):
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)


def test_a_layer_that_comes_later_waits_too():
    model = network()

    def forward(x, y):
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb")
    for _ in range(4):
        memory.loss(forward, *batch(1)).backward()
    model.append(nn.Linear(4, 4))
    loss = memory.loss(forward, *batch(1))
    assert model[-1].weight.grad is None
    (2 * loss).backward()
    found, model[-1].weight.grad = model[-1].weight.grad, None
    (2 * forward(*batch(1))).backward()
    assert torch.equal(found, model[-1].weight.grad)


def test_a_model_with_a_hook_runs_as_it_is_written(caplog):
    model, seen = network(), []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient))
    memory = runtime.preset("16gb", micro_batches=4)
    with caplog.at_level(logging.WARNING, "oomfix"):
        memory.loss(lambda x, y: F.cross_entropy(model(x), y), *batch(1)).backward()
    assert len(seen) == 1 and torch.equal(seen[0], model[0].weight.grad)
    assert "'weight' has a hook" in caplog.text


def test_a_hook_outside_of_models_is_refused():
    weight = torch.randn(6, 4, requires_grad=True)
    weight.register_hook(lambda gradient: 2 * gradient)
    memory = runtime.preset("16gb")
    with pytest.raises(RuntimeError, match="a tensor with a hook"):
        memory.loss(lambda x, y: F.cross_entropy(x @ weight, y), *batch(1))
    assert weight.grad is None


def test_off_runs_the_forward_and_nothing_else():
    model = network()

    def forward(x, y):
        out = model(x)
        return F.cross_entropy(out, y), out

    loss, out = runtime.preset("off").loss(forward, *batch(1))
    assert out.requires_grad
    loss.backward()
    assert model[0].weight.grad is not None


def test_windows_of_the_manager_are_refused():
    model = network()
    memory = runtime.preset("16gb")
    with pytest.raises(RuntimeError, match=r"memory\.accumulate"):
        for x, y in memory.accumulate([batch(1), batch(2)], 2):
            memory.loss(lambda x, y: F.cross_entropy(model(x), y), x, y)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_accelerate_runs_the_backward(micro_batches):
    accelerate = pytest.importorskip("accelerate")

    def run(through):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def forward(x, y):
            return F.cross_entropy(model(x), y)

        for step in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(through(forward, *batch(step)))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return list(model.state_dict().values())

    expected = run(directly)
    found = run(runtime.preset("16gb", micro_batches=micro_batches).loss)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0 if micro_batches == 1 else 1e-5, atol=0 if micro_batches == 1 else 1e-7
        )


class ClippedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.005, 0.005)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_backward_that_is_not_linear_meets_what_it_would(micro_batches):
    model = network(torch.float64)
    reference = copy.deepcopy(model)

    def loss_of(model, x, y):
        return F.cross_entropy(ClippedInBackward.apply(model(x)), y, reduction="sum")

    memory = runtime.preset("16gb", micro_batches=micro_batches)
    for seed in range(3):
        memory.loss(lambda x, y: loss_of(model, x, y), *batch(seed, torch.float64)).backward()
        loss_of(reference, *batch(seed, torch.float64)).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)


def test_gradients_with_a_graph_are_refused():
    model = network()
    loss = runtime.preset("16gb").loss(lambda x, y: F.cross_entropy(model(x), y), *batch(1))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_runs_as_it_is_written(context):
    model = network()
    with context():
        loss = runtime.preset("16gb").loss(lambda x, y: F.cross_entropy(model(x), y), *batch(1))
    assert loss == F.cross_entropy(model(batch(1)[0]), batch(1)[1])


def test_a_factor_of_next_to_nothing_is_not_what_the_next_call_is_computed_with():
    model = network()

    def forward(x, y):
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb", micro_batches=3)
    (memory.loss(forward, *batch(1)) * 1e-42).backward()
    model.zero_grad()
    memory.loss(forward, *batch(1)).backward()
    found, model[0].weight.grad = model[0].weight.grad, None
    forward(*batch(1)).backward()
    torch.testing.assert_close(found, model[0].weight.grad)


def assert_trains_the_same(run):
    expected = run(directly)
    memory = runtime.preset("16gb", micro_batches=3)
    for one, other in zip(run(memory.loss), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert "3 micro-batches" in str(memory.report())


@pytest.mark.slow
def test_a_training_step_of_lightning_returns_it():
    lightning = pytest.importorskip("lightning.pytorch")
    samples = [sample for seed in range(6) for sample in zip(*batch(seed), strict=True)]

    def run(through):
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = network()

            def training_step(self, batch, number):
                return through(lambda x, y: F.cross_entropy(self.net(x), y), *batch)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        module = Module()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_epochs": 2}
        trainer = lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **options)
        trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=SAMPLES))
        return list(module.net.state_dict().values())

    assert_trains_the_same(run)


@pytest.mark.slow
def test_the_compute_loss_of_a_trainer_of_transformers_returns_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    samples = [{"x": x, "labels": y} for seed in range(6) for x, y in zip(*batch(seed), strict=True)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.net(x), labels)}

    def run(through):
        class Trainer(transformers.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return through(lambda **named: model(**named)["loss"], **inputs)

        model = Model()
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 0.01, "optim": "sgd"}
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=SAMPLES, **quiet, **options
        )
        Trainer(model, arguments, train_dataset=samples).train()
        return list(model.state_dict().values())

    assert_trains_the_same(run)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_that_overflow_at_first_are_computed_without_a_scale(micro_batches, autocast):
    """As where nothing scales the loss, and nothing skips the step."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.0), nn.Linear(16, 4)).half()
    reference = copy.deepcopy(model)
    x, y = batch(1)
    memory = runtime.preset("16gb", micro_batches=micro_batches)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = memory.loss(lambda x, y: F.cross_entropy(model(x).float(), y) * 3, x.half(), y)
        loss.backward()
        if micro_batches == 1:
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                expected = F.cross_entropy(reference(x.half()).float(), y) * 3
            expected.backward()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
            assert all(map(torch.equal, model.buffers(), reference.buffers()))
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model[1].num_batches_tracked == 2
