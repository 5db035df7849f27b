"""Wrong arguments: every public entry names the argument, the value, and what was expected."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import presets, runtime

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))
NET = nn.Linear(6, 4)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
LOSS = "expected the loss as a tensor with one number, alone, first in a tuple, or under 'loss'"
FUNCTION = "expected a function that returns the loss"
NORM = "expected a norm above 0, or None"
COUNT = "expected a whole number of batches, at least 1"
OPTIMIZER = "expected an optimizer, or a wrapper with `step` around one"


def loss(x):
    return NET(x).pow(2).mean()


class Wrapper:
    """Steps, but holds no parameters anywhere."""

    def step(self):
        pass


class Closing(torch.optim.SGD):
    """Needs a closure, as LBFGS does."""

    def step(self, closure):
        closure()


REFUSED = {
    "no forward": (lambda m: m.forward_backward(None, X), TypeError, f"forward: got None, {FUNCTION}"),
    "a loss for a forward": (
        lambda m: m.forward_backward(loss(X)),
        TypeError,
        f"forward: got a tensor, {FUNCTION}; memory.backward(loss) takes a loss",
    ),
    "a forward without a loss": (
        lambda m: m.forward_backward(NET, X),
        ValueError,
        f"forward: returned a tensor of shape (8, 4), {LOSS}",
    ),
    "a forward that returns nothing": (
        lambda m: m.forward_backward(lambda x: None, X),
        ValueError,
        f"forward: returned NoneType, {LOSS}",
    ),
    "a float for a loss": (
        lambda m: m.forward_backward(lambda x: float(loss(x)), X),
        ValueError,
        f"forward: returned float, {LOSS}",
    ),
    "batch_size 0": (
        lambda m: m.forward_backward(loss, X, batch_size=0),
        ValueError,
        "batch_size: got 0, expected a whole number of at least 1, or None",
    ),
    "batch_size as text": (
        lambda m: m.evaluate(loss, X, batch_size="8"),
        ValueError,
        "batch_size: got '8', expected a whole number",
    ),
    "no evaluation": (lambda m: m.evaluate(None, X), TypeError, "forward: got None, expected a function"),
    "no model to call": (lambda m: m.forward(None, X), TypeError, "model: got None, expected a model or a function"),
    "a number for a loss": (
        lambda m: m.backward(1.0),
        TypeError,
        "loss: got 1.0, expected a tensor with one number; a loss made with .item() or float() has no graph",
    ),
    "a loss of many numbers": (
        lambda m: m.backward(NET(X)),
        ValueError,
        "loss: got a tensor of shape (8, 4), expected one number: take its mean or sum, or pass gradient=",
    ),
    "a detached loss": (
        lambda m: m.backward(loss(X).detach()),
        ValueError,
        "loss: got a tensor without a graph (requires_grad is False)",
    ),
    "no optimizer": (lambda m: m.step(None), TypeError, f"optimizer: got None, {OPTIMIZER}"),
    "a model for an optimizer": (lambda m: m.step(NET), TypeError, f"optimizer: got Linear, {OPTIMIZER}"),
    "a class for an optimizer": (lambda m: m.step(torch.optim.SGD), TypeError, f"optimizer: got type, {OPTIMIZER}"),
    "a wrapper around nothing": (
        lambda m: m.step(Wrapper()),
        TypeError,
        "optimizer: got Wrapper, expected an object with param_groups, or around one",
    ),
    "LBFGS": (
        lambda m: m.step(torch.optim.LBFGS(NET.parameters())),
        TypeError,
        "optimizer: LBFGS.step needs 'closure'",
    ),
    "an optimizer of one's own with a closure": (
        lambda m: m.step(Closing(NET.parameters(), lr=0.1)),
        TypeError,
        "optimizer: Closing.step needs 'closure'",
    ),
    "a norm for a scheduler": (
        lambda m: m.step(SGD, 1.0),
        TypeError,
        "schedulers: got 1.0, expected learning rate schedulers; a norm is clip_norm=1.0",
    ),
    "a scheduler that needs a metric": (
        lambda m: m.step(SGD, torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)),
        TypeError,
        "schedulers: ReduceLROnPlateau.step needs 'metrics'; call scheduler.step(metrics) by yourself",
    ),
    "a scheduler for an optimizer": (
        lambda m: m.step(torch.optim.lr_scheduler.StepLR(SGD, 1)),
        TypeError,
        "optimizer: got StepLR, expected an optimizer; schedulers come after it",
    ),
    "a scheduler with a metric for an optimizer": (
        lambda m: m.step(torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)),
        TypeError,
        "optimizer: got ReduceLROnPlateau, expected an optimizer; schedulers come after it",
    ),
    "a second optimizer for a scheduler": (
        lambda m: m.step(SGD, torch.optim.SGD(NET.parameters(), lr=0.1)),
        TypeError,
        "schedulers: got SGD, expected learning rate schedulers; each optimizer has a memory.step of its own",
    ),
    "a negative norm": (lambda m: m.step(SGD, clip_norm=-1), ValueError, f"clip_norm: got -1, {NORM}"),
    "no norm": (lambda m: m.step(SGD, clip_norm=0.0), ValueError, f"clip_norm: got 0.0, {NORM}"),
    "a norm that is NaN": (lambda m: m.step(SGD, clip_norm=float("nan")), ValueError, f"clip_norm: got nan, {NORM}"),
    "a norm as text": (lambda m: m.step(SGD, clip_norm="1"), TypeError, f"clip_norm: got '1', {NORM}"),
    "a norm as a flag": (lambda m: m.step(SGD, clip_norm=True), TypeError, f"clip_norm: got True, {NORM}"),
    "nothing to unscale": (lambda m: m.unscale_(None), TypeError, f"optimizer: got None, {OPTIMIZER}"),
    "a model to unscale": (lambda m: m.unscale_(NET), TypeError, f"optimizer: got Linear, {OPTIMIZER}"),
    "nothing to clear": (
        lambda m: m.zero_grad(None),
        TypeError,
        "optimizer: got None, expected an optimizer or a model, with zero_grad",
    ),
    "a loader that is none": (
        lambda m: m.accumulate(5, 2),
        TypeError,
        "loader: got 5, expected an iterable of batches",
    ),
    "windows of 0": (lambda m: m.accumulate([X], 0), ValueError, f"k: got 0, {COUNT}"),
    "windows of 1.5": (lambda m: m.accumulate([X], 1.5), ValueError, f"k: got 1.5, {COUNT}"),
    "windows without end": (lambda m: m.accumulate([X], float("inf")), ValueError, f"k: got inf, {COUNT}"),
    "windows of True": (lambda m: m.accumulate([X], True), ValueError, f"k: got True, {COUNT}"),
    "no model": (lambda m: m.prepare(None), TypeError, "model: got NoneType, expected a torch.nn.Module"),
    "no device": (
        lambda m: m.autocast("gpu"),
        ValueError,
        "device_type: got 'gpu', expected the type of a device, as 'cuda' or 'cpu'",
    ),
    "a device with a number": (
        lambda m: m.autocast("cuda:0"),
        ValueError,
        "device_type: got 'cuda:0', expected the type",
    ),
    "a device that is no text": (
        lambda m: m.autocast(torch.device("cpu")),
        TypeError,
        "device_type: got device(type='cpu'), expected the type of a device",
    ),
    "dtype as text": (
        lambda m: m.autocast("cpu", "bf16"),
        TypeError,
        "dtype: got 'bf16', expected a torch.dtype, or None",
    ),
    "a preset of another size": (
        lambda m: runtime.preset("17gb"),
        ValueError,
        "preset: got '17gb', expected one of '8gb', '12gb'",
    ),
    "a preset as a number": (lambda m: runtime.preset(16), TypeError, "preset: got 16, expected one of '8gb'"),
    "a policy as text": (
        lambda m: runtime.preset("16gb", micro_batches="2"),
        TypeError,
        "micro_batches: got '2', expected a whole number of at least 1, or \"auto\"",
    ),
    "a policy that there is not": (
        lambda m: runtime.preset("16gb", microbatches=2),
        TypeError,
        "preset override: got 'microbatches'",
    ),
    "a manager of a name": (
        lambda m: runtime.MemoryManager("16gb"),
        TypeError,
        "preset: got '16gb', expected a Preset; runtime.preset(\"16gb\") makes a manager of a name",
    ),
}


@pytest.mark.parametrize("preset", ["16gb", "off"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name(name, preset):
    call, kind, message = REFUSED[name]
    memory = runtime.preset(preset)
    before = NET.weight.detach().clone()
    with pytest.raises(kind) as refused:
        call(memory)
    assert message in str(refused.value)
    assert torch.equal(NET.weight, before)


@pytest.mark.parametrize("clip_norm", [1, 0.5, float("inf")])
def test_near_misses_are_taken(clip_norm):
    memory = runtime.preset("16gb")
    net = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    memory.forward_backward(lambda x, y: F.cross_entropy(net(x), y), X, Y, batch_size=8)
    memory.step(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), clip_norm=clip_norm)
    memory.backward(net(X), gradient=torch.ones(8, 4))
    memory.zero_grad(net)
    assert net.weight.grad is None
    with memory.autocast("cpu", torch.bfloat16, enabled=False):
        pass
    assert [len(batch) for batch in memory.accumulate(iter([X]), 2)] == [8]
    assert runtime.MemoryManager(presets.get("8gb")).preset.name == "8gb"


def test_a_batch_size_that_nothing_has_is_refused_and_what_there_is_is_named():
    net, x = torch.nn.Linear(4, 3), torch.randn(16, 4)
    with pytest.raises(ValueError, match=r"batch_size: got 8, expected .* \(found 16\)"):
        runtime.preset("16gb").forward_backward(lambda x: net(x).mean(), x, batch_size=8)
    runtime.preset("16gb").forward_backward(lambda: net(x).mean(), batch_size=8)  # its batch is not given


@pytest.mark.parametrize("overrides", [{}, {"micro_batches": 2}])
def test_an_evaluation_refuses_what_a_training_call_does(overrides):
    memory = runtime.preset("16gb", **overrides)
    with pytest.raises(TypeError, match="forward: got 3"):
        memory.evaluate(3, X)
    with pytest.raises(ValueError, match="batch_size: got 0"):
        memory.evaluate(lambda x: x, X, batch_size=0)
