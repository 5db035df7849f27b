"""Activations in host memory: bitwise gradients, parameters stay, nothing is left behind."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.estimation import estimate
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.techniques import offloading


class Encoder(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def moved(monkeypatch):
    """Lets tensors on the CPU count as on a card; lists the shapes of what was moved."""
    shapes = []
    copied = offloading.HostMemory._copied

    def noted(self, tensor):
        shapes.append(tuple(tensor.shape))
        return copied(self, tensor)

    monkeypatch.setattr(offloading, "_on_accelerator", lambda tensor: True)
    monkeypatch.setattr(offloading.HostMemory, "_copied", noted)
    return shapes


def gradients(model, run):
    torch.manual_seed(1)
    model.zero_grad()
    run().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_bitwise(first, second):
    assert len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_are_bitwise_those_without(moved):
    model, x = Encoder(), torch.randn(4, 8, 32)
    plain = gradients(model, lambda: model(x).square().mean())

    def offloaded():
        with runtime.offload_activations(min_bytes=0):
            return model(x).square().mean()

    assert_bitwise(gradients(model, offloaded), plain)
    assert len(moved) > 10


def test_nothing_on_the_host_is_moved():
    x = torch.randn(512, 512, requires_grad=True)
    with runtime.offload_activations(min_bytes=0):
        y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()


def test_small_tensors_stay(moved):
    layer = nn.Linear(8, 8)
    with runtime.offload_activations(min_bytes=4 * 8 * 8 + 1):
        layer(torch.randn(8, 8)).exp()
    assert moved == []
    with runtime.offload_activations(min_bytes=4 * 8 * 8):
        layer(torch.randn(8, 8)).exp()
    assert moved == [(8, 8), (8, 8)]


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_and_their_views_are_never_moved(moved, frozen):
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 7))
    model[2].requires_grad_(not frozen)
    with runtime.offload_activations(min_bytes=0):
        model(torch.randn(11, 3))
    parameters = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    assert moved and not parameters & set(moved)


def test_what_autocast_makes_of_a_parameter_is_not_moved(moved):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))
    with runtime.offload_activations(min_bytes=0), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(11, 3))
    assert (11, 5) in moved and (5, 7) not in moved and (7, 5) not in moved


def test_a_tensor_saved_by_several_operations_is_copied_once(moved):
    x = torch.randn(4, 6) + torch.zeros(4, 6, requires_grad=True)
    query, key = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    with runtime.offload_activations(min_bytes=0):
        (x @ query).sum() + (x @ key).sum()
    assert moved == [(4, 6)]


def test_a_tensor_written_between_two_uses_is_copied_twice(moved):
    weight = torch.randn(4, requires_grad=True)
    with runtime.offload_activations(min_bytes=0):
        x = torch.ones(4)
        first = weight * x
        x.mul_(3)
        second = weight * x
    (first + second).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 4.0))
    assert moved == [(4,), (4,)]


def test_an_expanded_tensor_is_not_blown_up(moved):
    weight = torch.randn(64, 64, requires_grad=True)
    with runtime.offload_activations(min_bytes=1):
        (weight * torch.randn(1, 1).expand(64, 64)).sum().backward()
    assert moved == []


def test_strides_are_those_of_the_tensor(moved):
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    with runtime.offload_activations(min_bytes=0):
        y = x.exp()
    assert y.grad_fn._saved_result.stride() == y.stride()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_leaves_no_trace(moved, where):
    model, x = Encoder(), torch.randn(4, 8, 32)
    plain = gradients(model, lambda: model(x).square().mean())
    held = []

    def fails(card):
        with runtime.offload_activations(min_bytes=0):
            hidden = model(x)
            held.append(weakref.ref(hidden))
            if where == "forward":
                card.fail_at(1)
            loss = hidden.square().mean()
        card.fail_at(5)
        loss.backward()

    torch.manual_seed(1)
    with SimulatedCard() as card:
        before = card.current_bytes
        with pytest.raises(OutOfMemoryError):
            fails(card)
        model.zero_grad()
        gc.collect()
        assert held[0]() is None
        assert card.current_bytes == before

    def again():
        with runtime.offload_activations(min_bytes=0):
            return model(x).square().mean()

    assert_bitwise(gradients(model, again), plain)


def test_a_graph_that_no_backward_runs_through_goes_with_its_output(moved):
    """The output of tanh is saved by tanh itself, and is too small to move."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4), nn.Tanh()), torch.randn(64, 32)
    with SimulatedCard() as card:
        with runtime.offload_activations(min_bytes=4096):
            output = model(x)
        assert (64, 32) in moved and (64, 4) not in moved
        del output
        gc.collect()
        assert card.current_bytes == 0


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_what_stays_may_not_be_written_before_backward_as_in_torch(moved, min_bytes):
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    with runtime.offload_activations(min_bytes):
        loss = layer(layer(x)).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"\[8, 8\] of torch.float32 .* was written in place after forward"):
        loss.backward()


