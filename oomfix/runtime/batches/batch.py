"""The batch of one call: how many samples it has, and which rows of it belong to a micro-batch."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from oomfix.runtime import compat, trees
from oomfix.runtime.batches.sample_dims import (
    Dim,
    Reading,
    as_it_was,
    dim_of,
    folded,
    is_open,
    samples_behind_steps,
    samples_first,
)

Place = tuple[Any, ...]


class Batch:
    """Arguments of a forward, as a batch of samples.

    Tensors (and NumPy arrays) whose dimension 0 is the batch size, and lists with one entry per sample, are
    split; everything else is passed whole. Nothing is looked at before it is asked for: a call that is not
    split pays nothing.

    Args:
        args: positional arguments of the forward.
        kwargs: its named arguments.
        size: number of samples; None infers it from the largest agreement of dimension 0.

    Attributes:
        whole: places of tensors and lists that are not cut though they are as long as the batch, as in `layout`.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None = None) -> None:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"batch_size: got {size!r}, expected a whole number of at least 1, or None")
        self.args = args
        self.kwargs = kwargs
        self._size = self._given_size = size
        self._length_of_views: int | None = None
        self.whole: frozenset[Place] = frozenset()
        self._reading: Reading | None = None
        self._steps = 0
        if size is not None and size > 1:
            self._check_that_something_has(size)

    @property
    def size(self) -> int:
        """Number of samples; 1 where nothing in the batch has samples to count."""
        if self._size is None and self._reading == "steps":
            self._size, self._steps = self._behind_steps()
        elif self._size is None and self._reading == "folded":
            self._size, self._steps = folded(self.tensors()) or (1, 0)
        elif self._size is None and self._reading == "input":
            self._size = next(iter(self._lengths()), 1)
        elif self._size is None:
            sizes = self._lengths()
            # of what there is one only all samples have the same, unless the input is a single sample
            votes = Counter(size for size in sizes if size != 1 or sizes[0] == 1)
            # ties go to the first argument, which is the input nearly always
            size = max(votes, key=votes.__getitem__) if votes else 1
            size = self._unless_length(size, votes) if len(votes) > 1 else size
            in_views = self._length_of_views = self._length_in_lists(size, votes)
            if self._reading is None:
                is_of_views = in_views is not None and in_views != size and votes[in_views] >= votes[size]
                self._reading = "views" if is_of_views else "samples"
            self._size = in_views if in_views is not None and self._reading == "views" else size
        return self._size

    @property
    def reading(self) -> Reading:
        """Whether lists of tensors of one length are taken for samples, or for views of all samples (agents, crops).

        Or dimension 0 of tensors is taken for time steps, and the samples stand behind these; or for all steps of one
        sample after the other. Or the first argument alone tells how many samples there are, though more of the others
        are of another length (the matrices of a graph).
        """
        return self._reading if self.size and self._reading is not None else "samples"

    def other_readings(self) -> list[Reading]:
        """What else the batch may be: only a check can tell."""
        if self._given_size is not None:
            return []
        of_lists: list[Reading] = ["samples", "views"] if self.may_hold_views else ["samples"]
        if self._may_have_steps_first():
            of_lists.append("steps")
        if folded(self.tensors()) is not None:
            of_lists.append("folded")
        if self._input_outweighs(self.size):
            of_lists.append("input")
        return [reading for reading in of_lists if reading != self.reading]

    @property
    def may_hold_views(self) -> bool:
        """Whether there are lists that may be such views as well as samples: only a check can tell."""
        return self.size > 1 and self._length_of_views is not None

    def _may_have_steps_first(self) -> bool:
        samples = samples_behind_steps(self.tensors())
        return samples is not None and not any(is_open(tensor, samples) for tensor in self.tensors())

    def read(self, reading: Reading) -> None:
        """Take the batch for what it may be."""
        if self._given_size is None:
            is_other = reading == "steps" and samples_behind_steps(self.tensors()) is None
            is_other = is_other or (reading == "folded" and folded(self.tensors()) is None)
            self._size, self._reading, self.whole = None, "samples" if is_other else reading, frozenset()

    def _input_outweighs(self, size: int) -> bool:
        """Whether what is as long as the first argument holds more numbers than what is of the length `size`.

        A small one may be of no use for the loss: then each part would compute that of the whole batch.
        """
        length = next(iter(self._lengths()), 1)
        with_rows = [one for one in self.tensors() if one.dim()]
        numbers = [sum(one.numel() for one in with_rows if _length(one) == rows) for rows in (length, size)]
        return length not in (1, size) and numbers[0] > numbers[1]

    def _lengths(self) -> list[int]:
        """How many samples each argument has, if it has any."""
        return [size for node in (*self.args, *self.kwargs.values()) for size in _votes(node)]

    def _behind_steps(self) -> tuple[int, int]:
        """The numbers of samples and of steps."""
        first = next(tensor for tensor in self.tensors() if tensor.dim() > 1)
        return int(first.shape[1]), int(first.shape[0])

    def _unless_length(self, size: int, votes: Counter[int]) -> int:
        """`size`, or the samples of the first tensor [samples, size, ...] where a mask [size, size] shows a length."""
        first = next(iter(self.tensors()), None)
        if first is None or first.dim() < 2 or first.shape[0] not in votes or first.shape[0] == size != first.shape[1]:
            return size
        squares = (tensor for tensor in self.tensors() if tensor.dim() > 1 and tensor.shape[:2] == (size, size))
        return int(first.shape[0]) if first.shape[1] == size and any(True for _ in squares) else size

    def _length_in_lists(self, size: int, votes: Counter[int]) -> int | None:
        """The one length of all tensors in lists of `size` entries, where nothing else has as many."""
        nodes = (*self.args, *self.kwargs.values())
        inside = [length for node in nodes for count, length in _lists_of_equals(node) if count == size]
        tells = len(inside) == votes[size] or inside[:1] == [size]
        return inside[0] if tells and len(set(inside)) == 1 else None

    def _check_that_something_has(self, size: int) -> None:
        lengths = sorted(set(self._lengths()))
        if lengths and self.whole_because() is None and not any(cut for _, cut in self.layout()):
            raise ValueError(
                f"batch_size: got {size}, expected the length of dimension 0 of a tensor, or of a list, among the "
                f"arguments (found {', '.join(map(str, lengths))})"
            )

    def whole_because(self) -> str | None:
        """Why this batch cannot be cut, or None if it can."""
        for node in (*self.args, *self.kwargs.values()):
            found = _uncuttable(node)
            if found is not None:
                return f"a {found} in the batch cannot be cut into samples"
        if self.reading == "steps" and any(is_open(tensor, self.size) for tensor in self.tensors()):
            return "it has as many steps as samples, which leaves open where these stand"
        return None

    def rows(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for samples `start` to `stop` (exclusive). Tensors are views; copies where steps come first."""
        if start == 0 and stop == self.size:
            return self.args, self.kwargs
        return self._cut_by(lambda samples: samples[start:stop])

    def chosen(self, rows: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the samples `rows`, of which some may be named twice. Copies, not views."""

        def take(samples: Any) -> Any:
            if isinstance(samples, list | tuple):
                return type(samples)(samples[row] for row in rows)
            return compat.named_rows(samples, rows) if isinstance(samples, torch.Tensor) else samples[rows]

        return self._cut_by(take)

    def uncut(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with None in place of what is cut into samples."""
        return self._cut_by(lambda samples: None)

    def _cut_by(self, take: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self._cut(node, (place,), take) for place, node in enumerate(self.args))
        return args, {name: self._cut(node, (name,), take) for name, node in self.kwargs.items()}

    def _cut(self, node: Any, place: Place, take: Callable[[Any], Any]) -> Any:
        if place in self.whole:
            return node
        if isinstance(node, torch.Tensor) or is_array(node):
            dim = self._dim(node)
            if dim is None or not isinstance(node, torch.Tensor):
                return node if dim is None else take(node)
            taken = take(samples_first(node, dim, self.size))
            return taken if taken is None else as_it_was(taken, dim)
        if self._is_list_of_samples(node):
            return take(node)
        inner = trees.children(node)
        if inner is None:
            return node
        return trees.rebuilt(node, [self._cut(child, (*place, key), take) for key, child in inner])

    def _dim(self, node: Any) -> Dim | None:
        """Where the samples of a tensor or an array stand; None: it has none."""
        if not node.ndim:
            return None
        if isinstance(node, torch.Tensor) and self.reading == "steps":
            return dim_of(node, self.size, self._steps)
        if isinstance(node, torch.Tensor) and self.reading == "folded" and _length(node) == self.size * self._steps:
            return "folded"
        return "first" if _length(node) == self.size else None

    def samples_first(self, tensors: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Every tensor of the batch, or `tensors` in their place with some of its rows, samples first.

        Those without samples are as they are. These are views: what is written there is written to the tensors.
        """
        own = self.tensors()
        given = own if tensors is None else list(tensors)
        if self.reading not in ("steps", "folded") or len(own) != len(given):
            return given
        dims = [self._dim(tensor) for tensor in own]
        return [self._turned(*pair) for pair in zip(given, dims, strict=True)]

    def _turned(self, tensor: torch.Tensor, dim: Dim | None) -> torch.Tensor:
        return tensor if dim is None else samples_first(tensor, dim, tensor.shape[0] // max(self._steps, 1))

    def _is_list_of_samples(self, node: Any) -> bool:
        if not isinstance(node, list | tuple) or len(node) != self.size or not is_samples(node):
            return False
        return self.reading != "views" or _length_of_all(node) != self.size

    def layout(self) -> Iterator[tuple[Place, bool]]:
        """For each tensor, array and list of samples, its place and whether it is cut.

        A place is the position or name of an argument, followed by the keys that lead to the tensor inside of it.
        """
        for place, node in (*enumerate(self.args), *self.kwargs.items()):
            yield from self._layout(node, (place,))

    def _layout(self, node: Any, place: Place) -> Iterator[tuple[Place, bool]]:
        """The same walk as of `_cut`."""
        if isinstance(node, torch.Tensor) or is_array(node):
            if node.ndim:
                yield place, place not in self.whole and self._dim(node) is not None
        elif place in self.whole:
            yield place, False
        elif self._is_list_of_samples(node):
            yield place, True
        else:
            for key, child in trees.children(node) or ():
                yield from self._layout(child, (*place, key))

    def placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Place, list[torch.Tensor]]:
        """The tensors that are cut into samples, in `args` and `kwargs`, which are rows of this batch.

        Returns:
            Tensors [rows, ...] by their place. Those in a list of samples, each as [1, ...], stand at one place: that
            of the list, followed by the keys that lead to them in an entry.
        """
        found: dict[Place, list[torch.Tensor]] = {}
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        for place in (place for place, cut in self.layout() if cut):
            node = trees.at(given, place)
            if isinstance(node, torch.Tensor):
                dim = self._dim(trees.at(dict(enumerate(self.args)) | self.kwargs, place))
                found[place] = [self._turned(node, dim)]
                continue
            for sample in node if isinstance(node, list | tuple) else ():
                for inside, tensor in trees.with_places(sample):
                    found.setdefault((*place, *inside), []).append(tensor[None])
        return found

    def mapped(self, function: Callable[[Any], Any]) -> "Batch":
        """The batch with `function` applied to every leaf."""
        args = tuple(trees.map_leaves(function, node) for node in self.args)
        mapped = Batch(args, trees.map_leaves(function, self.kwargs), self._given_size)
        mapped.whole, mapped._reading = self.whole, self._reading
        return mapped

    def numbers_per_sample(self) -> Iterator[list[int]]:
        """For each list with one entry per sample, how many rows the tensors of each entry have: boxes, tokens."""
        for node in (*self.args, *self.kwargs.values()):
            if self._is_list_of_samples(node):
                yield [sum(len(tensor) for tensor in trees.tensors(entry) if tensor.dim()) for entry in node]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        found: list[torch.Tensor] = []
        for node in (*self.args, *self.kwargs.values()):
            if isinstance(node, torch.Tensor):
                found.append(node)
            else:
                found.extend(trees.tensors(node))
        return found


def balanced(size: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of `parts` runs of `size` rows whose lengths differ by one at most, longer ones first.

    The same cut as `torch.tensor_split`, which leaves no short tail behind as `torch.split` does.
    """
    short, longer = divmod(size, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + short + (part < longer))
    return list(itertools.pairwise(bounds))


def is_array(node: Any) -> bool:
    """Whether `node` is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)


def is_samples(node: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list or tuple has one entry per sample, rather than one per kind of input.

    Collate functions make lists of both: `[inputs, targets]`, and images of different sizes. What differs in kind
    (type, dimensions) is no list of samples.
    """
    given = [child for child in node if child is not None]
    if len(set(map(_kind, given))) > 1:
        return False
    if isinstance(node, list):
        return not _differ_behind_the_first(node)
    lengths = {len(child) if isinstance(child, torch.Tensor) and child.dim() else -1 for child in given}
    # a tuple of equally long tensors is (input, target, ...); collate functions also make tuples of samples
    return not hasattr(node, "_fields") and (len(lengths) > 1 or lengths == {-1})


def _kind(entry: Any) -> Any:
    """What all entries of a list of samples have in common; objects of other types are taken for one kind."""
    if isinstance(entry, torch.Tensor):
        return entry.dtype, entry.dim()
    return next((kind for kind in (str, Mapping, list | tuple) if isinstance(entry, kind)), None)


def _differ_behind_the_first(node: list[Any]) -> bool:
    """Whether tensors are equally long and differ in other dimensions, which images of different sizes do too."""
    shapes = {child.shape for child in node if isinstance(child, torch.Tensor) and child.dim()}
    lengths = {shape[0] for shape in shapes}
    return len(shapes) > 1 and len(lengths) == 1 and not _are_images(shapes)


def _are_images(shapes: Iterable[Sequence[int]]) -> bool:
    return all(len(shape) == 3 and shape[0] in (1, 3, 4) for shape in shapes)


def _length(node: Any) -> int:
    """The length of dimension 0 of a tensor or an array."""
    return int(node.size(0)) if isinstance(node, torch.Tensor) else len(node)  # nested tensors have no shape


def _votes(node: Any) -> Iterator[int]:
    if isinstance(node, torch.Tensor) or is_array(node):
        if node.ndim:
            yield _length(node)
    elif isinstance(node, list | tuple) and node and is_samples(node):
        yield len(node)
    else:
        for _, child in trees.children(node) or ():
            yield from _votes(child)


def _lists_of_equals(node: Any) -> Iterator[tuple[int, int]]:
    """For each list of tensors of one length among what counts as samples, how many there are, and that length."""
    if isinstance(node, list) and node and is_samples(node):
        length = _length_of_all(node)
        if length is not None:
            yield len(node), length
    else:
        for _, child in trees.children(node) or ():
            yield from _lists_of_equals(child)


def _length_of_all(entries: Any) -> int | None:
    """The one length of all tensors in `entries`, where each is or holds some, and nothing else."""
    inside = [list(trees.leaves(entry)) for entry in entries]
    leaves = list(itertools.chain.from_iterable(inside))
    if not all(inside) or not all(isinstance(leaf, torch.Tensor) and not leaf.is_nested for leaf in leaves):
        return None
    shapes = {leaf.shape for leaf in leaves}
    lengths = {shape[0] if shape else None for shape in shapes}
    return lengths.pop() if len(lengths) == 1 and not _are_images(shapes) else None


def _uncuttable(node: Any) -> str | None:
    if isinstance(node, PackedSequence):
        return "packed sequence"
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            return "nested tensor"
        if node.is_meta:
            return "tensor without data (on the meta device)"
        return None if node.layout == torch.strided else "sparse tensor"
    inner = trees.children(node)
    if inner is None:
        # batched graphs and the like are objects of their own that can be moved to a device
        moves = hasattr(node, "to") and not isinstance(node, torch.nn.Module)
        return type(node).__name__ if moves else None
    return next((found for _, child in inner if (found := _uncuttable(child)) is not None), None)
