"""An estimate as lines of text, from the JSON that `oomfix.profile.run` writes. Imports no torch."""

import os
from typing import Any

from oomfix.profile.process import COUPLED
from oomfix.spelling import counted

_PHASES = {
    "setup": "before the first forward pass",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "between": "between passes",
}
_WORTH_TELLING_BYTES = 64 * 2**10
_MOST_ASSUMPTIONS = 8
# between two steps, what is made once and what grows look alike
_STEPS_THAT_SHOW_GROWTH = 3


def lines(found: dict[str, Any]) -> list[str]:
    """The whole report."""
    card, steps = found["card"], found["steps"]
    if found["error"] and not found["peak_allocated_bytes"]:
        return [f"{found['script']} failed before anything was on the card: the error above is its own"]
    batches = f", batches of {found['batch_size']}" if found["batch_size"] else ""
    text = [
        f"{found['script']} on {card['name']} ({card['capacity_gib']:.2f} GiB), {counted(len(steps), 'step')}{batches}"
    ]
    if found["out_of_memory"]:
        text.append(f"  out of memory: {found['out_of_memory']}")
    text.append(
        f"  peak {size(found['peak_allocated_bytes'])} allocated, {size(found['peak_reserved_bytes'])} reserved, "
        f"{_PHASES[found['peak_phase']]}; the CUDA context takes {size(found['context_bytes'])} more"
    )
    text += [f"    {category:<16} {size(nbytes):>11}" for category, nbytes in found["breakdown"].items()]
    if found["top_tensors"]:
        text.append("  largest at the peak")
        text += [f"    {_tensor(tensor)}" for tensor in found["top_tensors"][:8]]
    text += _shares(found)
    text += _growth(found)
    text += _fits(found)
    if found["assumptions"]:
        text.append("  assumed")
        here = os.getcwd() + os.sep
        text += [f"    {sentence.replace(here, '')}" for sentence in found["assumptions"][:_MOST_ASSUMPTIONS]]
        more = len(found["assumptions"]) - _MOST_ASSUMPTIONS
        text += [f"    and {more} more (--format json)"] if more > 0 else []
    return text


def trial_line(trial: dict[str, Any]) -> str:
    """One batch size of a search, and whether it fits."""
    needs = "" if trial["needs_bytes"] is None else f", {size(trial['needs_bytes'])} reserved"
    return f"batch size {trial['batch_size']}: {'fits' if trial['fits'] else 'does not fit'}{needs}"


def batch_size_lines(found: dict[str, Any]) -> list[str]:
    """What the search for the largest batch came to."""
    trials, largest = found["batch_sizes"], found["largest_batch_size"]
    if largest is None:
        return [f"  not even a batch size of {trials[0]['batch_size']} fits {size(trials[0]['has_bytes'])}"]
    too_large = [trial["batch_size"] for trial in trials if trial["batch_size"] > largest]
    more = f"{min(too_large)} does not" if too_large else "larger ones were not tried"
    more = "the whole data set in one batch" if largest == found["samples"] else more
    said = [f"  largest batch size that fits {size(trials[0]['has_bytes'])}: {largest}; {more}"]
    if any(assumption.startswith(COUPLED) for assumption in found["assumptions"]):
        said.append("  in one piece, that is: oomfix.runtime splits larger ones")
    return said


def size(nbytes: int) -> str:
    """Bytes in the unit that reads best: "1.25 GiB", "312.0 MiB", "4.0 KiB"."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _tensor(tensor: dict[str, Any]) -> str:
    times = f"{tensor['count']} x " if tensor["count"] > 1 else ""
    shape = f"{tensor['dtype']} {tensor['shape']}" if tensor["shape"] else tensor["operation"]
    where = " ".join(filter(None, (tensor["module"], _short(tensor["line"]))))
    return f"{size(tensor['nbytes']):>11}  {tensor['category']}, {times}{shape}  {where}"


def _short(line: str) -> str:
    path, _, number = line.rpartition(":")
    return f"{os.path.basename(path)}:{number}" if path else ""


def _shares(found: dict[str, Any]) -> list[str]:
    shares = found["shares"]
    if not shares:
        return []
    ddp, fsdp = size(shares["ddp_bytes"]), size(shares["fsdp2_bytes"])
    return [f"  each of {shares['ranks']} ranks, computed: {ddp} allocated under DDP, {fsdp} under FSDP2"]


def grows(found: dict[str, Any]) -> bool:
    """Whether memory grows from step to step, as far as the steps show it."""
    return len(found["steps"]) >= _STEPS_THAT_SHOW_GROWTH and found["growth_bytes_per_step"] >= _WORTH_TELLING_BYTES


def _growth(found: dict[str, Any]) -> list[str]:
    growth = found["growth_bytes_per_step"]
    if growth < _WORTH_TELLING_BYTES:
        return []
    if not grows(found):
        return [f"  {size(growth)} more stay after step 2 than after step 1: --steps 6 says whether it grows on"]
    has = found["budget_bytes"] or int(found["card"]["capacity_gib"] * 2**30) - found["context_bytes"]
    room = 0 if found["out_of_memory"] else has - found["peak_reserved_bytes"]
    full = f"full after {room // growth} more" if room > 0 else "already full"
    return [f"  grows {size(growth)} per step on average: {full}"]


def _fits(found: dict[str, Any]) -> list[str]:
    if not found["fits"]:
        return ["  the run ended early: which cards it fits is not known"]
    fits = {name: fit["fits"] for name, fit in found["fits"].items()}
    on_card = "fits" if fits.pop("card") else "does not fit"
    presets = ", ".join(name for name, fit in fits.items() if fit)
    return [
        f"  {on_card} the {found['card']['name']}; fits {f'the presets {presets}' if presets else 'no preset'}",
        f"  counted with a margin of {100 * found['margin_fraction']:.0f} %: {found['margin_reason']}",
    ]
