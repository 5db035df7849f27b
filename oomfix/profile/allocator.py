"""A model of torch's CUDA caching allocator: what it asks of the driver when tensors come and go.

Sizes are rounded up to 512 bytes. Requests of up to 1 MiB share segments of 2 MiB, larger ones below 10 MiB share
segments of 20 MiB, the rest get segments of their own, rounded up to 2 MiB. A free block serves the smallest
request that fits it best, and is split where enough is left. Freed neighbours merge. When the card is full, the
segments that are free as a whole are given back, and the request is tried once more.

With expandable segments there is one segment per pool that grows by pages of 2 or 20 MiB, and every block is
split, so that no request has to find a hole of its own. When the card is full, free pages are unmapped, those in the
middle of a segment too: the addresses stay, and memory is mapped there again where a request fits.

Source: c10/cuda/CUDACachingAllocator.cpp, default settings, one stream.
"""

import os
from bisect import bisect_left, insort

MIB = 2**20
ROUNDING_BYTES = 512
_SMALL_REQUEST = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_REQUEST = 10 * MIB
_LARGE_SEGMENT = 20 * MIB
_SEGMENT_ROUNDING = 2 * MIB


class Block:
    """A piece of a segment: its size in bytes, whether it is in use, and its neighbours in the same segment.

    A hole has addresses and no memory; it counts as in use, so that nothing is merged with it.
    """

    __slots__ = ("address", "in_use", "is_hole", "nbytes", "next", "previous", "small")

    def __init__(self, address: int, nbytes: int, small: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.small = small
        self.in_use = self.is_hole = False
        self.previous: Block | None = None
        self.next: Block | None = None


class CachingAllocator:
    """The allocator of one card.

    Args:
        capacity_bytes: what it may reserve; None: no limit.
        expandable_segments: grow one segment per pool instead of asking for many; None: as the environment says when
            the first memory is asked for, which is when torch reads it.

    Attributes:
        allocated_bytes, reserved_bytes: now, as `torch.cuda.memory_allocated` and `memory_reserved` count them.
        peak_allocated_bytes, peak_reserved_bytes: the most since the start or the last `reset_peaks`.
        retries: how often cached segments were given back because the card was full.
    """

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool | None = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}
        self._last: dict[bool, Block | None] = {True: None, False: None}
        self._holes: dict[bool, list[Block]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes` bytes; None: the card is full, even with every cache given back."""
        size = rounded(nbytes)
        small = size <= _SMALL_REQUEST
        block = self._take_cached(size, small) or self._reserve(size, small)
        if block is None:
            return None
        self._split(block, size)
        self._hand_out(block)
        return block

    def allocate_at(self, address: int, nbytes: int, small: bool) -> Block | None:
        """The block of exactly `nbytes` bytes at `address` of a pool; None: not all of it is free."""
        for _, start in self._free[small]:
            block = self._blocks[start]
            if start <= address and address + nbytes <= start + block.nbytes:
                break
        else:
            return None
        self._remove_free(block)
        if start < address:
            front, block = block, self._cut(block, address - start)
            self._add_free(front)
        if nbytes < block.nbytes:
            self._add_free(self._cut(block, nbytes))
        self._hand_out(block)
        return block

    def layout(self) -> tuple[tuple[int, int, bool], ...]:
        """All blocks, as (address, bytes, whether in use): where it is equal, what comes next will be."""
        return tuple(sorted((block.address, block.nbytes, block.in_use) for block in self._blocks.values()))

    def free(self, block: Block) -> None:
        """Put a block back into its pool, merged with free neighbours."""
        self.allocated_bytes -= block.nbytes
        block.in_use = False
        if block.next is not None and not block.next.in_use:
            self._remove_free(block.next)
            self._merge(block, block.next)
        if block.previous is not None and not block.previous.in_use:
            block = block.previous
            self._remove_free(block)
            assert block.next is not None
            self._merge(block, block.next)
        self._add_free(block)

    def empty_cache(self) -> None:
        """Give segments that are free as a whole back to the driver; of expandable ones, the free pages."""
        for pool in self._free.values():
            for _, address in list(pool):
                block = self._blocks[address]
                if self.expandable_segments:
                    self._shrink(block) if block.next is None else self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._remove_free(block)
                    del self._blocks[address]
                    self.reserved_bytes -= block.nbytes

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _hand_out(self, block: Block) -> None:
        block.in_use = True
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _take_cached(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        position = bisect_left(pool, (size, -1))
        if position == len(pool):
            return None
        return self._blocks[pool.pop(position)[1]]

    def configure(self, settings: str) -> None:
        """Follow settings in the words of PYTORCH_CUDA_ALLOC_CONF, as far as they are modelled and come in time.

        Once there are segments, torch makes new ones in the new way beside the old; here the old way goes on.
        """
        if not self.reserved_bytes and "expandable_segments" in settings:
            self.expandable_segments = _asks_for_expandable_segments(settings)

    def _reserve(self, size: int, small: bool) -> Block | None:
        if self.expandable_segments is None:
            names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
            self.expandable_segments = any(_asks_for_expandable_segments(os.environ.get(name, "")) for name in names)
        grown = self._grow if self.expandable_segments else self._new_segment
        block = grown(size, small)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = grown(size, small)
        return block

    def _new_segment(self, size: int, small: bool) -> Block | None:
        segment = segment_bytes(size)
        if not self._may_reserve(segment):
            return None
        block = Block(self._next_address, segment, small)
        # a gap between segments: neighbours in memory are not neighbours of one segment
        self._next_address += segment + 1
        self._blocks[block.address] = block
        self._add_reserved(segment)
        return block

    def _grow(self, size: int, small: bool) -> Block | None:
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        for hole in sorted(self._holes[small], key=lambda hole: hole.address):
            parts = _from(hole, size)
            if parts is not None:
                return self._map(parts, size, page)
        last = self._last[small]
        at_end = last if last is not None and not last.in_use else None
        missing = size - (at_end.nbytes if at_end else 0)
        pages = -(-missing // page) * page
        if not self._may_reserve(pages):
            return None
        self._add_reserved(pages)
        if at_end is not None:
            self._remove_free(at_end)
            at_end.nbytes += pages
            return at_end
        start = last.address + last.nbytes if last else _base(small)
        block = Block(start, pages, small)
        block.previous, self._last[small] = last, block
        if last is not None:
            last.next = block
        self._blocks[start] = block
        return block

    def _shrink(self, block: Block) -> None:
        """Unmap the whole pages of a free block at the end of its segment."""
        page = _SMALL_SEGMENT if block.small else _LARGE_SEGMENT
        pages = block.nbytes // page * page
        if not pages:
            return
        self._remove_free(block)
        self.reserved_bytes -= pages
        block.nbytes -= pages
        if block.nbytes:
            self._add_free(block)
            return
        del self._blocks[block.address]
        self._last[block.small] = block.previous
        if block.previous is not None:
            block.previous.next = None

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages in a free block in the middle of its segment, and leave a hole."""
        page, base = _SMALL_SEGMENT if block.small else _LARGE_SEGMENT, _base(block.small)
        end = block.address + block.nbytes
        first = base - (base - block.address) // page * page
        last = base + (end - base) // page * page
        if last <= first:
            return
        self._remove_free(block)
        if last < end:
            self._add_free(self._cut(block, last - block.address))
        hole = block
        if block.address < first:
            hole = self._cut(block, first - block.address)
            self._add_free(block)
        hole.in_use = hole.is_hole = True
        self._holes[hole.small].append(hole)
        self.reserved_bytes -= hole.nbytes

    def _map(self, parts: list[Block], size: int, page: int) -> Block | None:
        """One block of at least `size` bytes from free blocks and holes that follow each other; None: no memory."""
        missing = size - sum(part.nbytes for part in parts if not part.is_hole)
        last = parts[-1]
        if last.is_hole:
            others = sum(part.nbytes for part in parts[:-1] if part.is_hole)
            used = min(-(-(missing - others) // page) * page, last.nbytes)
        else:
            others, used = sum(part.nbytes for part in parts if part.is_hole), 0
        if not self._may_reserve(others + used):
            return None
        self._add_reserved(others + used)
        if last.is_hole and used < last.nbytes:
            rest = self._cut(last, used)
            rest.in_use = rest.is_hole = True
            self._holes[last.small].append(rest)
        for part in parts:
            if part.is_hole:
                self._holes[part.small].remove(part)
                part.in_use = part.is_hole = False
            else:
                self._remove_free(part)
        block, *others_behind = parts
        for part in others_behind:
            self._merge(block, part)
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """The rest of a block behind its first `size` bytes, as a block of its own."""
        tail = Block(block.address + size, block.nbytes - size, block.small)
        tail.previous, tail.next = block, block.next
        if block.next is not None:
            block.next.previous = tail
        block.next, block.nbytes = tail, size
        if self._last[block.small] is block:
            self._last[block.small] = tail
        self._blocks[tail.address] = tail
        return tail

    def _split(self, block: Block, size: int) -> None:
        rest = block.nbytes - size
        if block.small or self.expandable_segments:
            if rest < ROUNDING_BYTES:
                return
        elif rest <= _SMALL_REQUEST:
            return
        self._add_free(self._cut(block, size))

    def _merge(self, block: Block, tail: Block) -> None:
        block.nbytes += tail.nbytes
        block.next = tail.next
        if tail.next is not None:
            tail.next.previous = block
        if self._last[block.small] is tail:
            self._last[block.small] = block
        del self._blocks[tail.address]

    def _add_free(self, block: Block) -> None:
        insort(self._free[block.small], (block.nbytes, block.address))

    def _remove_free(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.nbytes, block.address))]

    def _may_reserve(self, nbytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + nbytes <= self.capacity_bytes

    def _add_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def _base(small: bool) -> int:
    """Where the expandable segment of a pool begins."""
    return 0 if small else 2**50


def _from(hole: Block, size: int) -> list[Block] | None:
    """A hole, with a free block ahead and all free blocks and holes behind that `size` bytes take; None: too few."""
    current: Block | None = hole.previous if hole.previous is not None and not hole.previous.in_use else hole
    parts: list[Block] = []
    found = 0
    while found < size and current is not None and (current.is_hole or not current.in_use):
        parts.append(current)
        found += current.nbytes
        current = current.next
    return parts if found >= size else None


def rounded(nbytes: int) -> int:
    """The bytes that the allocator hands out for a request: a multiple of 512, at least 512."""
    return max(ROUNDING_BYTES, -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES)


def segment_bytes(size: int) -> int:
    """What is asked of the driver for a block of `size` bytes, without expandable segments."""
    if size <= _SMALL_REQUEST:
        return _SMALL_SEGMENT
    if size < _LARGE_REQUEST:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING


def _asks_for_expandable_segments(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower().replace(" ", "")
