"""The kinds of out-of-memory errors, each with what in a log speaks for it and what cures it."""

import re
from dataclasses import dataclass, replace

from oomfix.crash import GIB, KILLED, KILLED_FOR_MEMORY, MIB, ON_THE_HOST, SHARED_MEMORY, SIZE, Crash, in_bytes
from oomfix.presets import PRESETS

# `--epoch 90` and `epoch=90` are settings, no epochs that were reached; the Trainer's lines hold both
_EPOCH = re.compile(r"(?<![-'\"(])\bepoch(?!=)\W{0,3}(\d{1,9})\b|'loss':[^}\n]{1,200}'epoch': (\d{1,9})", re.IGNORECASE)
_STAGE = re.compile(r"\bstage\W{0,2}(\d+)|\bunfreez", re.IGNORECASE)
_IN_USE = re.compile(rf"(?:allocated|memory)\W{{0,3}}{SIZE}|{SIZE} allocated", re.IGNORECASE)
# a progress bar that counts iterations: "1500/4000 ["
_ITERATIONS = re.compile(r"\b(\d{1,9})/(\d{1,9}) \[")
_EVALUATION = re.compile(r"eval|valid|(?<!la)(?<!con)test|infer", re.IGNORECASE)
_LAST_BARS_CHARACTERS = 2**20
_MANY_ITERATIONS = 20
_LARGE_OTHER_BYTES = 512 * MIB
_GROWTH = 1.2
# of the memory torch holds: less than that lies idle in every long run, and would not have carried it on for long
_PLAIN_FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Diagnosis:
    """What kind of out-of-memory error it was.

    Attributes:
        kind: "host memory", "shared memory", "serving", "another process", "limit", "refused though free",
            "fragmentation", "checkpoint loading", "first optimizer step", "stage switch", "leak", "evaluation",
            "too large" or "unknown".
        evidence: what in the log speaks for it, as sentences.
        cures: what to do, the most promising first; commands are in backquotes.
    """

    crash: Crash
    kind: str
    evidence: tuple[str, ...]
    cures: tuple[str, ...]


def recognised(crash: Crash, above: str, script: str) -> Diagnosis | None:
    """The first kind that an error shows the signs of; None where it shows none.

    Args:
        crash: the error.
        above: the log above it.
        script: the name that commands in the cures use.
    """
    for kind in _KINDS:
        diagnosis = kind(crash, above, script)
        if diagnosis is not None:
            return diagnosis if diagnosis.kind == "fragmentation" else _and_fragmented(diagnosis, script)
    return None


def unknown(crash: Crash, script: str) -> Diagnosis:
    """What to look at where nothing speaks for any kind."""
    evidence: tuple[str, ...] = ("there are no sizes to go by, so the cause has to be found by looking",)
    if "_STATUS_ALLOC_FAILED" in crash.message:
        evidence = ("a library of CUDA found no room beside torch's tensors: the card was as good as full", *evidence)
    cures = (
        "`nvidia-smi` says whether another process fills the card",
        f"`oomfix profile {script}` says what the script needs",
        f"`oomfix audit {script}` finds what leaks",
    )
    return Diagnosis(crash, "unknown", evidence, cures)


