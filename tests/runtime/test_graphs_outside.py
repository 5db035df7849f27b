"""Graphs that a forward did not make itself: only one backward can pass them, and nothing is lost if it fails."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError
from tests.runtime.through import through

X, Y = torch.randn(16, 4).double(), torch.randn(16, 3).double()


def layers():
    torch.manual_seed(0)
    return nn.Linear(4, 4).double(), nn.Linear(4, 3).double()


def in_the_closure(encoder, net):
    context = encoder(X[:1]).mean()
    return (lambda x, y: F.mse_loss(net(x) + context, y)), (X, Y)


def in_an_object(encoder, net):
    state = types.SimpleNamespace(context=encoder(X[:1]).mean())
    return (lambda x, y: F.mse_loss(net(x) + state.context, y)), (X, Y)


def in_a_module(encoder, net):
    net.context = encoder(X[:1]).mean()
    return (lambda x, y: F.mse_loss(net(x) + net.context, y)), (X, Y)


def in_an_argument_and_the_closure(encoder, net):
    hidden = encoder(X)
    return (lambda h, y: F.mse_loss(net(h), y) + hidden.pow(2).mean()), (hidden, Y)


@pytest.mark.parametrize("parts", ["auto", 4])
@pytest.mark.parametrize("place", [in_the_closure, in_an_object, in_a_module, in_an_argument_and_the_closure])
def test_a_graph_outside_is_passed_once(place, parts):
    encoder, net = layers()
    forward, batch = place(encoder, net)
    parameters = [*encoder.parameters(), *net.parameters()]
    expected = torch.autograd.grad(forward(*batch), parameters)
    forward, batch = place(encoder, net)
    runtime.preset("16gb", micro_batches=parts).forward_backward(forward, *batch)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-12)


def fail(gradient):
    raise OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("place", ["argument", "closure"])
def test_out_of_memory_in_a_graph_outside_leaves_gradients_as_they_were(place, window):
    encoder, net = layers()
    shift = nn.Parameter(torch.zeros(4).double())
    parameters = [*encoder.parameters(), *net.parameters(), shift]
    memory = runtime.preset("16gb")
    for _ in memory.accumulate([0, 1], window):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        # it fails on the way to the encoder, and has come to the shift by then
        hidden = through(fail)(encoder(X)) + shift
        with pytest.raises(RuntimeError, match="graph made before the call"):
            if place == "argument":
                memory.forward_backward(lambda h, y: F.mse_loss(net(h), y), hidden, Y)
            else:
                memory.forward_backward(lambda x, y, h=hidden: F.mse_loss(net(x) + h.mean(), y), X, Y)
        assert all(bool((parameter.grad == 1).all()) for parameter in parameters)


def test_a_loss_without_a_graph_is_named():
    net = layers()[1]
    with pytest.raises(ValueError, match="forward: returned a loss without a graph"):
        runtime.preset("16gb").forward_backward(lambda x, y: F.mse_loss(net(x), y).detach(), X, Y)
