"""Arguments of the loaders that rewritten loops go over: `pin_memory=True`, fewer batches fetched ahead (OOM503)."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from oomfix.presets import Preset
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.rewrite.surroundings.loaders import Loaders
from oomfix.rewrite.surroundings.moved_batches import moves_batches
from oomfix.rewrite.surroundings.torchvision_data import TorchvisionData
from oomfix.script import Script
from oomfix.script.fixes.added_keyword import added_keyword
from oomfix.script.syntax.edits import Edit, replace
from oomfix.script.syntax.patterns import Pattern
from oomfix.script.syntax.scopes import Scopes

_POSITIONAL = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
)
_OWN_BATCHES = frozenset({"collate_fn", "pin_memory", "pin_memory_device"})
_DRAWN_AHEAD = frozenset({"sampler", "batch_sampler", "persistent_workers"})
_ELSEWHERE = Pattern(
    r"set_default_(device|tensor_type)|set_video_backend|with torch\.device|default_collate|torch\.cuda\.device\("
)
"""What makes tensors on a GPU, or batches of another kind, where nothing that is seen of the data says so."""
_CARD = Pattern(r"cuda:(?!0$)")
_CHOOSES_CARD = Pattern(r"\bset_device\(|CUDA_VISIBLE_DEVICES")


class Written(NamedTuple):
    """An argument that is written into the call that makes a loader.

    Attributes:
        edits: that write it.
        verdict: of a loop that goes over the loader.
        line: of the call.
        argument: as it is written.
    """

    edits: tuple[Edit, ...]
    verdict: Verdict
    line: int
    argument: str


def loader_arguments(reading: Reading, preset: Preset, verdicts: Sequence[Verdict]) -> list[Written]:
    """What is written into the loaders of rewritten loops, in the order of the loops.

    Args:
        reading: the file.
        preset: what the file is rewritten for.
        verdicts: of its loops.
    """
    script, text = reading.script, reading.source.text
    # nothing else is pinned, or has fewer batches fetched: who makes what in the file is not asked then
    if "DataLoader" not in text or not ("torchvision" in text or "prefetch_factor" in text):
        return []
    scopes = Scopes(script.source.tree)
    loaders = Loaders(reading, scopes)
    pinning = _Pinning(script, scopes, loaders)
    written: dict[str, Written] = {}
    for verdict in verdicts:
        loop = verdict.loop.node
        if verdict.form == "none" or not isinstance(loop, ast.For):
            continue
        for call in loaders.of(loop):
            place = f"{call.lineno}:{call.col_offset}"
            if preset.pin_memory and pinning.is_certain(call, loop):
                edits = added_keyword(reading.source, call, "pin_memory=True")
                written.setdefault(f"{place} pin", Written(edits, verdict, call.lineno, "pin_memory=True"))
            if (ahead := _fetched_ahead(call, preset.prefetch_factor)) is not None:
                edits = replace(reading.source, ahead, str(preset.prefetch_factor))
                argument = f"prefetch_factor={preset.prefetch_factor}"
                written.setdefault(f"{place} ahead", Written(edits, verdict, call.lineno, argument))
    return list(written.values())


class _Pinning:
    """Decides which loaders may page-lock their batches."""

    def __init__(self, script: Script, scopes: Scopes, loaders: Loaders) -> None:
        self._script = script
        self._scopes = scopes
        self._loaders = loaders
        self._data = TorchvisionData(scopes, script.imports)
        self._allowed = self._is_allowed()

    def is_certain(self, call: ast.Call, loop: ast.For) -> bool:
        """Whether a loader's batches certainly lie on the CPU as plain tensors, and the loop moves them to the GPU."""
        given = _given(call)
        if not self._allowed or given is None or not _OWN_BATCHES.isdisjoint(given) or "dataset" not in given:
            return False
        size = given.get("batch_size")
        # without a batch size, what the data set gives is not copied: pinned, it would be
        if isinstance(size, ast.Constant) and size.value is None:
            return False
        return (
            moves_batches(loop, self._scopes) and call not in self._loaders.kept and self._data.holds(given["dataset"])
        )

    def _is_allowed(self) -> bool:
        """Whether the file makes tensors on the CPU where it says nothing else, and trains on the current card.

        The thread that pins opens the current card, which would then be another one than the one trained on.
        """
        text = self._script.source.text
        if _ELSEWHERE.search(text) or not self._script.devices.may_be_cuda:
            return False
        texts = (node.value for node in self._script.imports.nodes.of(ast.Constant))
        named = any(isinstance(one, str) and _CARD.search(one) for one in texts)
        return not named or bool(_CHOOSES_CARD.search(text))


def _given(call: ast.Call) -> dict[str, ast.expr] | None:
    """The arguments of a call that makes a loader, by name; None where some are not seen."""
    if any(isinstance(one, ast.Starred) for one in call.args) or len(call.args) > len(_POSITIONAL):
        return None
    given = dict(zip(_POSITIONAL, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        given[keyword.arg] = keyword.value
    return given


def _fetched_ahead(call: ast.Call, most: int) -> ast.Constant | None:
    """The number of batches that each worker prepares ahead, where it is above `most`, and fewer are the same batches.

    An order of the script's own may be drawn while training draws; workers that stay have drawn for what is ahead when
    an epoch is left early.
    """
    given = _given(call) or {}
    ahead = given.get("prefetch_factor")
    if not isinstance(ahead, ast.Constant) or type(ahead.value) is not int or not _DRAWN_AHEAD.isdisjoint(given):
        return None
    return ahead if ahead.value > most else None
