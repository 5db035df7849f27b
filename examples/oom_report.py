"""When memory runs out: what was on the card, who held it, where it was made, and what to do.

`record_origins` slows every operation, so wrap the iterations that fail, not a whole training. On a machine without
a GPU this example raises the error itself.

Prints:

    CUDA out of memory. Tried to allocate 2.00 GiB.
    ... MiB in tensors:
    ...
    The largest:
    ...
    - `losses` of ... holds 20 tensors with their graphs, and these the activations of as many iterations: ...
"""

import torch
from torch import nn

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
losses = []


def train():
    for step in range(20):
        x, y = torch.randn(32, 64, device=device), torch.zeros(32, dtype=torch.int64, device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss)  # the mistake: every loss keeps the activations of its iteration
        if step == 19:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


try:
    with runtime.record_origins():
        train()
except torch.cuda.OutOfMemoryError as error:
    print(runtime.oom_report(error, top=5))
