"""Out-of-memory errors in logs: how the versions of torch and what is around it word them, and where they happened.

Understood are the messages of torch 1.0 to 2.13 for CUDA, ROCm and Apple's cards, those of CUDA, cuBLAS and cuDNN that
stand for the same, and those of the system for the memory of the host. Imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "KB": 10**3, "MiB": MIB, "MB": 10**6, "GiB": GIB, "GB": 10**9}
SIZE = r"([\d.]{1,16}) ?(bytes|KiB|MiB|GiB|KB|MB|GB|B)"

# AMD cards say HIP; a tensor of absurd size has no number
_REQUEST = re.compile(rf"(?:CUDA|HIP) out of memory\.\s+Tried to allocate (?:{SIZE}|more than 1EB memory)")
_ON_MPS = re.compile(rf"MPS backend out of memory \(.*?\)\.\s+Tried to allocate {SIZE}", re.DOTALL)
ON_THE_HOST = re.compile(
    rf"DefaultCPUAllocator: .*?you tried to allocate (\d+) (bytes)|MemoryError: Unable to allocate {SIZE} for an array"
    r"|paging file is too small"
)
SHARED_MEMORY = re.compile(
    r"DataLoader worker \(pid[^)]*\) is killed by signal: Bus error|Unexpected bus error encountered in worker"
    r"|unable to (?:write to file|open shared memory object) </torch_"
)
# up to torch 2.0; "cached" was the word before 1.4, and "capacty" is torch 2.1's own
_FIELDS = {
    "capacity": (rf"{SIZE} total capacity", rf"total capac(?:i)?ty of {SIZE}", rf"max allowed: {SIZE}"),
    "free": (rf"{SIZE} free", rf"of which {SIZE} is free"),
    "allocated": (
        rf"{SIZE} already allocated", rf"allocated memory {SIZE} is allocated by PyTorch", rf"MPS allocated: {SIZE}",
    ),
    "reserved": (rf"{SIZE} (?:reserved in total by PyTorch|cached)",),
    "unallocated": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "own": (rf"this process has {SIZE} memory in use",),
    "allowed": (rf"{SIZE} allowed",),
}  # fmt: skip
_OTHERS = re.compile(rf"\bProcess \d+ has {SIZE} memory in use")
_WITHOUT_NUMBERS = re.compile(
    r"(?:CUDA|HIP) error: out of memory|cuda runtime error \(2\) ?: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaMalloc failed: out of memory|[Cc]uda failed with error 2 out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|Failed to CUDA calloc"
    r"|No available memory for the cache blocks"
)
# what a cluster or the kernel says of a process that filled the memory of the host; torch itself says nothing then
KILLED_FOR_MEMORY = re.compile(
    r"\boom[-_ ]?kill|\bout of memory: kill(?:ed)? process|task \d+: out of memory|paging file is too small",
    re.IGNORECASE,
)
KILLED = re.compile(
    r"exit code 137\b|killed by signal: Killed|Signal 9 \(SIGKILL\) received|exitcode *: -9\b|line \d+: +\d+ Killed\b"
    r"|^Killed$",
    re.IGNORECASE | re.MULTILINE,
)
_IN_WORDS = re.compile(r"out of memory|\bOOM\b", re.IGNORECASE)
# of Python, of IPython since 8 and before, and in the boxes that rich draws
_FRAMES = (
    re.compile(r'File "([^"]+)", line (\d+), in (\S+)[^\n]*\n?([^\n]*)'),
    re.compile(r"^ *File ([^\s\"(]+?\.py)(?:\([^)]*\))?:(\d+), in ([\w.<>]+)()", re.MULTILINE),
    re.compile(r"^ *Cell (In ?\[\d+\]), line (\d+)()()", re.MULTILINE),
    re.compile(r"^((?:[~/]|<ipython|[A-Za-z]:\\)\S+) in ([\w.<>]+)\([^\n]*\n(?:[^\n]*\n){0,6}?-+> (\d+) ?([^\n]*)",
               re.MULTILINE),
    re.compile(r"│ (\S+?\.py):(\d+) in ([\w.<>]+)()"),
)  # fmt: skip
# processes that train together write into one log
_RANK = re.compile(r"(\[(?:rank|default)?\d+\]:|\(\w+ (?:\w+=\S+ )?pid=\d+\)|\d+: (?=Traceback| |\w*\.?\w*Error))")
_BORDER = re.compile(r"[│|] *$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# a message goes on over a few lines of a log, a traceback stands above it
_MESSAGE_CHARACTERS = 900
_CONTEXT_CHARACTERS = 12_000
# what the patterns of errors hold, for a quick look at long logs
_NEEDLES = (
    "out of memory", "STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT", "CUDA calloc",
    "DefaultCPUAllocator", "MemoryError: Unable", "paging file is", "Bus error", "bus error", "</torch_",
    "No available memory for the cache",
)  # fmt: skip
# CUDA's context and its libraries are no other process; on old cards they took as much
_CONTEXT_BYTES = 3 * GIB // 2
_LEAST_INFERRED_BYTES = GIB


@dataclass(frozen=True)
class Crash:
    """One out-of-memory error. Sizes in bytes; None where the message does not say.

    Attributes:
        line: where it is in the text, from 1.
        message: what was said, on one line; "" where the error is only told of.
        requested, free, allocated: what was asked for, what the card has left, and what tensors hold.
        capacity: what torch may use: what the card has, or less where a setting limits it.
        card: what the card has.
        unallocated: what torch reserved and does not use.
        others: what other processes hold.
        frames: (file, line, function, code) of the traceback above, outermost first.
    """

    line: int
    message: str
    requested: int | None
    capacity: int | None
    card: int | None
    free: int | None
    allocated: int | None
    unallocated: int | None
    others: int
    frames: tuple[tuple[str, int, str, str], ...]


def plain(text: str) -> str:
    """A log without colours and without the line ends of Windows."""
    text = text.replace("\r\n", "\n")
    return _COLOUR.sub("", text) if "\x1b[" in text else text


def messages(text: str) -> list[tuple[int, int]]:
    """Where the errors of a log begin and end; one at its end where it only tells of an error."""
    starts = sorted(
        {
            match.start()
            for hit in _hits(text)
            for pattern in (_REQUEST, _ON_MPS, _WITHOUT_NUMBERS, ON_THE_HOST, SHARED_MEMORY)
            for match in pattern.finditer(text, max(0, hit - 60), hit + _MESSAGE_CHARACTERS)
        }
    )
    if not starts and _told_in_words(text):
        return [(len(text), len(text))]
    ends = [*starts[1:], len(text)] if starts else []
    return [(start, min(end, start + _MESSAGE_CHARACTERS)) for start, end in zip(starts, ends, strict=True)]


def crash_at(text: str, start: int, end: int, line: int) -> Crash:
    """The error whose message is between two places of a log, and begins on this line."""
    rank = _RANK.match(text, text.rfind("\n", 0, start) + 1)
    prefix = rank.group(1) if rank else ""
    # logs and write-ups wrap the message
    message = " ".join(_of_rank(text[start:end], prefix).split())
    request = _REQUEST.match(message) or ON_THE_HOST.match(message) or _ON_MPS.match(message)
    sizes = {name: _first(patterns, message) for name, patterns in _FIELDS.items()}
    allocated, unallocated = sizes["allocated"], sizes["unallocated"]
    if unallocated is None and sizes["reserved"] is not None and allocated is not None:
        unallocated = max(0, sizes["reserved"] - allocated)
    told = None if message else _first_of(text, KILLED_FOR_MEMORY, KILLED, _IN_WORDS)
    return Crash(
        line=text.count("\n", 0, told.start()) + 1 if told else line,
        message=message,
        requested=in_bytes(*filter(None, request.groups())) if request and any(request.groups()) else None,
        capacity=sizes["allowed"] or sizes["capacity"],
        card=sizes["capacity"],
        free=sizes["free"],
        allocated=allocated,
        unallocated=unallocated,
        others=_others(message, sizes, allocated, unallocated),
        frames=_frames(_of_rank(text[max(0, start - _CONTEXT_CHARACTERS) : start], prefix)),
    )


def in_bytes(number: str, unit: str) -> int:
    """ "1.50", "GiB" in bytes."""
    return int(float(number.rstrip(".")) * _UNITS[unit])


def _hits(text: str) -> Iterator[int]:
    """Where an error may be: patterns alone would take a minute for a log of 100 MiB."""
    for needle in _NEEDLES:
        hit = text.find(needle)
        while hit >= 0:
            yield hit
            hit = text.find(needle, hit + 1)


def _told_in_words(text: str) -> bool:
    return _first_of(text, _IN_WORDS, KILLED_FOR_MEMORY, KILLED) is not None


def _first_of(text: str, *patterns: re.Pattern[str]) -> re.Match[str] | None:
    """What the first of the patterns finds that finds something."""
    return next((match for pattern in patterns if (match := pattern.search(text))), None)


def _of_rank(text: str, prefix: str) -> str:
    """The lines of one of several processes, without what marks them; without a prefix, all lines."""
    if not prefix:
        return text
    first, *others = text.split("\n")
    own = [line.removeprefix(prefix).removeprefix(" ") for line in others if line.startswith(prefix)]
    return "\n".join([first.removeprefix(prefix).removeprefix(" "), *own])


def _others(message: str, sizes: dict[str, int | None], allocated: int | None, unallocated: int | None) -> int:
    """What other processes hold of the card, as far as the message says or its figures do not add up without."""
    capacity, free, own = sizes["capacity"], sizes["free"], sizes["own"]
    held = (in_bytes(*match.groups()) for match in _OTHERS.finditer(message))
    # drivers that cannot tell say 2**34 GiB
    others = sum(nbytes for nbytes in held if capacity is None or nbytes <= capacity)
    # torch names this process by its number too, in the versions that do not say "this process"
    if own is None and allocated is not None and others >= allocated:
        return max(0, others - allocated - (unallocated or 0))
    if others or capacity is None or free is None or allocated is None:
        return others
    mine = own if own is not None and own <= capacity else allocated + (unallocated or 0) + _CONTEXT_BYTES
    rest = capacity - free - mine
    return rest if rest >= _LEAST_INFERRED_BYTES else 0


def _frames(above: str) -> tuple[tuple[str, int, str, str], ...]:
    begin = max(0, above.rfind("Traceback (most recent call last)"))
    traceback = "\n".join(_BORDER.sub("", line) for line in above[begin:].split("\n"))
    for pattern in _FRAMES:
        if found := pattern.findall(traceback):
            return tuple(_frame(*parts) for parts in found)
    return ()


def _frame(file: str, line: str, name: str, code: str) -> tuple[str, int, str, str]:
    if not line.isdigit():
        # IPython before 8 names the function first
        line, name = name, line
    return file, int(line), name, code.strip()


def _first(patterns: tuple[str, ...], message: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern, message):
            return in_bytes(*match.groups())
    return None
