"""The rungs of the ladder: techniques that a forward can take when its call runs out of memory."""

import weakref
from contextlib import ExitStack
from typing import Protocol

from oomfix.presets import Policy, Preset
from oomfix.runtime import compat
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.calls.known import Known
from oomfix.runtime.recovery.checkpointed_models import CheckpointedModels
from oomfix.runtime.recovery.checkpointing_check import ROWS
from oomfix.runtime.techniques.attributes_on_host import AttributesOnHost, attributes_on_host
from oomfix.runtime.techniques.chunked_losses import ChunkedLosses
from oomfix.runtime.techniques.offloading import HostMemory, offload_activations


class Rung(Protocol):
    """A technique, for one forward.

    Attributes:
        field: the field of `Preset` that says when to use it.
        title: what to call it.
        measured: what `saved_bytes` is, and how it is known.
    """

    field: str
    title: str
    measured: str

    @staticmethod
    def policy(preset: Preset) -> Policy:
        """When a preset wants it."""
        ...

    def take(self, iteration: Iteration) -> bool:
        """Switch it on; False where it has nothing to offer to this forward."""
        ...

    def around(self, stack: ExitStack) -> None:
        """Enter what has to surround each forward."""
        ...

    def told(self, known: Known) -> str:
        """What is on for a forward, as it follows "with"."""
        ...

    def saved_bytes(self, known: Known, rows: int) -> int | None:
        """What it saves in calls with micro-batches of `rows` samples, as last seen; None: not known."""
        ...


class ChunkedLoss:
    """Cross entropies of large logits, a few rows at a time."""

    field = "chunked_loss"
    title = "cross entropy in chunks"
    measured = "at least: a copy of the logits in backward"

    @staticmethod
    def policy(preset: Preset) -> Policy:
        """As `Rung.policy`."""
        return preset.chunked_loss

    def __init__(self, models: CheckpointedModels) -> None:
        self._context = ChunkedLosses()

    def take(self, iteration: Iteration) -> bool:
        """As `Rung.take`: compiled code computes its own losses, and gradients of gradients do not pass."""
        known = iteration.known
        differentiates = known.verdict is not None and known.verdict.differentiates
        return not differentiates and not any(map(compat.is_compiled, known.modules()))

    def around(self, stack: ExitStack) -> None:
        """As `Rung.around`."""
        stack.enter_context(self._context)

    def told(self, known: Known) -> str:
        """As `Rung.told`."""
        return self.title

    def saved_bytes(self, known: Known, rows: int) -> int | None:
        """As `Rung.saved_bytes`: the largest loss so far; 0 where none was large enough."""
        return self._context.saved_bytes


class Checkpointing:
    """Activation checkpointing of the models that a forward runs."""

    field = "checkpointing"
    title = "checkpointing"
    measured = f"kept for backward, measured on {ROWS} samples"

    @staticmethod
    def policy(preset: Preset) -> Policy:
        """As `Rung.policy`."""
        return preset.checkpointing

    def __init__(self, models: CheckpointedModels) -> None:
        self._models = models

    def take(self, iteration: Iteration) -> bool:
        """As `Rung.take`: False where everything is checkpointed already, or may not be."""
        known = iteration.known
        changed = [self._models.checkpoint(model) for model in self._models.of(known)]
        return any(changed) and self._models.doubt(iteration)

    def around(self, stack: ExitStack) -> None:
        """Nothing: it is on the models."""

    def told(self, known: Known) -> str:
        """As `Rung.told`."""
        return f"{self.title} {self._models.told(known)}"

    def saved_bytes(self, known: Known, rows: int) -> int | None:
        """As `Rung.saved_bytes`: None where the forward failed on so few samples."""
        return self._models.saved_bytes(known, rows)


class Offloading:
    """Activations in host memory: those saved for backward, and those that modules keep as attributes."""

    field = "offloading"
    title = "activations in host memory"
    measured = "moved to the host by one micro-batch"

    @staticmethod
    def policy(preset: Preset) -> Policy:
        """As `Rung.policy`."""
        return preset.offloading

    def __init__(self, models: CheckpointedModels) -> None:
        self._known: weakref.ref[Known] | None = None
        self._hosts: tuple[HostMemory | AttributesOnHost, ...] = ()
        self._moved = 0

    def take(self, iteration: Iteration) -> bool:
        """As `Rung.take`: on the CPU there is nowhere to move them."""
        self._known = weakref.ref(iteration.known)
        return iteration.device_type() != "cpu"

    def around(self, stack: ExitStack) -> None:
        """As `Rung.around`."""
        self._moved = self._most()
        saved = stack.enter_context(offload_activations())
        known = self._known() if self._known is not None else None
        modules = [] if known is None else known.modules()
        # compiled code would be compiled anew for hooks that come and go
        hooked = bool(modules) and not any(map(compat.is_compiled, modules))
        self._hosts = (saved, stack.enter_context(attributes_on_host(modules))) if hooked else (saved,)

    def told(self, known: Known) -> str:
        """As `Rung.told`."""
        return self.title

    def saved_bytes(self, known: Known, rows: int) -> int | None:
        """As `Rung.saved_bytes`: the most that one forward moved."""
        return self._most()

    def _most(self) -> int:
        return max(self._moved, sum(host.moved_bytes for host in self._hosts))
