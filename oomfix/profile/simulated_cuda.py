"""torch.cuda, answering for a card that is not there."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.autograd.profiler

from oomfix.presets import Card
from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.cards import CONTEXT_BYTES
from oomfix.profile.patches import Patches

_GIB = 2**30


class _Stream:
    """A stream, an event or a device as a context: it does nothing, since nothing runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_stream = wait_event = record_event = _nothing

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, end: object) -> float:
        # scripts divide by it
        return 1.0


class _Generator(torch.Generator):
    """A generator of random numbers for any device: on the card no number is ever drawn."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls)


_DEVICE = torch.device
_LEGACY_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8, "IntTensor": torch.int32,
    "ShortTensor": torch.int16, "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip


class _LegacyType(type):
    """What `torch.cuda.FloatTensor` is: sizes give an empty tensor, a list gives its values; tensors are instances."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype).cuda()
        return torch.empty(*args, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


class _DeviceType(type):
    """What `torch.device` is, but a bare number is a card: torch asks the driver what it stands for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if len(args) == 1 and isinstance(args[0], int):
            args = ("cuda", *args)
        return _DEVICE(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _DEVICE)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _DEVICE

    def __hash__(cls) -> int:
        return hash(_DEVICE)


class _Statistics(dict[str, int]):
    """Allocator statistics by name; those that are not modelled are 0."""

    def __missing__(self, name: str) -> int:
        return 0


def simulate_cuda(patches: Patches, card: Card, allocator: CachingAllocator) -> None:
    """Let torch.cuda and torch.accelerator speak for `card`, with `allocator` as its memory."""
    _one_card(patches, card)
    _its_memory(patches, card, allocator)
    _streams_and_random_numbers(patches)
    patches.set(torch, Generator=_Generator, device=_DeviceType("device", (), {}))
    for name, dtype in _LEGACY_TYPES.items():
        patches.set(torch.cuda, **{name: _LegacyType(name, (), {"dtype": dtype})})
    patches.set(torch.cuda.amp.common, amp_definitely_not_available=_answer(False))
    _profile_the_host_alone(patches)
    patches.set(torch.backends.cudnn, is_available=_answer(True), is_acceptable=_answer(False), version=_answer(90100))
    if hasattr(torch, "accelerator"):
        patches.set(
            torch.accelerator,
            is_available=_answer(True), device_count=_answer(1), current_device_index=_answer(0),
            current_accelerator=_answer(torch.device("cuda")), set_device_index=_nothing, synchronize=_nothing,
            current_stream=lambda device=None: _Stream(),
        )  # fmt: skip


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_nothing = _answer(None)


def _total_bytes(card: Card) -> int:
    return int(card.capacity_gib * _GIB)


def _one_card(patches: Patches, card: Card) -> None:
    major, minor = card.compute_capability
    properties = SimpleNamespace(
        name=card.name, total_memory=_total_bytes(card), major=major, minor=minor, multi_processor_count=64,
        warp_size=32, max_threads_per_multi_processor=2048, is_integrated=False, is_multi_gpu_board=False,
        gcnArchName="", uuid="simulated", L2_cache_size=4 * 2**20,
    )  # fmt: skip
    patches.set(
        torch.cuda,
        is_available=_answer(True), is_initialized=_answer(True), init=_nothing, _lazy_init=_nothing,
        _lazy_call=_nothing, device_count=_answer(1), current_device=_answer(0), set_device=_nothing,
        get_device_name=_answer(card.name), get_device_properties=_answer(properties),
        get_device_capability=_answer(card.compute_capability), get_arch_list=_answer([f"sm_{major}{minor}"]),
        is_bf16_supported=lambda including_emulation=True: including_emulation or major >= 8,
        utilization=_answer(0), temperature=_answer(0), power_draw=_answer(0),
    )  # fmt: skip


def _its_memory(patches: Patches, card: Card, allocator: CachingAllocator) -> None:
    total = _total_bytes(card)

    def statistics(device: Any = None) -> dict[str, int]:
        figures = _Statistics(num_alloc_retries=allocator.retries)
        for kind in ("allocated_bytes", "active_bytes", "requested_bytes"):
            figures[f"{kind}.all.current"] = allocator.allocated_bytes
            figures[f"{kind}.all.peak"] = allocator.peak_allocated_bytes
        figures["reserved_bytes.all.current"] = allocator.reserved_bytes
        figures["reserved_bytes.all.peak"] = allocator.peak_reserved_bytes
        return figures

    patches.set(
        torch.cuda,
        memory_allocated=lambda device=None: allocator.allocated_bytes,
        max_memory_allocated=lambda device=None: allocator.peak_allocated_bytes,
        memory_reserved=lambda device=None: allocator.reserved_bytes,
        max_memory_reserved=lambda device=None: allocator.peak_reserved_bytes,
        memory_stats=statistics, memory_summary=_answer("simulated card"), memory_snapshot=_answer([]),
        memory_usage=_answer(0),
        mem_get_info=lambda device=None: (max(0, total - CONTEXT_BYTES - allocator.reserved_bytes), total),
        # peaks of the run are the profile's own: a script that resets them must not erase them
        reset_peak_memory_stats=_nothing, reset_max_memory_allocated=_nothing, reset_max_memory_cached=_nothing,
        reset_accumulated_memory_stats=_nothing, empty_cache=allocator.empty_cache,
        set_per_process_memory_fraction=_nothing, ipc_collect=_nothing,
    )  # fmt: skip
    patches.set(
        torch.cuda.memory,
        empty_cache=allocator.empty_cache, memory_allocated=torch.cuda.memory_allocated,
        mem_get_info=torch.cuda.mem_get_info, memory_stats=statistics,
        _set_allocator_settings=allocator.configure,
        _record_memory_history=_nothing, _dump_snapshot=_nothing,
        _snapshot=_answer({"segments": [], "device_traces": []}),
    )  # fmt: skip


def _streams_and_random_numbers(patches: Patches) -> None:
    random_state = torch.zeros(16, dtype=torch.uint8)
    patches.set(
        torch.cuda,
        synchronize=_nothing, Event=_Stream, Stream=_Stream, device=_Stream, device_of=_Stream,
        current_stream=lambda device=None: _Stream(), default_stream=lambda device=None: _Stream(),
        stream=lambda *stream: nullcontext(), set_stream=_nothing, is_current_stream_capturing=_answer(False),
        # as in a torch that is built without CUDA, where making one is an error with its name
        CUDAGraph=torch._utils._dummy_type("CUDAGraph"),
        manual_seed=_nothing, manual_seed_all=_nothing, seed=_nothing, seed_all=_nothing, initial_seed=_answer(0),
        get_rng_state=_answer(random_state), set_rng_state=_nothing,
        get_rng_state_all=_answer([random_state]), set_rng_state_all=_nothing,
    )  # fmt: skip


def _profile_the_host_alone(patches: Patches) -> None:
    """Let torch's profiler run without the card's part, which asks the driver for events."""
    init = torch.autograd.profiler.profile.__init__

    def init_for_host(profiler: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.update(use_cpu=True, use_device=None)
        kwargs.pop("use_cuda", None)
        init(profiler, *args, **kwargs)

    patches.set(torch.autograd.profiler.profile, __init__=init_for_host)
