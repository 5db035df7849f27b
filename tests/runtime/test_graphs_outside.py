"""Graphs that a forward did not make itself: only one backward can pass them, and nothing is lost if it fails."""

import copy
import gc
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.verification.border import Passing
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


def in_a_list_of_tuples(encoder, net):
    contexts = [(encoder(X[:3]), 1.0)]
    return (lambda x, y: F.mse_loss(net(x) + contexts[0][0].mean(), y)), (X, Y)


def under_a_mask(encoder, net):
    context = encoder(X[:1]).mean()

    def forward(x, y, mask):
        return ((net(x) * context - y).pow(2).mean(1) * mask).sum() / mask.sum()

    return forward, (X, Y, (torch.arange(16) % 3 > 0).double())


def around_checkpoints(encoder, net):
    context = encoder(X[:1]).mean()

    def block(x):
        return net(x) * context

    return (lambda x, y: F.mse_loss(checkpoint(block, x, use_reentrant=False), y)), (X, Y)


def in_a_transform(encoder, net):
    context = encoder(X[:1]).mean()

    def of_one(x, y):
        return F.mse_loss(net(x) * context, y)

    return (lambda x, y: torch.func.vmap(of_one)(x, y).mean()), (X, Y)


def beside_an_argument(encoder, net):
    hidden = encoder(X)
    context = hidden.mean()
    return (lambda h, y: F.mse_loss(net(h) * context, y)), (hidden, Y)


def in_an_argument_and_the_closure(encoder, net):
    hidden = encoder(X)
    return (lambda h, y: F.mse_loss(net(h), y) + hidden.pow(2).mean()), (hidden, Y)


def with_a_row_for_each_sample(encoder, net):
    hidden = encoder(X)
    return (lambda x, y: F.mse_loss(net(x), y) + hidden.pow(2).mean()), (X, Y)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x, scale):
        context.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(context, gradient):
        x, scale = context.saved_tensors
        return gradient * scale, (gradient * x).sum()


def in_a_function_of_its_own(encoder, net):
    scale = encoder(X[:1]).mean()
    return (lambda x, y: F.mse_loss(Scaled.apply(net(x), scale), y)), (X, Y)


def in_a_reentrant_checkpoint(encoder, net):
    context = encoder(X[:1]).mean()

    def block(x):
        return net(x) * context

    return (lambda x, y: F.mse_loss(checkpoint(block, x, use_reentrant=True), y)), (X.clone().requires_grad_(), Y)


def other_rows_in_parts(encoder, net):
    noise = torch.cat([encoder(X), encoder(X)]) * 0
    return (lambda x, y: F.mse_loss(net(x + noise[: len(x)]), y)), (X, Y)


SPLIT = [in_the_closure, in_an_object, in_a_module, in_a_list_of_tuples, under_a_mask, around_checkpoints,
         in_a_transform, beside_an_argument]  # fmt: skip
WHOLE = {
    in_an_argument_and_the_closure: "it uses 'hidden', which has a graph of its own",
    with_a_row_for_each_sample: "it uses 'hidden', which has a graph of its own",
    in_a_function_of_its_own: "it uses 'scale', which has a graph of its own",
    in_a_reentrant_checkpoint: "which has a graph of its own",
    other_rows_in_parts: "a few rows give another gradient in two parts",
}


@pytest.mark.parametrize("parts", ["auto", 4])
@pytest.mark.parametrize("place", [*SPLIT, *WHOLE])
def test_a_graph_outside_is_passed_once(place, parts):
    encoder, net = layers()
    parameters = [*encoder.parameters(), *net.parameters()]
    memory = runtime.preset("16gb", micro_batches=parts)
    for _ in range(4):
        forward, batch = place(encoder, net)
        forward(*batch).backward()
        expected = [parameter.grad for parameter in parameters]
        encoder.zero_grad()
        net.zero_grad()
        forward, batch = place(encoder, net)
        memory.forward_backward(forward, *batch)
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-12)
            parameter.grad = None
    (report,) = memory.report().forwards
    if parts != "auto":
        assert WHOLE.get(place, "None") in str(report.whole_because)
        assert report.micro_batches == (4 if place in SPLIT else None)


def actor_and_temperature():
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 6).double(), nn.Linear(7, 1).double()
    return actor, critic, nn.Parameter(torch.zeros(1).double())


