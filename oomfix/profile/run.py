"""Run an unmodified training script on a simulated card: `python -m oomfix.profile.run [options] SCRIPT [ARGS]`.

The script runs in this process, which it may leave in any state: `oomfix profile` starts one for each run. Its
output goes to standard error; the estimate is written as JSON to the file that --output names.

Exit codes: 0 with an estimate; 2 where the script cannot be simulated, with one sentence that says why; 1 where the
script itself failed, with its traceback.
"""

import argparse
import json
import logging
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook

from oomfix.profile.cards import budget, find_card
from oomfix.profile.checkpoints import Checkpoints
from oomfix.profile.checks import answer_checks
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.host import lighten_host
from oomfix.profile.loaders import Loaders
from oomfix.profile.optimizers import Optimizers
from oomfix.profile.overlay import overlay
from oomfix.profile.process import CANNOT_SIMULATE
from oomfix.profile.processes import Processes
from oomfix.profile.progress import EnoughSteps, Progress
from oomfix.profile.ranks import Ranks, shares
from oomfix.profile.refusals import CannotSimulate, refuse_what_cannot_be
from oomfix.profile.repeats import Repeats
from oomfix.profile.simulated_gpu import SimulatedGPU, assumptions
from oomfix.profile.steps_by_hand import StepsByHand
from oomfix.profile.threads import Threads

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def main(arguments: list[str] | None = None) -> int:
    """Run as the command line says; returns the exit code."""
    options = _parse(arguments)
    # an operation that is refused says so by its error, which is the script's own
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr):
            result = run(
                options.script,
                options.args,
                module=options.module,
                gpu=options.gpu,
                steps=options.steps,
                stage=options.stage,
                budget_bytes=options.budget_bytes,
                batch_size=options.batch_size,
                rewritten=options.rewritten,
                independent=not options.coupled,
                ranks=options.ranks,
            )
    except CannotSimulate as error:
        print(f"{options.script}: cannot be simulated: {error}", file=sys.stderr)
        return CANNOT_SIMULATE
    Path(options.output).write_text(json.dumps(result), encoding="utf-8")
    return 1 if result["error"] and not result["out_of_memory"] else 0


def run(
    script: str,
    args: list[str],
    *,
    module: str = "",
    gpu: str = "a100",
    steps: int = 2,
    stage: int = 0,
    budget_bytes: int | None = None,
    batch_size: tuple[int, int] | None = None,
    rewritten: Mapping[str, bytes] = MappingProxyType({}),
    independent: bool = True,
    ranks: int = 0,
) -> Any:
    """Simulate a script and return its estimate in types that `json` writes.

    Args:
        script: path of the script.
        args: its arguments.
        module: the name by which `python -m` would run it from the current folder; "": it is run as a file.
        gpu: the card, a name from `oomfix.profile.cards`.
        steps: after how many steps of each of its optimizers it is stopped.
        stage: measure from when the script builds its optimizer of this number; 0: from its start.
        budget_bytes: what the allocator may reserve; beyond it operations raise `torch.OutOfMemoryError`.
        batch_size: (what its data loaders are built with, what they get instead); None: as it is.
        rewritten: real path of a Python file -> what is run in place of what it holds.
        independent: what the runtime's check finds where it compares numbers: whether samples are independent.
        ranks: simulate the first of so many processes; 0: the script trains alone.

    Returns:
        The fields of `Estimate`, with "script", "gpu", "stage" and "budget_bytes" as asked for, "batch_size" (of the
        last batch from a `DataLoader`) and "samples" (in a pass of it) or None, "shares" (of `ranks`
        ranks, for a script that trained alone) or None, "stopped" (whether the steps were
        reached), "out_of_memory" (the error's message, or None), and "error" (the script's own traceback, or None).

    Raises:
        CannotSimulate: nothing ever reached the card, or the script needs what the simulation has not.
    """
    simulated = SimulatedGPU(find_card(gpu), budget_bytes, expandable_segments=None)
    optimizers = Optimizers(simulated.patches)
    with simulated.running(optimizers.moved) as trace:
        progress = Progress(trace, steps, stage)
        optimizers.built = progress.optimizer_built
        lighten_host(simulated.patches, trace)
        Checkpoints(simulated.patches, trace)
        group = Ranks(simulated.patches, trace, ranks)
        loaders = Loaders(simulated.patches, trace, progress, batch_size)
        overlay(simulated.patches, rewritten)
        answer_checks(simulated.patches, trace, independent)
        Repeats(simulated.patches, trace)
        StepsByHand(simulated.patches, trace, lambda: progress.without_optimizer, progress.stepped)
        threads = Threads(simulated.patches, trace)
        processes = Processes(simulated.patches)
        stop = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: progress.stepped())
        try:
            end = _run_to_its_end(script, args, module, progress, threads)
        finally:
            stop.remove()
        if end.out_of_memory is not None:
            trace.end_event = trace.refused_event
        result = simulated.report(assumptions(trace))
    if not trace.events and end.error is None:
        asked = "is it what it starts other processes for?" if processes.started else "does it look for a GPU?"
        raise CannotSimulate(f'no tensor was moved to "cuda" before the script ended; {asked}')
    if end.error is not None:
        print(end.error, file=sys.stderr)
    found = result.as_json()
    if end.out_of_memory or end.error:
        # the run ended early: what it would have needed is not known
        found["fits"] = {}
    return {
        "script": script,
        "gpu": gpu,
        "stage": stage,
        "budget_bytes": budget_bytes,
        "batch_size": loaders.batch_size,
        "samples": loaders.samples,
        "shares": None if group.joined or not ranks else asdict(shares(result.timeline, *group.blocks, ranks)),
        **end._asdict(),
        **found,
    }


