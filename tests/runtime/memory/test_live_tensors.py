"""The report finds every byte that lives, says who holds it and where it was made, and what helps."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.memory import live_tensors, origins


def alive():
    """The tensors and modules that the collector sees, and the storages of those that hold memory."""
    gc.collect()
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor | nn.Module)]
    # fake ones hold no memory, and torch 2.3 empties those that its compiler left
    real = [thing for thing in things if isinstance(thing, torch.Tensor) and not isinstance(thing, FakeTensor)]
    tensors = [tensor for tensor in real if tensor.layout is torch.strided]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return things, [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, FakeTensor)]


@pytest.fixture(scope="module")
def storages_before():
    """Those of what was imported, and of what other files left, which tests/conftest.py hides from the collector."""
    gc.unfreeze()
    things, storages = alive()
    gc.freeze()
    yield storages
    del things


def is_of_a_test(frame):
    return frame.f_code.co_filename == __file__


@pytest.fixture(autouse=True)
def nothing_else_alive(monkeypatch, storages_before):
    """What other tests left is not this test's business."""
    things, storages = alive()
    before = {id(thing) for thing in things}
    counted = {storage._cdata for storage in (*storages_before, *storages)}
    monkeypatch.setattr(origins, "_live", {})
    everything, initialise = gc.get_objects, live_tensors._Census.__init__
    frames_from = live_tensors._frames_from

    def with_those_counted(census, device_type):
        initialise(census, device_type)
        census._seen |= counted

    monkeypatch.setattr(gc, "get_objects", lambda: [thing for thing in everything() if id(thing) not in before])
    monkeypatch.setattr(live_tensors._Census, "__init__", with_those_counted)
    # what runs the tests refers to all of them, and to what each was given
    monkeypatch.setattr(live_tensors, "_frames_from", lambda frame: filter(is_of_a_test, frames_from(frame)))
    yield
    del things, storages  # alive until now, so that nothing new has their addresses


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return optimizer


def test_every_byte_on_the_card_is_found():
    with SimulatedCard() as card, runtime.record_origins():
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = trained(model)
        x = torch.ones(16, 8)
        loss = model(x).square().mean()
        report = runtime.oom_report()
        assert sum(report.by_role.values()) == card.current_bytes
    weights = nbytes(model.parameters())
    assert report.by_role["weights"] == report.by_role["gradients"] == weights
    assert report.by_role["optimizer state"] == 2 * weights + 4 * 4
    # the input, and the loss
    assert report.by_role["variables"] == 4 * (16 * 8 + 1)
    # what GELU read, what the second layer read, and what the square read
    assert report.by_role["kept for backward"] == 4 * (16 * 32 + 16 * 32 + 16 * 4)
    assert loss.grad_fn is not None and optimizer.state


def test_things_have_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 64))

        def forward(self, x):
            return self.block(x)

    model = Net()
    optimizer = trained(model)
    report = runtime.oom_report(top=50)
    names = {held.name for held in report.largest}
    assert "Net.block.0.weight" in names
    assert "gradient of Net.block.0.weight" in names
    assert "AdamW state of Net.block.0.weight" in names
    state = next(held for held in report.largest if held.name == "AdamW state of Net.block.0.weight")
    assert (state.count, state.nbytes) == (3, 2 * 4 * 8 * 64 + 4)
    assert optimizer.state


def test_what_autograd_keeps_is_listed_by_line():
    model = nn.Linear(8, 8)
    with runtime.record_origins():
        hidden = model(torch.ones(64, 8))
        loss = hidden.exp().sum()
    del hidden
    kept = [held for held in runtime.oom_report().largest if held.role == "kept for backward"]
    assert any(held.name.startswith("made by exp at ") and "test_live_tensors.py:" in held.name for held in kept)
    assert loss.grad_fn is not None


def test_what_a_compiler_has_left_is_no_memory():
    """Its tensors are shapes, some with sizes that are symbols, and stay for as long as what it compiled."""
    before = sum(runtime.oom_report().by_role.values())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    symbols = mode.from_tensor(torch.ones(6, 3), static_shapes=False, symbolic_context=sizes)
    with mode:
        numbers = torch.empty(2**20)
    assert sum(runtime.oom_report().by_role.values()) == before
    assert "MiB in tensors" in str(runtime.oom_report())
    del symbols, numbers


def test_what_is_left_of_fake_tensors_is_no_memory_and_no_error():
    """Torch 2.3 leaves such ones behind where it has compiled."""
    with FakeTensorMode():
        cleared = torch.empty(2**20)
    vars(cleared).clear()
    assert runtime.oom_report().by_role == {}
    del cleared


def test_the_frames_of_the_error_name_what_they_hold():
    def inner(x):
        wide = torch.cat([x, x, x])
        raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {wide.numel()} GiB.\nSecond line.")

    try:
        with runtime.record_origins():
            inner(torch.ones(1000))
    except OutOfMemoryError as error:
        report = runtime.oom_report(error)
    assert report.message == "CUDA out of memory. Tried to allocate 3000 GiB."
    wide = report.largest[0]
    assert wide.name.startswith("`wide` of inner (test_live_tensors.py:")
    assert (wide.nbytes, wide.shape, wide.dtype) == (12000, (3000,), "float32")
    assert "test_live_tensors.py:" in wide.line
    assert "`wide` of inner" in str(report) and "made at" in str(report)


