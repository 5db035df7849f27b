"""`oomfix profile`: run a training script on a simulated card, in a process of its own, and say what it found.

Imports no torch: the process that runs the script does.
"""

import json

import click

from oomfix.profile.process import run_script
from oomfix.profile.text import lines


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
