"""The commands of `oomfix`."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import click

from oomfix import __version__
from oomfix.audit import TorchVersion
from oomfix.config import FAIL_ON, check_codes
from oomfix.spelling import counted, did_you_mean
from oomfix.target import parse_version
from oomfix.terminal import Failure, is_terminal, tell, write, write_markdown, write_table

if TYPE_CHECKING:
    from oomfix.pages import Page
    from oomfix.report import Report

FORMATS = ("rich", "concise", "json", "sarif", "github")
_INTERRUPTED = 130


def _as_codes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...] | None:
    given = [code for value in values for code in value.split(",")]
    try:
        return check_codes(given, _codes()) if values else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _as_version(ctx: click.Context, param: click.Parameter, value: str | None) -> TorchVersion | None:
    try:
        return None if value is None else parse_version(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _as_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("got an empty name, expected a file")
    return value


class _Commands(click.Group):
    """A group that imports a command of another package only when it is asked for: `audit` starts without them."""

    elsewhere: ClassVar[dict[str, str]] = {
        "apply": "oomfix.rewrite.command",
        "diagnose": "oomfix.diagnose_command",
        "profile": "oomfix.profile.command",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.elsewhere])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.elsewhere:
            command = getattr(importlib.import_module(self.elsewhere[cmd_name]), cmd_name)
            assert isinstance(command, click.Command)
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # a second Ctrl-C has nothing left to end, and would end this line in a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oomfix")
def main() -> None:
    """Find and fix what makes PyTorch training die with CUDA out of memory."""


@main.command(short_help="Report what wastes or leaks GPU memory in scripts.")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--format", "form", type=click.Choice(FORMATS), default="rich", show_default=True, help="What to print.")
@click.option(
    "--select",
    metavar="CODES",
    multiple=True,
    callback=_as_codes,
    help="Report only these codes or prefixes, such as OOM1,OOM401; may be repeated.",
)
@click.option(
    "--ignore",
    metavar="CODES",
    multiple=True,
    callback=_as_codes,
    help="Do not report these codes or prefixes; may be repeated.",
)
@click.option(
    "--fail-on", type=click.Choice(FAIL_ON), help="The least severity that makes it exit 1.  [default: warning]"
)
@click.option("--statistics", is_flag=True, help="Print how often each rule was reported, not the findings.")
@click.option("--baseline", metavar="FILE", callback=_as_file, help="Leave out the findings that this file lists.")
@click.option(
    "--write-baseline",
    metavar="FILE",
    callback=_as_file,
    help="Write all findings to this file, for --baseline, and exit 0.",
)
@click.option(
    "--target-torch",
    metavar="VERSION",
    callback=_as_version,
    help="The oldest torch that the scripts must run on.  [default: as requirement files say]",
)
@click.option(
    "-j", "--jobs", metavar="N", type=click.IntRange(min=1), help="Number of processes.  [default: one per core]"
)
@click.option("--no-cache", is_flag=True, help="Neither use results of earlier runs nor keep new ones.")
@click.option("--stdin-filename", metavar="PATH", default="<stdin>", help="The name for standard input in the report.")
@click.pass_context
def audit(
    ctx: click.Context,
    paths: tuple[str, ...],
    form: str,
    select: tuple[str, ...] | None,
    ignore: tuple[str, ...] | None,
    fail_on: str | None,
    statistics: bool,
    baseline: str | None,
    write_baseline: str | None,
    target_torch: TorchVersion | None,
    jobs: int | None,
    no_cache: bool,
    stdin_filename: str,
) -> None:
    """Report what wastes or leaks GPU memory in training scripts.

    PATH is a Python file, a notebook, a folder, or `-` for standard input; without one, the current folder is audited.
    Settings are read from [tool.oomfix] in the nearest pyproject.toml.

    Exit codes: 0 if no finding is at or above --fail-on, 1 if one is, 2 if something could not be audited.
    """
    from oomfix.audit import Auditor
    from oomfix.config import Configuration, Flags
    from oomfix.pipeline import Pipeline
    from oomfix.progress import Progress
    from oomfix.rules import all_rules

    if statistics and form in ("sarif", "github"):
        raise click.UsageError(f"--statistics: has no {form} format, expected rich, concise or json")
    if write_baseline and baseline:
        raise click.UsageError("--write-baseline: writes every finding, expected no --baseline beside it")
    flags = Flags(select, ignore, fail_on, target_torch, baseline)
    progress = Progress("auditing")
    pipeline = Pipeline(
        Auditor(all_rules(), forms=form == "json" and not statistics),
        Configuration(flags, _codes(), use_baselines=not write_baseline),
        processes=jobs or _cores(),
        use_cache=not no_cache,
        read_stdin=_read_stdin,
        stdin_name=stdin_filename,
        progress=progress.show,
    )
    with progress:
        report = pipeline.audit(paths or (os.curdir,))
    if write_baseline:
        _write_baseline(write_baseline, report)
    else:
        write(lambda stream: _render(report, form, statistics, stream))
    if form in ("rich", "concise"):
        for path, message in report.errors():
            tell(path, message)
    ctx.exit(pipeline.status if not write_baseline or pipeline.status == 2 else 0)


@main.command(short_help="Explain a rule, with examples.")
@click.argument("code")
def explain(code: str) -> None:
    """Explain a rule: what it finds, why, when it is quiet, with examples.

    CODE is a code such as OOM101, or a name such as loss-accumulation.
    """
    from oomfix.pages import markdown

    pages = {page.code: page for page in _pages()}
    names = {page.name: page for page in pages.values()}
    page = pages.get(code.upper()) or names.get(code.lower())
    if page is None:
        begun = [known for known in pages if code and known.startswith(code.upper())]
        hint = f" but the start of {', '.join(begun)}" if begun else ""
        hint = hint or did_you_mean(code.upper(), pages) or did_you_mean(code.lower(), names)
        raise click.UsageError(f"{code!r} is no rule{hint or '; `oomfix rules` lists them'}")
    text = markdown(page)
    write(lambda stream: write_markdown(text, stream))


@main.command()
@click.option(
    "--format", "form", type=click.Choice(("table", "json")), default="table", show_default=True, help="What to print."
)
def rules(form: str) -> None:
    """List the rules."""
    from oomfix.pages import table

    pages = _pages()
    if form == "table":
        write(lambda stream: write_table(table(pages), stream))
        return
    import json

    fields = ("code", "name", "severity", "fix", "summary")
    rows = [{field: getattr(page, field) for field in fields} for page in pages]
    write(lambda stream: stream.write(json.dumps({"version": 1, "rules": rows}, indent=2) + "\n"))


@main.command(short_help="List the memory presets.")
@click.pass_context
def presets(ctx: click.Context) -> None:
    """List the memory presets: what a card of each class can hold, and the policies that go with it.

    Capacity is what such a card shows, and budget what tensors may take of it. A batch that does not fit is first
    split into as many parts as the table says. Checkpointing is on from the start, or only if splitting is not enough.
    The allocator's cache is emptied when it is fragmented, or after so many steps.

    `auto` takes what is free on the card at hand. `off` trains as the script says, in whole batches.

    Presets of your own, from [tool.oomfix.presets] in the nearest pyproject.toml, come last. It exits 2 if one of them
    is faulty.
    """
    from oomfix.config import Configuration, Flags
    from oomfix.presets import table

    configuration = Configuration(Flags(), _codes())
    own = {name: chosen.preset for name, chosen in configuration.settings(os.curdir).presets.items()}
    write(lambda stream: write_table(table(own), stream))
    for path, message in configuration.problems:
        tell(path, message)
    ctx.exit(2 if configuration.problems else 0)


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdin.buffer.read()


def _pages() -> list[Page]:
    from oomfix.pages import pages
    from oomfix.rules import all_rules

    return pages(all_rules())


def _codes() -> list[str]:
    from oomfix.rules import all_rules
    from oomfix.suppressions import UnusedSuppression

    return [UnusedSuppression.code, *(rule.code for rule in all_rules())]


def _cores() -> int:
    """The cores that this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _render(report: Report, form: str, statistics: bool, stream: TextIO) -> None:
    if statistics:
        _render_statistics(report, form, stream)
    elif form == "rich":
        from oomfix.report import rich

        rich.write(report, stream, terminal=is_terminal(stream))
    elif form == "concise":
        from oomfix.report import concise

        stream.write(concise.render(report))
    elif form == "json":
        from oomfix.report import json

        stream.write(json.render(report))
    elif form == "sarif":
        from oomfix.report import sarif

        stream.write(sarif.render(report, _pages()))
    else:
        from oomfix.report import github

        stream.write(github.render(report))


def _render_statistics(report: Report, form: str, stream: TextIO) -> None:
    from oomfix.report import concise, json, statistics

    rows = statistics(report)
    stream.write(json.render_statistics(report, rows) if form == "json" else concise.render_statistics(rows))


def _write_baseline(path: str, report: Report) -> None:
    from oomfix.baseline import BaselineError, write_baseline

    try:
        count = write_baseline(path, report.findings())
    except BaselineError as error:
        raise Failure(f"{error.path}: {error}") from None
    click.echo(f"{path}: {counted(count, 'finding')} written as known", err=True)
