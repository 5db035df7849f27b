"""Scripts that no simulation can run, and the sentence that says why."""

import re
import socket
from collections.abc import Iterator

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOST = re.compile(r"host='([^']+)'|https?://([^/\s'\"]+)")

# what torch built for CUDA says where no driver is
_NO_DRIVER = re.compile(r"Found no NVIDIA driver|CUDA driver version is insufficient|No CUDA GPUs are available")
# "dummy base class": what a torch built without CUDA has in place of CUDA's classes
_NOT_IN_THIS_TORCH = re.compile(r"dummy base class (\w+)|module 'torch\._C' has no attribute '_cuda_(\w+)'")


class CannotSimulate(Exception):
    """The script needs something that no simulation gives; the message is one sentence."""


def refuse_what_cannot_be(error: Exception) -> None:
    """Turn errors that stem from the simulation, not from the script, into one sentence."""
    kind = type(error).__name__
    if any(_is_of_the_network(cause) for cause in _chain(error)):
        raise CannotSimulate(f"it downloads from {_host(error)}, which cannot be reached from here") from None
    if isinstance(error, ModuleNotFoundError):
        raise CannotSimulate(f"it imports {error.name}, which is not installed here") from None
    if isinstance(error, KeyError) and error.args[:1] and error.args[0] in _OF_TORCHRUN:
        said = f"it reads {error.args[0]}, which torchrun sets; `--ranks N` simulates one of N processes"
        raise CannotSimulate(said) from None
    if isinstance(error, ImportError) and "attempted relative import" in str(error):
        said = "it is a module of a package: `oomfix profile -m package.module`, from the folder that holds the package"
        raise CannotSimulate(said) from None
    if isinstance(error, ImportError):
        raise CannotSimulate(str(error).splitlines()[0]) from None
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        raise CannotSimulate(f"the result of {error.args[0]} depends on data, which a simulated card has not") from None
    if kind == "UnsupportedOperatorException":
        raise CannotSimulate(f"{error.args[0]} has no shape rule, as custom CUDA operations often lack") from None
    if "_share_fd_: only available on CPU" in str(error):
        raise CannotSimulate("it shares its model with other processes, and one process is simulated") from None
    if "invalid device ordinal" in str(error):
        raise CannotSimulate("it uses a second card, and one is simulated") from None
    if match := _NOT_IN_THIS_TORCH.search(str(error)):
        raise CannotSimulate(
            f"it uses {match.group(1) or match.group(2)} of torch.cuda, which only a real card has"
        ) from None
    if _NO_DRIVER.search(str(error)):
        raise CannotSimulate("it asks the driver of the card, which only a real one has") from None
    if "NestedIntNode" in str(error):
        raise CannotSimulate("it uses nested tensors, whose shapes are data that a simulated card has not") from None
    if isinstance(error, FileNotFoundError) and error.filename:
        raise CannotSimulate(f"it needs the file {error.filename}") from None
    if isinstance(error, RuntimeError) and "data is not allocated yet" in str(error):
        raise CannotSimulate("it reads the memory of a tensor on the card directly, as custom kernels do") from None


def _is_of_the_network(error: BaseException) -> bool:
    return isinstance(error, socket.gaierror | ConnectionError | TimeoutError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _host(error: BaseException) -> str:
    found = next((match for cause in _chain(error) if (match := _HOST.search(str(cause)))), None)
    return (found.group(1) or found.group(2)) if found else "a server"