class _End(NamedTuple):
    """How a script ended: by itself, or as the result of `run` says."""

    stopped: bool = False
    out_of_memory: str | None = None
    error: str | None = None


def _run_to_its_end(script: str, args: list[str], module: str, progress: Progress, threads: Threads) -> _End:
    try:
        _execute(script, args, module)
        threads.raise_what_ended_one()
        progress.ended()
    except EnoughSteps:
        return _End(stopped=True)
    except OutOfMemoryError as exception:
        return _End(out_of_memory=str(exception))
    except CannotSimulate:
        raise
    except Exception as exception:
        # a training script can fail in any way; its traceback belongs into the report
        refuse_what_cannot_be(exception)
        return _End(error=_traceback(exception, os.path.abspath(script)))
    return _End()


def _traceback(error: Exception, path: str) -> str:
    """An error's traceback as the script alone would have shown it: without the frames that run the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    shown = traceback.TracebackException.from_exception(error.with_traceback(frames or error.__traceback__))
    simulating = [frame.filename.startswith(_OWN_FOLDER) for frame in shown.stack]
    # behind the first operation that is simulated, all frames are those of the simulation
    names = [frame.name if own else "" for frame, own in zip(shown.stack, simulating, strict=True)]
    end = names.index("__torch_dispatch__") if "__torch_dispatch__" in names else len(names)
    shown.stack[:] = [frame for frame, own in zip(shown.stack[:end], simulating[:end], strict=True) if not own]
    return "".join(shown.format())


def _execute(script: str, args: list[str], module: str) -> None:
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise CannotSimulate("there is no such file")
    sys.argv = [path, *args]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(path))
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            said = f"with exit code {exit.code}" if isinstance(exit.code, int) else f"and said: {exit.code}"
            raise CannotSimulate(f"it ended itself {said}") from None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m oomfix.profile.run", description="Simulate a training script.")
    parser.add_argument("--module", default="", metavar="NAME", help="run SCRIPT as `python -m NAME` would")
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--batch-size", type=int, nargs=2, metavar=("FROM", "TO"), help="of data loaders")
    parser.add_argument("--budget", dest="budget_bytes", type=budget, help="a preset such as 16gb, or GiB")
    parser.add_argument(
        "--rewritten", type=_contents, default={}, metavar="FILE", help="JSON: file -> the file to run in its place"
    )
    parser.add_argument("--coupled", action="store_true", help="samples depend on each other: batches run whole")
    parser.add_argument("--output", required=True, help="the JSON file to write")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def _contents(path: str) -> dict[str, bytes]:
    names = json.loads(Path(path).read_text(encoding="utf-8"))
    return {os.path.realpath(name): Path(instead).read_bytes() for name, instead in names.items()}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # a stopped script can leave processes, threads and half-finished modules: nothing of it shall run any more
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
