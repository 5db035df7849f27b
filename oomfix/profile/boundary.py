"""The boundary between the host and the simulated card.

Real tensors stay real until they are moved to "cuda", or made there: from then on they are fake tensors, which have a
shape and a type but no data. They say that they are on "cuda:0". Moved back, they are real tensors of zeros. What a
script reads from the card (`.item()`, `if loss > best`, boolean masks) has to be assumed, and is noted.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.answers import ANSWERS
from oomfix.profile.refusals import CannotSimulate
from oomfix.profile.trace import MemoryTrace, Scratch
from oomfix.profile.user_code import user_line

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

_MOST_QUESTIONS = 200_000
# operations whose tensors come from the script; operations between could have been given some that torch made
_OF_ONE_DEVICE = {
    getattr(aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_batch_norm", "native_layer_norm",
        "mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "nll_loss_forward", "nll_loss2d_forward",
    )
}  # fmt: skip


class CardTrace(MemoryTrace):
    """A memory trace that counts fake tensors only, makes them, and answers for the data they do not have.

    Attributes:
        fake_mode: the mode that the fake tensors belong to.
        assumed: (what was assumed, (file, line) or None), with how often.
        values_read: how often numbers were read that tensors of the card have from the host.
        recording: False while fake tensors are made that are not on the card, as in a model's initialisers.
    """

    def __init__(
        self,
        allocator: CachingAllocator | None = None,
        scratch: Scratch | None = None,
        keeps: Callable[[Any, bool], int] | None = None,
    ) -> None:
        super().__init__(allocator, self._is_on_card, scratch, keeps)
        self.recording = True
        self.values_read = 0
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.assumed: Counter[tuple[str, tuple[str, int] | None]] = Counter()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            # page-locked memory is the driver's to give, and makes no difference to the card
            kwargs = {**kwargs, "pin_memory": False}
        if is_cuda(kwargs.get("device")):
            return self._on_card_operation(func, args, kwargs)
        if func is aten.copy_.default and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            return args[0]
        if self.recording and func.overloadpacket in _OF_ONE_DEVICE:
            refuse_two_devices(args)
        if (answer := ANSWERS.get(func)) is not None and any(isinstance(a, FakeTensor) for a in args):
            return answer(self, func, args, kwargs)
        return func(*args, **kwargs)

    def assume(self, what: str) -> None:
        """Note an assumption, with the line of user code that asked.

        Raises:
            CannotSimulate: the line has asked so often that it seems to wait for another answer.
        """
        if self.recording:
            line = user_line(sys._getframe(1))
            self.assumed[what, line] += 1
            if self.assumed[what, line] >= _MOST_QUESTIONS and line is not None:
                raise CannotSimulate(
                    f"{line[0]}:{line[1]} has read the card {_MOST_QUESTIONS} times: it seems to wait for its numbers "
                    "to change, and a simulated card has none"
                )

    def watch(self, model: torch.nn.Module) -> None:
        """As `MemoryTrace.watch`; refuses models that several devices share."""
        places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(places) > 1:
            raise CannotSimulate(
                f"its device map spreads a model over {', '.join(sorted(places))}: one card is simulated"
            )
        super().watch(model)

    def _is_on_card(self, tensor: torch.Tensor) -> bool:
        return self.recording and isinstance(tensor, FakeTensor)

    def to_card(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty fake tensor like `tensor`; a tensor that is on the card already is returned as it is."""
        return tensor if isinstance(tensor, FakeTensor) else tensor.cuda()

    def _on_card_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory or a copy whose result is to be on the card."""
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        with self.fake_mode:
            if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
                source = args[0]
                fake = torch.empty_strided(source.size(), source.stride(), dtype=kwargs.get("dtype") or source.dtype)
                wanted = kwargs.get("memory_format")
                if wanted not in (None, torch.preserve_format):
                    fake = fake.contiguous(memory_format=wanted)
                return fake
            return func(*args, **kwargs)


def onto_the_card(values: Any) -> Any:
    """Nested values with their tensors on the card, as wrappers that know their device move what they are given."""
    return tree_map_only(Tensor, Tensor.cuda, values)


def refuse_two_devices(args: tuple[Any, ...]) -> None:
    """Raise torch's own error where an operation is given tensors of the card and of the host."""
    tensors = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(a, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        # a single number on the host is a number to every device
        if any(
            tensor.dim() and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor) for tensor in tensors
        ):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            )


def is_cuda(device: object) -> bool:
    """Whether this is the card.

    Raises:
        RuntimeError: it is a second one; the words are those of CUDA.
    """
    if not isinstance(device, torch.device) or device.type != "cuda":
        return False
    if device.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal {device.index}: one card is simulated")
    return True
