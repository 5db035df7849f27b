"""The command `oomfix apply`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from oomfix.rewrite.files import FileOutcome, Rewriter


def _codes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    from oomfix.config import check_codes
    from oomfix.rules import all_rules

    try:
        return () if value is None else check_codes(value.split(","), [rule.code for rule in all_rules()])
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--preset", required=True, metavar="NAME", help="The memory to train in; `oomfix presets` lists them.")
@click.option("--diff", is_flag=True, help="Print what would change, and write nothing.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would change.")
@click.option("--backup", is_flag=True, help="Keep each old file beside the new one, as NAME.orig.")
@click.option("--only", metavar="CODES", callback=_codes, help="Fix only these codes or prefixes, as OOM1,OOM205.")
@click.option("--ignore", metavar="CODES", callback=_codes, help="Do not fix these codes or prefixes.")
@click.option("--no-runtime", is_flag=True, help="Leave loops as they are; make fixes in plain torch alone.")
@click.option("--micro-batches", metavar="N", type=click.IntRange(min=1), help="Always split into N.  [default: auto]")
@click.option("--clip-norm", metavar="X", type=float, help="Clip gradients to this norm where the script does not.")
@click.option("--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True)
@click.pass_context
def apply(
    ctx: click.Context,
    paths: tuple[str, ...],
    preset: str,
    diff: bool,
    check: bool,
    backup: bool,
    only: tuple[str, ...],
    ignore: tuple[str, ...],
    no_runtime: bool,
    micro_batches: int | None,
    clip_norm: float | None,
    form: str,
) -> None:
    """Rewrite training scripts so that they train the same model in less memory.

    PATH is a Python file or a folder; without one, the scripts under the current folder that train are rewritten,
    after a question. Exits 0 when done, 1 when --check would change something, 2 when a file could not be read or
    written.
    """
    from oomfix.rewrite import summary
    from oomfix.rewrite.apply import Options
    from oomfix.rewrite.files import Rewriter
    from oomfix.rules import all_rules

    overrides: dict[str, object] = {}
    if micro_batches is not None:
        overrides["micro_batches"] = micro_batches
    if clip_norm is not None:
        overrides["clip_norm"] = clip_norm
    rules = all_rules()
    by_runtime = [rule.code for rule in rules if rule.fixed_by_runtime]
    runtime = not no_runtime and (not only or any(code.startswith(only) for code in by_runtime))
    options = Options(preset, overrides, runtime, only, ignore)
    rewriter = Rewriter(rules, options, backup=backup, writes=not (diff or check))
    try:
        for path in paths or ["."]:
            rewriter.chosen(path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    outcomes = _outcomes(ctx, rewriter, paths)
    if form == "json":
        click.echo(summary.as_json(outcomes), nl=False)
    else:
        if diff:
            click.echo(summary.diffs(outcomes, colour=sys.stdout.isatty()), nl=False)
        click.echo(summary.as_text(outcomes, written=rewriter.writes), nl=False, err=diff)
    for outcome in outcomes:
        for said in outcome.errors if form == "rich" else ():
            click.echo(said if said.startswith(outcome.path) else f"{outcome.path}: {said}", err=True)
    if any(outcome.errors for outcome in outcomes):
        ctx.exit(2)
    ctx.exit(1 if check and any(outcome.changed for outcome in outcomes) else 0)


def _outcomes(ctx: click.Context, rewriter: Rewriter, paths: Sequence[str]) -> list[FileOutcome]:
    if paths:
        return rewriter.rewrite(paths)
    if not rewriter.writes:
        return rewriter.rewrite(["."], only_training=True)
    if not sys.stdin.isatty():
        raise click.UsageError("PATH: none given, and nobody to ask; name files or folders, such as `.`")
    found = rewriter.training_files(".")
    if not found:
        raise click.UsageError("PATH: none given, and no file under the current folder holds a training loop")
    for path in found:
        click.echo(path)
    if not click.confirm(f"Rewrite {'these' if len(found) > 1 else 'this'} {len(found)} for {rewriter.preset}?"):
        ctx.exit(0)
    return rewriter.rewrite(found)
