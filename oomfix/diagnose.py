"""Read a CUDA out-of-memory error, or the log of a run that ended in one: which kind it is, and what cures it.

Understood are the messages of torch 1.8 to 2.13 and those of CUDA, cuBLAS and cuDNN that stand for the same. Imports
no torch: a crash is often read on another machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from oomfix.presets import PRESETS

MIB, GIB = 2**20, 2**30
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "KB": 10**3, "MiB": MIB, "MB": 10**6, "GiB": GIB, "GB": 10**9}
_SIZE = r"([\d.]{1,16}) ?(bytes|KiB|MiB|GiB|KB|MB|GB|B)"

# AMD cards say HIP; a tensor of absurd size has no number
_REQUEST = re.compile(rf"(?:CUDA|HIP) out of memory\.\s+Tried to allocate (?:{_SIZE}|more than 1EB memory)")
_ON_THE_HOST = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) (bytes)")
# up to torch 2.0; "cached" was the word before 1.4, and "capacty" is torch 2.1's own
_FIELDS = {
    "capacity": (rf"{_SIZE} total capacity", rf"total capac(?:i)?ty of {_SIZE}"),
    "free": (rf"{_SIZE} free", rf"of which {_SIZE} is free"),
    "allocated": (rf"{_SIZE} already allocated", rf"allocated memory {_SIZE} is allocated by PyTorch"),
    "reserved": (rf"{_SIZE} (?:reserved in total by PyTorch|cached)",),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "own": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed",),
}
_OTHERS = re.compile(rf"\bProcess \d+ has {_SIZE} memory in use")
_WITHOUT_NUMBERS = re.compile(
    r"(?:CUDA|HIP) error: out of memory|cuda runtime error \(2\) ?: out of memory|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|Failed to CUDA calloc"
)
# what a cluster or the kernel says of a process that filled the memory of the host; torch itself says nothing then
_KILLED = re.compile(r"\boom[-_ ]?kill|\bout of memory: kill(?:ed)? process", re.IGNORECASE)
_IN_WORDS = re.compile(r"out of memory|\bOOM\b", re.IGNORECASE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\s*\n?(.*)')
# `--epoch 90` and `epoch=90` are settings, no epochs that were reached
_EPOCH = re.compile(r"(?<![-'\"(])\bepoch(?!=)\W{0,3}(\d{1,9})\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STAGE = re.compile(r"\bstage\W{0,2}(\d+)|\bunfreez", re.IGNORECASE)
_IN_USE = re.compile(rf"(?:allocated|memory)\W{{0,3}}{_SIZE}|{_SIZE} allocated", re.IGNORECASE)

# a message goes on over a few lines of a log, a traceback stands above it
_MESSAGE_CHARACTERS = 900
_CONTEXT_CHARACTERS = 6000
_COURSE_CHARACTERS = 2**20
_MOST_ERRORS = 20
# what the patterns of errors hold, for a quick look at long logs
_NEEDLES = ("out of memory", "STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation", "CUDA calloc", "DefaultCPUAllocator")
_LARGE_OTHER_BYTES = 512 * MIB
_GROWTH = 1.2


@dataclass(frozen=True)
class Crash:
    """One out-of-memory error. Sizes in bytes; None where the message does not say.

    Attributes:
        line: where it is in the text, from 1.
        message: what was said, on one line.
        requested, capacity, free, allocated: what was asked for, what the card has, has left, and tensors hold.
        unallocated: what torch reserved and does not use.
        others: what other processes hold.
        frames: (file, line, function, code) of the traceback above, outermost first.
    """

    line: int
    message: str
    requested: int | None
    capacity: int | None
    free: int | None
    allocated: int | None
    unallocated: int | None
    others: int
    frames: tuple[tuple[str, int, str, str], ...]


@dataclass(frozen=True)
class Diagnosis:
    """What kind of out-of-memory error it was.

    Attributes:
        kind: "host memory", "another process", "fragmentation", "checkpoint loading", "first optimizer step", "stage
            switch", "leak", "evaluation", "too large" or "unknown".
        evidence: what in the log speaks for it, as sentences.
        cures: what to do, the most promising first; commands are in backquotes.
    """

    crash: Crash
    kind: str
    evidence: tuple[str, ...]
    cures: tuple[str, ...]


def diagnose(text: str, script: str = "train.py") -> list[Diagnosis]:
    """A diagnosis for each out-of-memory error in a log, in order; an error that repeats is reported once.

    Two errors with the same traceback are the same, and at most 20 different ones are reported. How the run went
    before an error is read from the first and the last MiB of the log above it.

    Args:
        text: a message, a traceback or a whole log; colours and progress bars may be in it.
        script: the name that commands in the cures use.
    """
    text = text.replace("\r\n", "\n")
    if "\x1b[" in text:
        text = _COLOUR.sub("", text)
    found: dict[tuple[object, ...], Diagnosis] = {}
    line, counted = 1, 0
    for start, end in _messages(text):
        line, counted = line + text.count("\n", counted, start), start
        crash = _crash(text, start, end, line)
        key = crash.frames or (crash.requested, crash.capacity, crash.allocated)
        if key not in found:
            found[key] = _diagnosis(crash, _course(text, start), script)
        if len(found) == _MOST_ERRORS:
            break
    return list(found.values())


def _course(text: str, end: int) -> str:
    """The log above an error; of a long one its beginning and its end."""
    if end <= 2 * _COURSE_CHARACTERS:
        return text[:end]
    return text[:_COURSE_CHARACTERS] + "\n" + text[end - _COURSE_CHARACTERS : end]


def _messages(text: str) -> list[tuple[int, int]]:
    starts = sorted(
        {
            match.start()
            for hit in _hits(text)
            for pattern in (_REQUEST, _WITHOUT_NUMBERS, _ON_THE_HOST)
            for match in pattern.finditer(text, max(0, hit - 40), hit + _MESSAGE_CHARACTERS)
        }
    )
    if not starts and _told_in_words(text):
        # all of the text is what is known of an error that somebody tells of without quoting it
        return [(len(text), len(text))]
    ends = [*starts[1:], len(text)] if starts else []
    return [(start, min(end, start + _MESSAGE_CHARACTERS)) for start, end in zip(starts, ends, strict=True)]


def _hits(text: str) -> Iterator[int]:
    """Where an error may be: patterns alone would take a minute for a log of 100 MiB."""
    for needle in _NEEDLES:
        hit = text.find(needle)
        while hit >= 0:
            yield hit
            hit = text.find(needle, hit + 1)


def _told_in_words(text: str) -> bool:
    lowered = text.lower()
    likely = "out of memory" in lowered or "oom" in lowered
    return likely and (_IN_WORDS.search(text) or _KILLED.search(text)) is not None


def _crash(text: str, start: int, end: int, line: int) -> Crash:
    # logs and write-ups wrap the message
    message = " ".join(text[start:end].split())
    request = _REQUEST.match(message) or _ON_THE_HOST.match(message)
    sizes = {name: _first(patterns, message) for name, patterns in _FIELDS.items()}
    allocated, unallocated = sizes["allocated"], sizes["unallocated"]
    if unallocated is None and sizes["reserved"] is not None and allocated is not None:
        unallocated = max(0, sizes["reserved"] - allocated)
    others = sum(_bytes(*match.groups()) for match in _OTHERS.finditer(message))
    # torch names this process by its number too, in the versions that do not say "this process"
    if sizes["own"] is None and allocated is not None and others >= allocated:
        others -= allocated + (unallocated or 0)
    above = text[max(0, start - _CONTEXT_CHARACTERS) : start]
    traceback = above[max(0, above.rfind("Traceback (most recent call last)")) :]
    frames = tuple((file, int(line), name, code.strip()) for file, line, name, code in _FRAME.findall(traceback))
    told = None if message else _KILLED.search(text) or _IN_WORDS.search(text)
    return Crash(
        line=text.count("\n", 0, told.start()) + 1 if told else line,
        message=message,
        requested=_bytes(*request.groups()) if request and request.group(1) else None,
        capacity=sizes["allowed"] or sizes["capacity"],
        free=sizes["free"],
        allocated=allocated,
        unallocated=unallocated,
        others=max(0, others),
        frames=frames,
    )


def _diagnosis(crash: Crash, above: str, script: str) -> Diagnosis:
    for recognise in (
        _host,
        _absurd,
        _another_process,
        _checkpoint,
        _optimizer,
        _stage,
        _fragmentation,
        _evaluation,
        _leak,
        _too_large,
    ):
        recognised = recognise(crash, above, script)
        if recognised is not None:
            return recognised if recognised.kind == "fragmentation" else _and_fragmented(recognised, script)
    evidence = ("there are no sizes to go by, so the cause has to be found by looking",)
    cures = (f"`oomfix audit {script}` finds what leaks", f"`oomfix profile {script}` says what the script needs")
    return Diagnosis(crash, "unknown", evidence, cures)


def _host(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if _ON_THE_HOST.match(crash.message):
        evidence = (f"{size(crash.requested or 0)} were asked for in the memory of the host: the card is not full",)
    elif not crash.message and _KILLED.search(above):
        evidence = ("the system killed a process that filled the memory of the host: the card is not full",)
    else:
        return None
    cures = ("use fewer DataLoader workers and a smaller prefetch_factor, or read the data set piece by piece",)
    return Diagnosis(crash, "host memory", evidence, cures)


def _absurd(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if "more than 1EB" not in crash.message:
        return None
    evidence = ("more memory was asked for than any machine has: a size in the script is wrong, often a broadcast",)
    where = f" at {_where(crash.frames[-1])}" if crash.frames else ""
    return Diagnosis(crash, "too large", evidence, (f"print the shapes of the tensors{where}",))


def _another_process(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if crash.others < _LARGE_OTHER_BYTES:
        return None
    evidence = (f"other processes hold {size(crash.others)} of the card",)
    cures = ("`nvidia-smi` lists the processes on the card: end those that are left over, or take another card",)
    return Diagnosis(crash, "another process", evidence, cures)


def _checkpoint(crash: Crash, above: str, script: str) -> Diagnosis | None:
    loading = [frame for frame in crash.frames if "torch.load(" in frame[3] or frame[2] in ("load", "load_state_dict")]
    if not loading:
        return None
    return Diagnosis(
        crash,
        "checkpoint loading",
        (f"it happened in {_where(loading[0])}, while a checkpoint was read onto the card beside the model",),
        (f"`oomfix apply {script}` gives torch.load the map_location that keeps the file on the host",),
    )


def _optimizer(crash: Crash, above: str, script: str) -> Diagnosis | None:
    inside = [frame for frame in crash.frames if "/optim/" in frame[0].replace("\\", "/")]
    if not inside:
        return None
    return Diagnosis(
        crash,
        "first optimizer step",
        (
            f"it happened in {_where(inside[-1])}: Adam makes two copies of the parameters there at its first step, "
            "and its multi-tensor form one more at every step",
        ),
        (f"`oomfix apply --preset {_preset(crash)} {script}`", "pass foreach=False to the optimizer, or use SGD"),
    )


def _stage(crash: Crash, above: str, script: str) -> Diagnosis | None:
    stages = list(_STAGE.finditer(above))
    if not stages or (stages[-1].group(1) or "2") == "1":
        return None
    return Diagnosis(
        crash,
        "stage switch",
        (f'the last stage named in the log is "{_line_of(above, stages[-1].start())}"', *_numbers(crash)),
        (
            "free the optimizer and the gradients of the stage before (`oomfix.runtime`), and unfreeze step by step",
            f"`oomfix apply --preset {_preset(crash)} {script}`",
        ),
    )


def _fragmentation(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if crash.unallocated is None or crash.requested is None or crash.unallocated < crash.requested:
        return None
    evidence = (
        f"torch holds {size(crash.unallocated)} that no tensor uses, more than the {size(crash.requested)} asked for, "
        "but not in one piece"
    )
    cures = (
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts",
        f"`oomfix apply --preset {_preset(crash)} {script}` sets it in the script",
    )
    return Diagnosis(crash, "fragmentation", (evidence,), cures)


def _and_fragmented(diagnosis: Diagnosis, script: str) -> Diagnosis:
    """The diagnosis with what speaks for fragmentation besides."""
    fragmentation = _fragmentation(diagnosis.crash, "", script)
    if fragmentation is None:
        return diagnosis
    evidence = (*diagnosis.evidence, *fragmentation.evidence)
    return replace(diagnosis, evidence=evidence, cures=(*diagnosis.cures, fragmentation.cures[0]))


def _evaluation(crash: Crash, above: str, script: str) -> Diagnosis | None:
    words = ("eval", "valid", "test", "infer")
    inside = [frame for frame in crash.frames if any(word in frame[2].lower() for word in words)]
    if not inside:
        return None
    return Diagnosis(
        crash,
        "evaluation",
        (f"it happened in {_where(inside[0])}", *_numbers(crash)),
        (f"`oomfix audit --select OOM201,OOM102 {script}` says whether gradients are on there, and what is kept",),
    )


def _leak(crash: Crash, above: str, script: str) -> Diagnosis | None:
    epochs = [int(match.group(1)) for match in _EPOCH.finditer(above)]
    series = [_bytes(*filter(None, match.groups())) for match in _IN_USE.finditer(above)]
    grew = len(series) >= 3 and series == sorted(series) and series[-1] > _GROWTH * series[0]
    if not grew and (not epochs or max(epochs) < 2):
        return None
    evidence = []
    if grew:
        evidence.append(f"memory in use grew from {size(series[0])} to {size(series[-1])} over the log")
    if epochs and max(epochs) >= 2:
        evidence.append(f"it ran until epoch {max(epochs)}: a first epoch that fits says that a single step does")
    cures = (
        f"`oomfix audit --select OOM1,OOM2 {script}` finds what is kept from one iteration to the next",
        f"`oomfix profile --steps 6 {script}` measures the growth per step",
    )
    return Diagnosis(crash, "leak", tuple(evidence), cures)


def _too_large(crash: Crash, above: str, script: str) -> Diagnosis | None:
    numbers = _numbers(crash)
    if not numbers:
        return None
    preset = _preset(crash)
    cures = (f"`oomfix apply --preset {preset} {script}`", f"`oomfix profile {script}` says what the memory is made of")
    return Diagnosis(crash, "too large", numbers, cures)


def _numbers(crash: Crash) -> tuple[str, ...]:
    if crash.requested is None:
        return ()
    text = f"{size(crash.requested)} were asked for"
    if crash.free is not None and crash.capacity is not None:
        text += f", {size(crash.free)} of {size(crash.capacity)} were free"
    if crash.allocated is not None:
        text += f", tensors held {size(crash.allocated)}"
    return (text,)


def _preset(crash: Crash) -> str:
    """The largest preset whose card is no larger than the one that ran out; "auto", which reads it, if not known."""
    if not crash.capacity:
        return "auto"
    names = ["8gb"]
    for preset in PRESETS.values():
        if preset.card is not None and preset.card.capacity_gib * GIB <= 1.02 * crash.capacity:
            names.append(preset.name)
    return names[-1]


def _first(patterns: tuple[str, ...], message: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern, message):
            return _bytes(*match.groups())
    return None


def _bytes(number: str, unit: str) -> int:
    return int(float(number.rstrip(".")) * _UNITS[unit])


def _where(frame: tuple[str, int, str, str]) -> str:
    return f"{frame[2]} ({frame[0]}, line {frame[1]})"


def _line_of(text: str, position: int) -> str:
    # progress bars write over their line
    return (re.split(r"[\r\n]", text[:position])[-1] + re.split(r"[\r\n]", text[position:], maxsplit=1)[0]).strip()


def size(nbytes: int) -> str:
    """Bytes as torch words them: "2.35 GiB", "375.12 MiB"."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2f} MiB"
