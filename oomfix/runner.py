"""The audit of many files: what the cache knows first, the rest in several processes where that pays."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from oomfix.audit import Auditor, TorchVersion
from oomfix.parsing import rare_garbage_collection
from oomfix.results import FileReport

if TYPE_CHECKING:
    from oomfix.cache import Cache
    from oomfix.discovery import Found

_BATCH_BYTES = 1 << 18
_WORTH_PROCESSES_BYTES = 1 << 20
"""Below a MiB of source the work takes less time than starting processes for it."""


class Job(NamedTuple):
    """A file to audit, for which torch, and where its result is kept."""

    found: Found
    target_torch: TorchVersion | None
    cache: Cache | None


class _Outcome(NamedTuple):
    number: int
    report: FileReport
    content: str | None
    """The digest of what was read; None where nothing is to be kept."""


def run(
    auditor: Auditor, jobs: Sequence[Job], processes: int, progress: Callable[[int, int], None] | None = None
) -> list[FileReport]:
    """The reports of the jobs, in their order. New results are put into the caches, which the caller saves.

    Args:
        auditor: what to run on each file.
        jobs: the files.
        processes: at most so many processes.
        progress: called with the number of files done and of all files.
    """
    reports: dict[int, FileReport] = {}
    rest = []
    for index, job in enumerate(jobs):
        known = _known(job)
        if known is None:
            rest.append(index)
        else:
            reports[index] = known
    for outcome in _audit(auditor, jobs, rest, processes):
        reports[outcome.number] = outcome.report
        found, _, cache = jobs[outcome.number]
        if cache is not None and outcome.content is not None:
            from oomfix.cache import State

            cache.put(os.path.abspath(found.path), State.of(found.stat), outcome.content, outcome.report)
        if progress is not None:
            progress(len(reports), len(jobs))
    return [reports[index] for index in range(len(jobs))]


def _known(job: Job) -> FileReport | None:
    found, _, cache = job
    if cache is None:
        return None
    from oomfix.cache import State, digest

    path, state = os.path.abspath(found.path), State.of(found.stat)
    report = cache.get(path, state, parsed=found.named)
    if report is None and cache.knows(path):
        try:
            content = digest(_read(found.path))
        except OSError:  # told when the file is read for its audit
            return None
        report = cache.get_by_content(path, state, content, parsed=found.named)
    return report


def _audit(auditor: Auditor, jobs: Sequence[Job], indices: Sequence[int], processes: int) -> Iterator[_Outcome]:
    # jobs as workers need them: a cache stays with the process that owns it
    bare = [(index, jobs[index]._replace(cache=None), jobs[index].cache is not None) for index in indices]
    if processes > 1 and sum(map(_bytes_of, bare)) > _WORTH_PROCESSES_BYTES:
        return _audit_in_processes(auditor, bare, processes)
    return (outcome for task in bare for outcome in _audit_batch(auditor, [task]))


_Task = tuple[int, Job, bool]


def _audit_batch(auditor: Auditor, tasks: Sequence[_Task]) -> list[_Outcome]:
    with rare_garbage_collection():
        return [_audit_file(auditor, *task) for task in tasks]


def _audit_file(auditor: Auditor, index: int, job: Job, keep: bool) -> _Outcome:
    found, target_torch, _ = job
    try:
        data = _read(found.path)
    except OSError as error:
        return _Outcome(index, FileReport(errors=(f"cannot read: {error.strerror}",)), None)
    report = auditor.audit(found.path, data, target_torch, parse_always=found.named)
    if not keep:
        return _Outcome(index, report, None)
    from oomfix.cache import digest

    return _Outcome(index, report, digest(data))


def _audit_in_processes(auditor: Auditor, tasks: Sequence[_Task], processes: int) -> Iterator[_Outcome]:
    # imported here: most runs need one process
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # no thread runs yet, so a fork is safe; on other systems than Linux, libraries may have started some
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, context, initializer=_die_of_interrupts) as pool:
        batches, lost = {}, []
        try:
            with _interrupts_held():
                for batch in _batches(tasks):
                    try:
                        batches[pool.submit(_audit_batch, auditor, batch)] = batch
                    except BrokenProcessPool:
                        lost += batch
            yield from (_died(index) for index, _, _ in lost)
            for future in as_completed(batches):
                try:
                    yield from future.result()
                except BrokenProcessPool:
                    yield from (_died(index) for index, _, _ in batches[future])
        except BaseException:
            # whatever broke it off, Ctrl-C and a caller that wants no more too: what runs is ended, the rest not begun
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Context in which Ctrl-C waits: a process that has just been forked would show a traceback of it."""
    import signal

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _died(index: int) -> _Outcome:
    message = "not audited: a worker process died, perhaps for lack of memory; try again with -j 1"
    return _Outcome(index, FileReport(errors=(message,)), None)


def _batches(tasks: Sequence[_Task]) -> Iterator[list[_Task]]:
    """The tasks in pieces of about equal bytes, the longest files first: what comes last keeps no process waiting."""
    batch: list[_Task] = []
    size = 0
    for task in sorted(tasks, key=_bytes_of, reverse=True):
        batch.append(task)
        size += _bytes_of(task)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _bytes_of(task: _Task) -> int:
    return task[1].found.stat.st_size


def _die_of_interrupts() -> None:
    """End at once on Ctrl-C, which a terminal sends to every process, without a traceback from each."""
    import signal

    # a shell lets what it starts in the background ignore them
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
