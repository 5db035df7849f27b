"""Does checkpointing leave the gradients of a forward as they are? Tried on two rows of its first batch."""

from collections.abc import Callable
from typing import Any

from torch import nn

from oomfix.runtime.attributes import Attributes
from oomfix.runtime.batch import Batch
from oomfix.runtime.checkpointing import same_gradients
from oomfix.runtime.oom import free_what_is_left, is_out_of_memory
from oomfix.runtime.probe import Probe, Writes
from oomfix.runtime.random_state import RandomState
from oomfix.runtime.rows import choose_rows

_ROWS = 2


def changes_gradients(
    model: nn.Module, forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], generators: list[Any]
) -> bool:
    """Whether checkpointing `model` changes the gradients of `forward`; nothing remains of the runs.

    Args:
        model: a model that is checkpointed, all or in part.
        forward, batch: as given to the manager.
        modules: every module that the forward may run.
        generators: random number generators of the program's own that it may draw from.

    Returns:
        False too where two rows cannot tell, because the forward fails on them or memory does not suffice.
    """
    args, kwargs = batch.chosen(choose_rows(batch, _ROWS))
    writes, random, attributes = Writes(), RandomState(own=generators), Attributes(modules)
    out_of_memory = False
    try:
        with Probe(writes, None):
            return not same_gradients(model, forward, *args, **kwargs)
    except Exception as error:  # the forward is the user's, and may fail on a few rows in any way
        out_of_memory = is_out_of_memory(error)
    finally:
        writes.undo()
        attributes.restore()
        random.restore()
    if out_of_memory:
        free_what_is_left(thorough=True)
    return False
