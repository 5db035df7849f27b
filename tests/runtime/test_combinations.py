"""Techniques two by two: whatever is combined, the step is that of the plain loop."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from oomfix import runtime
from oomfix.runtime.recovery import rungs
from oomfix.runtime.techniques import chunked_losses, offloading
from tests.torch_versions import needs_compiled_transformers, needs_fused_on_cpu

CHECKPOINTING, OFFLOADING, SPLITTING, AMP, COMPILE = "checkpointing", "offloading", "splitting", "amp", "compile"
LINEAR_LOSS, IN_BACKWARD, LEAN_STEP = "linear loss", "step in backward", "lean step"
TECHNIQUES = [CHECKPOINTING, OFFLOADING, SPLITTING, AMP, COMPILE, LINEAR_LOSS, IN_BACKWARD, LEAN_STEP]


@pytest.fixture(autouse=True)
def moved(monkeypatch):
    """Lets tensors on the CPU count as on a card; lists the shapes of what was moved."""
    shapes = []
    copied = offloading.HostMemory._copied
    monkeypatch.setattr(offloading, "_on_accelerator", lambda tensor: True)
    monkeypatch.setattr(
        offloading.HostMemory, "_copied", lambda self, tensor: shapes.append(tensor.shape) or copied(self, tensor)
    )
    return shapes


@pytest.fixture(scope="module")
def language_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    config.use_cache = False
    model = GPT2LMHeadModel(config).double()
    tokens = torch.randint(0, 97, (6, 12))
    labels = tokens[:, 1:].clone()
    labels[3:, 4:] = -100
    return model, tokens, labels


def compile_blocks(model):
    """Each layer by itself, as what stands around them takes most of the time to compile."""
    torch.compiler.reset()
    for block in model.transformer.h:
        block.compile(backend="aot_eager")


def step(techniques, model, tokens, labels):
    """The model's parameters after one SGD step with `techniques`."""
    model = copy.deepcopy(model)
    if CHECKPOINTING in techniques:
        assert runtime.enable_checkpointing(model)
    if COMPILE in techniques:
        compile_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, foreach=True)
    if LEAN_STEP in techniques:
        assert runtime.use_lean_step(optimizer) == "fused"
    splits, amp = SPLITTING in techniques, AMP in techniques

    def forward(tokens, labels):
        with runtime.offload_activations(0) if OFFLOADING in techniques else nullcontext():
            # the manager puts autocast around model calls itself
            with torch.autocast("cpu", torch.bfloat16) if amp and not splits else nullcontext():
                hidden = model.transformer(tokens[:, :-1]).last_hidden_state
            hidden = hidden.to(model.lm_head.weight.dtype)
            if LINEAR_LOSS in techniques:
                return runtime.linear_cross_entropy(hidden, model.lm_head.weight, labels, rows=7)
            return functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())

    with runtime.optimizer_in_backward(optimizer) if IN_BACKWARD in techniques else nullcontext():
        if splits:
            memory = runtime.preset("16gb", micro_batches=2, precision="bf16" if amp else "fp32")
            memory.forward_backward(forward, tokens, labels)
            assert not memory.report().whole_because or IN_BACKWARD in techniques or COMPILE in techniques
        else:
            forward(tokens, labels).backward()
    if IN_BACKWARD not in techniques:
        optimizer.step()
    return dict(model.state_dict())


def pairs(techniques):
    """Every two of them, with what they need."""
    marks = {
        COMPILE: needs_compiled_transformers,
        LEAN_STEP: needs_fused_on_cpu,
    }
    for pair in itertools.combinations(techniques, 2):
        yield pytest.param(pair, marks=[marks[name] for name in pair if name in marks], id=" and ".join(pair))


@pytest.mark.parametrize("pair", list(pairs(TECHNIQUES)))
def test_a_step_is_that_of_the_plain_loop(language_model, moved, pair):
    model, tokens, labels = language_model
    if AMP in pair:
        model = copy.deepcopy(model).float()
    expected = step((), model, tokens, labels)
    found = step(pair, model, tokens, labels)
    before = model.state_dict()
    # bf16 keeps 8 bits; without it only the order of sums differs
    tolerance = 0.03 if AMP in pair else 1e-12
    largest = max(float((expected[name] - before[name]).abs().max()) for name in before)
    worst = max(float((found[name] - expected[name]).abs().max()) for name in before)
    assert worst <= tolerance * largest
    assert largest > 0.01
    assert bool(moved) == (OFFLOADING in pair)


@pytest.mark.parametrize("pair", [(CHECKPOINTING, OFFLOADING), (OFFLOADING, IN_BACKWARD)], ids=" and ".join)
def test_what_only_moves_tensors_is_bitwise(language_model, pair):
    model, tokens, labels = language_model
    expected, found = (step(techniques, model, tokens, labels) for techniques in ((), pair))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- the same through the manager, as presets put them to work ---------------------------------------------------

POLICIES = {
    "chunked_loss": "on", "checkpointing": "on", "offloading": "on", "micro_batches": 2, "precision": "bf16",
    COMPILE: "",
}  # fmt: skip


@pytest.mark.parametrize("pair", list(pairs(POLICIES)))
def test_policies_of_a_preset_leave_gradients_as_they_are(language_model, moved, monkeypatch, relative_error, pair):
    monkeypatch.setattr(rungs.Offloading, "take", lambda self, iteration: True)
    monkeypatch.setattr(rungs, "offload_activations", lambda: runtime.offload_activations(0))
    monkeypatch.setattr(chunked_losses, "CHUNK_BYTES", 0)
    model, tokens, labels = (copy.deepcopy(part) for part in language_model)
    half = "precision" in pair
    model = model.float() if half else model
    reference = copy.deepcopy(model)

    def loss_of(model, tokens, labels):
        hidden = model.transformer(tokens[:, :-1]).last_hidden_state
        return functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())

    loss_of(reference, tokens, labels).backward()
    policies = {name: POLICIES[name] for name in pair if name != COMPILE}
    memory = runtime.preset("16gb", **{"precision": "fp32", **policies})
    memory.prepare(model)
    if COMPILE in pair:
        compile_blocks(model)
    memory.forward_backward(lambda tokens, labels: loss_of(model, tokens, labels), tokens, labels)
    assert relative_error(model, reference) < (0.1 if half else 1e-12)
    assert bool(moved) == ("offloading" in pair)
    told = " ".join(technique.name for technique in memory.report().techniques)
    assert ("host memory" in told, "checkpointing" in told) == ("offloading" in pair, "checkpointing" in pair)
    assert ("in chunks" in told) == ("chunked_loss" in pair and COMPILE not in pair)
