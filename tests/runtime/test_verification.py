"""A batch is split only where a few rows show that it may be; the traps that reading a model's mode falls into."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.rows import choose_rows, first_part
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.verification.verify import check

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(2))


def modules_of(*models):
    return [module for model in models for module in model.modules()]


def verdict_of(forward, *models, rows=5, batch=(X, Y), trust=False):
    return check(forward, Batch(batch, {}), modules_of(*models), rows, trust)


class PairwiseAttention(nn.Module):
    """Attends to another image of the batch, when training only (seed 001)."""

    def __init__(self):
        super().__init__()
        self.query, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        if self.training:
            keys = torch.cat([x, x.roll(1, 0)], 1).reshape(-1, 2, 6)
            x = (torch.softmax(keys @ self.query(x)[..., None], 1) * keys).sum(1)
        return self.head(x)


class Experts(nn.Module):
    """A mixture of experts with a balance loss over the batch, when training only."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.Linear(6, 12)

    def forward(self, x):
        gate = torch.softmax(self.gate(x), 1)
        out = (self.experts(x).reshape(-1, 3, 4) * gate[..., None]).sum(1)
        balance = 0.01 * 3 * gate.mean(0).pow(2).sum() if self.training else 0.0
        return out, balance


class Momentum(nn.Module):
    """A teacher that follows the student inside its forward."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return (self.student(x) - self.teacher(x)).pow(2).mean()


class Queue(nn.Module):
    """Keeps keys of earlier batches in a plain tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.__dict__["queue"] = torch.zeros(8, 4)

    def forward(self, x):
        out = self.net(x)
        loss = (out @ self.queue.T).pow(2).mean()
        self.queue[: len(out)] = out.detach()[:8]
        return loss


