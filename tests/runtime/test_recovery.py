"""Running out of memory leaves no trace: bitwise the run that started at the size that fits."""

import copy
import gc
import random
import sys
import types
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime import splitter
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.memory.oom import DoesNotFitError, free_what_is_left, is_out_of_memory, smallest_graph
from tests.runtime.through import through


class Trouble(torch.autograd.Function):
    """Runs out of memory in forward or backward where the batch has more than `limit` rows."""

    where, limit, error = None, 10**9, None

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        if Trouble.where == "forward" and len(x) > Trouble.limit:
            raise type(Trouble.error)(str(Trouble.error))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Trouble.where == "backward" and ctx.rows > Trouble.limit:
            raise type(Trouble.error)(str(Trouble.error))
        return gradient


@pytest.fixture(autouse=True)
def no_trouble():
    Trouble.where, Trouble.limit, Trouble.error = None, 10**9, OutOfMemoryError("CUDA out of memory. Tried to ...")
    yield
    Trouble.where = None


class Net(nn.Module):
    """Everything that a failed run may change: dropout, running statistics, a criterion with parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.second(Trouble.apply(self.dropout(x)))


class Centers(nn.Module):
    """A criterion with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 4))

    def forward(self, out, y):
        return F.cross_entropy(out, y) + 0.1 * (out - self.centers[y]).pow(2).mean()


