"""The command `oomfix apply`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from oomfix.script.syntax.patterns import Pattern
from oomfix.terminal import columns, escape_what_it_cannot_show

if TYPE_CHECKING:
    from oomfix.rewrite.files import FileOutcome, Rewriter
    from oomfix.rewrite.options import Options
    from oomfix.rewrite.proving.proof import Proof
    from oomfix.rewrite.proving.trial import Trial

_STANDARD_INPUT = Pattern(r"(-|/dev/stdin|/dev/fd/\d+|/proc/[^/]+/fd/\d+)$")


class _WithScriptArguments(click.Command):
    """A command whose arguments behind `--` are the script's, where one is run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            if "--prove" in args[:split]:
                ctx.obj = args[split + 1 :]
                args = args[:split]
        return super().parse_args(ctx, args)


def _codes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    from oomfix.config import check_codes
    from oomfix.rules import all_rules

    given = [code for value in values for code in value.split(",")]
    try:
        return check_codes(given, [rule.code for rule in all_rules()])
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(cls=_WithScriptArguments, short_help="Rewrite training scripts to train in less memory.")
@click.argument("paths", metavar="[PATH]... [-- ARGS]", nargs=-1)
@click.option(
    "--preset",
    metavar="NAME",
    help="The memory to train in: one that `oomfix presets` lists, or one of [tool.oomfix.presets] in pyproject.toml.  "
    "[required]",
)
@click.option("--diff", is_flag=True, help="Print what would change, and write nothing.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would change.")
@click.option(
    "--prove",
    is_flag=True,
    help="Run the first PATH, with ARGS, on a simulated card before and after; write only what fits.",
)
@click.option(
    "--check-equivalence",
    metavar="COMMAND",
    help="Run this command before and after, in copies of the current folder, and compare every optimizer step; write "
    "nothing.",
)
@click.option("--backup", is_flag=True, help="Keep each old file beside the new one, as NAME.orig.")
@click.option(
    "--only",
    metavar="CODES",
    multiple=True,
    callback=_codes,
    help="Fix only these codes or prefixes, such as OOM1,OOM205.",
)
@click.option(
    "--ignore",
    metavar="CODES",
    multiple=True,
    callback=_codes,
    help="Do not fix these codes or prefixes; may be repeated.",
)
@click.option("--no-runtime", is_flag=True, help="Leave loops as they are; make only the fixes in plain torch.")
@click.option(
    "--micro-batches", metavar="N", type=click.IntRange(min=1), help="Always split batches into N.  [default: auto]"
)
@click.option("--clip-norm", metavar="X", type=float, help="Clip gradients to this norm where the script does not.")
@click.option(
    "--format", "form", type=click.Choice(("rich", "json")), default="rich", show_default=True, help="What to print."
)
@click.pass_context
def apply(
    ctx: click.Context,
    paths: tuple[str, ...],
    preset: str | None,
    diff: bool,
    check: bool,
    prove: bool,
    check_equivalence: str | None,
    backup: bool,
    only: tuple[str, ...],
    ignore: tuple[str, ...],
    no_runtime: bool,
    micro_batches: int | None,
    clip_norm: float | None,
    form: str,
) -> None:
    """Rewrite training scripts so that they train the same model in less memory.

    PATH is a Python file, a notebook or a folder; without one, the scripts under the current folder that train are
    rewritten, after a question.

    Exits 0 when done, 1 when --check would change something, --prove does not fit or --check-equivalence finds a
    difference, 2 when a file could not be read or written, or a run came to no result. Where --prove does not end with
    0, nothing is written.
    """
    from oomfix.rewrite.files import Rewriter, write
    from oomfix.rules import all_rules

    for stream in (sys.stdout, sys.stderr):
        escape_what_it_cannot_show(stream)
    options = _options(preset, micro_batches, clip_norm, no_runtime, only, ignore)
    rewriter = Rewriter(all_rules(), options)
    _refuse_what_is_no_script(paths, check_equivalence)
    _refuse_unknown_presets(rewriter, paths)
    _refuse_other_runs(paths, prove, check_equivalence, diff or check)

    writes = not (diff or check or check_equivalence)
    outcomes = _outcomes(ctx, rewriter, paths, writes)
    proof = _prove(ctx, rewriter, paths[0], outcomes) if prove else None
    trial = _try_out(rewriter, options, paths, outcomes, check_equivalence) if check_equivalence else None
    # applying again changes nothing: a file written with a preset that it does not fit would keep that preset
    refused = writes and prove and (proof is None or not proof.fits)
    writes = writes and not refused
    if writes:
        outcomes = write(outcomes, backup=backup)
    _tell(outcomes, proof, trial, form=form, diff=diff, written=writes, loops=options.runtime)
    if refused:
        click.echo("nothing is written; without --prove, it would be", err=True)
    wanted = [ran for asked, ran in ((prove, proof), (check_equivalence, trial)) if asked]
    if any(outcome.errors for outcome in outcomes) or None in wanted:
        ctx.exit(2)
    missed = (proof is not None and not proof.fits) or (trial is not None and not trial.same)
    ctx.exit(1 if missed or (check and any(outcome.changed for outcome in outcomes)) else 0)


