"""Train the same model with the same batches in less memory.

The loop before::

    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()

and after::

    from oomfix import runtime

    memory = runtime.preset("16gb")
    model = memory.prepare(model)

    def forward(x, y):
        out = model(x)
        return criterion(out, y), out

    for x, y in loader:
        loss, out = memory.forward_backward(forward, x, y)
        memory.step(optimizer)

`forward_backward` runs the batch whole if it fits. If it does not, it checks on a few rows that samples do not
depend on each other, then runs the batch in micro-batches: gradients, loss and outputs are those of the whole
batch. When memory runs out half way, the call starts again in smaller pieces, as if it had never begun. Where a
batch may not be split (in-batch negatives, layers that keep state), it runs whole and says why, once.

Everything else is a policy of the preset, and can be overridden: `runtime.preset("16gb", precision="fp32",
micro_batches=4)`. The fields are those of `oomfix.presets.Preset`. OOMFIX_PRESET in the environment chooses
another preset without touching the script; OOMFIX_PRESET=off runs it as it was: own precision, whole batches.

Under torchrun the loop stays the same, with DistributedDataParallel or FSDP2 (`fully_shard`): see
`calls/distributed.py` for what processes do together.

Also: `memory.backward(loss)` for loops that cannot be split, `memory.evaluate(forward, *batch)`,
`memory.accumulate(loader, k)` with `memory.window_closed`, `memory.autocast()`, `memory.unscale_(optimizer)`,
`memory.scaler`, `memory.zero_grad(optimizer)`, `memory.loader_kwargs()`, `memory.report()`.

By hand, each alone in any loop; a runnable page for each is in examples/:

- activations: `enable_checkpointing(model, every=1, skip_last=0)`, `offload_activations()`, `detach_(state)`
- attention: `attention(query, key, value)`
- losses: `chunked_cross_entropy`, `linear_cross_entropy`, `encode_in_chunks` with `contrastive_loss`
- optimizers: `optimizer_in_backward(optimizer)`, `use_lean_step(optimizer)`, `adamw_8bit(parameters)`
- stages: `stage(name)`, `free(...)`, `ProgressiveUnfreezing(model, phases)`
- the card: `configure_allocator()`, `memory_fraction(share)`, `CacheJanitor()`, `loader_kwargs()`,
  `find_batch_size(run)`
- monitoring: `MemoryMonitor()`, `oom_report(error)` with `record_origins()`
"""

import os
from typing import Any

from oomfix import presets
from oomfix.runtime.manager import MemoryManager
from oomfix.runtime.memory.allocator_settings import configure_allocator, memory_fraction
from oomfix.runtime.memory.cache_janitor import CacheJanitor
from oomfix.runtime.memory.live_tensors import OomReport, oom_report
from oomfix.runtime.memory.monitor import MemoryMonitor, MemoryReading
from oomfix.runtime.memory.oom import DoesNotFitError
from oomfix.runtime.memory.origins import record_origins
from oomfix.runtime.report import Report
from oomfix.runtime.techniques.attention import attention
from oomfix.runtime.techniques.backward_steps import optimizer_in_backward
from oomfix.runtime.techniques.batch_size_search import find_batch_size
from oomfix.runtime.techniques.checkpointing import disable_checkpointing, enable_checkpointing
from oomfix.runtime.techniques.contrastive import contrastive_loss, encode_in_chunks
from oomfix.runtime.techniques.cross_entropy import chunked_cross_entropy, linear_cross_entropy
from oomfix.runtime.techniques.detaching import detach_
from oomfix.runtime.techniques.loading import loader_kwargs
from oomfix.runtime.techniques.offloading import offload_activations
from oomfix.runtime.techniques.optimizer_choice import adamw_8bit, use_lean_step
from oomfix.runtime.techniques.stages import Freed, Stage, free, stage
from oomfix.runtime.techniques.unfreezing import ProgressiveUnfreezing

__all__ = [
    "CacheJanitor",
    "DoesNotFitError",
    "Freed",
    "MemoryManager",
    "MemoryMonitor",
    "MemoryReading",
    "OomReport",
    "ProgressiveUnfreezing",
    "Report",
    "Stage",
    "adamw_8bit",
    "attention",
    "chunked_cross_entropy",
    "configure_allocator",
    "contrastive_loss",
    "detach_",
    "disable_checkpointing",
    "enable_checkpointing",
    "encode_in_chunks",
    "find_batch_size",
    "free",
    "linear_cross_entropy",
    "loader_kwargs",
    "memory_fraction",
    "offload_activations",
    "oom_report",
    "optimizer_in_backward",
    "preset",
    "record_origins",
    "reset",
    "stage",
    "use_lean_step",
]

_manager: MemoryManager | None = None


def preset(name: str, /, **overrides: Any) -> MemoryManager:
    """The manager of this process, with the policies of the preset `name`.

        memory = runtime.preset("16gb")
        memory = runtime.preset("16gb", micro_batches=4, precision="bf16", budget_gib=12.0)

    OOMFIX_PRESET in the environment names another preset, which keeps the overrides except the budget; "off" keeps
    none. Calling it again with the same arguments returns the same object; with others, a new one, which knows nothing
    of gradients that the first has scaled for fp16: the one that ran a backward steps its optimizer. CUDA is not
    started, so processes may be forked afterwards. Where the preset asks for expandable segments and the environment
    says nothing about them, PYTORCH_CUDA_ALLOC_CONF is set: call it before anything is moved to the GPU.

    Args:
        name: "8gb", "12gb", "16gb", "24gb", "40gb", "48gb", "80gb", "auto" or "off".
        overrides: values for fields of `oomfix.presets.Preset`.

    Returns:
        The manager, the same object wherever it is asked for.

    Raises:
        ValueError: no such preset, or a value out of range; also for OOMFIX_PRESET.
        TypeError: no such field, or a value of the wrong type.
    """
    global _manager
    chosen = presets.from_environment(presets.get(name, **overrides), os.environ)
    if _manager is None or _manager.preset != chosen:
        _manager = MemoryManager(chosen)
        # a choice of the environment stays; another allocator has no segments
        asked = "".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        if chosen.expandable_segments and "expandable_segments" not in asked and "backend" not in asked:
            configure_allocator(expandable_segments=True)
    return _manager


def reset() -> None:
    """Forget the manager and all it has learned; the next `preset` makes a fresh one (notebooks, tests)."""
    global _manager
    _manager = None
