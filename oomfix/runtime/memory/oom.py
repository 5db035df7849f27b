"""Out of memory: recognising it, freeing what it left behind, and the error for what cannot be made to fit."""

import gc

import torch

from oomfix.runtime.compat import OutOfMemoryError

# How the libraries below torch word it; they raise plain RuntimeErrors. cuDNN asks for a workspace and says
# that no engine was found when it does not get one; cuBLAS fails to make its handle.
_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "calling `cublasCreate(handle)`",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "unable to find an engine to execute this computation",
    "DefaultCPUAllocator: can't allocate memory",
)


class DoesNotFitError(OutOfMemoryError):  # type: ignore[misc, valid-type]
    """Not even the smallest exact piece of work fits in memory; the message lists what can be done.

    A subclass of torch's OutOfMemoryError (and so of RuntimeError): handlers that catch that one still work.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device, or a library on it, could not get memory."""
    if isinstance(error, DoesNotFitError):
        return False
    if isinstance(error, OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def note_choices(error: BaseException, choices: str) -> None:
    """Add what can be done to an error that says so of memory, where Python prints notes (3.11 and on).

    The error stays what it was, and tells the line of the model where memory ended.
    """
    if is_out_of_memory(error) and hasattr(error, "add_note"):
        error.add_note(f"oomfix: {choices}")


def free_what_is_left(thorough: bool = False) -> None:
    """Collect what only reference cycles keep alive, and give the allocator's unused blocks back.

    Args:
        thorough: look at old objects too, which takes a good part of a second in a large program. What a failed
            run left is young.

    To be called outside the `except` that caught the error: inside it, the traceback still holds the frames
    that failed, and they hold their tensors.
    """
    _empty_the_ready_queue()
    gc.collect(2 if thorough else 1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def smallest_graph() -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf on the CPU and the result of one operation on it, whatever device and grad mode are the default here."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        return leaf, leaf * 1.0


_LEAF, _RESULT = smallest_graph()  # at import: before the graphs of any training


def _empty_the_ready_queue() -> None:
    """Let autograd forget the operations of a failed backward that were ready to run on the CPU, and their tensors.

    It does so only when a later backward comes to them, and it takes those first that were recorded last: a graph
    that was recorded before all others comes to all.
    """
    torch.autograd.grad(_RESULT, _LEAF, retain_graph=True)
