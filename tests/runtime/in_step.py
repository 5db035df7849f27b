"""Run by name: cases where processes wait for each other inside of the forward."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.nn.functional import all_gather as from_all
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from oomfix import runtime
from oomfix.runtime.calls import distributed
from tests.runtime import torchrun
from tests.runtime.data_parallel import Trouble, batches, memory_of, sgd


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return Trouble.apply(torch.tanh(self.linear(x)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 4)).double()


def sharded(compiles=False, **options):
    # torch 2.6 brought it; what else is here runs without
    from torch.distributed.fsdp import fully_shard

    model = network()
    for block in model[:2]:
        if compiles:
            block.compile(backend="aot_eager")
        fully_shard(block, **options)
    return fully_shard(model, **options)


def on_a_mesh(replicas, shards):
    """Shards within groups of processes, each of which holds a replica (HSDP)."""
    return sharded(mesh=init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")))


def whole_parameters(model):
    return torch.cat([parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()])


def plain(data, **arguments):
    """What the average over both processes gives, without any of this."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        if arguments.get("clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), arguments["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def ours(model, data, memory, **arguments):
    optimizer = sgd(model)
    for x, y in data:
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        memory.step(optimizer, **arguments)


def error(model, expected):
    return float((whole_parameters(model) - expected).abs().max())


def shards(rank):
    model = sharded()
    ours(model, batches(3), memory_of())
    return {"error": error(model, plain(batches(3)))}


def shards_split(rank):
    """The processes ask for different numbers of micro-batches, and take the larger."""
    model, memory = sharded(), memory_of(micro_batches=2 + rank)
    ours(model, batches(3), memory)
    return {"error": error(model, plain(batches(3))), "said": memory.report().forwards[0].whole_because}


def shards_in_branches(rank):
    """In two steps one process mixes its samples, which its micro-batches show to it alone."""

    def train(model, memory):
        optimizer = sgd(model)
        for step, (x, y) in enumerate(batches(6)):
            mixed = torch.tensor(rank == 1 and step in (2, 4))

            def forward(x, y, mixed=mixed):
                if not mixed:
                    return F.cross_entropy(model(x), y)
                output = model((x + x.flip(0)) / 2)
                return (F.cross_entropy(output, y) + F.cross_entropy(output, y.flip(0))) / 2

            if memory is None:
                forward(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                memory.forward_backward(forward, x, y)
                memory.step(optimizer)

    replicated, model = DistributedDataParallel(network()), sharded()
    train(replicated, None)
    memory = memory_of(micro_batches=2)
    train(model, memory)
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in replicated.parameters()])
    (known,) = memory._forwards
    return {"error": error(model, expected), "split": known.split_calls}


def shards_clipped(rank):
    model, memory = sharded(), memory_of(micro_batches=2)
    ours(model, batches(3), memory, clip_norm=0.1)
    return {"error": error(model, plain(batches(3), clip_norm=0.1))}


def shards_out_of_memory(rank, where, everywhere):
    model, memory = sharded(), memory_of()
    Trouble.where, Trouble.limit = where, 4 if everywhere or rank == 1 else 10**9
    ours(model, batches(4), memory)
    Trouble.where = None
    return {"error": error(model, plain(batches(4))), "retries": memory.report().retries}


def shards_in_other_forms(rank):
    """Split as asked for, and after an out-of-memory error on all."""
    forms = {
        "two replicas": lambda: on_a_mesh(2, 1),
        "one replica": lambda: on_a_mesh(1, 2),
        "kept after forward": lambda: sharded(reshard_after_forward=False),
        "compiled": lambda: sharded(compiles=True),
    }
    errors, retries = {}, {}
    for name, form in forms.items():
        model, recovering = form(), form()
        ours(model, batches(2), memory_of(micro_batches=2 + rank))
        memory = memory_of()
        # torch's compiler does not follow a forward that fails
        Trouble.where, Trouble.limit = None if name == "compiled" else "backward", 4
        ours(recovering, batches(2), memory)
        Trouble.where = None
        expected = plain(batches(2))
        errors[name] = max(error(model, expected), error(recovering, expected))
        retries[name] = memory.report().retries
    return {"errors": errors, "retries": retries}