def _shared_memory(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if not SHARED_MEMORY.match(crash.message):
        return None
    evidence = ("workers of a DataLoader pass batches through /dev/shm, which is full: the card is not",)
    cures = (
        "give the container more of it: `docker run --shm-size=8g` or `--ipc=host`, on Kubernetes a memory volume",
        "use fewer DataLoader workers and a smaller prefetch_factor",
    )
    return Diagnosis(crash, "shared memory", evidence, cures)


def _host(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if ON_THE_HOST.match(crash.message) and crash.requested is None:
        evidence = ("Windows had no memory of the host to promise: the card is not full",)
    elif ON_THE_HOST.match(crash.message):
        evidence = (f"{size(crash.requested or 0)} were asked for in the memory of the host: the card is not full",)
    elif not crash.message and KILLED_FOR_MEMORY.search(above):
        evidence = ("the system killed a process that filled the memory of the host: the card is not full",)
    elif not crash.message and (killed := KILLED.search(above)):
        said = _line_of(above, killed.start())
        evidence = (f'the log says "{said}": mostly the system, because the memory of the host was full',)
    else:
        return None
    cures = ("use fewer DataLoader workers and a smaller prefetch_factor, or read the data set piece by piece",)
    return Diagnosis(crash, "host memory", evidence, cures)


def _serving(crash: Crash, above: str, script: str) -> Diagnosis | None:
    """Engines that serve models take most of the card for a cache by design."""
    inside = any("/vllm/" in frame[0] or "/sglang/" in frame[0] for frame in crash.frames)
    if not inside and "cache blocks" not in crash.message:
        return None
    evidence = ("it happened in an engine that serves models, which takes a fixed share of the card", *_numbers(crash))
    if "cache blocks" in crash.message:
        cure = "raise gpu_memory_utilization, since the weights alone took that share, or serve a smaller model"
    else:
        cure = "lower gpu_memory_utilization, max_model_len or the number of sequences at a time"
    return Diagnosis(crash, "serving", evidence, (cure,))


def _absurd(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if "more than 1EB" not in crash.message:
        return None
    evidence = ("more memory was asked for than any machine has: a size in the script is wrong, often a broadcast",)
    where = f" at {_where(crash.frames[-1])}" if crash.frames else ""
    return Diagnosis(crash, "too large", evidence, (f"print the shapes of the tensors{where}",))


def _limit(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if crash.capacity is None or crash.card is None or crash.capacity >= crash.card:
        return None
    if crash.free is None or crash.requested is None or crash.free < crash.requested:
        return None
    evidence = (
        f"torch may use {size(crash.capacity)}, while {size(crash.free)} of the card's {size(crash.card)} were free",
    )
    cures = ("raise the fraction that torch.cuda.set_per_process_memory_fraction or a setting allows",)
    return Diagnosis(crash, "limit", evidence, cures)


def _another_process(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if crash.others < _LARGE_OTHER_BYTES:
        return None
    if crash.message.startswith("MPS"):
        return None
    named = "Process " in crash.message
    holds = f"other processes hold {size(crash.others)} of the card"
    evidence = (holds if named else f"{size(crash.others)} of the card are neither free nor torch's: other processes",)
    cures = ("`nvidia-smi` lists the processes on the card: end those that are left over, or take another card",)
    return Diagnosis(crash, "another process", evidence, cures)


def _refused_though_free(crash: Crash, above: str, script: str) -> Diagnosis | None:
    if crash.free is None or crash.requested is None or crash.free < 2 * crash.requested:
        return None
    evidence = (
        f"{size(crash.free)} were free when {size(crash.requested)} were refused: not torch but the driver refused",
    )
    cures = (
        "look for a limit of the container, the job or a part of the card (MIG), and for a process that came and went",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts, which asks for smaller pieces",
    )
    return Diagnosis(crash, "refused though free", evidence, cures)


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
    # Lightning runs forward and backward in a closure that the optimizer calls
    closures = [index for index, frame in enumerate(crash.frames) if "closure" in frame[2] or "closure()" in frame[3]]
    behind = crash.frames[closures[-1] + 1 :] if closures else crash.frames
    inside = [frame for frame in behind if "/optim/" in frame[0].replace("\\", "/")]
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


def _plain_fragmentation(crash: Crash, above: str, script: str) -> Diagnosis | None:
    """Fragmentation that explains the error whatever else the log says."""
    unallocated, allocated = crash.unallocated or 0, crash.allocated or 0
    if unallocated < _PLAIN_FRAGMENTATION * (allocated + unallocated):
        return None
    return _fragmentation(crash, above, script)


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
    if any(".backward(" in frame[3] for frame in crash.frames):
        return None
    # `train_and_evaluate` does both; only what it calls tells which
    inside = [frame for frame in crash.frames if _EVALUATION.search(frame[2]) and "train" not in frame[2].lower()]
    if not inside:
        return None
    return Diagnosis(
        crash,
        "evaluation",
        (f"it happened in {_where(inside[0])}", *_numbers(crash)),
        (f"`oomfix audit --select OOM201,OOM102 {script}` says whether gradients are on there, and what is kept",),
    )


def _leak(crash: Crash, above: str, script: str) -> Diagnosis | None:
    epochs = [int(match.group(1) or match.group(2)) for match in _EPOCH.finditer(above)]
    series = [in_bytes(*filter(None, match.groups())) for match in _IN_USE.finditer(above)]
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
    if crash.message.startswith("MPS"):
        cures: tuple[str, ...] = (
            "take a smaller batch, or several of them to one optimizer step; PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lets "
            "the whole machine run out",
            f"`oomfix audit {script}` finds what wastes memory on any card",
        )
        return Diagnosis(crash, "too large", numbers, cures)
    preset = _preset(crash)
    cures = (f"`oomfix apply --preset {preset} {script}`", f"`oomfix profile {script}` says what the memory is made of")
    done = _iterations(above)
    if done < _MANY_ITERATIONS:
        return Diagnosis(crash, "too large", numbers, cures)
    evidence = (*numbers, f"{done} iterations had gone well: a later batch was larger, or memory grows")
    return Diagnosis(
        crash, "too large", evidence, (*cures, f"`oomfix profile --steps 6 {script}` says whether it grows")
    )


def _iterations(above: str) -> int:
    """How far the last progress bar had come."""
    bars = _ITERATIONS.findall(above[-_LAST_BARS_CHARACTERS:])
    return int(bars[-1][0]) if bars else 0


def _numbers(crash: Crash) -> tuple[str, ...]:
    if crash.requested is None:
        return ()
    text = f"{size(crash.requested)} were asked for"
    if crash.free is not None and crash.capacity is not None:
        text += f", {size(crash.free)} of {size(crash.card or crash.capacity)} were free"
    if crash.allocated is not None:
        text += f", tensors held {size(crash.allocated)}"
        text += f" of {size(crash.capacity)}" if crash.free is None and crash.capacity else ""
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


def _where(frame: tuple[str, int, str, str]) -> str:
    return f"{frame[2]} ({frame[0]}, line {frame[1]})"


def _line_of(text: str, position: int) -> str:
    # progress bars write over their line
    return (re.split(r"[\r\n]", text[:position])[-1] + re.split(r"[\r\n]", text[position:], maxsplit=1)[0]).strip()


def size(nbytes: int) -> str:
    """Bytes as torch words them: "2.35 GiB", "375.12 MiB"."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2f} MiB"


_KINDS = (
    _shared_memory,
    _host,
    _serving,
    _absurd,
    _limit,
    _another_process,
    _refused_though_free,
    _checkpoint,
    _optimizer,
    _stage,
    _plain_fragmentation,
    _evaluation,
    _leak,
    _fragmentation,
    _too_large,
)
"""In the order in which their signs are looked for: the sure ones first."""
