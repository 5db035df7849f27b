"""Sums over bits tell of every write, in tensors of all types that have one, and leave the others alone."""

import pytest
import torch

from oomfix.runtime.state.checksums import Checksums

WITH_SUMS = {
    "float": torch.zeros(3, 4),
    "half": torch.zeros(3, dtype=torch.bfloat16),
    "double": torch.zeros(3, dtype=torch.float64),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "flags": torch.zeros(3, dtype=torch.bool),
    "transposed": torch.zeros(3, 4).t(),
    "one number": torch.tensor(0.0),
}
WITHOUT = {
    "trained": torch.zeros(3, requires_grad=True),
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": torch.eye(3).to_sparse(),
    "without data": torch.empty(3, device="meta"),
    "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
    "wide": torch.zeros(3, dtype=torch.complex128),
}


@pytest.mark.parametrize("kind", WITH_SUMS)
def test_a_write_through_data_is_told_and_nothing_else(kind):
    tensor, other = WITH_SUMS[kind].clone(), torch.zeros(2)
    sums = Checksums([tensor, other])
    assert sums.changed() == []
    tensor.data.fill_(1)
    assert [id(one) for one in sums.changed()] == [id(tensor)]


def test_a_change_that_a_norm_would_miss_is_told():
    tensor = torch.tensor([3.0, 4.0, 1e-8])
    sums = Checksums([tensor])
    tensor.data[2] = 2e-8
    assert len(sums.changed()) == 1


@pytest.mark.parametrize("kind", WITHOUT)
def test_what_has_no_such_sum_is_left_out(kind):
    sums = Checksums([WITHOUT[kind]])
    if kind == "trained":
        WITHOUT[kind].data.fill_(1)
    assert sums.changed() == []
