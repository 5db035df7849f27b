"""Watching a few rows run: random draws that can be replayed, and writes that can be undone."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomfix.runtime import trees

_aten = torch.ops.aten
_NLL = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
_MEAN = 1
# operations that select among the values of a dimension, with the position of that argument
_SELECTIONS = {_aten.topk.default: 2, _aten.kthvalue.default: 2, _aten.sort.default: 1, _aten.sort.stable: 9}
# operations that draw indices below a bound, with the position of the bound
_INDEX_DRAWS = {_aten.randperm.default: 0, _aten.randint.default: 0, _aten.randint.low: 1}

# Their schemas do not say that they write running statistics (arguments 3 and 4) when training (argument 5).
_BATCH_NORMS = tuple(
    getattr(_aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_with_update")
    if hasattr(_aten, name)
)


class Writes:
    """Contents of tensors that existed before and were written to, so that they can be put back."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return any(True for _ in self._still_there())

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Keep the contents of `tensor`, unless an earlier write to its storage did."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._before:
            everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._before[storage._cdata] = (everything, everything.clone())

    def undo(self) -> None:
        """Put all contents back."""
        with torch.no_grad():
            for everything, before in self._still_there():
                everything.copy_(before)
        self._before.clear()

    def _still_there(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # memory that was given back since (parameters that FSDP2 puts together for a while) holds nothing
        for everything, before in self._before.values():
            if everything.untyped_storage().nbytes() == before.untyped_storage().nbytes():
                yield everything, before


class Draws:
    """Random draws of a run on some rows, for runs on parts of those rows.

    Args:
        reverses: they come in reverse order, so that those which lie in an order by chance do not.
    """

    def __init__(self, reverses: bool = False) -> None:
        self.recorded: list[Any] = []
        self._reverses = reverses
        self._start = 0
        self._rows = 0
        self._next: int | None = None

    def replay(self, start: int, rows: int) -> None:
        """Answer the draws to come with row `start` and following of those recorded over `rows` rows."""
        self._start, self._rows, self._next = start, rows, 0

    def answer(self, drawn: Any) -> Any:
        """What an operation that drew `drawn` shall return."""
        if self._next is None:
            if self._reverses:
                drawn = trees.map_leaves(_reversed, drawn)
            # what was drawn may be written to later
            self.recorded.append(trees.map_leaves(_copied, drawn))
            return drawn
        if self._next >= len(self.recorded):
            return drawn
        recorded = self.recorded[self._next]
        self._next += 1
        if isinstance(drawn, torch.Tensor):
            return self._rows_of(recorded, drawn)
        values = zip(drawn, recorded, strict=True)
        return tuple(self._rows_of(r, d) if isinstance(d, torch.Tensor) else d for d, r in values)

    def _rows_of(self, recorded: Any, drawn: torch.Tensor) -> torch.Tensor:
        if not isinstance(recorded, torch.Tensor) or recorded.dim() != drawn.dim():
            return drawn
        for dim in range(drawn.dim()):
            if recorded.shape[dim] == drawn.shape[dim]:
                continue
            # an even number of entries per row: heads and tokens are often folded into the batch
            per_row, rest = divmod(recorded.shape[dim], self._rows)
            if rest or drawn.shape[dim] % max(per_row, 1):
                return drawn
            recorded = recorded.narrow(dim, self._start * per_row, drawn.shape[dim])
        return drawn.copy_(recorded)


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context around one run of a forward on a few rows.

    Attributes:
        writes: what the run wrote into tensors that it did not make itself.
        nll_weights: the divisor of each NLL loss with a mean that it computed.
        selected_among: how many values each topk, sort or kthvalue of floats selected among, and the bound of each
            draw of indices.
        differentiates: a backward ran inside of it.

    Args:
        writes: shared by the runs of one check, so that all are undone together.
        draws: records the random draws of the run, or answers them.
        own: tensors made for the run, which it may write.
    """

    def __init__(self, writes: Writes, draws: Draws | None, own: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes = writes
        self.nll_weights: list[float] = []
        self.selected_among: list[int] = []
        self.differentiates = False
        self._draws = draws
        self._own = storages_of(own)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, which takes seconds, only to keep it away from this method
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        self.differentiates = self.differentiates or torch._C._current_graph_task_id() != -1
        if kind.writes:
            for tensor in _written(func, args, kwargs):
                if tensor.untyped_storage()._cdata not in self._own:
                    self.writes.about_to_write(tensor)
        if kind.selects and args[0].is_floating_point() and args[0].dim():
            dim = kwargs.get("dim", args[kind.selects] if len(args) > kind.selects else -1)
            self.selected_among.append(args[0].shape[dim])
        elif kind.bound is not None:
            self.selected_among.append(args[kind.bound])
        result = func(*args, **kwargs)
        if kind.draws and self._draws is not None:
            result = self._draws.answer(result)
        if kind.is_nll and args[3] == _MEAN:
            self.nll_weights.append(float(result[1]))
        if not kind.views:
            for tensor in strided(result):
                self._own.add(tensor.untyped_storage()._cdata)
        return result


class _Kind:
    """What an operation does, read off its schema once."""

    def __init__(self, func: Any) -> None:
        aliases = [result.alias_info for result in func._schema.returns]
        self.is_nll = func in _NLL
        self.selects = _SELECTIONS.get(func, 0)
        self.bound = _INDEX_DRAWS.get(func)
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        # FSDP2 puts whole parameters together in memory of its own
        self.writes = (func._schema.is_mutable and func.namespace != "fsdp") or func in _BATCH_NORMS
        # lift_fresh calls its result a view, of a tensor that was made for it alone
        self.views = any(alias is not None for alias in aliases) and func is not _aten.lift_fresh.default


_kinds: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _Kind(func)
    return kind


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    if func in _BATCH_NORMS:
        if len(args) > 5 and args[5] is False:
            return
        yield from strided(args[3:5])
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from strided(args[index] if index < len(args) else kwargs.get(argument.name))


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of these, those without one left out."""
    return {tensor.untyped_storage()._cdata for tensor in strided(list(tensors))}


def strided(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in what an operation takes or returns, those without a storage left out."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strided(item)


def _reversed(leaf: Any) -> Any:
    return leaf.copy_(leaf.flip(0)) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
