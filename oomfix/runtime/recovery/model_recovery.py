"""Calls of models in loops that stay in place: one that runs out of memory starts again, with a technique more.

Where an iteration is no function of its batch (two networks against each other, closures), it cannot start again as a
whole, and once its backward has failed the graph is gone. What can be tried again is the call of a model: its random
numbers, buffers and attributes are put back, and the call takes the next rung of the ladder (`ladder.py`),
checkpointing and then offloading. A backward that ran out of memory lets the next call of each model take a rung.

Not where several processes train: the others exchange buffers or parameters in each call of a model.
"""

import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from oomfix.presets import Preset
from oomfix.runtime import precision, trees
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.calls.known import Known, KnownForwards
from oomfix.runtime.memory.oom import free_what_is_left, is_out_of_memory
from oomfix.runtime.recovery.ladder import Ladder
from oomfix.runtime.recovery.model_call import PreciseCalls

_IN_PLACE = "its loop was left in place"


class RecoveringCalls:
    """Runs models in the preset's precision, one call at a time, with what memory asks for.

    Args:
        preset: the policies.
        ladder: the techniques.
        prepared: models that were given to `prepare`.
    """

    def __init__(self, preset: Preset, ladder: Ladder, prepared: Collection[nn.Module]) -> None:
        self._calls = PreciseCalls(preset.precision)
        self._ladder = ladder
        self._prepared = prepared
        self._forwards = KnownForwards(preset.first_micro_batches)
        self._owed: weakref.WeakSet[Known] = weakref.WeakSet()

    def run(self, model: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """`model(*args, **named)`; started again, as if it had never begun, as long as a technique is left.

        Raises:
            OutOfMemoryError: torch's own, where none is left.
        """
        if not torch.is_grad_enabled() or _exchanges():
            return self._calls.run(model, args, named)
        batch = Batch(args, named)
        known = self._forwards.about(model, False, batch, self._prepared)
        iteration = Iteration(known, _scored(model), batch, trains=False)
        known.begin_call()
        self._ladder.begin(iteration)
        climbed = known in self._owed and self._ladder.climb(iteration)
        self._owed.discard(known)
        iteration.remember()
        inputs = [(tensor, tensor._version) for tensor in batch.tensors() if tensor.requires_grad]
        left = True
        while True:
            around = nullcontext() if iteration.calls.around is None else iteration.calls.around()
            try:
                with around:
                    result = self._calls.run(model, args, named)
                break
            except RuntimeError as error:
                # an input with a graph that was written cannot be put back: the writing is part of its graph
                if not left or not is_out_of_memory(error) or any(t._version != version for t, version in inputs):
                    raise
            # outside of the `except`, whose error holds the frames that failed and their tensors
            iteration.put_back()
            free_what_is_left()
            # without one, the last try fails as the call would have failed by itself
            left = self._ladder.climb(iteration)
            climbed = climbed or left
        iteration.finish(1)
        if climbed:
            self._ladder.finish(iteration, 1, _IN_PLACE)
        return result

    def after_failed_backward(self) -> str:
        """Let the next call of each model take a rung; returns what to say of it, "" where none is left."""
        if _exchanges():
            return ""
        self._owed.update(known for known in self._forwards if self._ladder.has_more(known))
        names = sorted({known.name for known in self._owed})
        if not names:
            return ""
        return (
            f" The next call of {', '.join(names)} takes a technique more: a loop that catches this error, drops its "
            "gradients (zero_grad) and goes on needs less memory."
        )


def _exchanges() -> bool:
    """Whether other processes train with this one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _scored(model: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of what `model` returns, to compare gradients by."""

    def score(*args: Any, **named: Any) -> torch.Tensor:
        with_graph = [tensor for tensor in trees.tensors(model(*args, **named)) if tensor.requires_grad]
        return torch.stack([precision.in_fp32(tensor).square().mean() for tensor in with_graph]).sum()

    return score
