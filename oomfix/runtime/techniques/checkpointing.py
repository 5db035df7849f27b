"""Activation checkpointing put on a model from outside: fewer activations, about one more forward per step.

A model's own switch is used where it has one (timm, open_clip, transformers), because it knows the model's
caches; in other models the repeated blocks are checkpointed. Nothing a user can see of the model changes.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from oomfix.presets import Policy
from oomfix.runtime import simulation
from oomfix.runtime.batches.outputs import loss_in
from oomfix.runtime.modules import modules_in
from oomfix.runtime.techniques.checkpointed_block import CheckpointedBlock, can_be_wrapped, unwrap, wrap
from oomfix.runtime.techniques.offloading import is_weight
from oomfix.runtime.techniques.recomputation import undone

_SMALL = 65536  # entries of a parameter whose gradient is compared

# Models whose own switch was thrown here, and the use_cache of their configuration before (transformers).
_switched: "weakref.WeakKeyDictionary[nn.Module, bool | None]" = weakref.WeakKeyDictionary()


def enable_checkpointing(model: nn.Module, policy: Policy = "on", *, every: int = 1, skip_last: int = 0) -> list[str]:
    """Make `model` keep only the inputs of its blocks for backward, and run the blocks again there.

    A block is run once more at its first use, on copies of its inputs: one that writes its input, its
    parameters or buffers other than running statistics, or that has forward hooks inside, then stays as it
    was, said once. In the others random numbers are drawn again as in forward, and running statistics are
    updated once.

    Args:
        model: any module; parts that have a switch of their own and parts that have none may be mixed.
        policy: "on" checkpoints now; "if-needed" and "off" do nothing, and are accepted so that a preset's
            policy can be passed on.
        every: checkpoint the first of each `every` blocks, for less time and less memory saved; 1: all of them.
        skip_last: how many blocks at the end stay as they are. Backward begins with them, so that what they keep is
            needed at once.

    Returns:
        Names in `model` of what is checkpointed: blocks, and models that threw their own switch ("" is
        `model` itself). Empty where nothing was found to checkpoint.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `policy` is none of the three; `every` is below 1, or `skip_last` below 0; one of them is given for
            a model of transformers, whose own switch takes all blocks.

    At bf16 ViT-B/16 with batch 64 peaks at 1.95 GiB instead of 5.69, GPT-2 124M with 16 x 1024 tokens at 11.35
    instead of 23.42 (simulated A100); on a CPU smaller versions take 1.36 and 1.16 times as long
    (bench/results/techniques-cpu.md).

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; torch.utils.checkpoint without
    reentrance, which lets frozen inputs, keyword arguments and torch.autograd.grad pass.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    if policy not in ("off", "if-needed", "on"):
        raise ValueError(f"policy: got {policy!r}, expected 'off', 'if-needed' or 'on'")
    for argument, value, least in (("every", every, 1), ("skip_last", skip_last, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{argument}: got {value!r}, expected a whole number of at least {least}")
    if policy != "on":
        return []
    selective = every > 1 or skip_last > 0
    own = [name or "the model" for name, part in model.named_modules() if selective and _is_transformers(part)]
    if own:
        raise ValueError(f"every, skip_last: {own[0]} is of transformers, whose own switch takes all blocks")
    switches = {} if selective else dict(_throw_switches(model, ""))
    blocks = list(_choose_blocks(model, "", set(switches.values())).items())
    chosen = dict(blocks[: max(len(blocks) - skip_last, 0) : every])
    for block in chosen.values():
        wrap(block)
    return [*switches, *chosen]


def disable_checkpointing(model: nn.Module) -> None:
    """Undo `enable_checkpointing`; checkpointing that the user had switched on stays on."""
    for module in modules_in(model):
        unwrap(module)
        if module in _switched:
            _switch_off(module, _switched.pop(module))


def is_checkpointed(model: nn.Module) -> bool:
    """Whether `enable_checkpointing` has put checkpointing on some part of `model`."""
    return any(isinstance(module, CheckpointedBlock) or module in _switched for module in modules_in(model))


def bytes_saved_by_checkpointing(model: nn.Module, forward: Callable[..., Any], *rows: Any, **named_rows: Any) -> int:
    """How much less is kept for backward when `forward` ends than without the checkpointing of `model`, in bytes.

    Runs forward twice; arguments, and what is as it was afterwards, as for `same_gradients`.
    """

    def kept_bytes() -> int:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # weights are there in any case, and not in proportion to the rows
            if tensor.layout is torch.strided and not tensor.is_nested and not is_weight(tensor):
                storage = tensor.untyped_storage()
                kept[storage._cdata] = storage.nbytes()
            # detached: an operation that saved its own output would otherwise keep itself alive for ever
            return tensor.detach()

        with undone(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = forward(*rows, **named_rows)
        # until here it holds what was counted: no address was used twice
        del result
        return sum(kept.values())

    checkpointed_bytes = kept_bytes()
    with _without_checkpointing(model):
        return kept_bytes() - checkpointed_bytes


def same_gradients(model: nn.Module, forward: Callable[..., Any], *rows: Any, **named_rows: Any) -> bool:
    """Whether checkpointing leaves the gradients of `forward` as they are, tried on a few rows.

    Runs forward and backward twice, with checkpointing and without. Random generators, buffers and `.grad`
    are as they were afterwards. Compared are small parameters (biases, scales of norms), of which nearly every block
    has some; a model that has none compares all.

    Args:
        model: a model that `enable_checkpointing` has seen.
        forward: returns the loss, or a container whose first value (or "loss") it is.
        rows, named_rows: what `forward` is called with; two rows are enough.

    Returns:
        False where the gradient of some parameter differs by more than 1e-3 of its norm (float64: 1e-9), or
        exists only in one of the two runs. Kernels that add in no fixed order differ by less.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in trained if parameter.numel() <= _SMALL] or trained

    def gradients() -> list[torch.Tensor | None]:
        with undone(model):
            loss = loss_in(forward(*rows, **named_rows))
            if loss is None or not loss.requires_grad or not parameters:
                return []
            return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    checkpointed = gradients()
    with _without_checkpointing(model):
        plain = gradients()
    return all(_close(a, b) for a, b in zip(checkpointed, plain, strict=True))


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    blocks = [module for module in modules_in(model) if isinstance(module, CheckpointedBlock)]
    switched = [module for module in modules_in(model) if module in _switched]
    disable_checkpointing(model)
    try:
        yield
    finally:
        for block in blocks:
            wrap(block)
        for module in switched:
            _switch_on(module)


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or simulation.assumption is not None:
        return (a is None) == (b is None)
    tolerance = 1e-9 if b.dtype == torch.float64 else 1e-3
    return bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(b))


def _throw_switches(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Throw the outermost switches in `module`, which is called `name`; yields each model that has one."""
    if _has_switch(module) and (_is_on(module) or _switch_on(module)):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _throw_switches(child, _joined(name, child_name))


def _has_switch(module: nn.Module) -> bool:
    # their recomputation updates running statistics a second time; the blocks here do not
    if any(isinstance(norm, _NormBase) and norm.track_running_stats for norm in modules_in(module)):
        return False
    return _is_transformers(module) or callable(getattr(module, "set_grad_checkpointing", None))


def _is_transformers(module: nn.Module) -> bool:
    return callable(getattr(module, "gradient_checkpointing_enable", None))


def _is_on(module: nn.Module) -> bool:
    # three names: transformers since 5, transformers before, timm
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing", "grad_checkpointing"):
        if hasattr(module, name):
            return bool(getattr(module, name))
    return False


def _switch_on(module: Any) -> bool:
    """Switch a model's own checkpointing on; False where the model has the method but no checkpointing."""
    use_cache = None
    if not _is_transformers(module):
        try:
            module.set_grad_checkpointing(True)
        except AssertionError:  # how timm's models say that they have none
            return False
    elif not getattr(module, "supports_gradient_checkpointing", False):
        return False
    else:
        use_cache = getattr(module.config, "use_cache", None)
        _enable_transformers(module)
        if use_cache:
            module.config.use_cache = False
    _switched[module] = use_cache
    return True


def _enable_transformers(module: Any) -> None:
    requires_input_gradients = hasattr(module, "_require_grads_hook")
    if hasattr(module, "activation_checkpointing_enable"):  # the name since transformers 5
        module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(module, "_require_grads_hook") and not requires_input_gradients:
        # needed only with reentrance, and a hook that cannot be pickled: torch.save(model) would fail
        module.disable_input_require_grads()


def _switch_off(module: Any, use_cache: bool | None) -> None:
    if not _is_transformers(module):
        module.set_grad_checkpointing(False)
        return
    if hasattr(module, "activation_checkpointing_disable"):
        module.activation_checkpointing_disable()
    else:
        module.gradient_checkpointing_disable()
    if use_cache is not None:
        module.config.use_cache = use_cache


def _choose_blocks(module: nn.Module, name: str, switches: set[nn.Module]) -> dict[str, nn.Module]:
    """The blocks to checkpoint in `module`, which is called `name`: alike members of one container."""
    if isinstance(module, CheckpointedBlock):
        return {name: module}
    if module in switches:
        return {}
    members = dict(_members(module, name))
    repeated = _repeated(members) if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) else {}
    rest: dict[str, nn.Module] = {}
    finer: dict[str, nn.Module] = {}
    for member_name, member in members.items():
        inner = _choose_blocks(member, member_name, switches)
        if member_name in repeated:
            finer.update(inner or {member_name: member})
        else:
            rest.update(inner)
    return {**(repeated if _held(repeated) <= _held(finer) else finer), **rest}


def _members(container: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of `container`; in the place of a list inside a list, which is never called, those of that list."""
    for child_name, child in container.named_children():
        child_name = _joined(name, child_name)
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and isinstance(container, nn.ModuleList):
            yield from _members(child, child_name)
        elif isinstance(inside := getattr(child, "_orig_mod", None), nn.Module):
            # torch.compile(block) calls what is inside of it
            yield _joined(child_name, "_orig_mod"), inside
        else:
            yield child_name, child


def _repeated(members: dict[str, nn.Module]) -> dict[str, nn.Module]:
    blocks = {name: member for name, member in members.items() if _is_composite(member) and can_be_wrapped(member)}
    count = Counter(type(block) for block in blocks.values())
    return {name: block for name, block in blocks.items() if count[type(block)] > 1}


def _is_composite(module: nn.Module) -> bool:
    """Whether `module` has several layers; a single one keeps its input in any case."""
    return sum(bool(part._parameters) for part in modules_in(module)) > 1


def _held(blocks: dict[str, nn.Module]) -> int:
    """Activations held in backward: an input per block, and the layers of the block that runs again."""
    layers = [sum(1 for _ in modules_in(block)) for block in blocks.values()]
    return len(layers) + max(layers, default=0)


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
