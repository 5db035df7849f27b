"""What does checkpointing do to a forward? Tried on two rows of its first batch."""

from typing import NamedTuple

from torch import nn

from oomfix.runtime.batches.rows import choose_rows
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.memory.oom import free_what_is_left, is_out_of_memory
from oomfix.runtime.state.attributes import Attributes
from oomfix.runtime.state.probe import Probe, Writes
from oomfix.runtime.state.random_state import RandomState
from oomfix.runtime.techniques.checkpointing import bytes_saved_by_checkpointing, same_gradients

ROWS = 2


class Effect(NamedTuple):
    """What checkpointing a model does to a forward.

    Attributes:
        same_gradients: they are what they are without it.
        saved_bytes: what is kept less for backward, for each sample.
    """

    same_gradients: bool
    saved_bytes: float


def try_checkpointing(model: nn.Module, iteration: Iteration) -> Effect | None:
    """The effect of the checkpointing of `model` on `ROWS` rows of a call's batch; nothing remains of the runs.

    Returns:
        None where so few rows cannot tell, because the forward fails on them or memory does not suffice, and where
        processes are in step: backwards on rows would exchange with some that make none.
    """
    known = iteration.known
    if known.ranks.in_step:
        return None
    args, kwargs = iteration.batch.chosen(choose_rows(iteration.batch, ROWS))
    writes, random = Writes(), RandomState(own=known.generators)
    attributes = Attributes(known.modules())
    out_of_memory = False
    try:
        with Probe(writes, None):
            if not same_gradients(model, iteration.forward, *args, **kwargs):
                return Effect(False, 0.0)
            saved = bytes_saved_by_checkpointing(model, iteration.calls.in_its_precision, *args, **kwargs)
            return Effect(True, saved / ROWS)
    except Exception as error:  # the forward is the user's, and may fail on a few rows in any way
        out_of_memory = is_out_of_memory(error)
    finally:
        writes.undo()
        attributes.restore()
        random.restore()
    if out_of_memory:
        free_what_is_left(thorough=True)
    return None
