"""Run by test_data_parallel.py: cases on processes that each hold a replica, beside plain loops of DDP.

Every case prints one line for each process: what the test compares. All models and batches are float64.
"""

import copy
import gc
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.processes import replicas
from oomfix.runtime.recovery import rungs
from oomfix.runtime.techniques import chunked_losses, offloading
from tests.runtime import torchrun


class Trouble(torch.autograd.Function):
    """Runs out of memory in forward or backward where the batch has more than `limit` rows."""

    where, limit = None, 10**9

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        if Trouble.where == "forward" and len(x) > Trouble.limit:
            raise OutOfMemoryError("CUDA out of memory. Tried to ...")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Trouble.where == "backward" and ctx.rows > Trouble.limit:
            raise OutOfMemoryError("CUDA out of memory. Tried to ...")
        return gradient


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x):
        return self.second(Trouble.apply(torch.relu(self.norm(self.first(x)))))


class Branches(nn.Module):
    """Two branches of which a batch takes one, and one that is never taken."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](torch.relu(self.stem(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x):
        return x + self.back(torch.tanh(self.wide(x)))


class Stack(nn.Module):
    """Blocks that can be checkpointed, and a head with classes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(x))


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.embedding((x.abs() * 10).long() % 9).mean((1, 2)) if x.dim() == 3 else self._of(x))

    def _of(self, x):
        return self.embedding((x.abs() * 10).long() % 9).mean(1)


def made(model, **options):
    torch.manual_seed(0)
    return DistributedDataParallel(model().double(), **options)


def batches(count, size=12):
    """Other samples on each process."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(count):
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 4, (size,), generator=generator)


def memory_of(**overrides):
    runtime.reset()
    return runtime.preset("16gb", **overrides)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(model, data, clip=None, loss=F.cross_entropy):
    optimizer = sgd(model)
    for x, y in data:
        loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def ours(model, data, memory=None, **arguments):
    memory = memory or memory_of()
    optimizer = sgd(model)
    for x, y in data:
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        memory.step(optimizer, **arguments)
    return model


def error(model, reference):
    """The largest difference of parameters and buffers."""
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def spread(model):
    """The largest difference of parameters between the processes."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return float((flat - gathered(flat)[0]).abs().max())


def gathered(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def whole(rank):
    return {"error": error(ours(made(Net), batches(3)), plain(made(Net), batches(3)))}


def fixed_splits(rank):
    memory = memory_of(micro_batches=2 + rank)
    return {"error": error(ours(made(Net), batches(3), memory), plain(made(Net), batches(3)))}


def noise(rank):
    """Of samples and once for a batch, drawn inside of the forward by each process with a seed of its own."""
    model, reference = made(Net), made(Net)
    memory, optimizer = memory_of(micro_batches=2 + rank), sgd(model)

    def with_noise(out, y):
        return F.cross_entropy(out + torch.rand([]) * torch.randn_like(out), y)

    torch.manual_seed(5 + rank)
    plain(reference, batches(3), loss=with_noise)
    drawn = torch.rand(1)
    torch.manual_seed(5 + rank)
    for batch in batches(3):
        memory.forward_backward(lambda x, y: with_noise(model(x), y), *batch)
        memory.step(optimizer)
    return {"error": error(model, reference) + float((torch.rand(1) - drawn).abs())}


def options_of_ddp(rank):
    errors = []
    for options in (
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
    ):
        model, reference = made(Net, **options), made(Net, **options)
        for part in (batches(2), batches(2)):
            part = list(part)
            ours(model, part, memory_of(micro_batches=3))
            plain(reference, part)
            # and the model still averages by itself
            plain(model, part)
            plain(reference, part)
            errors.append(error(model, reference))
    return {"error": max(errors)}


def out_of_memory(rank, where):
    memory = memory_of()
    model = made(Net)
    Trouble.where, Trouble.limit = where, 4 if rank == 1 else 10**9
    ours(model, batches(4), memory)
    Trouble.where = None
    return {"error": error(model, plain(made(Net), batches(4))), "retries": memory.report().retries}


def smaller_card(rank):
    """The card of one process holds less than a step on the whole batch takes, whatever asks for memory when."""

    def wide():
        return nn.Sequential(nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 4))

    memory, model, data = memory_of(), made(wide), list(batches(2, 64))
    # weights, gradients and momentum are 0.5 MB, the activations of the whole batch 1 MB each
    with SimulatedCard(2_500_000 if rank == 1 else None) as card:
        card.track(model)
        ours(model, data, memory)
    return {"error": error(model, plain(made(wide), data)), "retries": memory.report().retries}


