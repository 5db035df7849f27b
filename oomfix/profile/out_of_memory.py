"""The words of the error that a simulated card raises where a real one would: those of torch."""


def refusal(
    requested_bytes: int, capacity_bytes: int, in_use_bytes: int, allocated_bytes: int, unallocated_bytes: int = 0
) -> str:
    """The message of a refused request.

    Args:
        requested_bytes: what was asked for.
        capacity_bytes: what the card has.
        in_use_bytes: what this process has of it: segments of the allocator, and the CUDA context.
        allocated_bytes: what tensors hold.
        unallocated_bytes: what the allocator has in reserve.
    """
    free = max(0, capacity_bytes - in_use_bytes)
    return (
        f"CUDA out of memory. Tried to allocate {size(requested_bytes)}. GPU 0 has a total capacity of "
        f"{size(capacity_bytes)} of which {size(free)} is free. Including non-PyTorch memory, this process has "
        f"{size(in_use_bytes)} memory in use. Of the allocated memory {size(allocated_bytes)} is allocated by PyTorch, "
        f"and {size(unallocated_bytes)} is reserved by PyTorch but unallocated."
    )


def size(nbytes: int) -> str:
    """Bytes as torch words them: "512 bytes", "2.00 MiB", "1024.00 MiB", "1.25 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
