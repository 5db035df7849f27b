"""The audit from end to end: paths -> settings -> files -> findings -> what is shown and the exit status."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oomfix.audit import Auditor, Selection, TorchVersion
from oomfix.cache import Cache, cache_folder, tool_version
from oomfix.config import Configuration, Settings
from oomfix.discovery import Discovery
from oomfix.report import AuditedFile, Report
from oomfix.results import FileReport, Located
from oomfix.rules.base import Severity
from oomfix.runner import Job, run

if TYPE_CHECKING:
    from oomfix.baseline import Baseline

STDIN = "-"


class Pipeline:
    """Audits paths.

    Args:
        auditor: the rules to run.
        configuration: where the settings of each path come from.
        processes: at most so many processes.
        use_cache: whether to take results from the cache and keep new ones there.
        read_stdin: gives the bytes that the path "-" stands for; asked only then. May raise OSError.
        stdin_name: how standard input is named, and where its settings are looked for.
        progress: called with the number of files done and of all files.

    Attributes:
        status: 0: nothing at or above fail-on so far; 1: findings; 2: something could not be audited.
    """

    def __init__(
        self,
        auditor: Auditor,
        configuration: Configuration,
        *,
        processes: int = 1,
        use_cache: bool = True,
        read_stdin: Callable[[], bytes] = bytes,
        stdin_name: str = "<stdin>",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.status = 0
        self._auditor = auditor
        self._configuration = configuration
        self._processes = processes
        self._use_cache = use_cache
        self._read_stdin = read_stdin
        self._stdin_name = stdin_name
        self._progress = progress
        self._caches: dict[tuple[str, TorchVersion | None], Cache] = {}
        self._baselines: dict[str, Baseline | None] = {}
        self._problems: list[tuple[str, str]] = []

    def audit(self, paths: Sequence[str]) -> Report:
        """The report on files, folders and standard input ("-"), in the order of the paths.

        A baseline that cannot be read is one of its errors; findings are reported as if it knew none.
        """
        discovery = Discovery()
        settings_of: list[Settings] = []
        jobs: list[Job] = []
        files: list[AuditedFile] = []
        for path in dict.fromkeys(paths):
            if path == STDIN:
                files.append(self._audit_stdin())
                continue
            settings = self._configuration.settings(path)
            self._baseline(settings)  # a faulty one is told even if nothing is found
            for found in discovery.find(path, settings.root, settings.exclude):
                jobs.append(Job(found, settings.target_torch, self._cache(settings)))
                settings_of.append(settings)
        reports = run(self._auditor, jobs, self._processes, self._progress)
        for job, settings, report in zip(jobs, settings_of, reports, strict=True):
            if job.found.named or report.foreign is None:
                files.append(self._shown(job.found.path, settings, report))
        for cache in self._caches.values():
            cache.save()
        problems = [*self._configuration.problems, *self._problems, *discovery.problems]
        files += [AuditedFile(path, errors=(message,)) for path, message in problems]
        self.status = 2 if any(file.errors for file in files) else self.status
        return Report(files)

    def _audit_stdin(self) -> AuditedFile:
        settings = self._configuration.settings(os.curdir if self._stdin_name == "<stdin>" else self._stdin_name)
        self._baseline(settings)
        try:
            data = self._read_stdin()
        except OSError as error:
            return AuditedFile(self._stdin_name, errors=(f"cannot read standard input: {error.strerror}",))
        report = self._auditor.audit(self._stdin_name, data, settings.target_torch, parse_always=True)
        return self._shown(self._stdin_name, settings, report)

    def _shown(self, path: str, settings: Settings, report: FileReport) -> AuditedFile:
        selection = Selection(settings.select, settings.ignore, tuple(self._configuration.codes))
        visible = selection.visible(report)
        baseline = self._baseline(settings)
        findings = visible if baseline is None else baseline.new(path, visible)
        if any(_fails(finding, settings.fail_on) for finding in findings):
            self.status = 1
        foreign = () if report.foreign is None else (report.foreign,)
        known = len(visible) - len(findings)
        return AuditedFile(path, findings, report.loops, (*report.errors, *foreign), known)

    def _baseline(self, settings: Settings) -> Baseline | None:
        """The known findings; None where there are none, or they cannot be read, which is told once."""
        path = settings.baseline
        if path is None:
            return None
        if path not in self._baselines:
            # imported here: most runs have no baseline
            from oomfix.baseline import Baseline, BaselineError

            try:
                self._baselines[path] = Baseline(path)
            except BaselineError as error:
                self._baselines[path] = None
                self._problems.append((os.path.relpath(path), str(error)))
        return self._baselines[path]

    def _cache(self, settings: Settings) -> Cache | None:
        if not self._use_cache:
            return None
        key = (settings.root, settings.target_torch)
        if key not in self._caches:
            forms = "\0forms" * self._auditor.forms
            name = f"{settings.root}\0{settings.target_torch}{forms}"
            self._caches[key] = Cache(cache_folder(), name, self._version)
        return self._caches[key]

    @property
    def _version(self) -> str:
        return tool_version([rule.code for rule in self._auditor.rules])


def _fails(finding: Located, fail_on: str) -> bool:
    return fail_on != "never" and Severity(finding.severity).rank >= Severity(fail_on).rank