def shards_ragged(rank):
    """Other numbers of samples on each process, and micro-batches of one without any target."""
    size = 9 if rank else 12
    data = [(x, torch.where(torch.arange(size) < 6 + rank, y, -100)) for x, y in batches(3, size)]
    model, memory = sharded(), memory_of(micro_batches=4)
    ours(model, data, memory)
    return {"error": error(model, plain(data))}


def shards_in_windows(rank):
    data, model, memory = list(batches(5)), sharded(), memory_of(micro_batches=2)
    optimizer = sgd(model)
    for x, y in memory.accumulate(data, 2):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        if memory.window_closed:
            memory.step(optimizer)
    windows = [data[0:2], data[2:4], data[4:5]]
    together = [(torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])) for window in windows]
    return {"error": error(model, plain(together))}


def shards_in_uneven_windows(rank):
    """A window that holds other numbers of samples on each process cannot be weighed any more, and says so."""
    data, model, memory, said = list(batches(2)), sharded(), memory_of(), ""
    data[1] = tuple(part[: 6 + rank] for part in data[1])
    try:
        for x, y in memory.accumulate(data, 2):
            memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    except RuntimeError as failure:
        said = str(failure)
    return {"said": said}


def synchronising(model, yes):
    """As scripts put the exchange of gradients off until the last backward of a step."""
    model.set_requires_gradient_sync(yes)
    model.set_is_last_backward(yes)


def shards_put_off(rank):
    """Accumulation by hand, whose gradients are exchanged once for each step; on one process it runs out of memory."""
    data, errors = list(batches(5)), {}
    windows = [data[0:2], data[2:5]]
    together = [tuple(torch.cat(parts) for parts in zip(*window, strict=True)) for window in windows]
    expected = plain(together)
    for name, form, policies in (
        ("whole", sharded, {}),
        ("split", sharded, {"micro_batches": 2 + rank}),
        ("out of memory", sharded, {}),
        ("replicas of shards", lambda: on_a_mesh(2, 1), {"micro_batches": 2}),
    ):
        model, memory = form(), memory_of(**policies)
        optimizer = sgd(model)
        Trouble.where, Trouble.limit = "backward", 4 if name == "out of memory" and rank == 1 else 10**9
        for window in windows:
            for index, (x, y) in enumerate(window):
                synchronising(model, index == len(window) - 1)
                memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y) / len(window), x, y)  # noqa: B023
            memory.step(optimizer)
        Trouble.where = None
        errors[name] = error(model, expected)
    return {"errors": errors}


def shards_left_waiting(rank):
    """A plain backward whose gradients are not exchanged yet, before a call that would."""
    model, memory, said, ((x, y), second) = sharded(), memory_of(), "", batches(2)
    synchronising(model, False)
    F.cross_entropy(model(x), y).backward()
    synchronising(model, True)
    try:
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *second)
    except RuntimeError as failure:
        said = str(failure)
    return {"said": said}


def shards_after_plain_backwards(rank):
    """Windows of plain backwards: the last is shorter, and in the second run one in the middle is ragged too."""
    model, memory, said = sharded(), memory_of(), ""
    optimizer, data = sgd(model), list(batches(3))
    data[2] = tuple(part[:5] for part in data[2])
    expected = plain([tuple(torch.cat(parts) for parts in zip(*data[:2], strict=True)), data[2]])
    for ragged in (False, True):
        if ragged:
            data[1] = tuple(part[:7] for part in data[1])
        try:
            for x, y in memory.accumulate(data, 2):
                memory.backward(F.cross_entropy(model(x), y))
                if memory.window_closed:
                    memory.step(optimizer)
        except RuntimeError as failure:
            said = str(failure)
        if not ragged:
            found = error(model, expected)
    return {"error": found, "said": said}


