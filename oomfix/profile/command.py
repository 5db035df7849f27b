"""`oomfix profile`: run a training script on a simulated card, in a process of its own, and say what it found.

Imports no torch: the process that runs the script does.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomfix.profile.batch_size import Trial, find_largest, largest_fitting
from oomfix.profile.cards import CARDS, find_card
from oomfix.profile.cards import budget as checked_budget
from oomfix.profile.process import run_script
from oomfix.profile.text import batch_size_lines, lines, trial_line
from oomfix.terminal import write_lines

if TYPE_CHECKING:
    from oomfix.rewrite.what_if import WhatIf

_DEFAULT_GPU = "a100-40gb"
_PLACEHOLDER, _FIRST_SIZE = "{}", 8


@click.command(short_help="Say how much GPU memory a script needs.", context_settings={"ignore_unknown_options": True})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module such as package.train, run as by `python -m`.")
@click.option(
    "--gpu",
    metavar="NAME",
    help=f"The card to simulate: {', '.join(CARDS)}.  [default: {_DEFAULT_GPU}, or the card of the --preset]",
)
@click.option(
    "--steps", default=2, show_default=True, metavar="N", type=click.IntRange(1), help="Optimizer steps to run."
)
@click.option("--budget", metavar="SIZE", help="Limit memory to that of a preset (16gb) or of a card with so many GiB.")
@click.option(
    "--preset", metavar="NAME", help="Profile the script as `apply --preset` would rewrite it, in the preset's memory."
)
@click.option(
    "--stage", metavar="K", type=click.IntRange(1), help="Measure from when SCRIPT builds its K-th optimizer."
)
@click.option(
    "--ranks", metavar="N", type=click.IntRange(2), help="Simulate one of N processes, as torchrun would start it."
)
@click.option(
    "--find-batch-size",
    "search",
    is_flag=True,
    help="Find the largest batch that fits; {} in ARGS stands for its size.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw memory over the run: .png, .svg or .html."
)
@click.option(
    "--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True, help="What to print."
)
@click.pass_context
def profile(
    ctx: click.Context,
    script: str,
    args: tuple[str, ...],
    as_module: bool,
    gpu: str | None,
    steps: int,
    budget: str | None,
    preset: str | None,
    stage: int | None,
    ranks: int | None,
    search: bool,
    plot: Path | None,
    form: str,
) -> None:
    """Say how much GPU memory a training script needs, without a GPU.

    The unmodified SCRIPT runs on a simulated card until its second optimizer step. Its own arguments follow after `--`.

    Exit codes: 0 for an estimate, 1 if the script failed or ran out of the --budget, 2 if it cannot be simulated.
    """
    module = ["--module", script] if as_module else []
    script = _file(script, as_module)
    if script.endswith(".ipynb"):
        save = f"jupyter nbconvert --to script {script}"
        raise click.UsageError(f"{script} is a notebook, expected a Python file: {save} makes one")
    _check_card(gpu or _DEFAULT_GPU, budget)
    if plot is not None:
        _check_plot(plot)
    what_if = None if preset is None else _what_if(ctx, script, preset)
    # of options given twice the last one counts
    options = ["--gpu", _DEFAULT_GPU, *(what_if.options if what_if else []), *(["--gpu", gpu] if gpu else [])]
    options += [*module, "--steps", str(steps), "--stage", str(stage or 0), "--ranks", str(ranks or 0)]
    options += ["--budget", budget] if budget else []

    def run(args: list[str], more_options: list[str]) -> dict[str, Any]:
        found, code = run_script(script, args, [*options, *more_options], what_if.contents if what_if else {})
        if found is None:
            ctx.exit(code)
        return found

    found = _search(run, list(args)) if search else run(list(args), [])
    if form == "json":
        rewritten = {"rewritten": what_if.as_json()} if what_if else {}
        click.echo(json.dumps(found | rewritten, indent=2))
    else:
        write_lines(_text(found, what_if, budget))
    if plot is not None:
        from oomfix.profile.plot import draw

        draw(found, plot)
    ctx.exit(1 if found["out_of_memory"] or found["error"] else 0)


def _text(found: dict[str, Any], what_if: "WhatIf | None", budget: str | None) -> Iterator[str]:
    """The report with what would be rewritten before it, and what was asked for behind."""
    if what_if:
        yield from what_if.lines()
    yield from lines(found)
    if what_if and not budget:
        yield from what_if.verdict(found)
    if "batch_sizes" in found:
        yield from batch_size_lines(found)


def _file(script: str, as_module: bool) -> str:
    """The file that is to run; ends the command where there is none."""
    places = [Path(script)]
    if as_module:
        place = Path(*script.split("."))
        places = [place.with_name(f"{place.name}.py"), place / "__main__.py"]
    for place in places:
        if place.is_file():
            return str(place)
    message = f"no file {' or '.join(map(str, places))}"
    raise click.BadParameter(f"{message} below the current folder" if as_module else message, param_hint="SCRIPT")


def _check_card(gpu: str, budget: str | None) -> None:
    try:
        find_card(gpu)
        if budget is not None:
            checked_budget(budget)
    except ValueError as error:
        # the message begins with the argument's name, which is the option's
        raise click.UsageError(f"--{error}") from None


def _check_plot(path: Path) -> None:
    from oomfix.profile.plot import SUFFIXES

    if path.suffix not in SUFFIXES:
        message = f"got {path.name!r}, expected a name that ends in {', '.join(SUFFIXES)}"
        raise click.UsageError(f"--plot: {message}")
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")


def _search(run: Callable[[list[str], list[str]], dict[str, Any]], args: list[str]) -> dict[str, Any]:
    """The run with the script's own batches, or where its arguments hold {} with the largest, and all trials."""
    in_args = any(_PLACEHOLDER in argument for argument in args)
    results: dict[int, dict[str, Any]] = {}
    # oomfix.runtime would split any batch until it fits: asked for is the largest that need not be
    whole = ["--coupled"]
    own = None if in_args else run(args, whole)
    if own is not None and own["batch_size"] is None:
        raise click.UsageError(
            "--find-batch-size: no DataLoader with a batch size feeds the script; put {} where its arguments name one"
        )

    def attempt(size: int) -> Trial:
        if own is not None and size == own["batch_size"]:
            found = own
        elif own is not None:
            found = run(args, [*whole, "--batch-size", str(own["batch_size"]), str(size)])
        else:
            found = run([argument.replace(_PLACEHOLDER, str(size)) for argument in args], whole)
        if found["error"] and not found["out_of_memory"]:
            raise click.ClickException(f"with batches of {size} the script failed")
        results[size], trial = found, _trial(found, size)
        click.echo(trial_line(asdict(trial)), err=True)
        return trial

    trials = find_largest(attempt, own["batch_size"] if own else _FIRST_SIZE, own["samples"] if own else None)
    largest = largest_fitting(trials)
    found = own or results[largest or min(results)]
    return {**found, "largest_batch_size": largest, "batch_sizes": [asdict(trial) for trial in trials]}


def _trial(found: dict[str, Any], size: int) -> Trial:
    if found["out_of_memory"]:
        return Trial(size, False, None, found["budget_bytes"])
    if found["budget_bytes"] is not None:
        return Trial(size, True, found["peak_reserved_bytes"], found["budget_bytes"])
    fit = found["fits"]["card"]
    return Trial(size, fit["fits"], found["peak_reserved_bytes"], fit["budget_bytes"])


def _what_if(ctx: click.Context, script: str, preset: str) -> "WhatIf":
    """The script as `apply` would rewrite it; ends the command where that cannot be."""
    from oomfix.rewrite.what_if import CannotRewrite, rewrite_for

    try:
        return rewrite_for(script, preset)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from None
    except CannotRewrite as error:
        click.echo(str(error), err=True)
        ctx.exit(2)
