"""Networks that come from other files, which also decide where they run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.facts.trace import Forward, Trace
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import Nodes, walk

_ON_THE_CPU = tuple(
    f"torch.{name}"
    for name in "zeros ones empty full rand randn randint randperm arange linspace eye tensor as_tensor from_numpy "
    "Tensor FloatTensor LongTensor".split()
)


def trains_what_it_is_handed(trace: Trace, imports: Imports) -> bool:
    """Whether all that is trained is handed to functions and objects that nothing in the file calls or makes.

    A file that makes tensors, and puts them nowhere, trains where they lie, unless it fetches others by `.cpu()`, or
    gives them to functions of other files, which may put them elsewhere: `as_variable(torch.ones(8))`. So does one
    that reads what it has computed as arrays (`out.detach().numpy()`), which no tensor on a GPU allows.

    Args:
        trace: what happens in the file.
        imports: its imports, and their uses.
    """
    fetches = any(node.attr == "cpu" for node in imports.nodes.of(ast.Attribute))
    lies_here = _leaves_tensors(imports) or any(map(_is_read_where_it_lies, imports.nodes.of(ast.Attribute)))
    if not trace.steps or (lies_here and not fetches):
        return False
    trained = [
        forward for forward in trace.forwards.values() if forward.origin in trace.backpropagated and forward.site.runs
    ]
    made = set(_made(imports.nodes))
    return bool(trained) and all(_is_handed_in(forward) and not _names(forward) & made for forward in trained)


def _leaves_tensors(imports: Imports) -> bool:
    """Whether it makes tensors other than for functions of other files."""
    handed = {
        part
        for call in imports.nodes.of(ast.Call)
        if _is_of_another_file(call.func, imports)
        for argument in call.args
        for part in walk(argument)
    }
    return any(call not in handed for call in imports.calls(*_ON_THE_CPU))


def _is_of_another_file(function: ast.expr, imports: Imports) -> bool:
    """Whether it is a function, and no class, of neither torch nor numpy."""
    named = imports.qualified(function)
    return bool(named) and all(
        name.split(".")[0] not in ("torch", "numpy") and last_of(name)[:1].islower() for name in named
    )


def _is_read_where_it_lies(node: ast.Attribute) -> bool:
    """`out.detach().numpy()`, `loss.data.numpy()`: what a network gives, without `.cpu()` or anything else between."""
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return node.attr == "numpy" and isinstance(value, ast.Attribute) and value.attr in ("detach", "data")


def _is_handed_in(forward: Forward) -> bool:
    """Whether it runs what a function that is called from elsewhere is given, or what its object holds."""
    arguments = [argument for function in forward.site.functions for argument in walk(function.node.args)]
    given = {argument.arg for argument in arguments if isinstance(argument, ast.arg)}
    return forward.site.way[:1] == ("entry",) and _parts(forward)[0] in given


def _parts(forward: Forward) -> list[str]:
    return (forward.path or "").split("[")[0].split(".")


def _names(forward: Forward) -> set[str]:
    """`self.model.encoder` and what it is a part of: `self.model` and `self`."""
    parts = _parts(forward)
    return {".".join(parts[: end + 1]) for end in range(len(parts))}


def _made(nodes: Nodes) -> Iterator[str]:
    """What is assigned from a call, other than one that is given its old value: `model = DataParallel(model)`."""
    for node in nodes.of(ast.Assign):
        if any(isinstance(part, ast.Call) for part in walk(node.value)):
            read = {path_of(part) for part in walk(node.value) if isinstance(part, ast.Name | ast.Attribute)}
            yield from {path for target in node.targets if (path := path_of(target)) is not None} - read
