"""Loops of many kinds: gradients are those of whole batches however they are cut, or batches stay whole and say why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard

SAMPLES = 12


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def labels(*shape, seed=2, classes=4):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def plain_batch(seed):
    return drawn(SAMPLES, 6, seed=seed), labels(SAMPLES, seed=seed)


def words_with_padding(seed):
    padded = torch.arange(5)[None] >= labels(SAMPLES, 1, seed=seed) + 2
    return drawn(SAMPLES, 5, 6, seed=seed), torch.where(padded, -100, labels(SAMPLES, 5, seed=seed)), padded


def transcripts(seed):
    lengths = labels(SAMPLES, seed=seed, classes=3) + 1
    return drawn(SAMPLES, 10, 6, seed=seed), labels(SAMPLES, 3, seed=seed) + 1, lengths


def state_of_a_cell():
    model = nn.LSTMCell(6, 4)

    def forward(x, y, hidden, cell):
        state = hidden, cell
        for _ in range(3):
            state = model(x, state)
        return F.cross_entropy(state[0], y), *state

    return model, forward, lambda seed: (*plain_batch(seed), drawn(SAMPLES, 4), drawn(SAMPLES, 4, seed=3))


def ctc(flat=False):
    model = nn.Linear(6, 5)

    def forward(x, targets, lengths):
        scores = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, torch.full((len(x),), x.shape[1]), lengths)

    def joined(seed):
        x, targets, lengths = transcripts(seed)
        return x, torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)]), lengths

    return model, forward, joined if flat else transcripts


def encoder_with_padding():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), 1)

    def forward(x, y, padded):
        return F.cross_entropy(model(x, src_key_padding_mask=padded).transpose(1, 2), y)

    return model, forward, words_with_padding


def causal_mask(tokens):
    model = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(x, mask):
        return model(x, x, x, attn_mask=mask)[0].pow(2).mean()

    return (
        model,
        forward,
        lambda seed: (drawn(SAMPLES, tokens, 6, seed=seed), torch.ones(tokens, tokens).triu(1).bool()),
    )


def packed_inside():
    model = nn.GRU(6, 4, batch_first=True)

    def forward(x, y, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(model(packed)[1][0], y)

    return (
        model,
        forward,
        lambda seed: (drawn(SAMPLES, 5, 6, seed=seed), labels(SAMPLES), labels(SAMPLES, seed=seed) + 1),
    )


def sparse_gradients():
    model = nn.EmbeddingBag(20, 4, sparse=True)
    batch = lambda seed: (labels(SAMPLES, 5, seed=seed, classes=20), labels(SAMPLES))  # noqa: E731
    return model, lambda words, y: F.cross_entropy(model(words), y), batch


def complex_parameters():
    model = nn.Linear(6, 4, dtype=torch.cdouble)
    return model, lambda x, y: F.cross_entropy(model(torch.fft.fft(x)).abs(), y), plain_batch


def parametrized(wrap):
    model = nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 4))
    return model, lambda x, y: F.cross_entropy(model(x), y), plain_batch


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0].abs() < 1)


class TimesSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * len(gradient)


def own_function(function):
    model = network()
    return model, lambda x, y: F.cross_entropy(model[2](function.apply(model[0](x))), y), plain_batch


def compiled_part():
    model = network()
    first = torch.compile(model[0], backend="eager")
    return model, lambda x, y: F.cross_entropy(model[1:](first(x)), y), plain_batch


def rounded(x, step):
    return x + ((x / step).round() * step - x).detach()


def quantised_weights():
    model = network()
    return model, lambda x, y: F.cross_entropy(F.linear(x, rounded(model[0].weight, 0.1))[:, :4], y), plain_batch


def quantised_by_the_largest():
    model = network()

    def forward(x, y):
        out = model[1](model[0](x))
        return F.cross_entropy(model[2](rounded(out, out.detach().abs().max() / 8)), y)

    return model, forward, plain_batch


def features_by_a_hook():
    model, seen = network(), []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))

    def forward(x, y):
        seen.clear()
        return F.cross_entropy(model(x), y) + seen[0].pow(2).mean()

    return model, forward, plain_batch


def hooked_activation(hook):
    model = network()

    def forward(x, y):
        hidden = model[1](model[0](x))
        hidden.register_hook(hook)
        return F.cross_entropy(model[2](hidden), y)

    return model, forward, plain_batch


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        out = self.net(x)
        self.centre = (0.9 * self.centre + 0.1 * out.mean(0)).detach()
        return out - self.centre


def buffer_replaced():
    model = Centred()
    return model, lambda x, y: F.cross_entropy(model(x), y), plain_batch


def generator_of_its_own():
    model = network()

    def forward(x, y, generator):
        kept = torch.rand(len(x), 8, generator=generator) > 0.5
        return F.cross_entropy(model[2](model[1](model[0](x)) * kept), y)

    return model, forward, lambda seed: (*plain_batch(seed), torch.Generator().manual_seed(seed))


def results_without_a_graph():
    model = network()

    def forward(x, y):
        out = model(x)
        return {"loss": F.cross_entropy(out, y), "hits": (out.argmax(1) == y).sum(), "out": out.detach()}

    return model, forward, plain_batch


def parts_whose_loss_is_a_constant():
    model = network()

    def forward(x, y, wanted):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return losses[wanted].sum() if wanted.any() else torch.zeros(()).double()

    return model, forward, lambda seed: (*plain_batch(seed), torch.arange(SAMPLES) < 3)


def steps_until_all_are_small():
    model = nn.Linear(6, 6)

    def forward(x):
        out, steps = x, 0
        while steps < 8 and out.abs().max() > 0.5 + steps:
            out, steps = out + 0.1 * torch.tanh(model(out)), steps + 1
        return out.pow(2).mean()

    return model, forward, lambda seed: (drawn(SAMPLES, 6, seed=seed),)


def attacked_by_sign():
    model = network()

    def forward(x, y):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x])
        return F.cross_entropy(model(x + 0.1 * gradient.sign()), y)

    return model, forward, plain_batch


def reentrant_checkpoint():
    model = network()

    def forward(x, y):
        hidden = torch.utils.checkpoint.checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(model[2](hidden), y)

    return model, forward, plain_batch


def several_crops():
    model = network()
    batch = lambda seed: ([drawn(SAMPLES, 6, seed=seed + n) for n in range(4)], labels(SAMPLES))  # noqa: E731
    return model, lambda crops, y: sum(F.cross_entropy(model(x), y) for x in crops) / len(crops), batch


def written_input():
    model = network()
    return model, lambda x, y: F.cross_entropy(model(x.mul_(2)), y), plain_batch


SPLIT = {
    "state of a cell": state_of_a_cell,
    "ctc": ctc,
    "encoder with padding": encoder_with_padding,
    "causal mask": lambda: causal_mask(5),
    "packed inside": packed_inside,
    "sparse gradients": sparse_gradients,
    "complex parameters": complex_parameters,
    "weight norm": lambda: parametrized(parametrizations.weight_norm),
    "weight norm by hooks": lambda: parametrized(nn.utils.weight_norm),
    "orthogonal": lambda: parametrized(parametrizations.orthogonal),
    "straight through": lambda: own_function(Sign),
    "compiled part": compiled_part,
    "quantised weights": quantised_weights,
    "features by a hook": features_by_a_hook,
    "doubling hook": lambda: hooked_activation(lambda gradient: gradient * 2),
    "generator of its own": generator_of_its_own,
    "results without a graph": results_without_a_graph,
    "parts whose loss is a constant": parts_whose_loss_is_a_constant,
    "attacked by sign": attacked_by_sign,
    "reentrant checkpoint": reentrant_checkpoint,
    "several crops": several_crops,
    "written input": written_input,
}
WHOLE = {
    "targets in one row": (lambda: ctc(flat=True), "it fails on"),
    "mask as long as the batch": (lambda: causal_mask(SAMPLES), "it fails on"),
    "times its samples": (lambda: own_function(TimesSamples), "another gradient"),
    "quantised by the largest": (quantised_by_the_largest, "depend on each other"),
    "normalising hook": (lambda: hooked_activation(lambda gradient: gradient / gradient.norm()), "another gradient"),
    "clamping hook": (lambda: hooked_activation(lambda gradient: gradient.clamp(-0.01, 0.01)), "another gradient"),
    "buffer replaced": (buffer_replaced, "keeps state of its own"),
    "steps until all are small": (steps_until_all_are_small, "depend on each other"),
}


def made(make):
    torch.manual_seed(0)
    model, forward, batch = make()
    return (
        model.to(torch.cdouble) if any(p.is_complex() for p in model.parameters()) else model.double(),
        forward,
        batch,
    )


def trained(make, forward_backward, before=lambda call: None):
    """The gradients of four calls, each with a step behind it."""
    model, forward, batch = made(make)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for call in range(4):
        tensors = batch(call)
        before(call)
        forward_backward(forward, *tensors)
        found += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_hand(forward, *batch):
    result = forward(*batch)
    loss = result["loss"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
    loss.backward()


def assert_close(found, expected, rtol=1e-12):
    for ours, plain in zip(found, expected, strict=True):
        assert (ours - plain).abs().max() <= rtol * max(plain.abs().max(), 1e-6)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", SPLIT)
def test_loops_that_may_be_split(kind, parts):
    memory = runtime.preset("16gb", micro_batches=parts)
    assert_close(trained(SPLIT[kind], memory.forward_backward), trained(SPLIT[kind], by_hand))
    (known,) = memory._forwards
    assert known.split_calls >= 3 * (parts > 1)


@pytest.mark.parametrize("kind", WHOLE)
def test_loops_that_stay_whole_say_why(kind):
    make, why = WHOLE[kind]
    memory = runtime.preset("16gb", micro_batches=3)
    assert_close(trained(make, memory.forward_backward), trained(make, by_hand))
    ((_, reason),) = memory.report().whole_because.items()
    assert why in reason


def allocations_of_a_call(make):
    """How many storages one forward and backward allocate."""
    spent = []
    with SimulatedCard() as card:

        def counted(forward, *batch):
            earlier = card.allocations
            by_hand(forward, *batch)
            spent.append(card.allocations - earlier)

        trained(make, counted)
    return spent[1]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95], ids=["forward", "between", "backward"])
@pytest.mark.parametrize("kind", SPLIT)
def test_loops_that_run_out_of_memory_go_on_in_parts(kind, share):
    refused = round(share * allocations_of_a_call(SPLIT[kind]))
    expected, memory = trained(SPLIT[kind], by_hand), runtime.preset("16gb")
    with SimulatedCard() as card:
        found = trained(SPLIT[kind], memory.forward_backward, lambda call: card.fail_at(refused) if call == 1 else None)
    assert_close(found, expected)
    assert memory.report().retries == 1