def train(steps=4, size=12, calls_per_step=1, clip=None, **overrides):
    """Returns everything that training has produced, with the numbers that random generators are at."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    runtime.reset()
    memory = runtime.preset("16gb", **overrides)
    model, criterion = Net(), Centers()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)
    losses = []

    def forward(x, y):
        noise = torch.tensor(random.random() + np.random.rand())
        return criterion(model(x) + 0.01 * noise, y)

    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(calls_per_step):
            x = torch.randn(size, 6, generator=generator)
            y = torch.randint(0, 4, (size,), generator=generator)
            losses.append(memory.forward_backward(forward, x, y))
        memory.step(optimizer)
    state = [*model.state_dict().values(), *criterion.state_dict().values(), torch.stack(losses), torch.rand(3)]
    return [*state, torch.tensor([random.random(), np.random.rand()])]


def assert_bitwise(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


ERRORS = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.35 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:30])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_recovery_is_bitwise_the_run_that_started_small(where, error):
    expected = train(micro_batches=4)
    Trouble.where, Trouble.limit, Trouble.error = where, 3, error
    # the first guess is 2 micro-batches of 6, then 4 of 3
    assert_bitwise(train(), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_calls_of_a_window_survive_a_failure_in_a_later_one(where):
    expected = train(calls_per_step=3, micro_batches=4)
    Trouble.where, Trouble.limit = where, 3
    assert_bitwise(train(calls_per_step=3), expected)


def test_a_late_failure_puts_the_gradients_of_a_window_back(relative_error):
    model = Net().eval().double()
    reference = copy.deepcopy(model)
    memory = runtime.preset("16gb")
    for call in range(3):
        x, y = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
        F.cross_entropy(reference(x), y).backward()
        Trouble.where, Trouble.limit = ("backward", 3) if call == 2 else (None, 0)
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        Trouble.where = None
    assert relative_error(model, reference) < 1e-12


def test_an_input_that_requires_grad_is_put_back():
    model = Net().eval()
    x, y = torch.randn(12, 6, requires_grad=True), torch.randint(0, 4, (12,))
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x])
    Trouble.where, Trouble.limit = "backward", 3
    runtime.preset("16gb").forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert torch.allclose(x.grad, expected, atol=1e-6)


def test_other_errors_go_to_the_caller_with_gradients_as_they_were():
    model = Net().eval()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    x, y = torch.randn(12, 6), torch.randint(0, 4, (12,))
    Trouble.where, Trouble.limit, Trouble.error = "backward", 3, ArithmeticError("not about memory")
    with pytest.raises(ArithmeticError, match="not about memory"):
        runtime.preset("16gb").forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert model.second.weight.grad is None


def test_errors_that_mention_memory_otherwise_are_not_taken_for_it():
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(DoesNotFitError("final"))
    assert is_out_of_memory(OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_frame_of_the_failure_is_alive_when_the_second_try_begins(where):
    """Measured without the garbage collector: its run would hide frames that only cycles keep."""
    model, alive = Net(), []
    x, y = torch.randn(12, 6), torch.randint(0, 4, (12,))

    class Activation:
        pass

    def forward(x, y):
        alive.append([reference for reference in alive_references if reference() is not None])
        activation = Activation()
        alive_references.append(weakref.ref(activation))
        return F.cross_entropy(model(x), y)

    alive_references = []
    Trouble.where, Trouble.limit = where, 6
    gc.disable()
    try:
        runtime.preset("16gb").forward_backward(forward, x, y)
    finally:
        gc.enable()
    assert all(not references for references in alive)


def test_memory_is_freed_when_the_error_is_no_longer_handled(monkeypatch):
    """Inside of the `except`, its traceback would keep the tensors of the frames that failed."""
    handled = []

    def free(thorough=False):
        handled.append(sys.exc_info()[1])
        free_what_is_left(thorough)

    monkeypatch.setattr(splitter, "free_what_is_left", free)
    model = Net().eval()
    Trouble.where, Trouble.limit = "backward", 3
    runtime.preset("16gb").forward_backward(
        lambda x, y: F.cross_entropy(model(x), y), torch.randn(12, 6), torch.randint(0, 4, (12,))
    )
    assert handled == [None, None]


def test_the_cache_of_the_card_is_emptied_once_for_each_failure(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(gc.isenabled()))
    free_what_is_left()
    assert len(emptied) == 1


def test_sizes_that_follow_free_memory_are_told_and_how_to_make_them_repeatable(caplog):
    model = Net().eval()
    Trouble.where, Trouble.limit = "backward", 6
    memory = runtime.preset("16gb")
    for _ in range(3):
        memory.forward_backward(
            lambda x, y: F.cross_entropy(model(x), y), torch.randn(12, 6), torch.randint(0, 4, (12,))
        )
    told = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(told) == 1
    assert "goes on in 2 micro-batches" in told[0] and "micro_batches=N makes runs repeatable" in told[0]


def test_what_was_ready_to_run_in_a_failed_backward_is_freed():
    """Autograd keeps operations that were ready when another one failed, with all that they saved, until it runs on."""

    def fail(gradient):
        raise OutOfMemoryError("CUDA out of memory")

    with SimulatedCard() as card:
        x = torch.randn(64, 64, requires_grad=True)
        before = card.current_bytes
        loss = x.exp().sum() + through(fail)(x).sum()
        with pytest.raises(OutOfMemoryError):
            loss.backward()
        del loss
        free_what_is_left()
        assert card.current_bytes == before


@pytest.mark.parametrize("here", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_what_frees_it_may_be_imported_anywhere(here):
    with here():
        leaf, result = smallest_graph()
    assert result.device.type == "cpu"
    assert torch.autograd.grad(result, leaf)[0] == 1


def test_the_optimizer_step_is_never_tried_twice():
    class Failing(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            Failing.steps += 1
            raise OutOfMemoryError("CUDA out of memory in step")

    model = Net()
    optimizer = Failing(model.parameters(), lr=0.1)
    memory = runtime.preset("16gb")
    forward_batch = (torch.randn(12, 6), torch.randint(0, 4, (12,)))
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *forward_batch)
    with pytest.raises(OutOfMemoryError, match="in step"):
        memory.step(optimizer)
    assert Failing.steps == 1


def test_a_sample_that_does_not_fit_says_what_to_do():
    model = Net().eval()
    before = copy.deepcopy(model.state_dict())
    Trouble.where, Trouble.limit = "backward", 0
    with pytest.raises(DoesNotFitError, match=r"1 sample\(s\) at a time .*smaller samples") as caught:
        runtime.preset("16gb").forward_backward(
            lambda x, y: F.cross_entropy(model(x), y), torch.randn(12, 6), torch.randint(0, 4, (12,))
        )
    assert isinstance(caught.value, OutOfMemoryError)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_coupled_batch_that_does_not_fit_names_the_choices():
    model = Net().eval()
    Trouble.where, Trouble.limit = "backward", 3
    with pytest.raises(DoesNotFitError, match=r"depend on each other.*split='always'"):
        runtime.preset("16gb").forward_backward(lambda x: model(x).std(0).mean(), torch.randn(12, 6))


def test_a_second_try_that_fits_with_nothing_switched_on_is_told_as_such(caplog):
    model = nn.Linear(6, 4)
    with SimulatedCard() as card:
        card.track(model)
        card.fail_at(2)
        runtime.preset("16gb").forward_backward(lambda x: model(x).std(0).mean(), torch.randn(12, 6))
    assert "its second try fitted all the same." in caplog.text
    assert "goes on with" not in caplog.text


class Deep(nn.Module):
    """Blocks to checkpoint."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x)


