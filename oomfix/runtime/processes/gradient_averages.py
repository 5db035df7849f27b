"""Gradients averaged over processes after backward, in one fixed order, whatever each process has computed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from oomfix.runtime.processes.agreement import agreement_in

_ALONE_BYTES = 1 << 20  # gradients from this size on are sent as they are
_BUCKET_BYTES = 25 << 20  # smaller ones are copied together up to this size, as DistributedDataParallel does
_NONE, _DENSE, _SPARSE = range(3)


def average_gradients(parameters: Sequence[torch.Tensor], group: "dist.ProcessGroup") -> None:
    """Put the average over the processes of `group` in place of the gradient of each of `parameters`.

    A process that has no gradient for a parameter counts as zero there, for it may have taken another branch; a
    parameter that no process has a gradient for stays without one. All processes pass the same parameters in the same
    order, so they send the same whatever they have computed.

    Gradients of 1 MiB and more are sent in place, smaller ones in copies of at most 25 MiB. Each is divided by the
    number of processes before they are added up, as DistributedDataParallel does it.
    """
    # on the host, since waiting for a device to say what it has no gradient for would hold the program up
    kinds = agreement_in(group).largest([_kind(parameter.grad) for parameter in parameters])
    share = 1.0 / dist.get_world_size(group)
    parcels = list(_parcels([(p, kind) for p, kind in zip(parameters, kinds, strict=True) if kind != _NONE]))
    with torch.no_grad():
        sent = [(parcel, parcel.send(share, group)) for parcel in parcels]
        for parcel, work in sent:
            work.wait()
            parcel.unpack()


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


def _parcels(reduced: list[tuple[torch.Tensor, int]]) -> Iterator["_Alone | _Bucket"]:
    """What is sent at once; backward comes to the last parameters first, and so does this."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter, kind in reversed(reduced):
        if kind == _SPARSE or _bytes(parameter) >= _ALONE_BYTES:
            yield _Alone(parameter, sparse=kind == _SPARSE)
            continue
        bucket = open_buckets.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(parameter)
        if sum(map(_bytes, bucket)) >= _BUCKET_BYTES:
            yield _Bucket(bucket)
            del open_buckets[parameter.dtype, parameter.device]
    yield from map(_Bucket, open_buckets.values())


class _Alone:
    """One gradient, sent in place where it lies in order."""

    def __init__(self, parameter: torch.Tensor, sparse: bool) -> None:
        self._parameter = parameter
        self._sparse = sparse

    def send(self, share: float, group: "dist.ProcessGroup") -> Any:
        """Begin to add up; returns what can be waited for."""
        parameter = self._parameter
        if parameter.grad is None:
            layout = torch.sparse_coo if self._sparse else torch.strided
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=layout)
        gradient = parameter.grad
        if self._sparse:
            gradient = gradient if gradient.is_sparse else gradient.to_sparse()
            self._sent = gradient.coalesce() * share
        else:
            self._sent = gradient.contiguous().mul_(share)
        return dist.all_reduce(self._sent, group=group, async_op=True)

    def unpack(self) -> None:
        """Make what came back the gradient."""
        gradient = self._parameter.grad
        assert gradient is not None
        if self._sparse:
            self._parameter.grad = self._sent
        elif self._sent is not gradient:
            gradient.copy_(self._sent)


class _Bucket:
    """Small gradients of one dtype and device, sent in one copy."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def send(self, share: float, group: "dist.ProcessGroup") -> Any:
        """Begin to add up; returns what can be waited for."""
        rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._parameters]
        self._sent = torch.cat(rows).mul_(share)
        return dist.all_reduce(self._sent, group=group, async_op=True)

    def unpack(self) -> None:
        """Make what came back the gradients."""
        averages = torch.split(self._sent, [parameter.numel() for parameter in self._parameters])
        present, of_present = [], []
        for parameter, average in zip(self._parameters, averages, strict=True):
            if parameter.grad is None:
                parameter.grad = average.reshape(parameter.shape).clone()
            else:
                present.append(parameter.grad)
                of_present.append(average.view(parameter.shape))
        if present:
            torch._foreach_copy_(present, of_present)


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
