"""`oomfix diagnose`: read an out-of-memory error from a file or from standard input."""

import json
from dataclasses import asdict
from typing import TextIO

import click

from oomfix.diagnose import Diagnosis


@click.command()
@click.argument("log", type=click.File(errors="replace"), default="-")
@click.option("--script", default="train.py", show_default=True, help="The script that the advice is about.")
@click.option("--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True)
@click.pass_context
def diagnose(ctx: click.Context, log: TextIO, script: str, form: str) -> None:
    """Say which kind of CUDA out-of-memory error a LOG ended in, and what cures it.

    LOG is a message, a traceback or the log of a whole run; without one, standard input is read.

    Exit codes: 0 if there was no such error, 1 if there was.
    """
    from oomfix.diagnose import diagnose as find

    found = find(log.read(), script)
    if form == "json":
        click.echo(json.dumps({"version": 1, "diagnoses": [asdict(diagnosis) for diagnosis in found]}, indent=2))
    elif not found:
        click.echo("no CUDA out-of-memory error found")
    else:
        click.echo("\n\n".join("\n".join(lines(diagnosis)) for diagnosis in found))
    ctx.exit(1 if found else 0)


def lines(diagnosis: Diagnosis) -> list[str]:
    """A diagnosis as lines of text."""
    text = [f"line {diagnosis.crash.line}: {diagnosis.kind}"]
    text += [f"  {sentence}" for sentence in diagnosis.evidence]
    return [*text, *(f"  fix: {cure}" for cure in diagnosis.cures)]
