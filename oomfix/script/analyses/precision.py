"""Who decides the precision of a script: autocast, a scaler, a framework, the model itself."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import TYPE_CHECKING

from oomfix.script.analyses.training_loop import TrainingLoop
from oomfix.script.facts.torch_facts import SCALERS
from oomfix.script.facts.trace import Backward, Clip, Forward, Site, Trace
from oomfix.script.interpreter.contexts import AUTOCAST
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import last_name, last_of, path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

if TYPE_CHECKING:
    from oomfix.script.analyses.switches import Switches
    from oomfix.script.analyses.without_gpu import WithoutGpu
    from oomfix.source import Source

_HALF = Pattern(r"\bmodel\w*\.to\((dtype=)?torch\.(bfloat16|float16|half)\)|torch_dtype=torch\.(bfloat16|float16|half)")
_OF_APEX = (
    *("apex.amp.initialize", "apex.amp.init", "apex.amp.scale_loss"),
    *("apex.fp16_utils.FP16_Optimizer", "apex.optimizers.FP16_Optimizer"),
)
_HALF_DTYPES = frozenset({"torch.bfloat16", "torch.float16", "torch.half"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SCALING = Pattern(r"\w*scaler\w*|\w*loss_scal(?!ar)\w*|scale_loss|\w*grad(?:ient)?_scale\w*", re.IGNORECASE)
_DATA_SCALER = Pattern(r"(Standard|MinMax|MaxAbs|Robust)Scaler")
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
    def trains_in_half(self) -> bool:
        """Whether the model itself is in 16 bits, so that autocast has nothing to do."""
        return bool(_HALF.search(self._source.text)) or any(
            _is_made_in_half(node.value) for node in self._imports.nodes.of(ast.Assign)
        )

    @cached_property
    def uses_apex(self) -> bool:
        """Whether NVIDIA's apex does the mixed precision."""
        return any(True for _ in self._imports.calls(*_OF_APEX))

    @property
    def autocasts_out_of_sight(self) -> bool:
        """Whether FSDP's MixedPrecision decides, or any loss is scaled with no autocast in sight to need it."""
        return self.names_mixed_precision or self._are_scaled_without_autocast(self._trace.backwards)

    def is_scaled_without_autocast(self, loop: TrainingLoop) -> bool:
        """Whether a loss of a loop is scaled, with no autocast in sight to need it: its network may bring that.

        What scales losses outside of all loops may do it for any.
        """
        outside = [backward for backward in self._trace.backwards if not backward.site.loops]
        return self._are_scaled_without_autocast([*loop.backwards, *outside])

    def _are_scaled_without_autocast(self, backwards: list[Backward]) -> bool:
        return "autocast" not in self._source.text and any(one.scaled for one in backwards) and not self._scales_nothing

    @cached_property
    def names_mixed_precision(self) -> bool:
        """`mixed_precision=MixedPrecision(...)`, and more than an import of it."""
        if "MixedPrecision" not in self._source.text:
            return False
        named = [*self._imports.nodes.of(ast.Name), *self._imports.nodes.of(ast.Attribute)]
        return any("MixedPrecision" in (path_of(node) or "") for node in named)

    @property
    def _scales_nothing(self) -> bool:
        """`GradScaler(enabled=False)`, of every scaler that the file makes."""
        made = list(self._imports.calls(*SCALERS))
        return bool(made) and all(
            any(
                keyword.arg == "enabled" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                for keyword in call.keywords
            )
            for call in made
        )

    def has_autocast_alternative(self, forward: Forward) -> bool:
        """The other branch of a flag runs the forward under autocast: this one is the fp32 choice.

        A switch of the file that says which branch runs leaves no choice.
        """
        return any(
            (id(guard.statement), not guard.value) in self._autocast_sides
            and self._switches.outcome(guard.test) is not guard.value
            for guard in forward.site.guards
        )

    def runs_without_gpu(self, forward: Forward) -> bool:
        """Whether a forward is only run where there is no GPU, whose autocast it could take."""
        return bool(forward.site.scopes) and self._without_gpu.leads_to(forward.site)

    @cached_property
    def _without_gpu(self) -> WithoutGpu:
        # few scripts come to this question, and every module is a third of a millisecond of each run
        from oomfix.script.analyses.without_gpu import WithoutGpu

        return WithoutGpu(self._imports)

    @cached_property
    def _switches(self) -> Switches:
        # few scripts come to this question, and every module is a third of a millisecond of each run
        from oomfix.script.analyses.switches import Switches

        return Switches(self._source.tree, self._imports.nodes)

    @cached_property
    def _autocast_sides(self) -> set[tuple[int, bool]]:
        """The sides of conditions on which a forward runs under autocast."""
        return {
            (id(guard.statement), guard.value)
            for forward in self._trace.forwards.values()
            if forward.site.autocast is not None
            for guard in forward.site.guards
        }

    def is_without_scaler(self, site: Site) -> bool:
        """Whether it is the branch for no scaler: the other one takes the scale off by what the condition asks for."""
        return any(
            bool(_unscaling(guard.statement.orelse if guard.value else guard.statement.body) & _paths_in(guard.test))
            for guard in site.guards
            if isinstance(guard.statement, ast.If)
        )

    def is_unscaled_where_scaled(self, clip: Clip) -> bool:
        """`if args.amp: scaler.unscale_(optimizer)` ahead of a clip: without this flag the scaler scales nothing."""
        if "unscaled" not in clip.gradients:
            return False
        around = {id(guard.statement) for guard in clip.site.guards}
        for event in self._trace.calls.get("unscale_", ()):
            if event.order <= clip.order and event.site.runs == clip.site.runs:
                asked = [guard for guard in event.site.guards if id(guard.statement) not in around]
                if asked and all(guard.value and self._enables_scaling(guard.test) for guard in asked):
                    return True
        return False

    def _enables_scaling(self, test: ast.expr) -> bool:
        """`scaler.is_enabled()`, or what the scaler is made with."""
        is_asked = isinstance(test, ast.Call) and last_name(test) == "is_enabled"
        return is_asked or _last_or_all(test) in self._enabling

    @cached_property
    def _enabling(self) -> set[str]:
        """What `GradScaler(enabled=args.amp)` is given, or autocast where the scaler is made out of sight."""
        made = list(self._imports.calls(*SCALERS)) or self._imports.calls(*AUTOCAST)
        return {_last_or_all(keyword.value) for call in made for keyword in call.keywords if keyword.arg == "enabled"}

    def unscaled(self, loop: TrainingLoop) -> list[Forward]:
        """The fp16 forwards of a loop whose gradients nothing scales."""
        half = [forward for forward in loop.forwards if forward.site.autocast == "float16"]
        if not half:
            return []
        scaled = [event for event in loop.backwards if event.scaled or _is_scaled_by_hand(event.node)]
        if not scaled:
            decided = loop.framework not in (None, "oomfix")  # the manager scales for its own autocast, not for torch's
            unseen = any(event.by_an_object for event in loop.backwards)
            return [] if decided or unseen or self._speaks_of_scaling(loop) else half
        plain = [event for event in loop.backwards if event not in scaled and not event.by_an_object]
        within: set[int] = set().union(*(event.origins for event in scaled))
        others: set[int] = set().union(*(event.origins for event in plain))
        return [forward for forward in half if forward.origin in others - within]

    def _speaks_of_scaling(self, loop: TrainingLoop) -> bool:
        """Whether a gradient scaler, or a factor of the loss, is named where a loop is written."""
        written = self._scaling_in_module.union(*map(_words_of_scaling, _definitions_around(loop)))
        return any(_DATA_SCALER.search(word) is None and word not in self._data_scalers for word in written)

    @cached_property
    def _scaling_in_module(self) -> set[str]:
        """What names scaling in the statements of the module itself."""
        statements = (statement for statement in self._source.tree.body if not isinstance(statement, _DEFINITIONS))
        return set[str]().union(*map(_words_of_scaling, statements))

    @cached_property
    def _data_scalers(self) -> set[str]:
        """The names of what scales the data (`scaler = StandardScaler()`)."""
        return {
            last_of(path_of(node.targets[0]))
            for node in self._imports.nodes.of(ast.Assign)
            if isinstance(node.value, ast.Call) and _DATA_SCALER.search(ast.unparse(node.value.func))
        }


