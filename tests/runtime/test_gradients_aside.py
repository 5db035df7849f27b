"""Gradients of earlier calls, aside while a call runs, lent to a forward of the whole batch."""

import pytest
import torch

from oomfix.runtime.state.gradients import GradientsAside


@pytest.fixture
def leaf():
    leaf = torch.zeros(2, requires_grad=True)
    leaf.grad = torch.tensor([1.0, 2.0])
    return leaf


@pytest.fixture
def aside(leaf):
    aside = GradientsAside()
    aside.cover([leaf])
    return aside


def test_a_forward_sees_the_earlier_gradients_and_a_backward_does_not(leaf, aside):
    assert leaf.grad is None
    aside.lend(copies=False)
    assert leaf.grad.tolist() == [1, 2]
    aside.take_back()
    assert leaf.grad is None
    (leaf * 3).sum().backward()
    aside.merge()
    assert leaf.grad.tolist() == [4, 5]


@pytest.mark.parametrize("reset", [None, torch.zeros(2)], ids=["none", "zeros"])
def test_what_a_forward_resets_is_gone(leaf, aside, reset):
    aside.lend(copies=False)
    leaf.grad = reset
    aside.take_back()
    (leaf * 3).sum().backward()
    aside.merge()
    assert leaf.grad.tolist() == [3, 3]


def test_a_try_that_is_dropped_has_reset_nothing(leaf, aside):
    aside.lend(copies=False)
    leaf.grad = None
    aside.take_back()
    (leaf * 7).sum().backward()
    assert aside.drop()
    (leaf * 3).sum().backward()
    aside.merge()
    assert leaf.grad.tolist() == [4, 5]


def test_a_call_that_fails_leaves_the_gradients_as_they_were(leaf, aside):
    aside.lend(copies=True)
    leaf.grad.zero_()
    aside.put_back()
    assert leaf.grad.tolist() == [1, 2]
