"""torch.cuda, answering for a card that is not there."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from oomfix.presets import Card
from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.overheads import CONTEXT_BYTES
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
        return 0.0


class _Generator(torch.Generator):
    """A generator of random numbers for any device: on the card no number is ever drawn."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls)


_LEGACY_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8, "IntTensor": torch.int32,
    "ShortTensor": torch.int16, "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip


def _constructor(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What `torch.cuda.FloatTensor` is: sizes give an empty tensor, a list gives its values."""

    def construct(*args: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=dtype).cuda()
        return torch.empty(*args, dtype=dtype, device="cuda")

    return construct


def simulate_cuda(patches: Patches, card: Card, allocator: CachingAllocator) -> None:
    """Let torch.cuda and torch.accelerator speak for `card`, with `allocator` as its memory."""
    total = int(card.capacity_gib * _GIB)
    major, minor = card.compute_capability
    properties = SimpleNamespace(
        name=card.name, total_memory=total, major=major, minor=minor, multi_processor_count=64, warp_size=32,
        max_threads_per_multi_processor=2048, is_integrated=False, is_multi_gpu_board=False, gcnArchName="",
        uuid="simulated", L2_cache_size=4 * 2**20,
    )  # fmt: skip

    def statistics(*device: Any) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": allocator.allocated_bytes,
            "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
            "reserved_bytes.all.current": allocator.reserved_bytes,
            "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
            "num_alloc_retries": allocator.retries,
            "num_ooms": 0,
            "inactive_split_bytes.all.current": 0,
        }

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    nothing = answer(None)
    random_state = torch.zeros(16, dtype=torch.uint8)
    patches.set(
        torch.cuda,
        is_available=answer(True), is_initialized=answer(True), device_count=answer(1), current_device=answer(0),
        init=nothing, _lazy_init=nothing, _lazy_call=nothing, set_device=nothing, synchronize=nothing,
        ipc_collect=nothing, manual_seed=nothing, manual_seed_all=nothing, seed=nothing, seed_all=nothing,
        initial_seed=answer(0), get_rng_state=answer(random_state), set_rng_state=nothing,
        get_rng_state_all=answer([random_state]), set_rng_state_all=nothing,
        get_device_name=answer(card.name), get_device_properties=answer(properties),
        get_device_capability=answer(card.compute_capability), get_arch_list=answer([f"sm_{major}{minor}"]),
        is_bf16_supported=lambda including_emulation=True: including_emulation or major >= 8,
        memory_allocated=lambda *device: allocator.allocated_bytes,
        max_memory_allocated=lambda *device: allocator.peak_allocated_bytes,
        memory_reserved=lambda *device: allocator.reserved_bytes,
        max_memory_reserved=lambda *device: allocator.peak_reserved_bytes,
        memory_stats=statistics, memory_summary=answer("simulated card"),
        mem_get_info=lambda *device: (max(0, total - CONTEXT_BYTES - allocator.reserved_bytes), total),
        # peaks of the run are the profile's own: a script that resets them must not erase them
        reset_peak_memory_stats=nothing, reset_max_memory_allocated=nothing, reset_max_memory_cached=nothing,
        reset_accumulated_memory_stats=nothing, empty_cache=allocator.empty_cache,
        set_per_process_memory_fraction=nothing, is_current_stream_capturing=answer(False),
        Event=_Stream, Stream=_Stream, device=_Stream, device_of=_Stream,
        current_stream=lambda *device: _Stream(), default_stream=lambda *device: _Stream(),
        stream=lambda *stream: nullcontext(), set_stream=nothing,
    )  # fmt: skip
    patches.set(torch, Generator=_Generator)
    for name, dtype in _LEGACY_TYPES.items():
        patches.set(torch.cuda, **{name: _constructor(dtype)})
    patches.set(torch.cuda.amp.common, amp_definitely_not_available=answer(False))
    patches.set(
        torch.cuda.memory,
        empty_cache=allocator.empty_cache, memory_allocated=torch.cuda.memory_allocated,
        mem_get_info=torch.cuda.mem_get_info, memory_stats=statistics,
        _set_allocator_settings=allocator.configure,
    )  # fmt: skip
    patches.set(torch.backends.cudnn, is_available=answer(True), is_acceptable=answer(False), version=answer(90100))
    if hasattr(torch, "accelerator"):
        patches.set(
            torch.accelerator,
            is_available=answer(True), device_count=answer(1), current_device_index=answer(0),
            current_accelerator=answer(torch.device("cuda")), set_device_index=nothing, synchronize=nothing,
            current_stream=lambda *device: _Stream(),
        )  # fmt: skip