def test_the_frames_of_what_caused_the_error_count_too():
    def inner(x):
        wide = torch.cat([x, x, x])
        raise OutOfMemoryError(f"CUDA out of memory, {wide.numel()}")

    def outer(x):
        try:
            inner(x)
        except OutOfMemoryError as error:
            raise RuntimeError("training failed") from error

    try:
        outer(torch.ones(1000))
    except RuntimeError as error:
        report = runtime.oom_report(error)
    assert any(held.name.startswith("`wide` of inner") for held in report.largest)


def test_a_storage_counts_once_however_many_names_it_has():
    x = torch.ones(1000)
    views = [x[:10], x.view(10, 100), x]
    report = runtime.oom_report()
    assert report.by_role["variables"] == 4000
    assert len(views) == 3


def test_what_an_object_keeps_is_named_by_its_attribute():
    class Trainer:
        def __init__(self):
            self.history = {"losses": [torch.ones(50), torch.ones(60)]}

        def report(self):
            return runtime.oom_report()

    report = Trainer().report()
    kept = next(held for held in report.largest if held.name.startswith("`self.history` of report"))
    assert (kept.nbytes, kept.count) == (4 * 110, 2)


def test_variables_that_hold_themselves_are_looked_into_once():
    cycle = {"tensor": torch.ones(70)}
    cycle["self"], cycle["globals"] = cycle, [cycle, globals()]
    knot = []
    # without end, if every way through it were followed
    knot.extend([knot] * 1000)
    report = runtime.oom_report()
    assert next(held for held in report.largest if held.name.startswith("`cycle` of")).nbytes == 280


def test_what_lies_deep_in_one_variable_is_looked_into_where_another_is_near():
    far = [[[]]]  # looked into first
    near = [[{"tensor": torch.ones(70)}]]
    far[0][0].append([near])
    report = runtime.oom_report()
    assert next(held for held in report.largest if held.name.startswith("`near` of")).nbytes == 280


def test_what_many_functions_refer_to_is_looked_into_once(monkeypatch):
    data, looked_into, tensors_in = [object() for _ in range(500)], [], live_tensors._tensors_in

    def counted(place, value, depth, depths):
        looked_into.append(id(value))
        return tensors_in(place, value, depth, depths)

    def reported(rows, calls):
        return reported(rows, calls - 1) if calls else runtime.oom_report()

    monkeypatch.setattr(live_tensors, "_tensors_in", counted)
    reported(data, 20)
    assert looked_into.count(id(data[0])) == 1


def test_kept_graphs_are_named_with_their_cure():
    model, losses = nn.Linear(8, 8), []
    for _ in range(10):
        losses.append(model(torch.ones(2, 8)).sum())
    advice = " ".join(runtime.oom_report().advice)
    assert "`losses` of test_kept_graphs_are_named_with_their_cure" in advice
    assert "holds 10 tensors with their graphs" in advice and "detach()" in advice
    losses[:] = [loss.detach() for loss in losses]
    assert "graphs" not in " ".join(runtime.oom_report().advice)


@pytest.mark.parametrize("role", ["logits", "activations", "state"])
def test_advice_follows_what_is_largest(role):
    if role == "logits":
        output = torch.ones(4, 20000)
        expected = "linear_cross_entropy"
    elif role == "activations":
        output = torch.ones(400, 200)
        expected = "forward_backward"
    else:
        model = nn.Linear(100, 100)
        output = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 100)).sum().backward()
        output.step()
        model.zero_grad()
        expected = "adamw_8bit"
    report = runtime.oom_report()
    assert expected in " ".join(report.advice)
    assert ("adamw_8bit" in " ".join(report.advice)) == (role == "state")
    assert output is not None


def test_recording_holds_nothing_alive_and_no_view_is_taken_for_new():
    before = torch.ones(100)
    with SimulatedCard() as card, runtime.record_origins():
        made = torch.ones(100)
        view = before.view(10, 10)
        assert [origin.operation for _, origin in origins.live_origins()] == ["ones"]
        del made
        assert origins.live_origins() == [] and card.current_bytes == 0
    assert view.numel() == 100


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def test_what_ran_while_recording_is_compiled_all_the_same():
    counter = CompileCounter()
    model = torch.compile(Doubled(), backend=counter)
    with runtime.record_origins():
        model(torch.ones(3))
    compiled_while_recording = counter.frame_count
    model(torch.ones(3))
    model(torch.ones(3))
    assert counter.frame_count == 1
    assert compiled_while_recording == (torch.__version__ >= "2.13")


def test_top_is_at_least_one():
    with pytest.raises(ValueError, match="top: got 0"):
        runtime.oom_report(top=0)
