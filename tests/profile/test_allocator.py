"""The allocator's books, against sizes worked out by hand from the rules of torch's CUDA caching allocator."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomfix.profile.allocator import CachingAllocator, rounded

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # at most 1 MiB left over: the large pool does not split
        (10 * MIB + 512, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB + 512, 20 * MIB, 20 * MIB),
    ],
)
def test_one_request_costs_what_torch_reserves(request_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_requests_share_a_segment():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_the_best_fitting_free_block_is_taken():
    allocator = CachingAllocator()
    big, between, small = (allocator.allocate(n * MIB) for n in (40, 12, 20))
    allocator.free(big)
    allocator.free(small)
    taken = allocator.allocate(20 * MIB)
    assert taken.address == small.address and between.in_use


def test_freed_neighbours_merge_into_a_block_that_serves_a_larger_request():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1], blocks[3]):
        allocator.free(block)
    assert allocator.allocate(20 * MIB) is not None
    assert allocator.reserved_bytes == 20 * MIB


def test_fragments_do_not_serve_a_larger_request():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_full_card_gives_back_free_segments_before_it_refuses():
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    first = allocator.allocate(40 * MIB)
    allocator.free(first)
    assert allocator.allocate(50 * MIB) is not None
    assert (allocator.retries, allocator.reserved_bytes) == (1, 50 * MIB)
    assert allocator.allocate(20 * MIB) is None
    assert allocator.allocated_bytes == 50 * MIB


def test_a_segment_in_use_is_not_given_back():
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    first, second = allocator.allocate(10 * MIB - 512), allocator.allocate(9 * MIB)
    allocator.free(first)
    assert allocator.allocate(21 * MIB) is None
    allocator.free(second)
    assert allocator.allocate(21 * MIB) is not None


def test_expandable_segments_grow_by_pages_where_separate_ones_leave_holes():
    sizes = [30 * MIB, 31 * MIB, 32 * MIB, 33 * MIB]
    separate, growing = CachingAllocator(), CachingAllocator(expandable_segments=True)
    for allocator in (separate, growing):
        for size in sizes:
            allocator.free(allocator.allocate(size))
    assert separate.reserved_bytes == (30 + 32 + 34) * MIB
    assert growing.reserved_bytes == 40 * MIB


def test_expandable_segments_return_the_free_end_when_full():
    allocator = CachingAllocator(capacity_bytes=60 * MIB, expandable_segments=True)
    kept = allocator.allocate(10 * MIB)
    allocator.free(allocator.allocate(45 * MIB))
    small = allocator.allocate(1)
    assert small is not None and kept.in_use
    assert allocator.reserved_bytes <= 60 * MIB


def test_expandable_segments_unmap_free_pages_in_their_middle_when_full_and_map_them_again():
    allocator = CachingAllocator(capacity_bytes=100 * MIB, expandable_segments=True)
    first, middle, last = (allocator.allocate(size * MIB) for size in (10, 50, 20))
    allocator.free(middle)
    # of the 50 MiB two pages of 20 are whole; with the one left at the end they make room behind
    behind = allocator.allocate(55 * MIB)
    assert behind is not None and behind.address > last.address
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(behind)
    again = allocator.allocate(45 * MIB)
    assert again is not None and again.address > last.address
    allocator.free(again)
    allocator.empty_cache()
    between = allocator.allocate(48 * MIB)
    assert between is not None and first.address < between.address < last.address
    assert allocator.reserved_bytes == 80 * MIB


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60 * MIB)), max_size=80),
    expandable=st.booleans(),
    capacity=st.sampled_from([None, 200 * MIB]),
)
def test_the_books_balance(steps, expandable, capacity):
    """Blocks in use never overlap, sums agree, the cap holds, and what is all freed is all given back."""
    allocator = CachingAllocator(capacity, expandable)
    live = []
    for release, size in steps:
        if release and live:
            allocator.free(live.pop(size % len(live)))
        else:
            block = allocator.allocate(size)
            if block is not None:
                assert block.nbytes >= rounded(size)
                live.append(block)
        spans = sorted((block.address, block.address + block.nbytes) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(block.nbytes for block in live) <= allocator.reserved_bytes
        assert capacity is None or allocator.reserved_bytes <= capacity
        mapped = sum(block.nbytes for block in allocator._blocks.values() if not block.is_hole)
        assert mapped == allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