def trained_by(update, before=lambda call: None):
    """A soft actor and its temperature, a number at first; after each call all gradients."""
    actor, critic, logarithm = actor_and_temperature()
    parameters, temperature, found = [*actor.parameters(), *critic.parameters(), logarithm], 0.2, []
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def policy(state):
        mean, deviation = actor(state).chunk(2, 1)
        action = torch.distributions.Normal(mean, deviation.exp()).rsample()
        likelihood = torch.distributions.Normal(mean, deviation.exp()).log_prob(action).sum(1, keepdim=True)
        return (temperature * likelihood - critic(torch.cat([state, action], 1))).mean(), likelihood

    for call in range(6):
        torch.manual_seed(call)
        before(call)
        likelihood = update(policy, X)[1].detach()
        found.append([parameter.grad for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
        update(lambda likelihood: -(logarithm.exp() * (likelihood + 3)).mean(), likelihood)
        optimizer.step()
        optimizer.zero_grad()
        temperature = logarithm.exp()
    return found


def by_hand(forward, *batch):
    result = forward(*batch)
    (result[0] if isinstance(result, tuple) else result).backward()
    return result


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_temperature_that_another_optimizer_learns_leaves_a_policy_split(parts):
    memory = runtime.preset("16gb", micro_batches=parts, precision="fp32")
    found = trained_by(memory.forward_backward)
    torch.testing.assert_close(found, trained_by(by_hand), rtol=1e-12, atol=1e-15)
    assert memory.report().forwards[0].micro_batches == parts


@pytest.mark.parametrize("refused", [8, 20])
def test_a_policy_whose_temperature_is_learned_recovers_in_parts(refused):
    expected, memory = trained_by(by_hand), runtime.preset("16gb", precision="fp32")
    with SimulatedCard() as card:
        found = trained_by(memory.forward_backward, lambda call: card.fail_at(refused) if call == 4 else None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert memory.report().retries == 1


@pytest.mark.parametrize("window", [2, 3])
def test_a_graph_outside_flows_into_an_accumulation_window(window):
    memory = runtime.preset("16gb", micro_batches=2, precision="fp32")
    encoder, net = layers()
    parameters = [*encoder.parameters(), *net.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    other = copy.deepcopy([encoder, net])
    batches = [X[:12], X[4:], X[2:9], X[:5]]
    for place, x in enumerate(memory.accumulate(batches, window)):
        context = encoder(X[:1]).mean()
        memory.forward_backward(lambda x, c=context: (net(x) * c).pow(2).mean(), x)
        if memory.window_closed:
            held = batches[place + 1 - (place % window + 1) : place + 1]
            rows = torch.cat(held)
            (other[1](rows) * other[0](X[:1]).mean()).pow(2).mean().backward()
            expected = [parameter.grad for layer in other for parameter in layer.parameters()]
            torch.testing.assert_close([parameter.grad for parameter in parameters], expected, rtol=1e-12, atol=1e-15)
            memory.zero_grad(optimizer)
            optimizer.zero_grad()
            for layer in other:
                layer.zero_grad()


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


def after_what_is_computed_in_the_forward(encoder, net, refuse):
    context = encoder(X[:1]).mean()
    return lambda x, y: F.mse_loss(refuse(net(x)) * context, y)


def ahead_of_what_is_computed_in_the_forward(encoder, net, refuse):
    state = types.SimpleNamespace(context=encoder(X[:1]).mean())
    return lambda x, y: F.mse_loss(refuse(net(x) * state.context), y)


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("place", [after_what_is_computed_in_the_forward, ahead_of_what_is_computed_in_the_forward])
def test_a_backward_that_fails_before_it_comes_to_a_graph_outside_starts_again_in_parts(place, failing):
    """Of what it has not come to nothing is freed; the calls between those that explore know that too."""
    encoder, net = layers()
    parameters, largest = [*encoder.parameters(), *net.parameters()], 16

    def refuse(out):
        return through(lambda gradient: gradient if len(gradient) <= largest else fail(gradient))(out)

    memory = runtime.preset("16gb", precision="fp32", checkpointing="off")
    for call in range(5):
        largest = 16
        expected = torch.autograd.grad(place(encoder, net, refuse)(X, Y), parameters)
        if call == failing:
            largest = 10
        memory.forward_backward(place(encoder, net, refuse), X, Y)
        assert memory.report().retries == (call >= failing)
        torch.testing.assert_close([parameter.grad for parameter in parameters], [*expected], rtol=1e-12, atol=1e-15)
        for parameter in parameters:
            parameter.grad = None


def test_a_graph_outside_that_lives_on_is_watched_no_more():
    """What is added frees nothing, so the same graph may be used in every call."""
    shift, net = nn.Parameter(torch.zeros(3).double()), layers()[1]
    context, memory = shift + 1, runtime.preset("16gb")
    for _ in range(3):
        memory.forward_backward(lambda x, y: F.mse_loss(net(x) * context, y), X, Y)
    assert not any(isinstance(one, Passing) for one in gc.get_objects())
    with torch.no_grad():
        expected = 3 * torch.autograd.functional.jacobian(lambda s: F.mse_loss(net(X) * (s + 1), Y), shift.detach())
    assert torch.allclose(shift.grad, expected, rtol=1e-12)


def test_a_loss_without_a_graph_is_named():
    net = layers()[1]
    with pytest.raises(ValueError, match="forward: returned a loss without a graph"):
        runtime.preset("16gb").forward_backward(lambda x, y: F.mse_loss(net(x), y).detach(), X, Y)
