"""How many micro-batches: the fewest that fit, found by trying, and changed by halves."""

import math

import torch

from oomfix.presets import Preset

_GIB = 2**30
_FIRST_WAIT = 64  # calls between two tries with larger micro-batches; four times as many after each that fails


class Sizing:
    """The largest micro-batch, in samples, that one forward has been seen to fit, and when to try a larger one.

    Args:
        first_parts: into how many micro-batches to cut at first when the whole batch does not fit.
    """

    def __init__(self, first_parts: int) -> None:
        self._first_parts = max(2, first_parts)
        self._fits: int | None = None  # None: whatever comes is run whole
        self._failed: int | None = None
        self._calls = 0
        self._wait = _FIRST_WAIT
        self._try_again_at = 0

    @property
    def splits(self) -> bool:
        """Whether some whole batch has failed to fit."""
        return self._fits is not None

    @property
    def largest(self) -> int | None:
        """The largest micro-batch known to fit, in samples; None: batches run whole."""
        return self._fits

    def parts(self, size: int, least_rows: int = 1) -> int:
        """Number of micro-batches for `size` samples, each of at least `least_rows` where the batch allows."""
        if self._fits is None:
            return 1
        rows = self._fits
        larger = rows * 2
        if larger < (self._failed or math.inf) or self._calls >= self._try_again_at:
            rows = larger
        return least_parts(size, rows, least_rows)

    def fitted(self, size: int, parts: int) -> None:
        """A call of `size` samples in `parts` micro-batches went well."""
        self._calls += 1
        rows = math.ceil(size / parts)
        if self._fits is None:
            return
        if rows > self._fits and parts == 1 and self._failed is None:
            self._fits = None
        elif rows > self._fits:
            self._fits = rows
            if self._failed is not None and rows >= self._failed:
                self._failed = None

    def failed(self, size: int, parts: int, least_rows: int = 1) -> int | None:
        """A call in `parts` micro-batches ran out of memory.

        Returns:
            The number of micro-batches to try next, or None if they cannot be smaller.
        """
        rows = math.ceil(size / parts)
        if rows <= least_rows:
            return None
        self._try_again_at = self._calls + self._wait
        if self._fits is not None and rows > self._fits:
            self._wait *= 4
            smaller = self._fits
        elif parts == 1 and self._fits is None:
            smaller = math.ceil(size / self._first_parts)
        else:
            smaller = math.ceil(rows / 2)
        self._failed = rows
        self._fits = max(min(smaller, rows - 1), least_rows)
        following = least_parts(size, self._fits, least_rows)
        return following if following > parts else None

    def recount(self, before: int, now: int) -> None:
        """A batch that was taken for one of `before` samples has `now`."""
        if self._fits is not None:
            self._fits = max(1, self._fits * now // before)
        if self._failed is not None:
            self._failed = math.ceil(self._failed * now / before)

    def forget_failures(self) -> None:
        """Larger micro-batches may fit now: memory that was held is free."""
        self._failed = None


def least_parts(size: int, rows: int, least_rows: int) -> int:
    """The fewest micro-batches of at most `rows` samples, and of at least `least_rows` if `size` allows that."""
    return max(1, min(math.ceil(size / rows), size // least_rows))


def fixed_parts(size: int, asked: int) -> int:
    """`asked` micro-batches, or as many as leave at least two samples in each: layers may need two to compare."""
    return max(1, min(asked, size // 2))


class OptimizerRoom:
    """Memory as large as the state that the optimizer will make at its first step.

    Held while a forward and backward are tried before that step, so that a size which only fits without the
    optimizer's state is not taken for one that fits. Two numbers per trainable parameter, as Adam keeps.
    """

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def hold(self, parameters: list[torch.Tensor]) -> None:
        """Allocate the room, on the device of each parameter. May run out of memory, as the step would."""
        if self._held:
            return
        sizes: dict[torch.device, int] = {}
        for parameter in parameters:
            sizes[parameter.device] = sizes.get(parameter.device, 0) + 2 * parameter.numel() * parameter.element_size()
        for device, size in sizes.items():
            self._held.append(torch.empty(size, dtype=torch.uint8, device=device))

    def release(self) -> None:
        """Free the room."""
        self._held.clear()


def limit_memory(preset: Preset, device: torch.device) -> None:
    """Make the CUDA allocator refuse what is over the budget, so that a larger card behaves like the preset's.

    The budget is the smaller of the preset's and of what is free or reserved by this process, in bytes, less the
    preset's margin for other allocators.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = free + torch.cuda.memory_reserved(device)
    budget = preset.memory_fraction * own
    if preset.budget_gib is not None:
        budget = min(budget, preset.budget_gib * _GIB)
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
