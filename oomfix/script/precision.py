"""Who decides the precision of a script: autocast, a scaler, a framework, the model itself."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from oomfix.script.imports import Imports
from oomfix.script.names import path_of
from oomfix.script.trace import Forward, Trace
from oomfix.script.training_loop import TrainingLoop

if TYPE_CHECKING:
    from oomfix.source import Source

_CUDA = re.compile(r"cuda|(?<![a-z])gpu|accelerat|fabric", re.IGNORECASE)
_CUDA_CALL = re.compile(r"\btorch\.cuda\.\w+")
_DEVICE = re.compile(r"\.to\((?!(dtype=)?torch\.\w+\))|device", re.IGNORECASE)
_DEVICE_OF_A_TENSOR = re.compile(
    r"\bdevice\s*=\s*(?!(?:torch|self|model|args?|cfg|conf|config|opts?|options|params|hparams|hps?|settings|flags)\b)"
    r"\w+\.device\b",
    re.IGNORECASE,
)
"""`torch.arange(n, device=x.device)`: where another tensor is, wherever that may be."""
_OTHER_DEVICES = frozenset({"cpu", "mps"})
_NAMED_DEVICE = re.compile(r"\s*(?:self\.)?(\w+)\s*=\s*torch\.device\(")
_HALF = re.compile(
    r"\bmodel\w*\.to\((dtype=)?torch\.(bfloat16|float16|half)\)|torch_dtype=torch\.(bfloat16|float16|half)"
)
_HALF_DTYPES = frozenset({"torch.bfloat16", "torch.float16", "torch.half"})
_SCALING = re.compile(r"\w*scaler\w*|\w*loss_scal(?!ar)\w*|scale_loss|\w*grad(?:ient)?_scale\w*", re.IGNORECASE)
_DATA_SCALER = re.compile(r"(Standard|MinMax|MaxAbs|Robust)Scaler")
_BEFORE_COMMENT = re.compile(r"""((?:[^#"'\\]|\\.|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)\#""")
_LOSS_SCALE = 128
_MOVES = frozenset({"to", "cuda", "half", "bfloat16", "train"})


class Precision:
    """The precision of a script's forwards and backwards.

    Args:
        source: the file.
        trace: what happens in it.
        imports: what its names refer to.
    """

    def __init__(self, source: Source, trace: Trace, imports: Imports) -> None:
        self._source = source
        self._trace = trace
        self._imports = imports

    @cached_property
    def may_use_cuda(self) -> bool:
        """Whether the script may run on a GPU: it names one, or a device that is not said to be another."""
        lines = map(_without_comment, self._source.lines)
        text = "\n".join(line for line in lines if not self._names_an_unused_device(line))
        text = _DEVICE_OF_A_TENSOR.sub("", text)
        if (overruled := self._overruled_device) is not None:
            # calls such as `torch.cuda.empty_cache()` do nothing for a script that is kept from the GPU
            return bool(_CUDA.search(_CUDA_CALL.sub("", text.replace(overruled, ""))))
        return bool(_CUDA.search(text)) or (bool(_DEVICE.search(text)) and not self._runs_elsewhere)

    @cached_property
    def _overruled_device(self) -> str | None:
        """The statement that chooses a device where the next one says `device = "cpu"`; None where there is none."""
        for one, other in pairwise(self._source.tree.body):
            if isinstance(one, ast.Assign) and isinstance(other, ast.Assign):
                paths = {path_of(statement.targets[0]) for statement in (one, other)}
                if len(paths) == 1 and None not in paths and _names_only(other.value, _OTHER_DEVICES):
                    return self._source.segment(one)
        return None

    @cached_property
    def _runs_elsewhere(self) -> bool:
        """Whether a device is set that is no GPU of CUDA; the default of a parameter is for the caller to change."""
        return "torch_xla" in self._source.text or any(
            isinstance(node, ast.Assign)
            and "device" in (path_of(node.targets[0]) or ".").lower()
            and "." not in (path_of(node.targets[0]) or ".")
            and _names_only(node.value, _OTHER_DEVICES)
            for node in self._imports.nodes
        )

    def _names_an_unused_device(self, line: str) -> bool:
        """`self.device = torch.device("cuda")`, and nothing of that name anywhere else."""
        named = _NAMED_DEVICE.match(line)
        return named is not None and self._words[named[1]] == 1

    @cached_property
    def _words(self) -> Counter[str]:
        """How often each word stands in the file, other than as a name of torch's."""
        return Counter(re.findall(r"(?<!torch\.)\b\w+\b", self._source.text))

    @cached_property
    def trains_in_half(self) -> bool:
        """Whether the model itself is in 16 bits, so that autocast has nothing to do."""
        return bool(_HALF.search(self._source.text)) or any(
            isinstance(node, ast.Assign) and _is_made_in_half(node.value) for node in self._imports.nodes
        )

    @cached_property
    def uses_apex(self) -> bool:
        """Whether NVIDIA's apex does the mixed precision."""
        return any(True for _ in self._imports.calls("apex.amp.initialize", "apex.amp.scale_loss"))

    @cached_property
    def autocasts_out_of_sight(self) -> bool:
        """Whether FSDP's MixedPrecision decides, or gradients are scaled with no autocast in sight to need it."""
        scaled = any(event.scaled for event in self._trace.backwards)
        return "MixedPrecision" in self._source.text or (scaled and "autocast" not in self._source.text)

    def has_autocast_alternative(self, forward: Forward) -> bool:
        """The other branch of a flag runs the forward under autocast: this one is the fp32 choice."""
        return any((id(guard.statement), not guard.value) in self._autocast_sides for guard in forward.site.guards)

    @cached_property
    def _autocast_sides(self) -> set[tuple[int, bool]]:
        """The sides of conditions on which a forward runs under autocast."""
        return {
            (id(guard.statement), guard.value)
            for forward in self._trace.forwards.values()
            if forward.site.autocast is not None
            for guard in forward.site.guards
        }

    def unscaled(self, loop: TrainingLoop) -> list[Forward]:
        """The fp16 forwards of a loop whose gradients nothing scales."""
        half = [forward for forward in loop.forwards if forward.site.autocast == "float16"]
        scaled = [event for event in loop.backwards if event.scaled or _is_scaled_by_hand(event.node)]
        if not scaled:
            decided = loop.framework not in (None, "oomfix")  # the manager scales for its own autocast, not for torch's
            return [] if decided or self._speaks_of_scaling(loop) else half
        within: set[int] = set().union(*(event.origins for event in scaled))
        others: set[int] = set().union(*(event.origins for event in loop.backwards if event not in scaled))
        return [forward for forward in half if forward.origin in others - within]

    def _speaks_of_scaling(self, loop: TrainingLoop) -> bool:
        """Whether a gradient scaler, or a factor of the loss, is named where a loop is written."""
        written = {word for part in self._around(loop) for word in _SCALING.findall(ast.unparse(part))}
        return any(_DATA_SCALER.search(word) is None and word not in self._data_scalers for word in written)

    @cached_property
    def _data_scalers(self) -> set[str]:
        """The names of what scales the data (`scaler = StandardScaler()`)."""
        assigned = [node for node in self._imports.nodes if isinstance(node, ast.Assign)]
        return {
            (path_of(node.targets[0]) or "").rsplit(".", 1)[-1]
            for node in assigned
            if isinstance(node.value, ast.Call) and _DATA_SCALER.search(ast.unparse(node.value.func))
        }

    def _around(self, loop: TrainingLoop) -> Iterator[ast.stmt]:
        """The functions and classes in which a loop's events are written, and the statements of the module itself."""
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        yield from (statement for statement in self._source.tree.body if not isinstance(statement, definitions))
        events = [*loop.forwards, *loop.backwards]
        functions = dict.fromkeys(function for event in events for function in event.site.functions)
        owners = [function.owner.node if function.owner is not None else function.node for function in functions]
        yield from dict.fromkeys(node for node in owners if isinstance(node, definitions))


def _without_comment(line: str) -> str:
    """A line up to its comment; whole where a quote stays open, as in a string over several lines."""
    if "#" not in line:
        return line
    before = _BEFORE_COMMENT.match(line)
    return line if before is None else before[1]


def _is_scaled_by_hand(node: ast.Call) -> bool:
    """`(loss * 1024).backward()`: what is differentiated was multiplied by more than a loss is weighted with."""
    root = node.func.value if isinstance(node.func, ast.Attribute) else None
    factors = [root.left, root.right] if isinstance(root, ast.BinOp) and isinstance(root.op, ast.Mult) else []
    powers = any(isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Pow) for factor in factors)
    values = [factor.value for factor in factors if isinstance(factor, ast.Constant)]
    return powers or any(isinstance(value, (int, float)) and value >= _LOSS_SCALE for value in values)


def _names_only(node: ast.expr, devices: frozenset[str]) -> bool:
    """`"cpu"`, `torch.device("cpu")`, `"mps" if ... else "cpu"`: a device that can only be one of some."""
    if isinstance(node, ast.IfExp):
        return _names_only(node.body, devices) and _names_only(node.orelse, devices)
    if isinstance(node, ast.Call) and (path_of(node.func) or "").rsplit(".", 1)[-1] == "device" and node.args:
        return _names_only(node.args[0], devices)
    return isinstance(node, ast.Constant) and node.value in devices


def _is_made_in_half(node: ast.expr) -> bool:
    """`Net().cuda().half()`, `Net().to("cuda", dtype=torch.bfloat16)`: an object moved to 16 bits where it is made."""
    in_half = False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
        given = [path_of(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
        in_half = in_half or node.func.attr in ("half", "bfloat16") or bool(_HALF_DTYPES.intersection(given))
        node = node.func.value
    made = path_of(node.func) if isinstance(node, ast.Call) else None
    return in_half and made is not None and made.rsplit(".", 1)[-1][0].isupper()
