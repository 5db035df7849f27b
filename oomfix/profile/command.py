"""`oomfix profile`: run a training script on a simulated card, in a process of its own, and say what it found.

Imports no torch: the process that runs the script does.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

_ROOT = Path(__file__).resolve().parent.parent.parent
_PHASES = {
    "setup": "before the first forward pass",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "between": "between passes",
}
_WORTH_TELLING_BYTES = 64 * 2**10
_MOST_ASSUMPTIONS = 8


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpu", default="a100", show_default=True, metavar="NAME", help="The card to simulate: t4, rtx3090, ...")
@click.option("--steps", default=2, show_default=True, type=click.IntRange(1), help="Optimizer steps to run.")
@click.option("--budget", metavar="SIZE", help="Refuse memory beyond a preset (16gb) or a card of so many GiB.")
@click.option("--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True)
@click.pass_context
def profile(
    ctx: click.Context, script: str, args: tuple[str, ...], gpu: str, steps: int, budget: str | None, form: str
) -> None:
    """Say how much GPU memory a training script needs, without a GPU.

    The unmodified SCRIPT runs on a simulated card until its second optimizer step. Its own arguments follow after `--`.

    Exit codes: 0 for an estimate, 1 if the script failed or ran out of the --budget, 2 if it cannot be simulated.
    """
    from oomfix.profile.cards import find_card

    try:
        find_card(gpu)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpu") from None
    options = ["--gpu", gpu, "--steps", str(steps), *(["--budget", budget] if budget else [])]
    found, code = run_script(script, list(args), options)
    if found is None:
        ctx.exit(code)
    assert found is not None
    click.echo(json.dumps(found, indent=2) if form == "json" else "\n".join(lines(found)))
    ctx.exit(1 if found["out_of_memory"] or found["error"] else 0)


def run_script(script: str, args: list[str], options: list[str]) -> tuple[dict[str, Any] | None, int]:
    """What `oomfix.profile.run` finds in a process of its own, and its exit code; None where it found nothing.

    What the script writes is shown, on standard error, only where it failed.
    """
    # the card is simulated even where there is a real one
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "estimate.json")
        command = [sys.executable, "-m", "oomfix.profile.run", "--output", str(output), *options, script, *args]
        finished = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if finished.returncode:
            sys.stderr.write(finished.stderr.decode(errors="replace"))
        if not output.exists():
            return None, finished.returncode
        return json.loads(output.read_text(encoding="utf-8")), finished.returncode


def lines(found: dict[str, Any]) -> list[str]:
    """An estimate as lines of text, from the JSON that `oomfix.profile.run` writes."""
    card, steps = found["card"], found["steps"]
    text = [f"{found['script']} on {card['name']} ({card['capacity_gib']:.2f} GiB), {_count(len(steps), 'step')}"]
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
    text += _growth(found)
    text += _fits(found)
    if found["assumptions"]:
        text.append("  assumed")
        text += [f"    {sentence}" for sentence in found["assumptions"][:_MOST_ASSUMPTIONS]]
        more = len(found["assumptions"]) - _MOST_ASSUMPTIONS
        text += [f"    and {more} more (--format json)"] if more > 0 else []
    return text


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


def _growth(found: dict[str, Any]) -> list[str]:
    grows = found["growth_bytes_per_step"]
    if grows < _WORTH_TELLING_BYTES:
        return []
    room = int(found["card"]["capacity_gib"] * 2**30) - found["context_bytes"] - found["peak_reserved_bytes"]
    full = f"full after {room // grows} more" if room > 0 else "already full"
    return [f"  grows {size(grows)} per step on average: {full}"]


def _fits(found: dict[str, Any]) -> list[str]:
    if not found["fits"]:
        return ["  the run ended early: which cards it fits is not known"]
    fits = {name: fit["fits"] for name, fit in found["fits"].items()}
    on_card = "fits" if fits.pop("card") else "does not fit"
    presets = ", ".join(name for name, fit in fits.items() if fit) or "no preset"
    margin = f"with a margin of {100 * found['margin_fraction']:.0f} % ({found['margin_reason']})"
    return [f"  {on_card} the {found['card']['name']}; fits {presets}; {margin}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