def ragged(rank):
    size = 9 if rank else 12
    memory = memory_of(micro_batches=2 + rank)
    return {"error": error(ours(made(Net), batches(3, size), memory), plain(made(Net), batches(3, size)))}


def branches(rank):
    found = {}
    for name, step in (("plain", None), ("ours", memory_of(micro_batches=2))):
        model = made(Branches, find_unused_parameters=True)
        for x, y in batches(1):
            if step is None:
                F.cross_entropy(model(x, rank), y).backward()
            else:
                step.forward_backward(lambda x, y, m=model: F.cross_entropy(m(x, rank), y), x, y)
        found[name] = [parameter.grad for parameter in model.parameters()]
    pairs = list(zip(found["plain"], found["ours"], strict=True))
    return {
        "none": [a is None for a, _ in pairs],
        "same_none": all((a is None) == (b is None) for a, b in pairs),
        "error": max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None),
    }


def windows(rank):
    """Windows of 3 in 7 batches; a reduction in the middle of one would show in gradients that agree."""
    data, k = list(batches(7)), 3
    reference = made(Net)
    optimizer = sgd(reference)
    for start in range(0, len(data), k):
        window = data[start : start + k]
        for index, (x, y) in enumerate(window):
            with nullcontext() if index == len(window) - 1 else reference.no_sync():
                (F.cross_entropy(reference(x), y) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    memory, model, apart, sent = memory_of(micro_batches=2), made(Net), [], []
    average = replicas.average_gradients
    replicas.average_gradients = lambda *arguments: (sent.append(1), average(*arguments))
    optimizer = sgd(model)
    for x, y in memory.accumulate(data, k):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        if not memory.window_closed:
            gradient = model.module.first.weight.grad
            apart.append(float((gathered(gradient)[0] - gathered(gradient)[1]).abs().max()))
        else:
            memory.step(optimizer)
    replicas.average_gradients = average
    calls = [forward.calls for forward in memory.report().forwards]
    return {"error": error(model, reference), "apart": min(apart), "averages": len(sent), "calls": calls}


def ragged_windows(rank):
    """Windows hold other numbers of samples on each process, and two losses in each batch."""
    data = [(x[: 12 - 3 * (i + rank) % 5], y[: 12 - 3 * (i + rank) % 5]) for i, (x, y) in enumerate(batches(4))]
    reference, model, memory = made(Net), made(Net), memory_of()
    optimizer, k = sgd(reference), 2
    for start in range(0, len(data), k):
        window = data[start : start + k]
        samples = sum(len(x) for x, _ in window)
        for index, (x, y) in enumerate(window):
            with nullcontext() if index == len(window) - 1 else reference.no_sync():
                out = reference(x)
                loss = F.cross_entropy(out, y) + out.square().mean()
                (loss * len(x) / samples).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer = sgd(model)
    for x, y in memory.accumulate(data, k):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        memory.forward_backward(lambda x, y: model(x).square().mean(), x, y)
        if memory.window_closed:
            memory.step(optimizer)
    return {"error": error(model, reference), "spread": spread(model)}


def plain_backward_in_windows(rank):
    """`memory.backward` leaves averaging to DDP: right for batches of one size, refused where sizes differ."""
    data, memory, model, reference, said = list(batches(3)), memory_of(), made(Net), made(Net), ""
    optimizer = sgd(model)
    for x, y in memory.accumulate(data, 2):
        memory.backward(F.cross_entropy(model(x), y))
        if memory.window_closed:
            memory.step(optimizer)
    plain(reference, [tuple(torch.cat(parts) for parts in zip(*data[:2], strict=True)), data[2]])
    data[1] = tuple(part[: 6 + rank] for part in data[1])
    try:
        for x, y in memory.accumulate(data, 2):
            memory.backward(F.cross_entropy(model(x), y))
    except RuntimeError as failure:
        said = str(failure)
    return {"error": error(model, reference), "said": said}


def window_left(rank):
    """A window that is left early is averaged by the step after it."""
    data, memory, model = list(batches(4)), memory_of(), made(Net)
    optimizer = sgd(model)
    loop = memory.accumulate(data, 3)
    for x, y in loop:
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        break
    loop.close()
    memory.step(optimizer)
    return {"error": error(model, plain(made(Net), data[:1])), "spread": spread(model)}


def no_sync(rank):
    data, errors = list(batches(2)), []
    reference, model, memory = made(Net), made(Net), memory_of()
    with reference.no_sync():
        F.cross_entropy(reference(data[0][0]), data[0][1]).backward()
    with model.no_sync():
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *data[0])
    own = model.module.first.weight.grad.clone()
    errors.append(float((own - reference.module.first.weight.grad).abs().max()))
    F.cross_entropy(reference(data[1][0]), data[1][1]).backward()
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *data[1])
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    errors += [float((a.grad - b.grad).abs().max()) for a, b in pairs]
    return {"error": max(errors), "own": float((gathered(own)[0] - gathered(own)[1]).abs().max())}