class Counting(nn.Module):
    """Ramps an auxiliary loss by counting its own calls."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Linear(6, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x).pow(2).mean() * min(1.0, self.calls / 100)


COUPLED = {
    "pairwise attention": lambda: (m := PairwiseAttention(), lambda x, y: F.cross_entropy(m(x), y)),
    "balance loss": lambda: (m := Experts(), lambda x, y: F.cross_entropy((o := m(x))[0], y) + o[1]),
    "in-batch negatives": lambda: (
        m := nn.Linear(6, 4),
        lambda x, y: F.cross_entropy(m(x) @ m(x.flip(1)).T, torch.arange(len(x))),
    ),
    "dice over the batch": lambda: (
        m := nn.Linear(6, 4),
        lambda x, y: 1 - 2 * (m(x).sigmoid() * (y[:, None] > 1)).sum() / (m(x).sigmoid().sum() + len(x)),
    ),
    "variance of the batch": lambda: (m := nn.Linear(6, 4), lambda x, y: F.relu(1 - m(x).std(0)).mean()),
    "hardest examples": lambda: (
        m := nn.Linear(6, 4),
        lambda x, y: F.cross_entropy(m(x), y, reduction="none").topk(max(1, len(x) // 2)).values.mean(),
    ),
    "mixup": lambda: (
        m := nn.Linear(6, 4),
        lambda x, y: F.mse_loss(m(0.5 * x + 0.5 * x[torch.randperm(len(x))]), F.one_hot(y, 4).float()),
    ),
}


@pytest.mark.parametrize("case", COUPLED)
def test_coupled_samples_are_noticed_in_training_mode(case):
    model, forward = COUPLED[case]()
    verdict = verdict_of(forward, model)
    assert verdict.rule is None
    assert "depend on each other" in verdict.reason or "fails" in verdict.reason


@pytest.mark.parametrize("above", [0, 1])
def test_a_mask_that_leaves_nothing_of_a_part_is_looked_at_on_other_rows(above):
    net = nn.Linear(6, 4)

    def forward(x, y):
        counts = y > above
        return (F.cross_entropy(net(x), y, reduction="none") * counts).sum() / counts.sum().clamp(min=1)

    verdict = verdict_of(forward, net)
    assert verdict.rule is not None
    assert (verdict.units, verdict.counted_means) == ("targets", ())


@pytest.mark.parametrize("make", [PairwiseAttention, Experts])
def test_the_same_models_may_be_split_in_eval_mode(make):
    model = make().eval()

    def forward(x, y):
        out = model(x)
        return F.cross_entropy(out[0] if isinstance(out, tuple) else out, y)

    assert verdict_of(forward, model).rule is not None


@pytest.mark.parametrize(("make", "reason"), [(Momentum, "writes"), (Queue, "writes"), (Counting, "Counting.calls")])
def test_state_is_noticed_and_put_back(make, reason):
    model = make()
    before, queue = copy.deepcopy(model.state_dict()), getattr(model, "queue", X).clone()
    verdict = verdict_of(lambda x, y: model(x), model)
    assert verdict.rule is None
    assert reason in verdict.reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(getattr(model, "queue", X), queue)
    assert getattr(model, "calls", 0) == 0


def vae():
    encode, decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(x, y):
        mean, log_variance = encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        rebuilt = (decode(z) - x).pow(2).sum(1).mean()
        return rebuilt - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()

    return (encode, decode), forward


def diffusion():
    model = nn.Linear(7, 6)

    def forward(x, y):
        step = torch.randint(1, 100, (len(x),))
        noise = torch.randn(x.shape)
        noisy = x * (step[:, None] / 100) + noise
        return F.mse_loss(model(torch.cat([noisy, step[:, None] / 100], 1)), noise)

    return (model,), forward


def functional_dropout():
    model = nn.Linear(6, 4)
    return (model,), lambda x, y: F.cross_entropy(F.dropout(model(x), 0.5, training=True), y)


def dropout_in_attention():
    model = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
    return (model,), lambda x, y: model(*[x.reshape(-1, 1, 6).expand(-1, 3, 6)] * 3)[0].pow(2).mean()


def noise_per_sample_in_a_loop():
    model = nn.Linear(6, 4)
    return (model,), lambda x, y: torch.stack([model(row + torch.randn(6)).pow(2).mean() for row in x]).mean()


def numpy_noise():
    model = nn.Linear(6, 4)
    return (model,), lambda x, y: model(x + torch.from_numpy(np.random.randn(len(x), 6)).float()).pow(2).mean()


def python_branch():
    model = nn.Linear(6, 4)
    return (model,), lambda x, y: F.cross_entropy(model(x if random.random() < 0.5 else x.flip(1)), y)


def gradient_penalty():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(x, y):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
        return (gradient.norm(dim=1) - 1).pow(2).mean()

    return (model,), forward


def batch_norm_and_dropout():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    return (model,), lambda x, y: F.cross_entropy(model(x), y)


SPLITTABLE = [
    vae, diffusion, functional_dropout, dropout_in_attention, noise_per_sample_in_a_loop, numpy_noise, python_branch,
    gradient_penalty, batch_norm_and_dropout,
]  # fmt: skip


@pytest.mark.parametrize("make", SPLITTABLE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_independent_samples_pass_whatever_they_draw_or_differentiate(make, rows):
    models, forward = make()
    verdict = verdict_of(forward, *models, rows=rows)
    assert verdict.rule is not None, verdict.reason
    assert verdict.needs_gradients == (make is gradient_penalty)


@pytest.mark.parametrize("make", SPLITTABLE, ids=lambda make: make.__name__)
def test_a_check_leaves_nothing_behind(make):
    models, forward = make()
    models[0].train()
    frozen = nn.BatchNorm1d(6).eval()
    before = copy.deepcopy([model.state_dict() for model in models])
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    modes = [module.training for module in modules_of(*models, frozen)]
    verdict_of(lambda x, y: forward(frozen(x), y), *models, frozen)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert [module.training for module in modules_of(*models, frozen)] == modes


def test_a_frozen_batch_norm_stays_frozen_and_may_be_split():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    assert not model[1].training
    assert int(model[1].num_batches_tracked) == 0


def test_no_more_rows_are_run_than_one_micro_batch_has():
    model, seen = nn.Linear(6, 4), []

    def forward(x, y):
        seen.append((len(x), torch.is_grad_enabled()))
        return F.cross_entropy(model(x), y)

    runtime.preset("16gb", micro_batches=4).forward_backward(forward, X, Y)
    assert max(rows for rows, graded in seen if not graded) <= 4
    seen.clear()
    verdict_of(forward, model, rows=1)
    assert max(rows for rows, _ in seen) == 4  # pairs would stay together in three; without gradients they cost less


def test_a_loss_is_checked_again_at_calls_2_4_8_and_a_ramped_coupling_is_caught(caplog):
    """The auxiliary loss couples samples from the sixth call on; the check at the eighth sees it.

    Its weight is a tensor: terms that are multiplied by a plain 0 are compared from the first check on.
    """
    model, strength, calls, checks = nn.Linear(6, 4), torch.tensor(0.0), [0], []

    def forward(x, y):
        if not torch.is_grad_enabled():
            checks.append(calls[0])
        return F.cross_entropy(model(x), y) + strength * model(x).std(0).mean()

    memory = runtime.preset("16gb", micro_batches=2)  # a part of a check needs two rows for a deviation
    for call in range(1, 18):
        calls[0] = call
        strength.fill_(0.1 if call >= 6 else 0.0)
        memory.forward_backward(forward, X, Y)
        assert ("depend on each other" in caplog.text) == (call >= 8)
    assert list(dict.fromkeys(checks)) == [1, 2, 4, 8, 16]
    assert caplog.text.count("7 earlier call(s) were split") == 1


def test_a_loss_that_stays_coupled_is_checked_ever_more_seldom():
    model, calls, checks = PairwiseAttention(), [0], []

    def forward(x, y):
        if not torch.is_grad_enabled():
            checks.append(calls[0])
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb", micro_batches=4)
    for calls[0] in range(1, 70):
        memory.forward_backward(forward, X, Y)
    assert list(dict.fromkeys(checks)) == [1, 2, 8, 32]


def test_the_same_code_defined_again_in_a_loop_is_checked_once():
    model, checks = nn.Linear(6, 4), []
    memory = runtime.preset("16gb", micro_batches=4)
    for index in range(3):

        def forward(x, y):
            if not torch.is_grad_enabled():
                checks.append(index)  # noqa: B023
            return F.cross_entropy(model(x), y)

        memory.forward_backward(forward, X, Y)
    assert set(checks) == {0, 1}  # call 1 and call 2


def test_another_model_under_the_same_code_is_checked_by_itself():
    memory = runtime.preset("16gb", micro_batches=4)
    for make in (nn.Identity, PairwiseAttention):
        model = nn.Sequential(nn.Linear(6, 6), make())
        reference = copy.deepcopy(model)
        F.cross_entropy(reference(X), Y % 4).backward()
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y % 4)  # noqa: B023
        gradient = reference[0].weight.grad
        assert torch.allclose(model[0].weight.grad, gradient, atol=1e-6)


def test_a_coupled_batch_runs_whole_and_the_reason_is_told_once(caplog):
    model, forward = COUPLED["pairwise attention"]()
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(X), Y).backward()
    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(forward, X, Y)
    assert torch.equal(model.head.weight.grad, reference.head.weight.grad)
    memory.forward_backward(forward, X, Y)
    assert caplog.text.count("run whole") == 1


def test_split_always_overrides_and_names_the_consequence(caplog):
    model, _ = COUPLED["pairwise attention"]()
    sizes = []

    def forward(x, y):
        sizes.append(len(x))
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb", micro_batches=4, split="always")
    memory.forward_backward(forward, X, Y)
    assert sizes[-4:] == [4, 4, 4, 4]
    assert "gradients are not those of the batch" in caplog.text


def test_split_never_runs_whole():
    model, sizes = nn.Linear(6, 4), []

    def forward(x, y):
        sizes.append(len(x))
        return F.cross_entropy(model(x), y)

    runtime.preset("16gb", micro_batches=4, split="never").forward_backward(forward, X, Y)
    assert sizes == [16]


def test_a_forward_that_fails_on_a_few_rows_runs_whole(caplog):
    model = nn.Linear(6, 4)

    def forward(x, y):
        if len(x) != 16:
            raise KeyError("sixteen")
        return F.cross_entropy(model(x), y)

    runtime.preset("16gb", micro_batches=4).forward_backward(forward, X, Y)
    assert "KeyError" in caplog.text
    assert model.weight.grad is not None


@pytest.mark.parametrize("where", ["parameter", "accumulated", "module"])
def test_gradient_hooks_force_the_whole_batch(where):
    model, gradients = nn.Linear(6, 4), []
    if where == "parameter":
        model.weight.register_hook(lambda gradient: gradients.append(gradient) or gradient.clamp(-1e-3, 1e-3))
    elif where == "accumulated":
        model.weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad))
    else:
        model.register_full_backward_hook(lambda m, i, o: gradients.append(o))
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    assert len(gradients) == 1


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_scaled_by_how_often_an_index_comes_are_those_of_the_whole_batch(kind, relative_error):
    """The few rows that are checked each have another index, which comes once in the parts as in the whole."""
    table = kind(20, 4, scale_grad_by_freq=True)
    reference, memory = copy.deepcopy(table), runtime.preset("16gb", micro_batches=3)
    indices = torch.arange(12).fmod(6).view(12, 1)
    reference(indices).pow(2).mean().backward()
    memory.forward_backward(lambda indices: table(indices).pow(2).mean(), indices)
    assert relative_error(table, reference) < 1e-6


def test_batch_norm_starts_whole_and_its_statistics_forget_as_much_as_for_one_batch(caplog):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6, momentum=0.2)
    x = torch.randn(4, 6).repeat(4, 1)  # all micro-batches have the same mean
    memory = runtime.preset("16gb", micro_batches=4)
    reference = copy.deepcopy(norm)
    reference(x)
    memory.forward_backward(lambda x: norm(x).pow(3).mean(), x)
    memory.forward_backward(lambda x: norm(x).pow(3).mean(), x)
    reference(x)
    assert norm.momentum == 0.2
    assert torch.allclose(norm.running_mean, reference.running_mean, atol=1e-6)
    assert caplog.text.count("BatchNorm") == 1

    sizes = []
    other = nn.BatchNorm1d(6)

    def forward(x):
        sizes.append(len(x))
        return other(x).pow(3).mean()

    runtime.reset()
    runtime.preset("16gb").forward_backward(forward, x)
    assert sizes == [16]


@pytest.mark.parametrize("momentum", [0.2, None])
@pytest.mark.parametrize("parts", [1, 4])
def test_statistics_after_batches_in_micro_batches_are_those_of_whole_batches(momentum, parts):
    """Micro-batches that all hold the same; without momentum statistics are averages over all batches so far."""
    norm = nn.BatchNorm1d(6, momentum=momentum)
    reference, memory = copy.deepcopy(norm), runtime.preset("16gb", micro_batches=parts)
    for call in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(call)).repeat(4, 1)
        reference(x)
        memory.forward_backward(lambda x: norm(x).pow(3).mean(), x)
    assert int(norm.num_batches_tracked) == 3
    assert torch.allclose(norm.running_mean, reference.running_mean, atol=1e-6)


@pytest.mark.parametrize("spectral", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_iterates_once_per_batch(spectral):
    model = spectral(nn.Linear(6, 4)).double()
    reference = copy.deepcopy(model)
    x = X.double()
    reference(x).pow(2).mean().backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x: model(x).pow(2).mean(), x)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10), name
    for a, b in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spectral", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_each_part_iterates_as_often_as_the_batch_calls_the_layer(spectral):
    """A discriminator is called for real and fake samples: the first call is normalised by less than the second."""
    model = spectral(nn.Linear(6, 4)).double()
    reference = copy.deepcopy(model)
    x = X.double()

    def hinges(net, x):
        return torch.relu(1 - net(x)).mean() + torch.relu(1 + net(-x)).mean()

    hinges(reference, x).backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x: hinges(model, x), x)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10), name
    for a, b in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_compiled_model_is_checked_as_it_was_written():
    from torch._dynamo.testing import CompileCounter

    # code of its own: what torch 2.6 met under a simulated card, in another test, it never compiles again
    class Inner(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    counter = CompileCounter()
    inner = Inner(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model = torch.compile(inner, backend=counter, dynamic=False)
    memory = runtime.preset("16gb", micro_batches=4)
    for _ in range(4):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    assert counter.frame_count == 1  # one shape: no compilation for the rows of a check


def test_a_faint_random_pairing_is_noticed_by_what_it_draws():
    model = nn.Linear(6, 4)

    def forward(x, y):
        return F.cross_entropy(model(x + 1e-7 * x[torch.randperm(len(x))]), y)

    assert "selects among the samples" in verdict_of(forward, model).reason


def test_random_indices_below_a_fixed_bound_do_not_stand_in_the_way():
    table = nn.Embedding(10, 6)

    def forward(x, y):
        return (table(torch.randint(0, 10, (len(x),))) * x).pow(2).mean()

    assert verdict_of(forward, table).rule is not None


def test_choosing_rows_takes_no_more_memory_than_a_few_rows():
    images, labels = torch.rand(512, 3, 16, 16), torch.randint(0, 4, (512,))
    images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])  # the range of a mask
    with SimulatedCard() as card:
        choose_rows(Batch((images, labels), {}), 4)
    assert card.peak_bytes < images[:16].numel() * 4


@given(st.lists(st.integers(0, 4), min_size=3, max_size=12), st.integers(3, 8))
def test_the_two_parts_of_a_check_hold_other_numbers_of_boxes_per_image(numbers, count):
    assume(count != 6 or len(numbers) > 3)  # of three rows, each named twice, no check makes two threes
    boxes = [torch.zeros(number, 4) for number in numbers]
    rows = choose_rows(Batch((torch.zeros(len(numbers), 2), boxes), {}), count)
    seen = [numbers[row] for row in rows]
    cut = first_part(count)
    assert len(rows) == count
    if len(set(seen)) > 1:
        assert sum(seen[:cut]) / cut != sum(seen[cut:]) / (count - cut)
    assert len(set(seen)) > 1 or len(set(numbers)) == 1


@pytest.mark.parametrize(
    ("tensors", "count"),
    [
        # in the one of two ways to name rows again that does so
        ([[[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]], [2, -100, 1, -100]], 6),
        # in an order that does so
        ([[1, 0, 2], [0, 1, 2]], 8),
    ],
)
def test_rows_that_are_named_again_put_other_numbers_of_each_tensor_into_two_parts(tensors, count):
    batch, cut = [torch.tensor(tensor) for tensor in tensors], first_part(count)
    rows = choose_rows(Batch(tuple(batch), {}), count)
    for tensor in batch:
        counted = (tensor > 0).double().reshape(len(tensor), -1).sum(1)
        assert counted[rows[:cut]].mean() != counted[rows[cut:]].mean()
        if tensor.dim() == 1:
            assert tensor.double()[rows[:cut]].mean() != tensor.double()[rows[cut:]].mean()


@pytest.mark.parametrize("valid", [[3], [3, 9], [0, 1, 14, 15]])
def test_rows_with_targets_that_count_are_chosen_and_the_mean_over_them_is_seen(valid):
    model, y = nn.Linear(6, 4), torch.full((16,), -100)
    y[valid] = 0
    verdict = verdict_of(lambda x, y: F.cross_entropy(model(x), y), model, batch=(X, y))
    assert verdict.rule is not None
    assert verdict.units == "targets"


@pytest.mark.parametrize("ignored", [17, 5])
def test_a_cross_entropy_in_a_checkpoint_is_split(ignored):
    net, x = nn.Linear(6, 4).double(), X.double()
    y = torch.where(torch.arange(1, 17) % ignored == 0, -100, Y)

    def loss(x, y):
        return torch.utils.checkpoint.checkpoint(lambda h: F.cross_entropy(h, y), net(x), use_reentrant=False)

    sizes = []
    memory = runtime.preset("16gb", micro_batches=4)
    expected = torch.autograd.grad(loss(x, y), net.weight)[0]
    memory.forward_backward(lambda x, y: (sizes.append(len(x)), loss(x, y))[1], x, y)
    assert sizes[-4:] == [4, 4, 4, 4]
    assert torch.allclose(net.weight.grad, expected, rtol=1e-12)


def test_a_result_that_cannot_be_put_together_is_not_called_a_coupled_loss():
    net = nn.Linear(6, 4)
    found = verdict_of(lambda x, y: (F.cross_entropy(net(x), y), net(x).abs().max()), net)
    assert found.rule is None
    assert "return besides the loss" in found.reason


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 2048), nn.Linear(2048, 16)

    def forward(self, x):
        return x + self.out(torch.relu(self.into(x)))


def test_a_check_under_autocast_takes_no_more_memory_than_a_micro_batch():
    """It computes in fp32, and the micro-batches, checkpointed, in half of that."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide(), Wide(), Wide())
    runtime.enable_checkpointing(model)
    x = torch.randn(32, 64, 16)

    def forward(x):
        return model(x).square().mean()

    with SimulatedCard() as card:
        for part in x.chunk(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(part) / 4
            loss.backward()
        by_hand = card.peak_bytes
    for parameter in model.parameters():
        parameter.grad = None
    memory = runtime.preset("16gb", precision="bf16", micro_batches=4)
    with SimulatedCard() as card:
        memory.forward_backward(forward, x)
        assert card.peak_bytes <= 1.02 * by_hand
    assert memory.report().forwards[0].micro_batches == 4


def squeezed(model, extra):
    """Fails on a single sample, whose dimension is lost."""

    def forward(x, y):
        out = model(x).squeeze()
        return F.mse_loss(out[:, 0], y.to(out.dtype)) + extra(out)

    return forward


@pytest.mark.parametrize("size", range(4, 20))
def test_what_fails_on_one_row_is_split_where_micro_batches_have_more(size, relative_error):
    model = nn.Linear(6, 4).double()
    reference, (x, y) = copy.deepcopy(model), (torch.randn(size, 6).double(), torch.arange(size) % 4)
    squeezed(reference, torch.mean)(x, y).backward()
    memory = runtime.preset("16gb", micro_batches=2)
    memory.forward_backward(squeezed(model, torch.mean), x, y)
    assert relative_error(model, reference) < 1e-12
    (known,) = memory._forwards
    assert known.split_calls == 1


def test_what_fails_on_one_row_has_its_gradients_compared_on_more():
    """A number of the batch that is 1 whatever it holds: only gradients show that samples depend on each other."""
    model = nn.Linear(6, 4)

    def spread(out):
        return out.std() / out.std().detach()

    assert verdict_of(squeezed(model, torch.mean), model).rule is not None
    assert verdict_of(squeezed(model, spread), model).rule is None


def test_two_rows_that_give_one_and_the_same_loss_alone_leave_it_open():
    """As those of a triplet loss, in which a single row has nobody to compare itself with; memory holds two."""
    model = nn.Linear(6, 4)

    def forward(x, y):
        if len(x) > 2:
            raise OutOfMemoryError("CUDA out of memory.")
        away = torch.cdist(model(x), model(x)) * (y[:, None] == y)
        return (0.2 + away.sum(1)).mean()

    verdict = verdict_of(forward, model, batch=(X[:2], torch.tensor([0, 1])))
    assert verdict.rule is None
    assert verdict.undecided