def test_a_gradient_penalty_is_bitwise_that_without(moved):
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4, 8, requires_grad=True)

    def penalised(context):
        with context:
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty = gradient.square().sum()
        return torch.autograd.grad(penalty, [model[0].weight, model[0].bias, model[2].weight])

    plain = penalised(nullcontext())
    for min_bytes in (0, 1 << 20):
        assert_bitwise(penalised(runtime.offload_activations(min_bytes)), plain)


@pytest.mark.parametrize("allocation", [5, 25])
def test_the_manager_starts_again_in_smaller_pieces(moved, relative_error, allocation):
    reference, x = nn.Sequential(*[nn.Linear(16, 16), nn.GELU()] * 3).double(), torch.randn(8, 16).double()
    model = copy.deepcopy(reference)
    reference(x).square().mean().backward()

    def forward(x):
        with runtime.offload_activations(min_bytes=0):
            return model(x).square().mean()

    memory = runtime.preset("16gb", precision="fp32", checkpointing="off")
    with SimulatedCard() as card:
        # the first of these is in forward, the second in backward
        card.fail_at(allocation)
        memory.forward_backward(forward, x)
    assert memory.report().retries == 1
    assert relative_error(model, reference) < 1e-12


def test_the_host_copies_go_with_the_graph(moved):
    x = torch.randn(1000, requires_grad=True)
    with SimulatedCard() as card:
        with runtime.offload_activations(min_bytes=0):
            loss = x.exp().sum()
        assert card.current_bytes == 4 + 4000
        loss.backward()
        x.grad = None
        assert card.current_bytes == 4


def test_inside_checkpointed_blocks_only_their_inputs_are_moved(moved):
    model, x = Encoder(depth=2), torch.randn(4, 8, 32)
    plain = gradients(model, lambda: model(x).square().mean())

    def both():
        with runtime.offload_activations(min_bytes=1024):
            hidden = x
            for layer in model.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            return hidden.square().mean()

    assert_bitwise(gradients(model, both), plain)
    # the inputs of the two blocks, and that of the square
    assert moved == [(4, 8, 32)] * 3


def test_the_card_holds_less(monkeypatch):
    def to_host_of_the_simulated_card(self, tensor):
        return offloading._Parked(tensor.detach().cpu(), tensor.device, None)

    monkeypatch.setattr(offloading.HostMemory, "_copied", to_host_of_the_simulated_card)

    def estimated(offloads):
        def loss(model, x):
            if not offloads:
                return model(x).square().mean()
            with runtime.offload_activations(min_bytes=1024):
                return model(x).square().mean()

        found = estimate(lambda: Encoder(64, 3), lambda: torch.randn(16, 64, 64), loss)
        return found.breakdown["activations"]

    assert estimated(True) < 0.35 * estimated(False)


def test_the_compiler_leaves_the_hooks_alone(moved):
    """A forward that it cannot take in one piece runs the rest as it is written, with what that calls."""

    class Broken(Encoder):
        def forward(self, x):
            try:
                torch._dynamo.graph_break()
                return super().forward(x).sin()
            finally:
                pass

    model, x = Broken(depth=1).eval(), torch.randn(4, 8, 32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled():
        torch.compiler.reset()
        graphs.clear()
        found = gradients(model, lambda: torch.compile(model, backend=backend)(x).sum())
        return found, len(graphs)

    expected, number = compiled()
    with runtime.offload_activations(min_bytes=0):
        found, with_hooks = compiled()
    assert_bitwise(expected, found)
    assert moved
    assert with_hooks == number > 0


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="min_bytes: got -1"), runtime.offload_activations(min_bytes=-1):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_gradients_are_bitwise_and_memory_is_lower():
    model, x = Encoder(256, 6).cuda(), torch.randn(32, 128, 256, device="cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)

    def peak(run):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = gradients(model, run)
        return torch.cuda.max_memory_allocated() - before, found

    def offloaded():
        with runtime.offload_activations():
            return model(x).square().mean()

    # the backward of the fused kernels adds in no fixed order
    with sdpa_kernel(SDPBackend.MATH):
        gradients(model, offloaded)  # cuBLAS takes its workspaces
        plain_peak, plain = peak(lambda: model(x).square().mean())
        offloaded_peak, found = peak(offloaded)
    torch.use_deterministic_algorithms(False)
    assert_bitwise(found, plain)
    assert offloaded_peak < 0.5 * plain_peak
