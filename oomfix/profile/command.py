"""`oomfix profile`: run a training script on a simulated card, in a process of its own, and say what it found.

Imports no torch: the process that runs the script does.
"""

import json
from typing import TYPE_CHECKING

import click

from oomfix.profile.process import run_script
from oomfix.profile.text import lines

if TYPE_CHECKING:
    from oomfix.rewrite.what_if import WhatIf

_DEFAULT_GPU = "a100"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--gpu", metavar="NAME", help="The card to simulate: t4, rtx3090, ...  [default: a100, or that of the --preset]"
)
@click.option("--steps", default=2, show_default=True, type=click.IntRange(1), help="Optimizer steps to run.")
@click.option("--budget", metavar="SIZE", help="Refuse memory beyond a preset (16gb) or a card of so many GiB.")
@click.option(
    "--preset", metavar="NAME", help="Profile the script as `apply --preset` would rewrite it, in the preset's memory."
)
@click.option("--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True)
@click.pass_context
def profile(
    ctx: click.Context,
    script: str,
    args: tuple[str, ...],
    gpu: str | None,
    steps: int,
    budget: str | None,
    preset: str | None,
    form: str,
) -> None:
    """Say how much GPU memory a training script needs, without a GPU.

    The unmodified SCRIPT runs on a simulated card until its second optimizer step. Its own arguments follow after `--`.

    Exit codes: 0 for an estimate, 1 if the script failed or ran out of the --budget, 2 if it cannot be simulated.
    """
    from oomfix.profile.cards import find_card

    try:
        find_card(gpu or _DEFAULT_GPU)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpu") from None
    what_if = None if preset is None else _what_if(ctx, script, preset)
    # of options given twice the last one counts
    options = ["--gpu", _DEFAULT_GPU, *(what_if.options if what_if else []), *(["--gpu", gpu] if gpu else [])]
    options += ["--steps", str(steps), *(["--budget", budget] if budget else [])]
    found, code = run_script(script, list(args), options, what_if.contents if what_if else {})
    if found is None:
        ctx.exit(code)
    assert found is not None
    if what_if and form == "json":
        found["rewritten"] = what_if.as_json()
    elif what_if:
        click.echo(what_if.as_text(), nl=False)
    click.echo(json.dumps(found, indent=2) if form == "json" else "\n".join(lines(found)))
    if what_if and form == "rich" and not budget:
        click.echo(what_if.verdict(found), nl=False)
    ctx.exit(1 if found["out_of_memory"] or found["error"] else 0)


def _what_if(ctx: click.Context, script: str, preset: str) -> "WhatIf":
    """The script as `apply` would rewrite it; ends the command where that cannot be."""
    from oomfix.rewrite.what_if import CannotRewrite, rewrite_for

    try:
        return rewrite_for(script, preset)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--preset") from None
    except CannotRewrite as error:
        click.echo(str(error), err=True)
        ctx.exit(2)
