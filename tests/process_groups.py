"""Groups of processes for tests."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group that this process is alone in. Models made in it must be out of sight when it ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # a model that is collected later ends the group itself, and waits for threads of it that wait for Python
        gc.collect()
        dist.destroy_process_group()
