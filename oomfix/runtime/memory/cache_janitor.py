"""When to empty the CUDA allocator's cache: when much of it was not needed even at the peak, and hardly ever."""

import logging

import torch

_log = logging.getLogger("oomfix")
_GIB = 2**30
_LONGEST_INTERVAL = 100_000


class CacheJanitor:
    """Returns unused blocks of the CUDA allocator to the driver where this process has no use for them.

        janitor = runtime.CacheJanitor()
        for epoch in range(epochs):
            for batch in loader:
                ...
                janitor.after_step()

    Emptying the cache lowers no peak: the next iteration asks the driver for the same blocks again, and waits for
    them. It helps where memory is reserved in pieces that nothing fits into any more (sizes that vary, a stage
    that is over). So the janitor looks only once in `every` steps, empties only where more than `unused_share` of
    the reserved memory was not in use at the peak either, and looks half as often each time that it finds what it
    gave back in use again.

    Args:
        unused_share: of the reserved memory, above 0 and below 1.
        every: steps between two looks.
        device: the card; None: the current one.

    Attributes:
        every: steps between two looks, as they are now.

    Raises:
        ValueError: an argument out of its range.

    A step without a look costs one addition. The peak is the one that torch counts since
    `torch.cuda.reset_peak_memory_stats`, which `MemoryMonitor.log` calls.
    """

    def __init__(self, unused_share: float = 0.3, every: int = 100, device: int | torch.device | None = None) -> None:
        if not isinstance(unused_share, int | float) or not 0 < unused_share < 1:
            raise ValueError(f"unused_share: got {unused_share!r}, expected a share between 0 and 1")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: got {every!r}, expected a whole number of steps, at least 1")
        self.every = every
        self._unused_share = unused_share
        self._device = device
        self._steps_left = every
        self._reserved_before = 0

    def after_step(self) -> int:
        """Call this once per step.

        Returns:
            Bytes given back to the driver; 0 nearly always.
        """
        self._steps_left -= 1
        if self._steps_left:
            return 0
        freed = self._look()
        self._steps_left = self.every
        return freed

    def _look(self) -> int:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        reserved = torch.cuda.memory_reserved(self._device)
        if self._reserved_before and reserved >= self._reserved_before:
            self.every = min(2 * self.every, _LONGEST_INTERVAL)
        self._reserved_before = 0
        unused = reserved - torch.cuda.max_memory_allocated(self._device)
        if unused <= self._unused_share * reserved:
            return 0
        torch.cuda.empty_cache()
        freed: int = reserved - torch.cuda.memory_reserved(self._device)
        if freed:
            self._reserved_before = reserved
            _log.info("cache janitor: gave %.2f of %.2f GiB back", freed / _GIB, reserved / _GIB)
        return freed
