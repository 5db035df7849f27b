"""What the audit of a script says about the kind of out-of-memory error it died of."""

from dataclasses import dataclass

from oomfix.audit import Auditor
from oomfix.config import Configuration, Flags
from oomfix.diagnose_kinds import Diagnosis
from oomfix.pipeline import Pipeline
from oomfix.rules import all_rules

# by kind of error, the findings that explain it, the likeliest first; what leaks makes every kind worse
_LEAKS = ("OOM101", "OOM102", "OOM104", "OOM103")
_EXPLAINED_BY = {
    "leak": (*_LEAKS, "OOM201"),
    "evaluation": ("OOM201", "OOM102", *_LEAKS),
    "checkpoint loading": ("OOM205", *_LEAKS),
    "fragmentation": ("OOM501", *_LEAKS),
    "stage switch": (*_LEAKS, "OOM202"),
    "first optimizer step": (*_LEAKS, "OOM205", "OOM202"),
}
_NO_FAULT_OF_THE_SCRIPT = (
    "another process", "host memory", "shared memory", "serving", "limit", "refused though free",
)  # fmt: skip
_OTHERWISE = (*_LEAKS, "OOM201", "OOM202", "OOM203", "OOM205")


@dataclass(frozen=True)
class Cause:
    """A finding of the audit that bears on an error.

    Attributes:
        place: "path:line:column".
        code, severity, message: as `oomfix audit` reports them.
        on_the_way: whether the traceback passes through its line.
    """

    place: str
    code: str
    severity: str
    message: str
    on_the_way: bool


def causes(diagnosis: Diagnosis, script: str) -> list[Cause]:
    """The findings in `script` that bear on an error: those on the lines of its traceback first, then by code.

    Another process on the card, say, is no fault of the script: then there are none.
    """
    if diagnosis.kind in _NO_FAULT_OF_THE_SCRIPT:
        return []
    codes = _EXPLAINED_BY.get(diagnosis.kind, _OTHERWISE)
    auditor = Auditor(all_rules())
    configuration = Configuration(Flags(), [rule.code for rule in auditor.rules])
    report = Pipeline(auditor, configuration, use_cache=False).audit([script])
    passed = {line for file, line, _, _ in diagnosis.crash.frames if _same_file(file, script)}
    found = [
        Cause(
            f"{path}:{finding.line}:{finding.column}",
            finding.code,
            finding.severity,
            finding.message,
            not passed.isdisjoint(range(finding.line, finding.end_line + 1)),
        )
        for path, finding in report.findings()
        if finding.code in codes
    ]
    return sorted(found, key=lambda cause: (not cause.on_the_way, codes.index(cause.code)))


def _same_file(file: str, script: str) -> bool:
    # a log comes from another machine: folders differ, the name stays
    return file.replace("\\", "/").rpartition("/")[2] == script.replace("\\", "/").rpartition("/")[2]