def buffers(rank):
    """Running statistics are those of the first process at each forward, as DDP has it; bitwise while whole."""

    reference, model = made(normed), made(normed)
    ours(model, batches(3))
    plain(reference, batches(3))
    found = {"error": error(model, reference)}
    x, _ = next(batches(1))
    memory = memory_of()
    for module in (model, reference):
        module.eval()
    with torch.no_grad():
        expected = reference(x)
    found["evaluation"] = float((memory.evaluate(lambda x: model(x), x) - expected).abs().max())
    found["apart"] = float((gathered(model.module.norm.running_mean)[0] - model.module.norm.running_mean).abs().max())
    return found


def buffers_in_windows(rank):
    """Inside of a window each process goes on with its own statistics, as inside of `no_sync`."""

    reference, model, memory, data = made(normed), made(normed), memory_of(), list(batches(4))
    optimizer = sgd(reference)
    for index, (x, y) in enumerate(data):
        with nullcontext() if index % 2 else reference.no_sync():
            (F.cross_entropy(reference(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer = sgd(model)
    for x, y in memory.accumulate(data, 2):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        if memory.window_closed:
            memory.step(optimizer)
    mean = model.module.norm.running_mean
    return {"error": error(model, reference), "apart": float((gathered(mean)[0] - gathered(mean)[1]).abs().max())}


def normed():
    return Net(norm=True)


def evaluated_by_one(rank):
    """The first process alone evaluates what is inside of the wrapper, between two steps that all make."""
    reference, model, memory, (x, _) = made(normed), made(normed), memory_of(), next(batches(1))
    errors = []
    for _ in range(2):
        ours(model, batches(2), memory)
        plain(reference, batches(2))
        for module in (model, reference):
            module.eval()
        if rank == 0:
            with torch.no_grad():
                expected = reference.module(x)
            errors.append(float((memory.evaluate(lambda x: model.module(x), x) - expected).abs().max()))
        for module in (model, reference):
            module.train()
    return {"error": max([error(model, reference), *errors]), "spread": spread(model)}


def evaluated_in_pieces(rank):
    """Buffers differ between the processes when the evaluation begins, in which one runs out of memory."""
    reference, model, memory = made(normed), made(normed), memory_of()
    ours(model, batches(2), memory)
    plain(reference, batches(2))
    apart = float((gathered(model.module.norm.running_mean)[0] - model.module.norm.running_mean).abs().max())
    errors = []
    for x, _ in batches(3):
        for module in (model, reference):
            module.eval()
        with torch.no_grad():
            expected = reference(x)
        Trouble.where, Trouble.limit = "forward", 5 if rank else 10**9
        errors.append(float((memory.evaluate(lambda x: model(x), x) - expected).abs().max()))
        Trouble.where = None
        for module in (model, reference):
            module.train()
        ours(model, batches(1), memory)
        plain(reference, batches(1))
    largest = memory.report().forwards[-1].largest
    return {"error": max([error(model, reference), *errors]), "apart": apart, "largest": largest}


def several_models(rank):
    encoder, head = made(Net), made(lambda: nn.Linear(4, 4))
    encoder_2, head_2 = made(Net), made(lambda: nn.Linear(4, 4))
    memory = memory_of(micro_batches=1 + rank)

    def forward(x, y):
        return F.cross_entropy(head(encoder(x)), y) + encoder(-x).square().mean()

    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    optimizer_2 = torch.optim.SGD([*encoder_2.parameters(), *head_2.parameters()], lr=0.1)
    for x, y in batches(3):
        memory.forward_backward(forward, x, y)
        memory.step(optimizer)
        # one backward of two forwards is not for DDP; their sum is
        with encoder_2.no_sync():
            encoder_2(-x).square().mean().backward()
        F.cross_entropy(head_2(encoder_2(x)), y).backward()
        optimizer_2.step()
        optimizer_2.zero_grad()
    return {"error": max(error(encoder, encoder_2), error(head, head_2))}


def preparing(rank):
    errors = []
    for before in (True, False):
        memory = memory_of(checkpointing="on", micro_batches=2)
        torch.manual_seed(0)
        net = Stack().double()
        if before:
            memory.prepare(net)
        model = DistributedDataParallel(net)
        if not before:
            memory.prepare(model)
        errors.append(error(ours(model, batches(3), memory), plain(made(Stack), batches(3))))
        assert "checkpointing 3 blocks" in [technique.name for technique in memory.report().techniques]
    return {"error": max(errors)}


def compiled(model):
    return torch.compile(model, backend="aot_eager")


@contextmanager
def small_tensors_count():
    """Lets chunked losses take small logits, and offloading small activations on the CPU."""
    with ExitStack() as stack:
        for owner, name, value in (
            (chunked_losses, "CHUNK_BYTES", 0),
            (rungs.Offloading, "take", lambda self, iteration: True),
            (rungs, "offload_activations", lambda: runtime.offload_activations(0)),
            (offloading, "_on_accelerator", lambda tensor: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def techniques(rank):
    """Each policy of a preset, and compiled models, with splits that differ between the processes."""
    cases = {
        "chunked loss": {"chunked_loss": "on"},
        "checkpointing": {"checkpointing": "on"},
        "offloading": {"offloading": "on"},
        "half precision": {"precision": "bf16"},
        "compiled": {"inner": compiled},
        "compiled around": {"outer": compiled},
    }
    found = {}
    for name, policies in cases.items():
        inner, outer = policies.pop("inner", lambda m: m), policies.pop("outer", lambda m: m)
        dtype = torch.float32 if name == "half precision" else torch.float64
        data = [(x.to(dtype), y) for x, y in batches(3)]
        torch.manual_seed(0)
        net = Stack().to(dtype)
        reference = DistributedDataParallel(copy.deepcopy(net))
        memory = memory_of(**{"precision": "fp32", **policies, "micro_batches": 2 + rank})
        memory.prepare(net)
        with small_tensors_count():
            ours(outer(DistributedDataParallel(inner(net))), data, memory)
        plain(reference, data)
        report = memory.report()
        assert not report.whole_because
        told = [technique.name for technique in report.techniques]
        found[name] = {"error": error(net, reference.module), "spread": spread(net), "told": told}
    torch.compiler.reset()
    return {"found": found}


def unfrozen_in_phases(rank):
    """A part that trains from the second step on; DDP was made before, and by hand is made anew."""
    found = []
    for memory in (memory_of(micro_batches=2 + rank), None):
        torch.manual_seed(0)
        net = Net().double()
        unfreezing = runtime.ProgressiveUnfreezing(net, {1: ["first"]})
        model, optimizer = DistributedDataParallel(net), sgd(net)
        for step, (x, y) in enumerate(batches(3)):
            if unfreezing.at(step) and memory is None:
                model = DistributedDataParallel(net)
            if memory is None:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)  # noqa: B023
                memory.step(optimizer)
        found.append(net)
    return {"error": error(*found), "spread": max(map(spread, found))}


def clipping(rank):
    memory = memory_of(micro_batches=2)
    model = ours(made(Net), batches(3), memory, clip_norm=0.1)
    return {"error": error(model, plain(made(Net), batches(3), clip=0.1))}


def overflow(rank):
    """One process overflows in one step: all leave it out, and their scales and parameters stay the same."""
    memory = memory_of(precision="fp16")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches(4)):
        factor = 1e30 if step == 1 and rank == 1 else 1.0
        memory.forward_backward(lambda x, y, f: f * F.cross_entropy(model(x), y), x.float(), y, torch.tensor(factor))
        memory.step(optimizer)
    return {"spread": spread(model), "skipped": memory.skipped_steps, "scale": memory.scaler.get_scale()}


def nowhere_to_go(rank):
    """One sample does not fit on one process: all end the call with the same error, and can go on."""
    memory, model = memory_of(), made(Net)
    (first, second) = batches(2)
    Trouble.where, Trouble.limit = "backward", 0 if rank == 1 else 10**9
    said = ""
    try:
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *first)
    except runtime.DoesNotFitError as failure:
        said = str(failure)
    Trouble.where = None
    left = [parameter.grad is not None for parameter in model.parameters()]
    ours(model, [second], memory)
    return {"said": said, "left": any(left), "error": error(model, plain(made(Net), [second]))}


def mistake(rank):
    """A mistake of the forward on one process ends the call of all."""
    memory, model, kind = memory_of(), made(Net), ""
    (first, second) = batches(2)

    def forward(x, y):
        if rank == 1:
            raise KeyError("no such thing")
        return F.cross_entropy(model(x), y)

    try:
        memory.forward_backward(forward, *first)
    except (KeyError, RuntimeError) as failure:
        kind = type(failure).__name__
    ours(model, [second], memory)
    return {"kind": kind, "error": error(model, plain(made(Net), [second]))}


def fewer_batches(rank):
    """The first process is over after one batch of two."""
    memory, model, said = memory_of(), made(Net), ""
    try:
        ours(model, batches(1 + rank), memory)
    except RuntimeError as failure:
        said = str(failure)
    return {"said": said}


def inside_of_the_wrapper(rank):
    """A forward that leaves the wrapper out, whose gradients DDP by itself leaves to each process."""
    data, model, apart, reference = list(batches(3)), made(Net), made(Net), made(Net)
    memory, optimizer = memory_of(micro_batches=2 + rank), sgd(model)
    for x, y in data:
        memory.forward_backward(lambda x, y: F.cross_entropy(model.module(x), y), x, y)
        memory.step(optimizer)
    optimizer = sgd(apart)
    for x, y in data:
        F.cross_entropy(apart.module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"error": error(model, plain(reference, data)), "spread": spread(model), "alone": spread(apart)}


def refused(rank):
    hooked, static = made(Net), made(Net, static_graph=True)
    hooked.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    said = []
    for model in (hooked, static):
        try:
            memory_of().forward_backward(lambda x, y, m=model: F.cross_entropy(m(x), y), *next(batches(1)))
        except RuntimeError as failure:
            said.append(str(failure))
    return {"said": said}


class Hidden:
    """Holds a model where reading the forward does not find it."""

    __slots__ = ("model",)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)


def unseen(rank):
    """Models that no forward shows, listed by the collector in another order in each process, beside garbage."""
    hidden, other, garbage = Hidden(), Hidden(), Hidden()
    gc.collect()
    gc.disable()
    garbage.model = made(Branches)
    garbage.model.itself = [garbage.model]
    garbage.model = None
    hidden.model = made(Net)
    if rank:
        gc.collect()
    other.model = made(Stack)
    memory = memory_of(micro_batches=2 + rank)
    optimizers = [sgd(hidden.model), sgd(other.model)]
    for x, y in batches(3):
        memory.forward_backward(hidden.loss, x, y)
        memory.forward_backward(other.loss, x, y)
        for optimizer in optimizers:
            memory.step(optimizer)
    gc.enable()
    references = [plain(made(Net), batches(3)), plain(made(Stack), batches(3))]
    errors = [error(ours.model, plain) for ours, plain in zip((hidden, other), references, strict=True)]
    twin = Hidden()
    twin.model = made(Net)
    try:
        memory_of().forward_backward(twin.loss, *next(batches(1)))
    except RuntimeError as refused:
        return {"error": max(errors), "said": str(refused)}


def sparse(rank):
    data = [(x[:, : 3 + rank], y) for x, y in batches(3)]
    found = []
    for memory in (None, memory_of(micro_batches=2)):
        model = made(Words)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in data:
            if memory is None:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                memory.forward_backward(lambda x, y, m=model: F.cross_entropy(m(x), y), x, y)
                memory.step(optimizer)
        found.append(model)
    return {"error": error(*found)}


def large(rank):
    """Gradients that are sent alone, one of them in another order in memory."""

    def convolution():
        model = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 400, 8, padding=4), nn.Flatten())
        model.append(nn.LazyLinear(4))
        model.double()(torch.zeros(2, 6, dtype=torch.float64))
        return model.to(memory_format=torch.channels_last)

    memory = memory_of(micro_batches=2)
    return {"error": error(ours(made(convolution), batches(2), memory), plain(made(convolution), batches(2)))}


