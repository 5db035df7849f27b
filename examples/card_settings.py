"""Before anything is on the card: the allocator, the share of the card, and the loader.

Expandable segments avoid most fragmentation. The fraction leaves room for a desktop or another process on the same
card. Neither call starts CUDA, so both can stand at the top of a script that forks workers later.

Prints:

    allocator: expandable_segments:True
    loader: {'num_workers': 0, 'pin_memory': ...}
    loss ...
    loss ...
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from oomfix import runtime

print("allocator:", runtime.configure_allocator(expandable_segments=True))
runtime.memory_fraction(0.9)

device = "cuda" if torch.cuda.is_available() else "cpu"
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
arguments = runtime.loader_kwargs(num_workers=0)
print("loader:", arguments)
model = torch.nn.Linear(8, 2).to(device)

for x, y in DataLoader(data, batch_size=32, shuffle=True, **arguments):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    print(f"loss {torch.nn.functional.cross_entropy(model(x), y).item():.4f}")