def _last_or_all(node: ast.expr) -> str:
    """`amp` of `args.amp`; what is no path, as it is written."""
    path = path_of(node)
    return ast.unparse(node) if path is None else last_of(path)


def _definitions_around(loop: TrainingLoop) -> set[ast.stmt]:
    """The functions and classes in which a loop's events are written."""
    functions = {function for event in (*loop.forwards, *loop.backwards) for function in event.site.functions}
    owners = (function.owner.node if function.owner is not None else function.node for function in functions)
    return {node for node in owners if isinstance(node, _DEFINITIONS)}


def _words_of_scaling(statement: ast.stmt) -> set[str]:
    return set(_SCALING.findall(ast.unparse(statement)))


def _unscaling(block: list[ast.stmt]) -> set[str | None]:
    """The paths of the scalers that take the scale off in a block."""
    nodes = walk(*block)
    return {path_of(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "unscale_"}


def _paths_in(test: ast.expr) -> set[str | None]:
    return {path_of(node) for node in walk(test) if isinstance(node, ast.Name | ast.Attribute)} - {None}


def _is_scaled_by_hand(node: ast.Call) -> bool:
    """`(loss * 1024).backward()`: what is differentiated was multiplied by more than a loss is weighted with."""
    root = node.func.value if isinstance(node.func, ast.Attribute) else None
    factors = [root.left, root.right] if isinstance(root, ast.BinOp) and isinstance(root.op, ast.Mult) else []
    powers = any(isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Pow) for factor in factors)
    values = [factor.value for factor in factors if isinstance(factor, ast.Constant)]
    return powers or any(isinstance(value, (int, float)) and value >= _LOSS_SCALE for value in values)


def _is_made_in_half(node: ast.expr) -> bool:
    """`Net().cuda().half()`, `Net().to("cuda", dtype=torch.bfloat16)`: an object moved to 16 bits where it is made."""
    in_half = False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
        given = [path_of(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
        in_half = in_half or node.func.attr in ("half", "bfloat16") or bool(_HALF_DTYPES.intersection(given))
        node = node.func.value
    return in_half and isinstance(node, ast.Call) and last_of(path_of(node.func))[:1].isupper()
