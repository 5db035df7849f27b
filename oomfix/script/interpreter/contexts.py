"""What a context manager or decorator does to the code under it: gradients off, autocast on."""

from __future__ import annotations

import ast
import re
from typing import Any

from oomfix.script.facts.trace import Autocast
from oomfix.script.facts.values import MISSING, Given, Graph, Kind, Value
from oomfix.script.syntax.names import last_of

_GRAD_MODES = ("torch", "torch.autograd", "torch.autograd.grad_mode")
"""The modules that offer torch's switches of gradients."""
_SWITCHES = ("no_grad", "inference_mode", "enable_grad", "set_grad_enabled")
_NULL = ("contextlib.nullcontext", "contextlib.suppress", "contextlib.ExitStack")
AUTOCAST = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.cuda.amp.autocast",
    "torch.cuda.amp.autocast_mode.autocast",
    "torch.cpu.amp.autocast",
)


def context(*effects: str) -> Value:
    """A context that has these effects; with several, one of them, by a flag."""
    return Value(Kind.CONTEXT, ref=frozenset(effects))


NULL = context("null")


def makes_context(function: Value) -> bool:
    """Whether a function is an imported one that makes a context: `torch.no_grad`, before it is called."""
    if function.kind is not Kind.EXTERNAL:
        return False
    module, _, name = function.ref.rpartition(".")
    return function.ref in (*AUTOCAST, *_NULL) or (module in _GRAD_MODES and name in _SWITCHES)


def context_of_call(node: ast.Call, qualified: str, given: Given) -> Value | None:
    """The context that a call of an imported name makes; None when it makes none that matters here."""
    module, _, name = qualified.rpartition(".")
    if module in _GRAD_MODES and (switch := _grad_switch(name, given.argument("mode").constant)) is not None:
        return switch
    if qualified in AUTOCAST:
        return _autocast(node, qualified, given)
    if qualified in _NULL:
        return NULL
    if qualified == "apex.amp.scale_loss":
        return context("apex")._replace(items=tuple(given.positional[:1]))
    return None


def _grad_switch(name: str, mode: Any) -> Value | None:
    """What one of torch's switches of gradients does with a mode; None for any other function."""
    if name in ("no_grad", "inference_mode"):
        return context("grad" if mode is False else "no_grad")
    if name == "enable_grad":
        return context("grad")
    if name != "set_grad_enabled":
        return None
    if mode is MISSING:
        return context("grad", "no_grad")
    return context("grad" if mode else "no_grad")


def _autocast(node: ast.Call, qualified: str, given: Given) -> Value:
    old = qualified.startswith(("torch.cuda", "torch.cpu"))
    device = "cuda" if old else given.argument("device_type").constant
    slots = ["enabled", "dtype"] if old else ["device_type", "dtype", "enabled"]
    named = {**dict(zip(slots, given.positional, strict=False)), **given.keywords}
    written: dict[str | None, ast.expr] = dict(zip(slots, node.args, strict=False))
    enabled = (written | {keyword.arg: keyword.value for keyword in node.keywords}).get("enabled")
    # a name that stands for False is a switch, which its reader has seen
    if isinstance(enabled, ast.Constant) and enabled.value is False:
        return context("autocast:off")
    dtype = named.get("dtype")
    if dtype is None or dtype.constant is None:
        name = "bfloat16" if device == "cpu" or qualified.startswith("torch.cpu") else "float16"
    else:
        reference = dtype.ref if dtype.kind is Kind.EXTERNAL else None
        name = {"torch.float16": "float16", "torch.half": "float16", "torch.bfloat16": "bfloat16"}.get(
            reference or "", "unknown"
        )
    return context(f"autocast:{name}")


def grad_under(effects: frozenset[str], grad: Graph) -> Graph:
    """Whether gradients are recorded under a context."""
    if "no_grad" in effects:
        return Graph.NO if effects <= {"apex", "no_grad"} else min(grad, Graph.MAYBE)
    return Graph.YES if effects == {"grad"} else grad


def autocast_under(effects: frozenset[str], autocast: Autocast | None) -> Autocast | None:
    """The dtype of autocast under a context; a context that is autocast on one side of a flag counts as autocast."""
    dtypes = {effect.partition(":")[2] for effect in effects if effect.startswith("autocast:")}
    if not dtypes:
        return autocast
    return min(dtypes - {"off"}, default=None)  # type: ignore[return-value]


def held_elsewhere(path: str | None) -> frozenset[str] | None:
    """What a context out of sight may do, by its name: `with amp_autocast():`, `with ctx:`; None for any other."""
    name = last_of(path).lower()
    if re.search(r"no_?grad|inference", name):
        return frozenset({"no_grad"})
    if re.search(r"autocast|(^|_)amp(_|$)|precision", name):
        return frozenset({"autocast:held"})
    if re.search(r"(^|_)(ctx|context|cm|guard|grad)(_|$)", name):
        return frozenset({"autocast:held", "no_grad", "null"})
    return None


def decorated_elsewhere(path: str | None) -> frozenset[str] | None:
    """What a decorator out of sight does, by its name: `@no_grad_pass`, `@evaluating`; None for any other."""
    name = last_of(path).lower()
    return frozenset({"no_grad"}) if re.search(r"no_?grad|inference|(^|_)eval", name) else None