def test_a_coupled_batch_is_checkpointed_before_anything_is_given_up(relative_error, caplog):
    model = Deep().double()
    reference = copy.deepcopy(model)
    x = torch.randn(1024, 32).double()

    def loss(model, x):
        return model(x).std(0).mean()

    with SimulatedCard() as card:
        card.track(model)
        loss(reference, x).backward()
    # between what the batch takes with and without checkpointing
    with SimulatedCard(budget_bytes=int(0.7 * card.peak_bytes)) as small:
        small.track(model, x)
        runtime.preset("16gb", precision="fp32").forward_backward(lambda x: loss(model, x), x)
    assert "checkpointing 6 blocks" in caplog.text
    assert relative_error(model, reference) < 1e-12


@pytest.mark.parametrize("preset", ["16gb", "off"])
def test_evaluation_has_no_gradients_whole_or_in_pieces(preset):
    model, seen = nn.Linear(6, 4), []

    def forward(x):
        seen.append((len(x), torch.is_grad_enabled()))
        if preset != "off" and len(seen) == 1:
            raise OutOfMemoryError("CUDA out of memory.")
        return model(x)

    memory = runtime.preset(preset)
    result = memory.evaluate(forward, torch.randn(8, 6))
    assert len(result) == 8 and not result.requires_grad and model.weight.grad is None
    assert not any(enabled for _, enabled in seen)
    assert (len(seen) > 1) == (preset != "off")


def test_evaluation_goes_on_in_pieces_with_the_results_of_the_whole():
    model = Net().eval()
    x, y = torch.randn(13, 6), torch.randint(0, 4, (13,))
    y[:3] = -100

    def forward(x, y):
        out = model(x)
        return out, F.cross_entropy(out, y), (out.argmax(1) == y).sum(), [int(label) for label in y]

    with torch.no_grad():
        expected = forward(x, y)
    Trouble.where, Trouble.limit = "forward", 3
    out, loss, correct, listed = runtime.preset("16gb").evaluate(forward, x, y)
    assert torch.allclose(out, expected[0], atol=1e-6)
    assert torch.allclose(loss, expected[1], atol=1e-6)
    assert torch.equal(correct, expected[2])
    assert listed == expected[3]
    assert not out.requires_grad
    assert model.first.weight.grad is None


def test_memory_that_is_really_held_is_recovered_from(relative_error):
    """A batch 16 times what the card holds."""
    model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 4)).double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(256, 8).double(), torch.randint(0, 4, (256,))
    with SimulatedCard() as card:
        F.cross_entropy(reference(x), y).backward()
    sizes = []

    def forward(x, y):
        sizes.append(len(x))
        return F.cross_entropy(model(x), y)

    static_bytes = 5 * sum(parameter.numel() * 8 for parameter in model.parameters())
    with SimulatedCard(budget_bytes=static_bytes + card.peak_bytes // 16) as small:
        small.track(model)
        runtime.preset("16gb").forward_backward(forward, x, y)
    assert max(sizes[-4:]) <= 32
    assert relative_error(model, reference) < 1e-12


def trained_with_trouble_at_the_third_call(place):
    """Parameters after five calls, of which the third runs out of memory before or after its forward has drawn."""
    torch.manual_seed(0)
    runtime.reset()
    model, memory = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 4)), runtime.preset("16gb")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(12, 6), torch.randint(0, 4, (12,))

    def forward(x, y):
        if place == "before":
            return F.cross_entropy(model(Trouble.apply(x)), y)
        return F.cross_entropy(Trouble.apply(model(x)), y)

    for call in range(1, 6):
        Trouble.where, Trouble.limit = "forward", 6 if call == 3 else 10**9
        memory.forward_backward(forward, x, y)
        memory.step(optimizer)
    assert memory.report().retries == 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_draws_are_put_back_at_calls_that_do_not_explore():
    before, after = map(trained_with_trouble_at_the_third_call, ("before", "after"))
    assert torch.equal(before, after)