def shards_overflow(rank):
    """fp16 overflows in one step on one process: all leave it out, and their scales stay the same."""
    memory = memory_of(precision="fp16")
    model = sharded().float()
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches(4)):
        factor = 1e30 if step == 1 and rank == 1 else 1.0
        memory.forward_backward(lambda x, y, f: f * F.cross_entropy(model(x), y), x.float(), y, torch.tensor(factor))
        memory.step(optimizer)
    finite = bool(whole_parameters(model).isfinite().all())
    return {"finite": finite, "skipped": memory.skipped_steps, "scale": memory.scaler.get_scale()}


def shards_evaluated(rank):
    """Evaluations in pieces, with other samples on each process, before, between and after training."""
    model, memory, errors = sharded(), memory_of(), []
    x, _ = next(batches(1))
    for _ in range(2):
        with torch.no_grad():
            expected = model(x)
        Trouble.where, Trouble.limit = "forward", 5 if rank else 10**9
        errors.append(float((memory.evaluate(lambda x: model(x), x) - expected).abs().max()))
        Trouble.where = None
        ours(model, batches(1), memory)
    return {"error": max(errors), "largest": memory.report().forwards[-1].largest}


def shards_fail_together(rank):
    """Not even one sample fits: all end with the same error."""
    model, memory, said = sharded(), memory_of(), ""
    Trouble.where, Trouble.limit = "backward", 0
    try:
        ours(model, batches(1), memory)
    except runtime.DoesNotFitError as failure:
        said = str(failure)
    Trouble.where = None
    return {"said": said}


def shards_of_a_single_sample(rank):
    """One process has a sample only, so that the other, which runs out of memory, cannot cut its batch."""
    model, memory, said = sharded(), memory_of(chunked_loss="off", checkpointing="off", offloading="off"), ""
    Trouble.where, Trouble.limit = "backward", 4
    try:
        ours(model, batches(1, 1 if rank else 12), memory)
    except runtime.DoesNotFitError as failure:
        said = str(failure)
    Trouble.where = None
    return {"said": said}


class Synchronised(nn.SyncBatchNorm):
    """SyncBatchNorm by plain collectives, for processes without a GPU."""

    def forward(self, x):
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        together = torch.cat(from_all(x))
        mean, variance = together.mean(0), together.var(0, unbiased=False)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def normalised(trouble=True):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    before = [Block(), norm] if trouble else [norm, Block()]
    model = DistributedDataParallel(nn.Sequential(*before, nn.Linear(6, 4)).double())
    # it does not take such layers without a GPU
    norm.__class__ = Synchronised
    return model


def norms_split(rank):
    """Micro-batches are normalised over both processes, so these make the same number of them."""
    model, memory = normalised(), memory_of(micro_batches=2 + rank)
    reference = normalised()
    ours(model, batches(2), memory)
    optimizer = sgd(reference)
    for x, y in batches(2):
        for part in torch.arange(12).tensor_split(3):
            (F.cross_entropy(reference(x[part]), y[part]) * len(part) / 12).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return {"error": max(float((a - b).detach().abs().max()) for a, b in pairs)}


def norms_out_of_memory(rank):
    """All run out of memory at the same point, and start again together."""
    model, memory = normalised(), memory_of()
    Trouble.where, Trouble.limit = "forward", 4
    ours(model, batches(2), memory)
    Trouble.where = None
    return {"retries": memory.report().retries}


def apart(rank, model, where):
    """One process runs out of memory where the other is past the point of starting again: both end."""
    memory, said = memory_of(), ""
    distributed._WAIT_S = 2.0
    Trouble.where, Trouble.limit = where, 4 if rank == 1 else 10**9
    try:
        ours(model, batches(1), memory)
    except runtime.DoesNotFitError as failure:
        said = str(failure)
    return {"said": said}


