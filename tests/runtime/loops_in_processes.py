"""Run by test_loops_in_processes.py: whole training loops on two processes, beside plain torch.

Every case runs with DistributedDataParallel and, from torch 2.13 on, with FSDP2. All models and batches are float64,
unless said.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix.runtime.compat import OutOfMemoryError
from tests.runtime import torchrun
from tests.runtime.data_parallel import Stack, batches, memory_of, sgd, small_tensors_count

# bringing FSDP2 back after an error is what torch 2.13 has learned
SHARDS = torch.__version__ >= "2.13"
if SHARDS:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Once(torch.autograd.Function):
    """Runs out of memory in backward number `at`."""

    count, at = 0, None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Once.count += 1
        if Once.count == Once.at:
            raise OutOfMemoryError("CUDA out of memory. Tried to ...")
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return Once.apply(torch.tanh(self.linear(x)))


def network(outputs=4):
    return nn.Sequential(Block(), nn.Linear(6, 6), nn.Linear(6, outputs)).double()


def sharded(model, **policies):
    for block in model[:-1]:
        fully_shard(block, **policies)
    return fully_shard(model, **policies)


WRAPPED = {"ddp": DistributedDataParallel, **({"fsdp2": sharded} if SHARDS else {})}


def made(wrap, make=network, **arguments):
    torch.manual_seed(0)
    return wrap(make(**arguments))


def whole_parameters(*models):
    parts = [parameter for model in models for parameter in model.parameters()]
    parts = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def difference(ours, plain):
    return float((ours - plain).abs().max())


def train(model, data, memory=None, fails_at=(None, None)):
    """Train; `memory` None is plain torch. `fails_at`: a step, and the backward of it that runs out of memory."""
    optimizer = sgd(model)
    for step, (x, y) in enumerate(data):
        Once.count, Once.at = 0, fails_at[1] if step == fails_at[0] else None
        if memory is None:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            memory.step(optimizer)
    Once.at = None
    return whole_parameters(model)


def fails_in_one(rank):
    """One process runs out of memory in the first, a middle and the last of four micro-batches of its second step."""
    found = {}
    for kind, wrap in WRAPPED.items():
        plain = train(made(wrap), batches(3))
        for at in (1, 3, 4):
            memory = memory_of(micro_batches=4)
            ours = train(made(wrap), batches(3), memory, (1, at) if rank else (None, None))
            found[f"{kind} {at}"] = {"error": difference(ours, plain), "retries": memory.report().retries}
    return found


def frozen(rank):
    def partly_frozen():
        model = network()
        model[1].requires_grad_(False)
        return model

    found = {}
    for kind, wrap in WRAPPED.items():
        plain = train(made(wrap, partly_frozen), batches(3))
        split = train(made(wrap, partly_frozen), batches(3), memory_of(micro_batches=2 + rank))
        failed = train(made(wrap, partly_frozen), batches(3), memory_of(), (1, 1) if rank else (None, None))
        found[kind] = {"error": max(difference(split, plain), difference(failed, plain))}
    return found


def adversaries(wrap, memory, in_place=False):
    """Three steps of a GAN."""
    generator, critic = made(wrap, outputs=6), made(wrap, outputs=1)
    of_generator, of_critic = sgd(generator), sgd(critic)
    for x, _ in batches(3):
        noise = x.flip(0)

        def critic_loss(x, noise):
            return F.softplus(-critic(x)).mean() + F.softplus(critic(generator(noise).detach())).mean()

        def generator_loss(noise):
            return F.softplus(-critic(generator(noise))).mean()

        for loss, arguments, optimizer in (
            (critic_loss, (x, noise), of_critic),
            (generator_loss, (noise,), of_generator),
        ):
            of_generator.zero_grad()
            of_critic.zero_grad()
            if memory is None:
                loss(*arguments).backward()
                optimizer.step()
            elif in_place:
                memory.backward(loss(*arguments))
                memory.step(optimizer)
            else:
                memory.forward_backward(loss, *arguments)
                memory.step(optimizer)
    return whole_parameters(generator, critic)


def gan(rank):
    found = {}
    for kind, wrap in WRAPPED.items():
        plain = adversaries(wrap, None)
        found[kind] = {
            "split": difference(adversaries(wrap, memory_of(micro_batches=2 + rank)), plain),
            "in place": difference(adversaries(wrap, memory_of(), in_place=True), plain),
        }
    return found


def policies(rank):
    """FSDP2 that keeps parameters on the host, and FSDP2 with its own mixed precision (float32 models)."""
    data = list(batches(3))
    found = {}
    on_host = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    plain = train(made(sharded), data)
    for name, memory, fails in (
        ("split", memory_of(micro_batches=2 + rank), (None, None)),
        ("failed", memory_of(), (1, 1) if rank else (None, None)),
    ):
        ours = train(made(lambda model: sharded(model, **on_host)), data, memory, fails)
        found[f"on the host, {name}"] = {"error": difference(ours, plain)}

    def half(model):
        inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model[:-1]:
            fully_shard(block, mp_policy=inner)
        outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        return fully_shard(model.float(), mp_policy=outer)

    data = [(x.float(), y) for x, y in data]
    plain = train(made(half), data)
    for name, memory, fails in (
        ("whole", memory_of(precision="fp32"), (None, None)),
        ("split", memory_of(precision="fp32", micro_batches=2 + rank), (None, None)),
        ("failed", memory_of(precision="fp32"), (1, 1) if rank else (None, None)),
    ):
        found[f"half, {name}"] = {"error": difference(train(made(half), data, memory, fails), plain)}
    return found


def checkpoints(rank):
    """fp16, with schedulers: the first process alone writes checkpoints, from which a second run goes on."""
    found = {}
    data = [(x.float(), y) for x, y in batches(4)]
    for resumes in (False, True):
        memory = memory_of(precision="fp16")
        model = made(DistributedDataParallel, lambda: network().float())
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        for step, (x, y) in enumerate(data):
            if step == 2 and resumes:
                kept = [None]
                if rank == 0:
                    parts = (model.module, optimizer, scheduler, memory.scaler)
                    kept = [[part.state_dict() for part in parts]]
                dist.broadcast_object_list(kept)
                memory = memory_of(precision="fp16")
                model = made(DistributedDataParallel, lambda: network().float())
                optimizer = sgd(model)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
                for part, state in zip((model.module, optimizer, scheduler, memory.scaler), kept[0], strict=True):
                    part.load_state_dict(state)
            memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)  # noqa: B023
            memory.step(optimizer, scheduler)
        found[resumes] = (whole_parameters(model), optimizer.param_groups[0]["lr"], memory.scaler.get_scale())
    (plain, *numbers), (resumed, *same) = found[False], found[True]
    return {"error": difference(resumed, plain), "same": numbers == same}


def climbs_alone(rank):
    """Coupled samples, and out of memory on one process: it checkpoints alone, and gradients stay those of all."""

    def coupled(model, x, y):
        logits = model(x)
        return F.cross_entropy(logits / logits.std(0), y)

    model, plain = (made(lambda m: DistributedDataParallel(m.double()), Stack) for _ in range(2))
    memory, optimizer, of_plain = memory_of(chunked_loss="off"), sgd(model), sgd(plain)
    for x, y in batches(3):
        # counted by the class: what a forward holds is put back
        Once.count, Once.at = 0, 1 if rank and not optimizer.state else None
        memory.forward_backward(lambda x, y: Once.apply(coupled(model, x, y)), x, y)
        memory.step(optimizer)
        coupled(plain, x, y).backward()
        of_plain.step()
        of_plain.zero_grad()
    Once.at = None
    names = [technique.name for technique in memory.report().techniques]
    return {"error": difference(whole_parameters(model), whole_parameters(plain)), "techniques": names}


def sharded_stack(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def techniques_of_shards(rank):
    """Each policy of a preset under FSDP2, prepared before and after it was sharded."""
    found = {}
    for name, policy in {
        "chunked loss": {"chunked_loss": "on"},
        "checkpointing": {"checkpointing": "on"},
        "offloading": {"offloading": "on"},
        "half precision": {"precision": "bf16"},
    }.items():
        # both change the classes of blocks
        for prepared in ("before", "after") if name == "checkpointing" else ("after",):
            dtype = torch.float32 if name == "half precision" else torch.float64
            data = [(x.to(dtype), y) for x, y in batches(2)]
            plain = train(made(lambda m, to=dtype: sharded_stack(m.to(to)), Stack), data)
            memory = memory_of(**{"precision": "fp32", **policy, "micro_batches": 2 + rank})
            torch.manual_seed(0)
            model = Stack().to(dtype)
            if prepared == "before":
                model = sharded_stack(memory.prepare(model))
            else:
                memory.prepare(sharded_stack(model))
            with small_tensors_count():
                ours = train(model, data, memory)
            told = [technique.name for technique in memory.report().techniques]
            found[f"{name} {prepared}"] = {"error": difference(ours, plain), "told": told}
    return found


def shards_climb(rank):
    """Coupled samples under FSDP2, and out of memory on one process or on both: they climb together."""
    found = {}
    for who in ("one", "both"):
        data, plain, memory = (
            list(batches(3)),
            made(sharded_stack, lambda: Stack().double()),
            memory_of(chunked_loss="off"),
        )
        model, of_plain = made(sharded_stack, lambda: Stack().double()), sgd(plain)
        optimizer = sgd(model)

        def coupled(model, x, y):
            logits = model(x)
            return F.cross_entropy(logits / logits.std(0), y)

        for step, (x, y) in enumerate(data):
            fails = step == 1 and (who == "both" or rank == 1)
            Once.count, Once.at = 0, 1 if fails else None
            memory.forward_backward(lambda x, y: Once.apply(coupled(model, x, y)), x, y)  # noqa: B023
            memory.step(optimizer)
            coupled(plain, x, y).backward()
            of_plain.step()
            of_plain.zero_grad()
        Once.at = None
        names = [technique.name for technique in memory.report().techniques]
        error = difference(whole_parameters(model), whole_parameters(plain))
        found[who] = {"error": error, "techniques": names, "retries": memory.report().retries}
    return found


CASES = {
    "fails in one": fails_in_one,
    "frozen": frozen,
    "gan": gan,
    "checkpoints": checkpoints,
    "climbs alone": climbs_alone,
}
if SHARDS:
    CASES |= {"policies": policies, "techniques of shards": techniques_of_shards, "shards climb": shards_climb}


if __name__ == "__main__":
    torchrun.answer(CASES, sys.argv[1:] or [*CASES])
