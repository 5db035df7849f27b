"""Progressive unfreezing: parts of a model begin to train at given epochs, so that memory grows by phases."""

from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsIndex

from torch import nn

from oomfix.runtime.arguments import shown


class ProgressiveUnfreezing:
    """Freezes the parts of a model that phases name, and lets each train from its epoch on.

        unfreezing = runtime.ProgressiveUnfreezing(model, {30: ["backbone.layer4"], 60: ["backbone"]})
        optimizer = torch.optim.AdamW(model.parameters())
        for epoch in range(90):
            unfreezing.at(epoch)
            ...

    A frozen part has no gradients, and one that no trainable part comes before keeps no activations. The optimizer
    may be given all parameters at once: it makes no state for those that have no gradient yet, and schedulers see
    the same groups throughout.

    Args:
        model: what trains. Parameters that no phase names stay as they are.
        phases: for each epoch, the names of modules or parameters in `model` that train from then on ("" is all of
            it). A parameter named twice trains from the earlier epoch.

    Raises:
        TypeError: `model` is not a module, or `phases` is not a mapping.
        ValueError: a name that `model` does not have, or an epoch below 0.

    DistributedDataParallel exchanges the gradients of what trained when it was made: make it anew whenever `at` returns
    something, or the processes drift apart unseen. `memory.forward_backward` exchanges those of all that trains.

    ViT-B/16 with batch 64 peaks at 1.80 GiB instead of 5.69 while the last quarter of its layers trains (simulated
    A100); on a CPU a step of a smaller one takes 0.53 of the time (bench/results/stages-cpu.md).

    BatchNorm in a frozen part goes on updating its statistics in training mode, as torch does.

    Source: Howard and Ruder 2018, "Universal Language Model Fine-tuning for Text Classification" (gradual
    unfreezing).
    """

    def __init__(self, model: nn.Module, phases: Mapping[int, Sequence[str]]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {shown(model)}, expected a torch.nn.Module")
        if not isinstance(phases, Mapping):
            raise TypeError(f"phases: got {shown(phases)}, expected a mapping of epochs to lists of names")
        self._phases: dict[int, list[nn.Parameter]] = {}
        for epoch in sorted(phases):
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise ValueError(f"phases: got the epoch {epoch!r}, expected a whole number of at least 0")
            if isinstance(phases[epoch], str):
                raise ValueError(f"phases: got {phases[epoch]!r} for epoch {epoch}, expected a list of names")
            found = [parameter for name in phases[epoch] for parameter in _parameters(model, name)]
            self._phases[epoch] = list(dict.fromkeys(found))
        for parameters in self._phases.values():
            for parameter in parameters:
                parameter.requires_grad_(False)

    def at(self, epoch: int) -> list[nn.Parameter]:
        """Let train what trains in `epoch`; a run that is resumed there needs no other call.

        Returns:
            The parameters that began to train with this call.

        Raises:
            TypeError: `epoch` is no whole number.
        """
        if not isinstance(epoch, SupportsIndex):
            raise TypeError(f"epoch: got {shown(epoch)}, expected a whole number")
        due = [parameter for first, parameters in self._phases.items() if first <= epoch for parameter in parameters]
        new = [parameter for parameter in dict.fromkeys(due) if not parameter.requires_grad]
        for parameter in new:
            parameter.requires_grad_(True)
        return new


def _parameters(model: nn.Module, name: str) -> Iterator[nn.Parameter]:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    if name in modules:
        yield from modules[name].parameters()
    elif name in parameters:
        yield parameters[name]
    else:
        known = ", ".join(key for key in modules if key and key.count(".") == name.count("."))
        raise ValueError(f"phases: got the name {name!r}, expected a module or parameter of the model: {known}")
