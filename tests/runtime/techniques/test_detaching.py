"""`detach_`: nothing that refers to the state keeps the last iteration's graph."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


@dataclass
class Cache:
    keys: list
    length: int


def made():
    return torch.ones(3, requires_grad=True) * 2


def test_a_tensor_is_detached_where_it_is():
    state = made()
    alias = state
    assert runtime.detach_(state) is alias
    assert alias.grad_fn is None and not alias.requires_grad


def test_containers_keep_their_identity_and_lose_their_graphs():
    keys = [made(), made()[:2]]
    state = {"pair": Pair(made(), made()), "cache": Cache(keys, 2), "name": "lstm", "none": None}
    data = keys[1].data_ptr()
    found = runtime.detach_(state)
    assert found is state and found["cache"].keys is keys
    tensors = [*found["pair"], *keys]
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in tensors)
    assert isinstance(found["pair"], Pair) and found["name"] == "lstm"
    assert keys[1].data_ptr() == data


def test_views_in_tuples_are_replaced():
    whole = made()
    view = whole[:2]
    found = runtime.detach_((view, 5))
    assert found[0].grad_fn is None and found[1] == 5
    assert view.grad_fn is not None
    assert found[0].data_ptr() == view.data_ptr()


def test_leaves_that_train_stay_as_they_are():
    weight = nn.Parameter(torch.ones(3))
    assert runtime.detach_([weight])[0] is weight and weight.requires_grad


def test_memory_does_not_grow_with_iterations():
    cell = nn.LSTMCell(4, 4)

    def held(detaches):
        hidden = None
        with SimulatedCard() as card:
            sizes = []
            for _ in range(6):
                hidden = cell(torch.ones(2, 4), hidden)
                if detaches:
                    hidden = runtime.detach_(hidden)
                sizes.append(card.current_bytes)
        return sizes

    assert held(False)[-1] > held(False)[2]
    assert len(set(held(True))) == 1