def checkpointed(model, x):
    return checkpoint(lambda x: model[0](Trouble.apply(x)), x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("held", [False, True])
def test_leaves_inside_a_reentrant_checkpoint_are_put_back(held, relative_error):
    """Its backward is one of its own: nothing of the checkpointed layers is in the graph of the loss."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    x, y = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    reference = copy.deepcopy(model)

    def forward(x, y):
        return F.cross_entropy(model[1](checkpointed(model, x)), y)

    memory = runtime.preset("16gb")
    for call in range(3):
        if not held:
            model.zero_grad()
            reference.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        Trouble.where, Trouble.limit = ("backward", 5) if call == 2 else (None, 0)
        memory.forward_backward(forward, x, y)
    assert memory.report().retries
    assert relative_error(model, reference) < 1e-12


@pytest.mark.parametrize("windows", [False, True])
def test_leaves_inside_a_reentrant_checkpoint_are_corrected(windows, relative_error):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    x, y = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    y[:5] = -100
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(x), y).backward()

    def forward(x, y):
        return F.cross_entropy(model[1](checkpointed(model, x)), y)

    memory = runtime.preset("16gb", micro_batches=3)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])] if windows else [(x, y)]
    for batch in memory.accumulate(batches, len(batches)):
        memory.forward_backward(forward, *batch)
    assert relative_error(model, reference) < 1e-12


@pytest.mark.parametrize("refused", [3, 9])
def test_a_layer_that_came_between_two_calls_keeps_its_earlier_gradient(refused, relative_error):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, memory = torch.randn(12, 6).double(), runtime.preset("16gb")

    def forward(x):
        return model(x).pow(2).mean()

    for _ in range(4):
        memory.forward_backward(forward, x)
    model.zero_grad()
    model[2] = nn.Linear(8, 4).double()
    reference = copy.deepcopy(model)
    (2 * reference(x).pow(2).mean()).backward()
    memory.forward_backward(forward, x)  # the fifth call: neither this one nor the next looks at everything
    with SimulatedCard() as card:
        card.track(model)
        card.fail_at(refused)
        memory.forward_backward(forward, x)
    assert memory.report().retries == 1
    assert relative_error(model, reference) < 1e-12


@pytest.mark.parametrize("trains", [False, True])
def test_an_evaluation_in_pieces_warns_where_layers_normalise_by_the_batch(trains, caplog):
    norm, x = nn.BatchNorm1d(6).train(trains), torch.randn(12, 6)
    Trouble.where, Trouble.limit = "forward", 6
    memory = runtime.preset("16gb")
    memory.evaluate(lambda x: norm(Trouble.apply(x)), x)
    assert memory.report().retries == 1
    assert ("normalisation is by fewer samples" in caplog.text) == trains


def with_a_backward_of_its_own(model, begins=0):
    """Its own backward adds to the gradients that are there, before it may run out of memory; from a call on."""
    calls = []

    def forward(x):
        calls.append(len(x))
        if len(calls) > begins:
            model(x).mean().backward()
        return model(Trouble.apply(x)).pow(2).mean()

    return forward


@pytest.mark.parametrize("filled", [False, True], ids=["none before", "zeros before"])
def test_earlier_gradients_that_a_forward_writes_into_are_put_back(filled, monkeypatch, caplog):
    """Whether the call ends in an error or in a second try: as if it had never begun."""
    model, memory = nn.Linear(6, 4).double(), runtime.preset("16gb")
    forward, plain = with_a_backward_of_its_own(model), copy.deepcopy(model)
    as_written = with_a_backward_of_its_own(plain)
    first, second = torch.randn(4, 6).double(), torch.randn(12, 6).double()
    for parameter in (*model.parameters(), *plain.parameters()) if filled else ():
        parameter.grad = torch.zeros_like(parameter)
    memory.forward_backward(forward, first)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    Trouble.where, Trouble.limit = "forward", 4
    with pytest.raises(DoesNotFitError):
        memory.forward_backward(forward, second)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    monkeypatch.setattr(splitter, "free_what_is_left", lambda thorough: setattr(Trouble, "where", None))
    memory = runtime.preset("16gb", clip_norm=1.0)
    memory.forward_backward(forward, first)
    Trouble.where = "forward"
    memory.forward_backward(forward, second)
    Trouble.where = None
    for batch in (first, first, second):
        as_written(batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    assert "gradients of earlier calls" not in caplog.text


def test_earlier_gradients_that_a_forward_writes_into_for_the_first_time_are_named(caplog):
    model, memory = nn.Linear(6, 4), runtime.preset("16gb")
    forward = with_a_backward_of_its_own(model, begins=1)
    memory.forward_backward(forward, torch.randn(4, 6))
    Trouble.where, Trouble.limit = "forward", 4
    with pytest.raises(DoesNotFitError):
        memory.forward_backward(forward, torch.randn(12, 6))
    assert "gradients of earlier calls" in caplog.text


def test_a_forward_that_comes_to_fail_on_parts_alone_runs_whole_from_then_on(relative_error, caplog):
    """Weights that the loop made for the whole batch, under a test of their own, meet a part of it."""
    model = nn.Linear(4, 3).double()
    reference = copy.deepcopy(model)
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)
    weights = torch.rand(6).double()
    for step in range(6):
        x, y = torch.randn(6, 4).double(), torch.randint(0, 3, (6,))

        def forward(x, y, network=model, is_weighed=step == 4):
            losses = F.cross_entropy(network(x), y, reduction="none")
            return (losses * weights).mean() if is_weighed else losses.mean()

        memory.forward_backward(forward, x, y)
        forward(x, y, reference).backward()
        assert relative_error(model, reference) < 1e-12
        model.zero_grad()
        reference.zero_grad()
    assert "it fails on" in caplog.text


def test_an_error_of_the_program_goes_on_to_the_caller_from_a_split_call_too():
    model = nn.Linear(4, 3)
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)

    def forward(x, fails=False):
        if fails:
            raise ValueError("no such label")
        return model(x).mean()

    memory.forward_backward(forward, torch.randn(6, 4))
    before = model.weight.grad.clone()
    with pytest.raises(ValueError, match="no such label"):
        memory.forward_backward(forward, torch.randn(6, 4), True)
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(
    ("parts", "error"),
    [("auto", KeyboardInterrupt), ("auto", ZeroDivisionError), (3, KeyboardInterrupt), (3, SystemExit)],
)
def test_an_error_in_the_middle_of_a_batch_leaves_everything_as_it_was_before_the_call(parts, error, call):
    """Statistics that some micro-batches have updated and numbers that they drew would be counted twice."""
    memory, model = runtime.preset("16gb", micro_batches=parts), Net().double()
    x, y, hidden = torch.randn(12, 6).double(), torch.arange(12) % 4, types.SimpleNamespace(last=None)

    def forward(x, y):
        out = model(x)
        hidden.last = out.detach().mean()
        if failing and (x[0] == rows[4 if parts == 3 else 0]).all():
            raise error("in the middle")
        return F.cross_entropy(out, y)

    failing, rows = False, x
    for _ in range(call - 1):
        memory.forward_backward(forward, x, y)
    failing, last = True, hidden.last
    before = [*map(torch.clone, model.state_dict().values()), torch.get_rng_state()]
    with pytest.raises(error, match="in the middle"):
        memory.forward_backward(forward, x, y)
    assert_bitwise([*model.state_dict().values(), torch.get_rng_state()], before)
    assert hidden.last is last
