"""`memory.backward(loss)`: the backward of a loss whose graph exists already, which no split can change any more.

Inside of an accumulation window the loss stands for all samples of its batch, as the loader gave it, and is weighed
by them. A backward that fails withdraws from its window, so that the batch may be run again and counts once. Running
out of memory ends in an error that says what to call instead, since the graph is gone by then; models called through
`memory.forward` take a technique more in the next iteration, if the loop goes on.
"""

from collections.abc import Callable
from typing import Any

import torch

from oomfix.runtime.calls.accumulation import Window
from oomfix.runtime.calls.distributed import same_everywhere
from oomfix.runtime.memory.oom import DoesNotFitError, is_out_of_memory
from oomfix.runtime.state.gradients import reach


def backward_of(
    loss: torch.Tensor,
    options: dict[str, Any],
    window: Window,
    scaler: torch.amp.GradScaler,
    weighs: bool,
    after_failure: Callable[[], str],
) -> None:
    """`loss.backward(**options)`, scaled for fp16 and for its window.

    Args:
        weighs: by samples inside of a window; False: by the number of batches, as scripts do by hand.
        after_failure: does what helps when the iteration is run again, and returns what to say of it.

    Raises:
        DoesNotFitError: out of memory.
        RuntimeError: its window is averaged in another way.
    """
    # an exception that is kept, as the context of another, keeps the activations of its frames
    said = None
    try:
        if window.length == 1:
            _scaled_backward(scaler, loss, options)
        elif not weighs:
            _scaled_backward(scaler, loss / window.length, options)
        else:
            _in_window(loss, options, window, scaler)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said = str(error)
    if said is not None:
        raise DoesNotFitError(
            f"backward ran out of memory ({said}). A loss whose graph exists already cannot be cut; call "
            "memory.forward_backward(forward, *batch), with batch_size=1 where it may not be cut either, set "
            f"checkpointing='on', or use a smaller batch.{after_failure()}"
        )


def _in_window(loss: torch.Tensor, options: dict[str, Any], window: Window, scaler: torch.amp.GradScaler) -> None:
    slot = window.totals.begin(window.position)
    try:
        if slot.units not in ("", "rows"):
            raise RuntimeError(
                f"backward: in the batches before, this loss of the window came from forward_backward and was "
                f"averaged over its {slot.units}, not over samples; use one of both throughout a window"
            )
        slot.units = "rows"
        share = slot.divisor.share(window.samples, window.samples * window.length)
        if share:
            reached = reach(loss)
            window.totals.meets(reached.leaves, lambda leaf: leaf.grad, reached.hides_leaves)
            _scaled_backward(scaler, loss * share, options)
        if window.closed and not same_everywhere(slot.divisor.correction()):
            raise RuntimeError(
                "backward: the batches of this accumulation window differ in size between processes, and their "
                "gradients are averaged over processes already; use memory.forward_backward, or batches of one size"
            )
    except BaseException:
        # whatever ended it, Ctrl-C in a notebook too: this batch may be run again, and shall not count twice
        window.totals.withdraw(slot)
        raise
    window.totals.end(window)


def _scaled_backward(scaler: torch.amp.GradScaler, loss: torch.Tensor, options: dict[str, Any]) -> None:
    scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]
