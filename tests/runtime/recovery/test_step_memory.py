"""Policies of a preset outside of splitting: the form of the optimizer's step, the allocator, the loaders."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import presets, runtime
from oomfix.runtime.recovery import step_memory
from tests.torch_versions import needs_fused_on_cpu

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))
PARAMETER_BYTES = 4 * (6 * 4 + 4)


class Lookahead:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.fixture
def model():
    return nn.Linear(6, 4)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def step(memory, model, optimizer):
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    memory.step(optimizer)


def form(optimizer):
    return [(group["foreach"], bool(group["fused"])) for group in optimizer.param_groups]


def leave(monkeypatch, left_bytes):
    monkeypatch.setattr(step_memory, "bytes_left", lambda device, preset: left_bytes)


# -- the form of the step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "lean"), [(0, False), (1, True)])
def test_a_step_is_lean_only_where_state_and_temporaries_do_not_fit(model, monkeypatch, caplog, missing, lean):
    leave(monkeypatch, 4 * PARAMETER_BYTES - missing)
    optimizer = adamw(model)
    step(runtime.preset("16gb"), model, optimizer)
    assert (form(optimizer)[0][0] is False) == lean
    assert ("AdamW: its first step needs about" in caplog.text) == lean


def test_state_that_is_there_needs_no_room(model, monkeypatch):
    optimizer = adamw(model)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    leave(monkeypatch, 2 * PARAMETER_BYTES)
    step(runtime.preset("16gb"), model, optimizer)
    assert form(optimizer) == [(None, False)]


@pytest.mark.parametrize("chosen", [{"foreach": True}, {"fused": False}, {"foreach": False}])
def test_a_form_that_the_script_chose_stays(model, monkeypatch, chosen):
    leave(monkeypatch, 0)
    optimizer = adamw(model, **chosen)
    before = form(optimizer)
    step(runtime.preset("16gb"), model, optimizer)
    assert form(optimizer) == before


@pytest.mark.parametrize("name", ["off", "16gb"])
def test_a_preset_that_says_off_leaves_every_optimizer_alone(model, monkeypatch, name):
    leave(monkeypatch, 0)
    optimizer = adamw(model)
    step(runtime.preset(name, lean_step="off"), model, optimizer)
    assert form(optimizer) == [(None, False)]


@needs_fused_on_cpu
def test_on_means_from_the_first_step_and_is_reported(model):
    memory, optimizer = runtime.preset("16gb", lean_step="on"), adamw(model)
    step(memory, model, optimizer)
    assert form(optimizer)[0][0] is False
    assert str(memory.report().techniques[-1]) == (
        "AdamW: fused step since its first step, because preset 16gb has it on; what it saves is not measured"
    )


def test_an_optimizer_inside_a_wrapper_is_found(model, monkeypatch):
    leave(monkeypatch, 0)
    optimizer = adamw(model)
    step(runtime.preset("16gb"), model, Lookahead(optimizer))
    assert form(optimizer)[0][0] is False


def test_on_the_cpu_nothing_changes(model):
    """There torch loops over parameters by itself, and the step is bitwise that of the plain loop."""
    reference = copy.deepcopy(model)
    plain = adamw(reference)
    F.cross_entropy(reference(X), Y).backward()
    plain.step()
    optimizer = adamw(model)
    step(runtime.preset("8gb"), model, optimizer)
    assert form(optimizer) == [(None, False)]
    assert torch.equal(model.weight, reference.weight)


def test_a_lean_step_learns_the_same(model, monkeypatch):
    reference = copy.deepcopy(model)
    plain = adamw(reference)
    leave(monkeypatch, 0)
    memory, optimizer = runtime.preset("16gb"), adamw(model)
    for _ in range(5):
        plain.zero_grad()
        F.cross_entropy(reference(X), Y).backward()
        plain.step()
        step(memory, model, optimizer)
    assert torch.allclose(model.weight, reference.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_would_not_fit_a_gpu_fits(caplog):
    model = nn.Linear(8192, 8192, device="cuda")  # 256 MiB of parameters; cuBLAS takes 64 on a Hopper card
    memory, optimizer = runtime.preset("auto", budget_gib=1.2, precision="fp32"), adamw(model)
    for _ in range(2):
        memory.forward_backward(lambda x: model(x).pow(2).mean(), torch.randn(8, 8192, device="cuda"))
        memory.step(optimizer)
    assert "AdamW: its first step needs about" in caplog.text
    assert torch.cuda.max_memory_allocated() < 1.2 * 2**30


# -- the cache -------------------------------------------------------------------------------------------------


class Cache:
    """What torch.cuda says of an allocator that holds 1000 MiB, none of which a tensor takes now."""

    reserved_bytes, peak_bytes = 1000 * 2**20, 0

    def empty(self):
        self.reserved_bytes = 0


@pytest.fixture
def cache(monkeypatch):
    found = Cache()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *device: found.reserved_bytes)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *device: found.peak_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", found.empty)
    return found


def steps(memory, model, count):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        memory.step(optimizer)


@pytest.mark.parametrize(("name", "every"), [("8gb", 10), ("16gb", 100)])
def test_a_cache_that_nothing_needs_is_emptied_in_time(cache, model, name, every):
    memory = runtime.preset(name, expandable_segments=False)
    steps(memory, model, every - 1)
    assert cache.reserved_bytes
    steps(memory, model, 1)
    assert not cache.reserved_bytes


@pytest.mark.parametrize(("name", "emptied"), [("8gb", True), ("16gb", False)])
def test_a_cache_that_the_peak_needed_is_emptied_by_count_only(cache, model, name, emptied):
    cache.peak_bytes = cache.reserved_bytes
    steps(runtime.preset(name, expandable_segments=False), model, 100)
    assert (not cache.reserved_bytes) == emptied


def test_off_leaves_the_cache_alone(cache, model):
    steps(runtime.preset("off"), model, 100)
    assert cache.reserved_bytes


# -- the allocator ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no expandable segments")
def test_a_preset_asks_for_expandable_segments_before_cuda_starts():
    runtime.preset("16gb")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(("name", "changes"), [("off", {}), ("16gb", {"expandable_segments": False})])
def test_a_preset_without_them_leaves_the_environment_alone(name, changes):
    runtime.preset(name, **changes)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("chosen", ["expandable_segments:False", "max_split_size_mb:64,backend:cudaMallocAsync"])
def test_what_the_environment_says_of_the_allocator_stays(monkeypatch, name, chosen):
    monkeypatch.setenv(name, chosen)
    runtime.preset("16gb")
    assert os.environ[name] == chosen


# -- loaders ---------------------------------------------------------------------------------------------------


def test_loaders_get_what_the_preset_says(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = runtime.preset("16gb", prefetch_factor=3).loader_kwargs(2)
    assert (arguments["prefetch_factor"], arguments["pin_memory"], arguments["num_workers"]) == (3, True, 2)
    assert runtime.preset("16gb", pin_memory=False).loader_kwargs(2)["pin_memory"] is False


def test_without_a_gpu_nothing_is_pinned():
    memory = runtime.preset("16gb")
    assert memory.loader_kwargs(0) == {"num_workers": 0, "pin_memory": torch.cuda.is_available()}


def test_off_leaves_loaders_as_they_were_written():
    assert runtime.preset("off").loader_kwargs() == {}
    assert runtime.preset("off").loader_kwargs(3) == {"num_workers": 3}


# -- all of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [f for f in presets.Preset.__dataclass_fields__ if f not in ("name", "card")])
def test_every_policy_is_read_somewhere(field):
    """A field that nobody reads is a promise that nobody keeps."""
    sources = "".join(path.read_text() for path in Path(runtime.__file__).parent.rglob("*.py"))
    assert f"preset.{field}" in sources or f"chosen.{field}" in sources
