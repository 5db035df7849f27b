"""The models that a manager checkpoints, and whether that leaves the gradients of each forward as they are."""

import logging
import weakref
from collections.abc import Collection

from torch import nn

from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.calls.known import Known
from oomfix.runtime.recovery.checkpointing_check import try_checkpointing
from oomfix.runtime.techniques.checkpointing import disable_checkpointing, enable_checkpointing

_log = logging.getLogger("oomfix")


class CheckpointedModels:
    """What was checkpointed here, what may not be, and what it saves.

    Args:
        prepared: models that were given to `prepare`; every forward is taken to run them.
    """

    def __init__(self, prepared: Collection[nn.Module]) -> None:
        self._prepared = prepared
        self._blocks: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._unsound: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._judged: weakref.WeakKeyDictionary[Known, int] = weakref.WeakKeyDictionary()
        self._saved: weakref.WeakKeyDictionary[Known, float | None] = weakref.WeakKeyDictionary()
        self._changes = 0

    def of(self, known: Known) -> list[nn.Module]:
        """The models that a forward may run."""
        return list({*known.roots(), *self._prepared})

    def told(self, known: Known) -> str:
        """What is checkpointed for a forward, as "12 blocks"; "" where it is nothing."""
        places = [(model, self._blocks[model]) for model in self.of(known) if model in self._blocks]
        # a model that has a switch of its own for all of it
        told = [type(model).__name__ for model, names in places if names == [""]]
        blocks = sum(len(names) for _, names in places if names != [""])
        if blocks:
            told.append(f"{blocks} block{'s' if blocks != 1 else ''}")
        return " and ".join(told)

    def checkpoint(self, model: nn.Module) -> bool:
        """Checkpoint `model`; whether that changed anything."""
        if model in self._unsound:
            return False
        names = enable_checkpointing(model)
        if len(names) <= len(self._blocks.get(model, ())):
            return False
        self._blocks[model] = names
        self._changes += 1
        return True

    def doubt(self, iteration: Iteration) -> bool:
        """Take checkpointing off models where it changes the gradients of a call; looked at once after each change.

        Returns:
            Whether some model of the call is checkpointed after that.
        """
        if not self._changes:
            return False
        known = iteration.known
        if self._judged.get(known, 0) != self._changes:
            self._judged[known] = self._changes
            saved = [self._judge(iteration, model) for model in self.of(known) if model in self._blocks]
            sure = [nbytes for nbytes in saved if nbytes is not None]
            self._saved[known] = sum(sure) if len(sure) == len(saved) else None
            if not self.told(known):
                del self._saved[known]
        return known in self._saved

    def saved_bytes(self, known: Known, rows: int) -> int | None:
        """What is kept less for backward by a forward of `rows` samples; None: nothing was seen on two of them."""
        return int((self._saved.get(known) or 0) * rows) or None

    def _judge(self, iteration: Iteration, model: nn.Module) -> float | None:
        """What checkpointing `model` saves per sample, in bytes, 0 where it is taken off; None: not known."""
        effect = try_checkpointing(model, iteration)
        if effect is None:
            return None
        if not effect.same_gradients:
            disable_checkpointing(model)
            self._unsound.add(model)
            del self._blocks[model]
            name = type(model).__name__
            _log.warning(f"{iteration.known.name}: {name} is not checkpointed, because that changes its gradients.")
        return effect.saved_bytes