def _tell(
    outcomes: Sequence[FileOutcome],
    proof: Proof | None,
    trial: Trial | None,
    *,
    form: str,
    diff: bool,
    written: bool,
    loops: bool,
) -> None:
    """Say what became of the files: with `diff`, the summary goes to standard error, and so do errors always."""
    from oomfix.rewrite import summary

    if form == "json":
        click.echo(summary.as_json(outcomes, proof, trial), nl=False)
        return
    if diff:
        click.echo(summary.diffs(outcomes, colour=sys.stdout.isatty()), nl=False)
    width = columns(sys.stderr if diff else sys.stdout)
    click.echo(
        summary.as_text(outcomes, proof, trial, written=written, loops=loops, width=width),
        nl=False,
        err=diff,
    )
    for outcome in outcomes:
        for problem in outcome.errors:
            click.echo(problem if problem.startswith(outcome.path) else f"{outcome.path}: {problem}", err=True)


def _refuse_unknown_presets(rewriter: Rewriter, paths: Sequence[str]) -> None:
    try:
        for path in paths or ["."]:
            rewriter.chosen(path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _refuse_other_runs(paths: Sequence[str], prove: bool, command: str | None, only_shows: bool) -> None:
    if command and (only_shows or prove):
        raise click.UsageError("--check-equivalence: runs alone, expected no --diff, --check or --prove beside it")
    if prove and not (paths and paths[0].endswith(".py") and os.path.isfile(paths[0])):
        raise click.UsageError("--prove: runs a script, expected a Python file as the first PATH")


def _refuse_what_is_no_script(paths: Sequence[str], command: str | None) -> None:
    for path in filter(_STANDARD_INPUT.match, paths):
        raise click.UsageError(f"{path}: expected a file or folder; scripts are rewritten in place, not from a stream")
    if command is not None and not command.strip():
        expected = "expected a command that trains, such as 'python train.py'"
        raise click.UsageError(f"--check-equivalence: got {command!r}, {expected}")


def _options(
    preset: str | None,
    micro_batches: int | None,
    clip_norm: float | None,
    no_runtime: bool,
    only: tuple[str, ...],
    ignore: tuple[str, ...],
) -> Options:
    from oomfix.presets import PRESETS
    from oomfix.rewrite.options import Options
    from oomfix.rules import all_rules

    if preset is None:
        known = ", ".join(name for name in PRESETS if name != "off")
        raise click.UsageError(f"--preset: none given, expected one of {known}, or one of your own")
    flags = {"micro_batches": micro_batches, "clip_norm": clip_norm}
    overrides: dict[str, object] = {name: value for name, value in flags.items() if value is not None}
    by_runtime = [rule.code for rule in all_rules() if rule.fixed_by_runtime]
    runtime = not no_runtime and (not only or any(code.startswith(only) for code in by_runtime))
    return Options(preset, overrides, runtime, only, ignore)


def _outcomes(ctx: click.Context, rewriter: Rewriter, paths: Sequence[str], writes: bool) -> list[FileOutcome]:
    from oomfix.progress import Progress

    if paths or not writes:
        with Progress("rewriting" if writes else "reading") as progress:
            return rewriter.rewrite(paths or ["."], only_training=not paths, progress=progress.show)
    if not sys.stdin.isatty():
        raise click.UsageError("PATH: none given, and nobody to ask; name files or folders, such as `.`")
    found = rewriter.training_files()
    if not found:
        raise click.UsageError("PATH: none given, and no file under the current folder holds a training loop")
    for path in found:
        click.echo(path)
    which = "this file" if len(found) == 1 else f"these {len(found)} files"
    if not click.confirm(f"Rewrite {which} for {rewriter.preset}?"):
        ctx.exit(0)
    return rewriter.rewrite(found)


def _prove(ctx: click.Context, rewriter: Rewriter, script: str, outcomes: Sequence[FileOutcome]) -> Proof | None:
    """Both peaks; None, and a line that says why, where a run came to no result."""
    from oomfix.rewrite.proving.proof import CannotProve, prove

    try:
        return prove(script, ctx.obj or (), rewriter.preset, rewriter.chosen(script).preset, outcomes)
    except CannotProve as problem:
        click.echo(str(problem), err=True)
        return None


def _try_out(
    rewriter: Rewriter, options: Options, paths: Sequence[str], outcomes: Sequence[FileOutcome], command: str
) -> Trial | None:
    """All runs of a command; None, and a line that says why, where they cannot be compared."""
    from oomfix.rewrite.files import Rewriter
    from oomfix.rewrite.proving.trial import CannotCompare, Contents, Versions, contents_here, try_out
    from oomfix.rewrite.summary import CHANGING, mended
    from oomfix.rules import all_rules

    changed = [outcome.path for outcome in outcomes if outcome.changed]

    def rewritten(mends: bool, **overrides: object) -> Contents:
        ignore = options.ignore if mends else (*options.ignore, *CHANGING)
        changes = options._replace(ignore=ignore, overrides={**options.overrides, **overrides})
        return contents_here(Rewriter(all_rules(), changes).rewrite(changed))

    preset = rewriter.chosen(next(iter(paths), ".")).preset
    parts = max(2, preset.first_micro_batches) if preset.micro_batches == "auto" else preset.micro_batches
    versions = Versions(
        rewriter.preset,
        bool(mended(outcomes)),
        rewritten,
        lambda mends, split: rewritten(mends, precision="fp32", micro_batches=parts if split else "auto"),
    )
    try:
        return try_out(command, versions, _say)
    except CannotCompare as problem:
        click.echo(str(problem), err=True)
        return None


def _say(line: str) -> None:
    click.echo(line, err=True)