def gathered_loss(rank):
    """In-batch negatives of all processes: whole batches, with the gradients of plain DDP."""
    model, reference, memory = DistributedDataParallel(network()), DistributedDataParallel(network()), memory_of()

    def loss(model, x):
        out = F.normalize(model(x))
        return F.cross_entropy(out @ torch.cat(all_gather(out)).T, torch.arange(len(x)) + rank * len(x))

    optimizer = sgd(reference)
    for x, _ in batches(2):
        loss(reference, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    memory, optimizer, failed = memory_of(micro_batches=3), sgd(model), ""
    for x, _ in batches(2):
        memory.forward_backward(lambda x: loss(model, x), x)
        memory.step(optimizer)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    found = {"error": max(float((a - b).detach().abs().max()) for a, b in pairs)}
    Trouble.where, Trouble.limit = "forward", 4
    try:
        memory.forward_backward(lambda x: loss(model, x), x)
    except runtime.DoesNotFitError as failure:
        failed = str(failure)
    Trouble.where = None
    return {**found, "said": memory.report().forwards[0].whole_because, "failed": failed}


def unforeseen(rank):
    """A collective that cannot be read off the code is noticed by the first call."""
    model, memory = DistributedDataParallel(network()), memory_of()
    exchange = vars(dist)["all_" + "reduce"]

    def forward(x, y):
        seen = x.detach().mean()
        exchange(seen)
        return F.cross_entropy(model(x) + seen, y)

    for x, y in batches(2):
        memory.forward_backward(forward, x, y)
    return {"said": memory.report().forwards[0].whole_because}


def refused(rank):
    class Engine(nn.Linear):
        __module__ = "deepspeed.runtime.engine"

    class FullyShardedDataParallel(nn.Linear):
        """What the model of FSDP1 is recognised by; it needs a GPU to be made."""

    parallel = parallelize_module(network(), init_device_mesh("cpu", (2,)), {"2": ColwiseParallel()})
    said = []
    for model in (Engine(6, 4), FullyShardedDataParallel(6, 4), parallel):
        try:
            memory_of().forward_backward(lambda x, y, m=model: F.cross_entropy(m(x), y), *next(batches(1)))
        except RuntimeError as failure:
            said.append(str(failure))
    return {"said": said}


# they end a process for good, so each is run by itself
LAST = {
    "norms apart": lambda rank: apart(rank, normalised(trouble=False), "forward"),
    # exchanges of two groups of processes cannot be left out one by one
    "replicas of shards apart": lambda rank: apart(rank, on_a_mesh(2, 1), "backward"),
}

OF_SHARDS = {
    "shards": shards,
    "shards split": shards_split,
    "shards in branches": shards_in_branches,
    "shards clipped": shards_clipped,
    "shards in other forms": shards_in_other_forms,
    "shards ragged": shards_ragged,
    "shards in windows": shards_in_windows,
    "shards in uneven windows": shards_in_uneven_windows,
    "shards put off": shards_put_off,
    "shards left waiting": shards_left_waiting,
    "shards after plain backwards": shards_after_plain_backwards,
    "shards overflow": shards_overflow,
    "shards evaluated": shards_evaluated,
    "shards fail together": shards_fail_together,
    "shards of a single sample": shards_of_a_single_sample,
    "out of memory in forward of all": lambda rank: shards_out_of_memory(rank, "forward", True),
    "out of memory in backward of all": lambda rank: shards_out_of_memory(rank, "backward", True),
    "out of memory in forward of one": lambda rank: shards_out_of_memory(rank, "forward", False),
    "out of memory in backward of one": lambda rank: shards_out_of_memory(rank, "backward", False),
}
CASES = {
    "norms split": norms_split,
    "norms out of memory": norms_out_of_memory,
    "gathered loss": gathered_loss,
    "unforeseen": unforeseen,
    "refused": refused,
}


if __name__ == "__main__":
    torchrun.answer({**OF_SHARDS, **CASES, **LAST}, sys.argv[1:])
