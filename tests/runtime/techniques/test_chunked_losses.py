"""Cross entropies of a program that are computed in chunks instead: same value, same gradient, less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.techniques import chunked_losses, cross_entropy
from oomfix.runtime.techniques.chunked_losses import ChunkedLosses

ROWS, CLASSES = 40, 30


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    monkeypatch.setattr(chunked_losses, "CHUNK_BYTES", 0)


@pytest.fixture
def data():
    logits = torch.randn(ROWS, CLASSES, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::7] = -100
    return logits, target


def loss_and_gradient(compute, logits):
    loss = compute(logits)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 3},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "reduction": "sum"},
    ],
    ids=str,
)
def test_the_loss_and_its_gradient_are_those_of_torch(data, options):
    logits, target = data
    target = target.clamp(min=0) if "ignore_index" in options else target
    expected = loss_and_gradient(lambda x: F.cross_entropy(x, target, **options), logits)
    context = ChunkedLosses()
    with context:
        found = loss_and_gradient(lambda x: nn.CrossEntropyLoss(**options)(x, target), logits)
    assert context.saved_bytes == logits.numel() * 8
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_what_differentiates_a_gradient_is_that_of_torch(data):
    logits, target = data

    def penalised():
        loss = F.cross_entropy(logits, target)
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        return torch.autograd.grad(loss + gradient.square().sum(), logits)[0]

    expected = penalised()
    context = ChunkedLosses()
    with context:
        found = penalised()
    assert context.saved_bytes and torch.allclose(found, expected, rtol=1e-12, atol=1e-15)


def weighted(logits, target):
    return F.cross_entropy(logits, target.clamp(min=0), weight=torch.rand(CLASSES, dtype=logits.dtype))


def probabilities(logits, target):
    return F.cross_entropy(logits, logits.detach().softmax(1))


def images(logits, target):
    return F.cross_entropy(logits.T[None], target.new_zeros(1, ROWS))


def half(logits, target):
    return F.cross_entropy(logits.to(torch.bfloat16), target)


def without_gradients(logits, target):
    with torch.no_grad():
        return F.cross_entropy(logits, target)


def old_names(logits, target):
    return F.cross_entropy(logits, target, size_average=False)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("compute", [weighted, probabilities, images, half, without_gradients, old_names])
def test_what_may_come_out_otherwise_is_left_to_torch(data, compute):
    logits, target = data
    torch.manual_seed(0)
    expected = compute(logits, target)
    context = ChunkedLosses()
    torch.manual_seed(0)
    with context:
        found = compute(logits, target)
    assert context.saved_bytes == 0
    assert torch.equal(found, expected)


def test_what_a_checkpoint_runs_again_is_left_to_torch(data):
    """Its second run is in backward, outside of the context: it would save other tensors."""
    logits, target = data
    context = ChunkedLosses()
    with context:
        inside = checkpoint(F.cross_entropy, logits, target, use_reentrant=False)
        assert context.saved_bytes == 0
        after = F.cross_entropy(logits, target)
    inside.backward()
    assert context.saved_bytes > 0
    assert torch.allclose(inside, after, rtol=1e-12)


def test_compiled_losses_keep_their_gradients(data):
    logits, target = data
    expected = loss_and_gradient(lambda x: F.cross_entropy(x, target), logits)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: F.cross_entropy(x, y), backend="aot_eager")
    with ChunkedLosses():
        found = loss_and_gradient(lambda x: compiled(x, target), logits)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("kept", "copies"), [(False, 1), (True, 2)], ids=["dropped", "kept"])
def test_it_saves_what_it_says_at_the_peak(monkeypatch, kept, copies):
    """One copy of the logits, and another where the program keeps its own until backward."""
    chunk_bytes = 2**16
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(chunked_losses, "CHUNK_BYTES", chunk_bytes)

    def peak_bytes(context):
        with SimulatedCard() as card:
            hidden = torch.randn(512, 8, requires_grad=True)
            logits = hidden @ torch.randn(8, 4096)
            with context:
                loss = F.cross_entropy(logits, torch.randint(0, 4096, (512,)))
            if not kept:
                del logits
            loss.backward()
            return card.peak_bytes

    context = ChunkedLosses()
    saved = peak_bytes(torch.enable_grad()) - peak_bytes(context)
    assert context.saved_bytes == 4 * 512 * 4096 - chunk_bytes
    # temporaries of a chunk are a few times a chunk
    assert saved == pytest.approx(copies * context.saved_bytes, abs=4 * chunk_bytes)
