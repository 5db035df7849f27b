"""Batches whose samples stand behind time steps, as `nn.LSTM` and `nn.Transformer` take them, are split along these."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.sample_dims import samples_behind_steps
from oomfix.runtime.compat import OutOfMemoryError

STEPS, SAMPLES, WORDS = 7, 12, 20


def words(seed, steps=STEPS, samples=SAMPLES):
    return torch.randint(2, WORDS, (steps, samples), generator=torch.Generator().manual_seed(seed))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def split_calls(memory):
    return sum(known.split_calls for known in memory._forwards)


class Recurrent(nn.Module):
    def __init__(self, features=WORDS):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer, self.head = nn.Embedding(WORDS, 6), nn.LSTM(6, 8), nn.Linear(8, features)

    def forward(self, x, state=None):
        hidden, state = self.layer(x if x.is_floating_point() else self.words(x), state)
        return self.head(hidden), state


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, source, target):
        later = torch.triu(torch.full((len(target), len(target)), -torch.inf).double(), 1)
        masks = {"src_key_padding_mask": (source == 1).T, "tgt_key_padding_mask": (target == 1).T}
        return self.head(self.body(self.words(source), self.words(target), tgt_mask=later, **masks))


def padded(seed, steps=STEPS):
    found = words(seed, steps)
    lengths = torch.randint(3, steps + 1, (SAMPLES,), generator=torch.Generator().manual_seed(seed))
    return found.masked_fill(torch.arange(steps)[:, None] >= lengths, 1)


def language_model(seed):
    model = Recurrent()
    return model, lambda x, y: F.cross_entropy(model(x)[0].view(-1, WORDS), y), (words(seed), words(seed + 9).view(-1))


def carried_state(seed):
    model = Recurrent()
    states = numbers(1, SAMPLES, 8, seed=seed), numbers(1, SAMPLES, 8, seed=seed + 1)

    def forward(x, y, state):
        output, state = model(x, state)
        return F.cross_entropy(output.flatten(0, 1), y.flatten()), state

    return model, forward, (words(seed), words(seed + 9), states)


def classes_of_sequences(seed):
    model = Recurrent(4)
    classes = words(seed)[0] % 4
    return model, lambda x, y: F.cross_entropy(model(x)[0][-1], y), (numbers(STEPS, SAMPLES, 6, seed=seed), classes)


def packed(seed):
    model = Recurrent(4)
    lengths = (words(seed)[0] % STEPS + 1).sort(descending=True).values

    def forward(x, lengths, y):
        _, (last, _) = model.layer(nn.utils.rnn.pack_padded_sequence(x, lengths))
        return F.cross_entropy(model.head(last[-1]), y)

    return model, forward, (numbers(STEPS, SAMPLES, 6, seed=seed), lengths, words(seed)[0] % 4)


def translation(seed):
    model = Translator()

    def forward(source, target):
        output = model(source, target[:-1])
        return F.cross_entropy(output.flatten(0, 1), target[1:].flatten(), ignore_index=1)

    return model, forward, (padded(seed), padded(seed + 9, STEPS + 2))


def masked_mean(seed):
    model = Recurrent(3)

    def forward(x, y, mask):
        return ((model(x)[0] - y).pow(2).mean(2) * mask).sum() / (mask.sum() + 1e-8)

    mask = (words(seed) % 3 > 0).double()
    return model, forward, (numbers(STEPS, SAMPLES, 6, seed=seed), numbers(STEPS, SAMPLES, 3, seed=seed + 1), mask)


@pytest.mark.parametrize(
    "made", [language_model, carried_state, classes_of_sequences, packed, translation, masked_mean]
)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_samples_behind_time_steps_are_split_exactly(made, parts, relative_error):
    memory = runtime.preset("16gb", micro_batches=parts, precision="fp32")
    split, forward_of_split, _ = made(0)
    split.double()
    for seed in range(4):
        whole, forward, batch = made(seed)
        whole.double()
        loss = forward(*batch)
        loss = loss if isinstance(loss, torch.Tensor) else loss[0]
        loss.backward()
        split.zero_grad()
        result = memory.forward_backward(forward_of_split, *batch)
        found = result if isinstance(result, torch.Tensor) else result[0]
        assert relative_error(split, whole) < 1e-12
        assert abs(float(found) - float(loss)) < 1e-12
    assert split_calls(memory) >= 3


def test_a_state_comes_back_with_its_samples_in_their_place():
    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    model, forward, batch = carried_state(0)
    model.double()
    _, expected = forward(*batch)
    _, state = memory.forward_backward(forward, *batch)
    for of_split, of_whole in zip(state, expected, strict=True):
        assert torch.allclose(of_split, of_whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("couple", [lambda out: out - out.mean(1, keepdim=True), lambda out: out - out.flip(1)])
def test_samples_behind_time_steps_that_depend_on_each_other_run_whole(couple):
    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    model = Recurrent(3).double()
    batch = numbers(STEPS, SAMPLES, 6), numbers(STEPS, SAMPLES, 3, seed=1)
    memory.forward_backward(lambda x, y: (couple(model(x)[0]) - y).pow(2).mean(), *batch)
    assert split_calls(memory) == 0


def test_a_batch_with_as_many_steps_as_samples_runs_whole():
    """Which of the two a tensor begins with is not to be seen then."""
    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    model = Recurrent().double()
    forward = lambda x, y: F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())  # noqa: E731
    memory.forward_backward(forward, words(0), words(1))
    memory.forward_backward(forward, words(0, SAMPLES), words(1, SAMPLES))
    memory.forward_backward(forward, words(0, STEPS, 9), words(1, STEPS, 9))
    assert split_calls(memory) == 2


def test_what_writes_a_batch_behind_time_steps_runs_whole():
    """Its micro-batches would be copies, and the caller would not see what was written."""
    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    model = Recurrent(3).double()
    x, y = numbers(STEPS, SAMPLES, 6), numbers(STEPS, SAMPLES, 3, seed=1)
    expected = 0.5 * x
    memory.forward_backward(lambda x, y: (model(x.mul_(0.5))[0] - y).pow(2).mean(), x, y)
    assert torch.equal(x, expected)
    assert split_calls(memory) == 0


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(7, 12), (84,)], 12),
        ([(7, 12, 6), (12,)], 12),
        ([(7, 12, 6), (12, 7), (7, 7)], 12),
        ([(12, 3, 8, 8), (12,)], None),
        ([(12, 6), (12, 5)], None),
        ([(12, 6)], None),
        ([(12, 12), (12,)], 12),
    ],
)
def test_a_batch_may_have_steps_first_where_all_its_tensors_agree(shapes, expected):
    assert samples_behind_steps([torch.zeros(shape) for shape in shapes]) == expected


def test_a_batch_behind_time_steps_that_does_not_fit_goes_on_in_micro_batches(relative_error):
    model, forward, batch = classes_of_sequences(0)
    model.double()
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(batch[0])[0][-1], batch[1]).backward()

    def limited(x, y):
        if x.shape[1] > 4:
            raise OutOfMemoryError("CUDA out of memory. Tried to ...")
        return forward(x, y)

    memory = runtime.preset("16gb", precision="fp32")
    memory.forward_backward(limited, *batch)
    assert relative_error(model, reference) < 1e-12
    assert split_calls(memory) == 1


def test_few_samples_that_tell_nothing_are_not_taken_for_steps():
    """Anchors do not depend on each other either: the images of a batch stay its samples, which a window counts."""
    torch.manual_seed(0)
    model, memory = nn.Linear(6, 1).double(), runtime.preset("16gb", precision="fp32", micro_batches=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = model.weight.detach().clone()

    def forward(x, positive):
        loss = F.softplus(model(x).squeeze(-1))
        return loss.sum() / (positive.sum() + 1e-6)

    images = [2, 3]
    batches = [(numbers(n, 7, 6, seed=n), torch.zeros(n, 7, dtype=torch.bool)) for n in images]
    batches[0][1][0, 4] = batches[1][1][1, :3] = True
    losses = [forward(*batch) * n / sum(images) for batch, n in zip(batches, images, strict=True)]
    expected = torch.autograd.grad(sum(losses), model.weight)[0]
    for x, positive in memory.accumulate(batches, 2):
        memory.forward_backward(forward, x, positive)
    memory.step(optimizer)
    assert torch.allclose(weights - model.weight, expected, rtol=1e-12, atol=1e-15)
