"""The largest batch that fits, found by trying."""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from oomfix.runtime import trees
from oomfix.runtime.arguments import shown
from oomfix.runtime.memory.oom import DoesNotFitError, free_what_is_left, is_out_of_memory
from oomfix.runtime.state.random_state import RandomState

_log = logging.getLogger("oomfix")


def find_batch_size(
    run: Callable[[int], object],
    *,
    start: int = 8,
    most: int = 4096,
    multiple_of: int = 1,
    restore: Iterable[Any] = (),
) -> int:
    """The largest batch size, up to `most`, with which `run` does not run out of memory.

    Sizes double until one fails, and the gap is then halved until it is `multiple_of` wide. The size returned has
    been run. It has no margin: leave some where samples differ in size, and try with the largest.

        def run(size):
            loss = criterion(model(torch.randn(size, 3, 224, 224, device="cuda")), torch.zeros(size, ...))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        size = runtime.find_batch_size(run, restore=[model, optimizer])

    Args:
        run: makes one whole training step with a batch of that size, the optimizer's included: its state is made
            in the first.
        start: the first size.
        most: the largest size, for instance that of the data set.
        multiple_of: sizes are multiples of this.
        restore: models and optimizers (anything with `state_dict` and `load_state_dict`) to be put back
            afterwards; copies of them are held on the host meanwhile. Gradients are dropped, random generators
            put back.

    Raises:
        DoesNotFitError: not even `multiple_of` samples fit.
        TypeError: `run` is not a function, or something in `restore` has no state.
        ValueError: a number out of its range.

    A larger batch trains differently. Where the batch size is part of a recipe, keep it and let
    `memory.forward_backward` cut it.
    """
    for name, value in (("start", start), ("most", most), ("multiple_of", multiple_of)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1")
    if most < multiple_of:
        raise ValueError(f"most: got {most!r}, expected at least multiple_of, {multiple_of}")
    if not callable(run):
        raise TypeError(
            f"run: got {shown(run)}, expected a function that makes one training step with a batch of a given size"
        )
    if not isinstance(restore, Iterable) or isinstance(restore, nn.Module):
        raise TypeError(f"restore: got {shown(restore)}, expected a list of models and optimizers")
    restore = list(restore)
    for thing in restore:
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(
                f"restore: got {shown(thing)} in it, expected models and optimizers, with state_dict and "
                "load_state_dict"
            )
    kept = [(thing, copy.deepcopy(trees.map_leaves(_on_host, thing.state_dict()))) for thing in restore]
    generators = RandomState()
    try:
        found = _search(run, max(1, start // multiple_of), most // multiple_of, multiple_of) * multiple_of
    finally:
        for thing, state in kept:
            thing.load_state_dict(state)
            _drop_gradients(thing)
        generators.restore()
        free_what_is_left()
    _log.info("find_batch_size: %d samples fit", found)
    return found


def _search(run: Callable[[int], object], size: int, most: int, unit: int) -> int:
    """The largest number of units that fits."""
    fits, fails = 0, most + 1
    size = min(size, most)
    while fails - fits > 1:
        said = _failure(run, size * unit)
        if said is None:
            fits = size
        else:
            fails = size
            if size == 1:
                raise DoesNotFitError(f"find_batch_size: a batch of {unit} runs out of memory. torch said: {said}")
        # doubling as long as nothing has failed
        size = min(2 * fits, most) if fails > most else max(1, (fits + fails) // 2)
    return fits


def _failure(run: Callable[[int], object], size: int) -> str | None:
    """What an out-of-memory error said, or None where there was none."""
    try:
        run(size)
        said = None
    except RuntimeError as error:
        if not (is_out_of_memory(error) or isinstance(error, DoesNotFitError)):
            raise
        said = str(error).splitlines()[0]
    # outside the `except`, where the frames that failed hold nothing any more
    free_what_is_left(thorough=said is not None)
    return said


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _drop_gradients(thing: Any) -> None:
    if isinstance(thing, nn.Module | torch.optim.Optimizer):
        thing.zero_grad(set_to_none=True)
