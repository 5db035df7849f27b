"""Read a CUDA out-of-memory error, or the log of a run that ended in one: which kind it is, and what cures it.

Imports no torch: a crash is often read on another machine.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace

from oomfix.crash import Crash, crash_at, messages, plain
from oomfix.diagnose_kinds import Diagnosis, recognised, unknown

_LIBRARY = re.compile(
    r"[\\/](site-packages|dist-packages|lib(64)?[\\/]python\S*|torch)[\\/]|ipykernel|^<", re.IGNORECASE
)
# frameworks own the loop, so that `apply` finds none to rewrite: how each is told to take less memory
_FRAMEWORKS = (
    (
        re.compile(r"/transformers/trainer"),
        "in TrainingArguments: gradient_checkpointing=True, bf16=True, and a smaller per_device_train_batch_size with "
        "gradient_accumulation_steps to make up for it",
    ),
    (
        re.compile(r"/(lightning/pytorch|pytorch_lightning)/"),
        'in the Trainer: precision="bf16-mixed", and a smaller batch with accumulate_grad_batches to make up for it',
    ),
)
_EVALUATION_OF_TRAINER = (
    "in TrainingArguments: eval_accumulation_steps, which moves predictions to the host, and a smaller "
    "per_device_eval_batch_size"
)
_COURSE_CHARACTERS = 2**20
_MOST_ERRORS = 20


def diagnose(text: str, script: str | None = None) -> list[Diagnosis]:
    """A diagnosis for each out-of-memory error in a log, in order; an error that repeats is reported once.

    Two errors with the same traceback are the same, and at most 20 different ones are reported. How the run went
    before an error is read from the first and the last MiB of the log above it.

    Args:
        text: a message, a traceback or a whole log; colours and progress bars may be in it.
        script: the name that commands in the cures use; default: that in the traceback, or train.py.
    """
    text = plain(text)
    found: dict[tuple[object, ...], Diagnosis] = {}
    line, counted = 1, 0
    for start, end in messages(text):
        line, counted = line + text.count("\n", counted, start), start
        crash = crash_at(text, start, end, line)
        key = crash.frames or (crash.requested, crash.capacity, crash.allocated)
        if key in found:
            continue
        found[key] = _diagnosis(crash, _course(text, start), script or _script_of(crash))
        if len(found) == _MOST_ERRORS:
            break
    return _told_once(found.values())


def _told_once(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Diagnoses without those that only say again, without sizes, what another one says."""
    told: set[tuple[object, ...]] = set()
    different = []
    for diagnosis in diagnoses:
        said = diagnosis.kind, diagnosis.evidence, diagnosis.cures
        if diagnosis.crash.requested is not None or said not in told:
            different.append(diagnosis)
        told.add(said)
    return different


def _course(text: str, end: int) -> str:
    """The log above an error; of a long one its beginning and its end."""
    if end <= 2 * _COURSE_CHARACTERS:
        return text[:end]
    return text[:_COURSE_CHARACTERS] + "\n" + text[end - _COURSE_CHARACTERS : end]


def _diagnosis(crash: Crash, above: str, script: str) -> Diagnosis:
    diagnosis = recognised(crash, above, script)
    return unknown(crash, script) if diagnosis is None else _of_framework(diagnosis)


def _script_of(crash: Crash) -> str:
    """The outermost file of the traceback that belongs to no library."""
    files = (frame[0] for frame in crash.frames)
    return next((shlex.quote(file) for file in files if file.endswith(".py") and not _LIBRARY.search(file)), "train.py")


def _of_framework(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with the framework's own settings where commands find no loop to rewrite."""
    files = "\n".join(frame[0].replace("\\", "/") for frame in diagnosis.crash.frames)
    settings = next((known for known in _FRAMEWORKS if known[0].search(files)), None)
    if settings is None:
        return diagnosis
    cures = [cure for cure in diagnosis.cures if not cure.startswith("`oomfix apply --preset")]
    if diagnosis.kind == "evaluation" and settings is _FRAMEWORKS[0]:
        cures.insert(0, _EVALUATION_OF_TRAINER)
    elif len(cures) < len(diagnosis.cures) and diagnosis.kind != "fragmentation":
        cures.insert(0, settings[1])
    return replace(diagnosis, cures=tuple(cures))
