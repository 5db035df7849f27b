"""`oomfix diagnose`: read an out-of-memory error from a file or from standard input."""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

import click

from oomfix.diagnose_kinds import Diagnosis
from oomfix.spelling import counted
from oomfix.terminal import tell, write_lines

if TYPE_CHECKING:
    from oomfix.diagnose_script import Cause

_MOST_CAUSES = 5


@click.command(short_help="Say why a run died of CUDA out of memory.")
@click.argument("log", type=click.File("rb"), default="-")
@click.option(
    "--script",
    metavar="FILE",
    help="The script that died; it is audited if the file is here.  [default: that of the traceback, not audited]",
)
@click.option(
    "--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True, help="What to print."
)
@click.pass_context
def diagnose(ctx: click.Context, log: BinaryIO, script: str | None, form: str) -> None:
    """Say which kind of CUDA out-of-memory error a LOG ended in, and what cures it.

    LOG is a message, a traceback or the log of a whole run; without one, standard input is read.

    Exit codes: 0 if there was no such error, 1 if there was.
    """
    from oomfix.diagnose import diagnose as find

    # not as a text file: that would make a line of every step of a progress bar
    text = log.read().decode("utf-8", errors="replace")
    found = [(diagnosis, _causes(diagnosis, script)) for diagnosis in find(text, script)]
    if form == "json":
        diagnoses = [
            {**asdict(diagnosis), "findings": [asdict(cause) for cause in causes]} for diagnosis, causes in found
        ]
        click.echo(json.dumps({"version": 1, "diagnoses": diagnoses}, indent=2))
    elif not found:
        click.echo("no CUDA out-of-memory error found")
    else:
        for number, (diagnosis, causes) in enumerate(found):
            write_lines([*([""] if number else []), *lines(diagnosis, causes)])
    if script is not None and not os.path.isfile(script):
        tell(script, "no such file; it was not audited")
    ctx.exit(1 if found else 0)


def _causes(diagnosis: Diagnosis, script: str | None) -> "list[Cause]":
    # a file that happens to have the name in the log need not be the one that died
    if script is None or not os.path.isfile(script):
        return []
    from oomfix.diagnose_script import causes

    return causes(diagnosis, script)


def lines(diagnosis: Diagnosis, causes: "list[Cause]") -> list[str]:
    """A diagnosis as lines of text, with what the audit of the script has to say."""
    text = [f"line {diagnosis.crash.line}: out of memory: {diagnosis.kind}"]
    text += [f"  {sentence}" for sentence in diagnosis.evidence]
    for cause in causes[:_MOST_CAUSES]:
        here = ", on the way to the error" if cause.on_the_way else ""
        text.append(f"  {cause.place}  {cause.code}  {cause.severity}  {cause.message}{here}")
    more = len(causes) - _MOST_CAUSES
    text += [f"  and {counted(more, 'more finding')} in the script"] if more > 0 else []
    return [*text, *(f"  fix: {cure}" for cure in diagnosis.cures)]