CASES = {
    "whole": whole,
    "fixed splits": fixed_splits,
    "noise": noise,
    "options of DDP": options_of_ddp,
    "out of memory in forward": lambda rank: out_of_memory(rank, "forward"),
    "out of memory in backward": lambda rank: out_of_memory(rank, "backward"),
    "smaller card": smaller_card,
    "ragged": ragged,
    "branches": branches,
    "windows": windows,
    "ragged windows": ragged_windows,
    "plain backward in windows": plain_backward_in_windows,
    "window left": window_left,
    "no_sync": no_sync,
    "buffers": buffers,
    "buffers in windows": buffers_in_windows,
    "evaluated by one": evaluated_by_one,
    "evaluated in pieces": evaluated_in_pieces,
    "several models": several_models,
    "preparing": preparing,
    "unfrozen in phases": unfrozen_in_phases,
    "clipping": clipping,
    "techniques": techniques,
    "overflow": overflow,
    "nowhere to go": nowhere_to_go,
    "mistake": mistake,
    "refused": refused,
    "unseen": unseen,
    "sparse": sparse,
    "large": large,
    "inside of the wrapper": inside_of_the_wrapper,
}
# it ends a process for good, so it is run by itself
LAST = {"fewer batches": fewer_batches}


if __name__ == "__main__":
    torchrun.answer({**CASES, **LAST}, sys.argv[1:] or [*CASES])
