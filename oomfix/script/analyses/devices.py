"""The device that a script trains on, as far as the file decides it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from oomfix.script.facts.torch_facts import COPIES, FRESH
from oomfix.script.syntax.edits import bounds
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import Nodes, blocks, walk
from oomfix.script.syntax.parameters import named_parameters
from oomfix.script.syntax.patterns import Pattern

if TYPE_CHECKING:
    from oomfix.source import Source

_CUDA = Pattern(r"cuda|(?<![a-z])gpu|accelerat|fabric", re.IGNORECASE)
_SWITCH = Pattern(r"(use_)?(cuda|gpu)", re.IGNORECASE)
_DEVICE = Pattern(
    r"""\.to\((?!\s*(dtype=)?(torch\.\w+|[\w.]+\.dtype)\s*\)|\s*["']cpu["'])|device""",
    re.IGNORECASE,
)
_DEVICE_OF_TORCH = Pattern(
    r"""\.to\((?!\s*(dtype=)?(torch\.\w+|[\w.]+\.dtype)\s*\)|\s*["']cpu["'])|"""
    r"""torch\.device|\.device\b|\bdevice\s*=|["'][-_]*device["']""",
    re.IGNORECASE,
)
"""What names a device where the file has devices of another kind as well."""
_OTHER_KIND = Pattern(r"[a-z]Device$")
_DEVICE_OF_A_TENSOR = Pattern(
    r"(?:\bdevice\s*=|\.to\()\s*"
    r"(?:self(?:\.\w+)+\.(?:weight|bias)|"
    r"(?!(?:torch|self|model|args?|cfg|conf|config|opts?|options|params|hparams|hps?|settings|flags)\b)"
    r"(\w+))\.device\b",
    re.IGNORECASE,
)
"""`torch.arange(n, device=x.device)`, `mask.to(x.device)`: where another tensor is, unless it is none.

`self.first.weight.device` is where a layer of its own is.
"""
_IDLE_CALL = Pattern(
    r"\btorch\.cuda\.(is_available|empty_cache|manual_seed\w*|synchronize|device_count|\w*memory\w*|reset_\w+|get_\w+)\b"
)
"""Calls that ask CUDA something, or do nothing for a script that puts nothing on a GPU."""
_SEED = Pattern(r"\btorch\.cuda\.(is_available|manual_seed\w*)\b")
"""What a script asks and sets for a GPU, whether or not it puts anything there."""
_DEVICE_NAME = Pattern(r"^(?!\w*cpu)\w*device\w*$", re.IGNORECASE)
_OTHER_DEVICES = frozenset({"cpu", "mps"})
_VISIBLE = "os.environ['CUDA_VISIBLE_DEVICES']"
_NONE_VISIBLE = frozenset({"", "-1"})
_BEFORE_COMMENT = Pattern(r"""((?:[^#"'\\]|\\.|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)\#""")

_NETWORKS = frozenset({"model", "net", "network"})
_OF_TENSORS = frozenset({"shape", "size", "view", "dim", "reshape", "detach", "numel", "ndim", "requires_grad"})

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Devices:
    """Where a script may train.

    Args:
        source: the file.
        nodes: all nodes of the file.
    """

    def __init__(self, source: Source, nodes: Nodes) -> None:
        self._source = source
        self._nodes = nodes

    @cached_property
    def may_be_cuda(self) -> bool:
        """Whether the script may run on a GPU: it names one, or a device that is not said to be another.

        What is decided and then decided otherwise before anything asks for it, or is never asked for, does not count.
        """
        if self._hides_gpus:
            return False
        followed, names = self._devices_of_tensors
        names = [*names, *self._tensors]
        elsewhere = self._decides_for_another
        idle = [*self._overruled, *self._set_elsewhere, *self._unused, *self._said, *self._not_of_torch, *followed]
        idle += [*self._visible, *self._offered]
        idle += [text for text in self._printed if elsewhere or isinstance(text, ast.Constant)]
        idle += self._of_another_kind
        text = _DEVICE_OF_A_TENSOR.sub(lambda found: found[0] * (found[1] in self._no_tensors), self._without(idle))
        text = _SEED.sub("", text)
        if names:
            text = re.sub(rf"(?:\bdevice\s*=|\.to\()\s*(?:{'|'.join(names)})\b", "", text)
        if elsewhere:
            return bool(_CUDA.search(_IDLE_CALL.sub("", text)))
        return bool(_CUDA.search(text) or (_DEVICE_OF_TORCH if self._of_another_kind else _DEVICE).search(text))

    @cached_property
    def are_left_open(self) -> bool:
        """Whether nothing is decided here: no GPU is hidden, no other device is named, and none that is never used."""
        return not (self._hides_gpus or self._decides_for_another or self._unused_devices)

    @cached_property
    def _hides_gpus(self) -> bool:
        """`os.environ["CUDA_VISIBLE_DEVICES"] = ""`, whatever else is asked for."""
        values = (node.value for node in self._visible if node in self._source.tree.body)
        return any(isinstance(value, ast.Constant) and value.value in _NONE_VISIBLE for value in values)

    @cached_property
    def _visible(self) -> list[ast.Assign]:
        """What names the GPUs that are there, which puts nothing on them."""
        return [node for node in self._nodes.of(ast.Assign) if _VISIBLE in _targets(node)]

    @cached_property
    def _decides_for_another(self) -> bool:
        """Whether the file itself decides for a device that is no GPU of CUDA."""
        return bool(self._overruled) or self._runs_elsewhere

    @cached_property
    def _runs_elsewhere(self) -> bool:
        """Whether the device is set to one that is no GPU of CUDA, as no `cpu_device` beside it does."""
        return "torch_xla" in self._source.text or bool(self._set_elsewhere) or self._given_elsewhere

    @cached_property
    def _given_elsewhere(self) -> bool:
        """Whether all that takes a device is given one that is no GPU of CUDA, by every call in the file."""
        if not any(_DEVICE_NAME.search(node.arg) for node in self._nodes.of(ast.arg)):
            return False
        # few scripts come to this question, and every module is a third of a millisecond of each run
        from oomfix.script.analyses.devices_given import all_are_given

        return all_are_given(
            self._nodes,
            lambda name: _DEVICE_NAME.search(name) is not None,
            lambda value: _is_one_of(value, _OTHER_DEVICES),
        )

    @cached_property
    def _offered(self) -> list[ast.expr | ast.stmt]:
        """Options for a GPU that the command line offers and nothing reads; where the file decides, nothing of it."""
        if "add_argument" not in self._source.text:
            return []
        from oomfix.script.analyses.options_unread import unread_options

        return unread_options(self._nodes, _CUDA, in_sight=self._decides_for_another)

    @cached_property
    def _set_elsewhere(self) -> list[ast.stmt]:
        """`device = torch.device("mps" if USE_GPU else "cpu")`, with `USE_GPU = True` that nothing else asks for.

        A parameter is for the caller to give, whatever is taken where nothing is given.
        """
        decided = [
            node
            for node in self._nodes.of(ast.Assign)
            if _is_one_of(node.value, _OTHER_DEVICES)
            and any(
                _DEVICE_NAME.search(target.removeprefix("self.")) for target in set(_targets(node)) - self._given_others
            )
            and node not in self._for_callers_without
            and node not in self._unless_asked
        ]
        asked = Counter(part.id for node in decided for part in walk(node.value) if isinstance(part, ast.Name))
        switches = (
            node
            for node in self._nodes.of(ast.Assign)
            if isinstance(node.value, ast.Constant)
            and [0 < asked[target] == self._words[target] - 1 for target in _targets(node)] == [True]
        )
        return [*decided, *switches]

    @cached_property
    def _given_others(self) -> set[str]:
        """The attributes of objects that are also assigned what is no processor: `def to(self, device)`."""
        others = (node for node in self._nodes.of(ast.Assign) if not _is_one_of(node.value, _OTHER_DEVICES))
        return {target for node in others for target in _targets(node) if target.startswith("self.")}

    @cached_property
    def _unless_asked(self) -> set[ast.AST]:
        """`device = "cpu"` before `if torch.cuda.is_available(): device = 0`: taken where no condition holds."""
        return {
            first
            for block in blocks(self._nodes)
            for index, first in enumerate(block)
            if isinstance(first, ast.Assign)
            for decision in block[index + 1 :]
            if isinstance(decision, ast.If) and any(_decides_otherwise(part, first) for part in decision.body)
        }

    @cached_property
    def _for_callers_without(self) -> set[ast.AST]:
        """What parameters become on some ways through their functions: `if device is None: device = "cpu"`."""
        return {
            node
            for function in self._nodes.functions
            for node in walk(function)
            if isinstance(node, ast.Assign) and node not in function.body
            if any(argument.arg in _targets(node) for argument in named_parameters(function.args))
        }

    @cached_property
    def _overruled(self) -> list[ast.stmt]:
        """The decisions for a device behind which `device = "cpu"` stands, before anything reads it."""
        return [
            decision
            for block in blocks(self._nodes)
            for index, last in enumerate(block)
            if isinstance(last, ast.Assign) and _is_one_of(last.value, _OTHER_DEVICES)
            for path in _targets(last)
            for decision in _decided_before(block[:index], path)
        ]

    @cached_property
    def _said(self) -> list[ast.expr]:
        """Docstrings, and other texts that stand alone."""
        return [node.value for node in self._nodes.of(ast.Expr) if isinstance(node.value, ast.Constant)]

    @property
    def _not_of_torch(self) -> list[ast.expr | ast.keyword]:
        """GPUs that a call is told not to use, `cuda=False`, and simulators: `qml.device("default.qubit")`."""
        calls = list(self._nodes.of(ast.Call))
        given = (keyword for call in calls for keyword in call.keywords if _SWITCH.fullmatch(keyword.arg or ""))
        off = [one for one in given if isinstance(one.value, ast.Constant) and one.value.value is False]
        return [*off, *(call.func for call in calls if path_of(call.func) in ("qml.device", "pennylane.device"))]

    @cached_property
    def _of_another_kind(self) -> list[ast.stmt]:
        """`device = EdgeDevice(battery=0.8)`: the devices that a script is about, where they are made."""
        return [
            node
            for node in self._nodes.of(ast.Assign)
            if isinstance(node.value, ast.Call) and _OTHER_KIND.search(last_of(path_of(node.value.func)))
        ]

    @property
    def _printed(self) -> list[ast.expr]:
        """`print("Training on GPU")`, and `print(f"{device}: {torch.cuda.is_available()}")`, which may ask for more."""
        printed = (node for node in self._nodes.of(ast.Call) if path_of(node.func) == "print")
        return [text for node in printed for text in node.args if isinstance(text, ast.JoinedStr | ast.Constant)]

    @cached_property
    def _unused(self) -> list[ast.stmt | ast.alias]:
        """Devices that are never used, and what is imported in vain, such as `import USE_CUDA`."""
        imported = [
            alias
            for node in self._nodes.of(ast.ImportFrom)
            for alias in node.names
            if self._words[alias.asname or alias.name] == 1
        ]
        return [*imported, *self._unused_devices]

    @cached_property
    def _devices_of_tensors(self) -> tuple[list[ast.stmt], list[str]]:
        """`device = x.device`: the statements, and the names that are never anything else."""
        other = {node.arg for node in self._nodes.of(ast.arg)}
        found: list[tuple[str, ast.Assign]] = []
        for node in self._nodes.of(ast.Assign):
            for name, value in _pairs(node):
                of_tensor = _DEVICE_OF_A_TENSOR.fullmatch(f"device={path_of(value)}")
                if of_tensor is not None and of_tensor[1] not in self._no_tensors:
                    found.append((name, node))
                else:
                    other.add(name)
        alone = [(name, node) for name, node in found if name not in other]
        return [node for _, node in alone], sorted({re.escape(name) for name, _ in alone})

    @cached_property
    def _tensors(self) -> list[str]:
        """`z` of `x.to(z)`, asked for its shape or made by torch: where it is, nothing but its name says."""
        moved_to = {
            node.args[0].id
            for node in self._nodes.of(ast.Call)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "to" and len(node.args) == 1
            if isinstance(node.args[0], ast.Name)
        }
        if not moved_to:
            return []
        asked = {path_of(node.value) for node in self._nodes.of(ast.Attribute) if node.attr in _OF_TENSORS}
        pairs = [pair for node in self._nodes.of(ast.Assign) for pair in _pairs(node)]
        made = {name for name, value in pairs if _makes_tensor(value)}
        return sorted(re.escape(name) for name in moved_to & (asked | made) - self._imported)

    @cached_property
    def _unused_devices(self) -> list[ast.stmt]:
        """`self.device = torch.device("cuda")`, and nothing of that name anywhere else that is in sight."""
        return [
            node
            for node in self._nodes.of(ast.Assign)
            if isinstance(node.value, ast.Call)
            and node not in self._for_base_classes
            and path_of(node.value.func) == "torch.device"
            and all(self._words[last_of(target)] == 1 for target in _targets(node))
        ]

    @cached_property
    def _for_base_classes(self) -> set[ast.AST]:
        """What is left on objects that a base class of another file may read."""
        here = {node.name for node in self._nodes.of(ast.ClassDef)}
        names = {path for node in self._nodes.of(ast.ClassDef) for base in node.bases if (path := path_of(base))}
        elsewhere = {name for name in names - here if last_of(name) not in ("Module", "object")}
        return {
            inner
            for node in self._nodes.of(ast.ClassDef)
            if any(path_of(base) in elsewhere for base in node.bases)
            for inner in walk(node)
            if isinstance(inner, ast.Assign) and any(target.startswith("self.") for target in _targets(inner))
        }

    @cached_property
    def _imported(self) -> set[str]:
        """The names that the file imports: `s` of `from settings import Settings as s`."""
        modules = [alias for node in self._nodes.of(ast.Import) for alias in node.names]
        parts = [alias for node in self._nodes.of(ast.ImportFrom) for alias in node.names]
        return {alias.asname or alias.name for alias in (*modules, *parts)}

    @cached_property
    def _no_tensors(self) -> set[str]:
        """The names that the file imports, and those of objects: what holds a network, or is made of settings alone."""
        asked = (node.value for node in self._nodes.of(ast.Attribute) if node.attr in _NETWORKS)
        holders = {holder.id for holder in asked if isinstance(holder, ast.Name)}
        return self._imported | holders | self._managers

    @cached_property
    def _managers(self) -> set[str]:
        """`dist = DistributedManager()`: objects of imported classes that are given nothing, as tensors never are."""
        return {
            name
            for node in self._nodes.of(ast.Assign)
            for name, value in _pairs(node)
            if isinstance(value, ast.Call) and not (value.args or value.keywords) and isinstance(value.func, ast.Name)
            if value.func.id in self._imported and value.func.id[:1].isupper()
        }

    @cached_property
    def _words(self) -> Counter[str]:
        """How often each word stands in the file, other than as a name of torch's or in a comment."""
        return Counter(re.findall(r"(?<!torch\.)\b\w+\b", self._without([])))

    def _without(self, nodes: Sequence[ast.stmt | ast.expr | ast.alias | ast.keyword]) -> str:
        """The text of the file without its comments and these nodes."""
        text = self._source.text
        for start, end in (bounds(self._source, node) for node in nodes):
            text = text[:start] + " " * (end - start) + text[end:]
        return "\n".join(map(_without_comment, text.splitlines()))


def _decided_before(block: list[ast.stmt], path: str) -> Iterator[ast.stmt]:
    """The statements at the end of a block that do nothing but decide a path, behind which nothing uses it."""
    for statement in reversed(block):
        if _only_decides(statement, path):
            yield statement
        elif not (isinstance(statement, _DEFINITIONS) or _is_printed(statement)) and any(
            isinstance(node, ast.expr) and path_of(node) == path for node in walk(statement)
        ):
            return


def _is_printed(statement: ast.stmt) -> bool:
    """`print(device)`, which uses it for nothing."""
    match statement:
        case ast.Expr(ast.Call(ast.Name("print"))):
            return True
    return False


def _only_decides(statement: ast.stmt, path: str) -> bool:
    """`device = ...`, also by an `if` that does nothing else."""
    if isinstance(statement, ast.If):
        return all(_only_decides(part, path) for part in [*statement.body, *statement.orelse])
    if not isinstance(statement, ast.Assign):
        return False
    return _targets(statement) == [path] and not any(
        isinstance(node, ast.expr) and path_of(node) == path for node in walk(statement.value)
    )


def _decides_otherwise(statement: ast.stmt, first: ast.Assign) -> bool:
    """Whether a statement sets what another one set, to what may be a GPU."""
    if not isinstance(statement, ast.Assign) or _is_one_of(statement.value, _OTHER_DEVICES):
        return False
    return bool(set(_targets(statement)) & set(_targets(first)))


def _targets(statement: ast.Assign) -> list[str]:
    """The names, attributes and entries that a statement assigns to."""
    return [path for target in statement.targets if (path := path_of(target)) is not None]


def _pairs(statement: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement binds, and the value of each, as far as it is written down."""
    for target in statement.targets:
        listed = target.elts if isinstance(target, ast.Tuple) else [target]
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else []
        written = values if len(values) == len(listed) else [statement.value] * len(listed)
        yield from ((name.id, value) for name, value in zip(listed, written, strict=True) if isinstance(name, ast.Name))


def _makes_tensor(node: ast.expr) -> bool:
    """`torch.zeros(8)`, `Variable(torch.Tensor(rows))`."""
    if not isinstance(node, ast.Call):
        return False
    module, _, name = (path_of(node.func) or "").rpartition(".")
    if name == "Variable":
        return bool(node.args) and _makes_tensor(node.args[0])
    return module == "torch" and name in FRESH | COPIES


def _is_one_of(node: ast.expr, devices: frozenset[str]) -> bool:
    """`"cpu"`, `torch.device("cpu")`, `"mps" if ... else "cpu"`: a device that can only be one of some."""
    if isinstance(node, ast.IfExp):
        return _is_one_of(node.body, devices) and _is_one_of(node.orelse, devices)
    if isinstance(node, ast.Call) and last_of(path_of(node.func)) == "device" and node.args:
        return _is_one_of(node.args[0], devices)
    return isinstance(node, ast.Constant) and node.value in devices


def _without_comment(line: str) -> str:
    """A line up to its comment; whole where a quote stays open, as in a string over several lines."""
    if "#" not in line:
        return line
    before = _BEFORE_COMMENT.match(line)
    return line if before is None else before[1]
