"""A split batch draws the random numbers of the whole batch, and leaves the generators where that leaves them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.state.random_state import RandomState
from oomfix.runtime.state.whole_draws import DrawnShapes, DrawnSize, WholeDraws, sizes_by_rows

EXACT = 1e-12
OWN = SimpleNamespace(torch=torch.Generator(), numpy=np.random.default_rng(0), python=random.Random(0))


def vae():
    encode, decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(x):
        mean, log_variance = encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return (decode(z) - x).pow(2).sum(1).mean() - 0.5 * (1 + log_variance - mean**2).sum(1).mean()

    return (encode, decode), forward


def distributions():
    encode, decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(x):
        mean, log_variance = encode(x).chunk(2, 1)
        posterior = Normal(mean, (log_variance / 2).exp())
        return (decode(posterior.rsample()) - x).pow(2).mean() + (decode(posterior.sample()) + x).pow(2).mean()

    return (encode, decode), forward


def diffusion():
    model = nn.Linear(7, 6)

    def forward(x):
        step = torch.randint(1, 100, (len(x),))
        with torch.no_grad():
            noise = torch.randn(x.shape)
        noisy = x * (step[:, None] / 100) + noise
        return F.mse_loss(model(torch.cat([noisy, step[:, None] / 100], 1)), noise)

    return (model,), forward


def gumbel_softmax():
    encode, decode = nn.Linear(6, 5), nn.Linear(5, 6)
    return (encode, decode), lambda x: F.mse_loss(decode(F.gumbel_softmax(encode(x), 0.7)), x)


def stochastic_depth():
    model = nn.Linear(6, 6)
    return (model,), lambda x: (x + model(x) * x.new_empty(len(x), 1).bernoulli_(0.7)).pow(2).mean()


def several_of_each_sample():
    model = nn.Linear(6, 4)
    return (model,), lambda x: model(x[:, None] + torch.randn(len(x) * 3, 6).view(-1, 3, 6)).pow(2).mean()


def time_first():
    model = nn.Linear(2, 4)
    return (model,), lambda x: model(x.view(-1, 3, 2).transpose(0, 1) + torch.randn(3, len(x), 2)).pow(2).mean()


def generator_of_its_own():
    model = nn.Linear(6, 4)
    return (model,), lambda x: model(x + torch.randn(x.shape, generator=OWN.torch)).pow(2).mean()


def noise_in_weights():
    model = nn.Linear(6, 4)

    def forward(x):
        noise = torch.randn(4, 6).sign(), torch.randn(4).abs()  # as long as a micro-batch has samples
        return F.linear(x, model.weight * (1 + noise[0]), model.bias * noise[1]).pow(2).mean()

    return (model,), forward


def layers_left_out():
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(x):
        for layer in layers:
            if torch.rand([]) < 0.5:
                x = x + layer(x).tanh()
        return x.pow(2).mean()

    return tuple(layers), forward


def one_time_for_the_batch():
    model = nn.Linear(6, 6)

    def forward(x):
        time = torch.rand(1)
        return (model(x * time) - x[:, torch.randperm(6)]).pow(2).mean()

    return (model,), forward


def teacher_forcing():
    model = nn.Linear(6, 6)

    def forward(x):
        state, total = x, 0
        for _ in range(5):
            state = model(x if random.random() < 0.5 else state).tanh()
            total = total + state.pow(2).mean()
        return total

    return (model,), forward


def mixed_by_one_number():
    model = nn.Linear(6, 6)
    return (model,), lambda x: model((np.random.beta(0.4, 0.4) + OWN.numpy.random()) * x).pow(2).mean()


def sample_by_sample():
    model = nn.Linear(6, 4)
    return (model,), lambda x: torch.stack([model(row + torch.randn(6)).pow(2).mean() for row in x]).mean()


def numpy_by_rows():
    model = nn.Linear(6, 4)
    return (model,), lambda x: model(x + torch.from_numpy(np.random.randn(len(x), 6))).pow(2).mean()


def numpy_by_rows_in_vain():
    model = nn.Linear(6, 4)
    return (model,), lambda x: model(x + 0 * torch.from_numpy(np.random.randn(len(x), 6))).pow(2).mean()


FORWARDS = [
    vae, distributions, diffusion, gumbel_softmax, stochastic_depth, several_of_each_sample, time_first,
    generator_of_its_own, noise_in_weights, layers_left_out, one_time_for_the_batch, teacher_forcing,
    mixed_by_one_number, sample_by_sample, numpy_by_rows,
    numpy_by_rows_in_vain,
]  # fmt: skip


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    OWN.torch.manual_seed(5)
    OWN.numpy.bit_generator.state = np.random.default_rng(5).bit_generator.state
    OWN.python.seed(5)


def drawn_next():
    own = torch.rand(20, generator=OWN.torch).tolist(), OWN.numpy.random(), OWN.python.random()
    return torch.rand(20).tolist(), random.random(), np.random.rand(), own


def gradients_of(models):
    gradients = [parameter.grad for model in models for parameter in model.parameters()]
    for model in models:
        model.zero_grad()
    return [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def assert_same_gradients(models, expected):
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for gradient, wanted in zip(gradients_of(models), expected, strict=True):
        assert float((gradient - wanted).abs().max()) <= EXACT * largest


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "flags",
    [
        lambda count: torch.from_numpy(np.random.rand(count) > 0.3),
        lambda count: torch.tensor([random.random() > 0.3 for _ in range(count)]),
        lambda count: torch.from_numpy(np.random.choice([0.5, 1.0], size=count)),
    ],
    ids=["numpy", "python", "chosen"],
)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_flags_that_are_drawn_for_each_sample_outside_of_torch_are_split_at_every_call(flags, parts, double):
    """They may be alike for a few rows, which then look as if they had been drawn once for the batch."""
    torch.manual_seed(0)
    model, batches = nn.Linear(6, 4), torch.randn(9, 12, 6)
    forward = lambda x: model(x * flags(len(x))[:, None]).pow(2).mean()  # noqa: E731
    memory = runtime.preset("16gb", micro_batches=parts)
    for number, x in enumerate(batches):
        np.random.seed(number)
        random.seed(number)
        forward(x).backward()
        expected = gradients_of([model])
        np.random.seed(number)
        random.seed(number)
        memory.forward_backward(forward, x)
        assert_same_gradients([model], expected)
    assert sum(known.split_calls for known in memory._forwards) == len(batches)


@pytest.mark.parametrize("make", FORWARDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("size", [12, 13])
def test_gradients_and_generators_are_those_of_the_whole_batch(make, size, double):
    (models, forward), x = make(), torch.randn(size, 6)
    seed()
    forward(x).backward()
    after, expected = drawn_next(), gradients_of(models)

    memory = runtime.preset("16gb", micro_batches=3)
    for _ in range(3):  # the second call checks again, the third explores nothing
        seed()
        memory.forward_backward(forward, x)
        assert drawn_next() == after
        assert_same_gradients(models, expected)
    assert memory.report().forwards[0].micro_batches == 3


@pytest.mark.parametrize(
    "coin",
    [random.random, np.random.rand, OWN.numpy.random, OWN.python.random],
    ids=["python", "numpy", "own of numpy", "own of python"],
)
def test_noise_behind_a_coin_that_the_check_saw_fall_otherwise_is_that_of_the_whole_batch(coin, double):
    model, x = nn.Linear(6, 6), torch.randn(12, 6)

    def forward(x):
        noisy = x + torch.randn_like(x) if coin() < 0.5 else x
        return model(noisy).pow(2).mean()

    memory = runtime.preset("16gb", micro_batches=3)
    for begin in range(12):  # of the calls whose coin falls for noise, some are not checked
        seed()
        for _ in range(begin):
            coin()
        start = RandomState(own=[OWN.torch, OWN.numpy, OWN.python])
        forward(x).backward()
        after, expected = drawn_next(), gradients_of([model])
        start.restore()
        memory.forward_backward(forward, x)
        assert drawn_next() == after
        assert_same_gradients([model], expected)


STEPS = [
    lambda h: h + torch.randn_like(h),
    lambda h: h * torch.rand(len(h), 1),
    lambda h: h + torch.randn(6, len(h)).T,
    lambda h: h + torch.randn(3 * len(h), 6).view(len(h), 3, 6).mean(1),
    lambda h: h + torch.randn(h.shape, generator=OWN.torch),
    lambda h: h + torch.normal(h.detach(), 0.5),
    lambda h: h + F.gumbel_softmax(h),
    lambda h: h @ torch.randn(6, 6),
    lambda h: h[:, torch.randperm(6)] * torch.rand([]),
    lambda h: h * (OWN.numpy.random() + np.random.rand()),
    lambda h: h.tanh() if torch.rand(()) < 0.5 else h + torch.rand(len(h), 1),
    lambda h: h.tanh() if random.random() < 0.5 else h,
]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5), size=st.integers(5, 24), parts=st.integers(2, 4))
def test_draws_in_any_order_are_those_of_the_whole_batch(steps, size, parts):
    layers = [nn.Linear(6, 6).double() for _ in steps]

    def forward(x, sources=OWN):
        for layer, step in zip(layers, steps, strict=True):
            x = step(layer(x).sin())
        return x.pow(2).mean()

    torch.set_default_dtype(torch.float64)
    try:
        x = torch.randn(size, 6)
        seed()
        forward(x).backward()
        after, expected = drawn_next(), gradients_of(layers)
        runtime.reset()
        memory = runtime.preset("16gb", micro_batches=parts)
        seed()
        memory.forward_backward(forward, x)
        assert drawn_next() == after
        assert_same_gradients(layers, expected)
        assert memory.report().forwards[0].micro_batches == parts
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("make", FORWARDS, ids=lambda make: make.__name__)
def test_after_running_out_of_memory_the_numbers_are_drawn_again(make, double):
    (models, forward), x = make(), torch.randn(13, 6)
    seed()
    forward(x).backward()
    after, expected = drawn_next(), gradients_of(models)
    calls = 0

    def fails_in_a_second_part(x):
        nonlocal calls
        loss = forward(x)
        calls += len(x) in (6, 7)
        if len(x) > 7 or (len(x) > 5 and calls == 2):
            raise OutOfMemoryError("CUDA out of memory.")
        return loss

    memory = runtime.preset("16gb", first_micro_batches=2)
    seed()
    memory.forward_backward(fails_in_a_second_part, x)

    assert memory.report().retries == 2
    assert drawn_next() == after
    assert_same_gradients(models, expected)


def test_an_evaluation_draws_what_the_whole_batch_draws(double):
    x = torch.randn(13, 6)

    def sampled(x):
        if len(x) > 4:
            raise OutOfMemoryError("CUDA out of memory.")
        return x + torch.randn_like(x)

    seed()
    expected = x + torch.randn(13, 6)
    seed()
    assert torch.equal(runtime.preset("16gb").evaluate(sampled, x), expected)


def test_masks_of_dropout_differ_between_micro_batches():
    weight = nn.Parameter(torch.ones(()))

    def forward(x):
        kept = F.dropout(x * weight, 0.5, training=True)
        return (kept + 0 * torch.randn_like(x)).mean(), kept

    _, kept = runtime.preset("16gb", micro_batches=3).forward_backward(forward, torch.ones(12, 64))
    masks = (kept > 0).view(3, 4, 64)
    agreement = (masks[0] == masks[1]).float().mean(), (masks[1] == masks[2]).float().mean()
    assert max(agreement) < 0.7


# -- what is run again in backward draws from the generators ---------------------------------------------------------


class Noisy(nn.Module):
    """Linear in its weight: the loss is the weight times its gradient, if backward sees the noise of forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.weight * x * torch.randn_like(x)


class Recomputed(torch.autograd.Function):
    """Draws again in backward, from the state that the generator had in forward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.state = torch.get_rng_state()
        return weight * x * torch.randn_like(x)

    @staticmethod
    def backward(ctx, gradient):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        (x,) = ctx.saved_tensors
        of_weight = (gradient * x * torch.randn_like(x)).sum()
        torch.set_rng_state(now)
        return None, of_weight


def reentrant(model):
    return lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True)


def not_reentrant(model):
    return lambda x: checkpoint(model, x, use_reentrant=False)


def offloaded_inside(model):
    def run(x):
        with runtime.offload_activations(min_bytes=0):
            return model(x)

    return lambda x: checkpoint(run, x, use_reentrant=False)


def in_chunks(model):
    return lambda x: runtime.encode_in_chunks(model, x, rows=12)


def function_of_its_own(model):
    return lambda x: Recomputed.apply(x, model.weight)


def composable(model):
    from torch.distributed._composable import checkpoint as put_checkpoint

    return put_checkpoint(model)


@pytest.mark.parametrize(
    "around",
    [reentrant, not_reentrant, offloaded_inside, in_chunks, function_of_its_own, composable],
    ids=lambda around: around.__name__,
)
def test_what_runs_again_in_backward_sees_the_noise_of_its_forward(around, double):
    model = Noisy()
    run = around(model)
    memory = runtime.preset("16gb", micro_batches=3)
    for _ in range(3):
        loss = memory.forward_backward(lambda x: (run(x) * torch.rand(len(x), 1)).mean(), torch.randn(12, 6))
        assert torch.allclose(model.weight.grad * model.weight, loss, rtol=EXACT)
        model.zero_grad()
    assert memory.report().forwards[0].micro_batches == 3


def test_noise_under_hooks_on_saved_tensors_is_that_of_the_whole_batch(double):
    (models, forward), x = vae(), torch.randn(12, 6)
    seed()
    forward(x).backward()
    expected = gradients_of(models)

    def saved_on_the_host(x):
        with torch.autograd.graph.save_on_cpu():
            return forward(x)

    seed()
    runtime.preset("16gb", micro_batches=3).forward_backward(saved_on_the_host, x)
    assert_same_gradients(models, expected)


def test_a_compiled_model_draws_by_itself(double):
    model = Noisy()
    compiled = torch.compile(model, backend="eager")
    memory, modes = runtime.preset("16gb", micro_batches=3), []

    def forward(x):
        modes.append(torch._C._len_torch_function_stack())
        return compiled(x).mean()

    loss = memory.forward_backward(forward, torch.randn(12, 6))
    assert torch.allclose(model.weight.grad * model.weight, loss, rtol=EXACT)
    assert modes[-3:] == [0, 0, 0]


def test_a_compiled_function_draws_by_itself(double):
    model = Noisy()
    compiled = torch.compile(lambda x: model.weight * x * torch.randn_like(x), backend="eager", fullgraph=True)
    memory = runtime.preset("16gb", micro_batches=3)
    loss = memory.forward_backward(lambda x: (compiled(x) * torch.rand(len(x), 1)).mean(), torch.randn(12, 6))
    assert torch.allclose(model.weight.grad * model.weight, loss, rtol=EXACT)
    assert memory.report().forwards[0].micro_batches == 3


def test_vmap_draws_for_each_sample(double):
    weight = nn.Parameter(torch.ones(()))

    def forward(x):
        noise = torch.vmap(lambda row: row + torch.randn(()), randomness="different")(x)[:, 0]
        return (noise * weight).mean(), noise

    memory = runtime.preset("16gb", micro_batches=3, split="always")
    _, noise = memory.forward_backward(forward, torch.zeros(12, 6))
    assert len(set(noise.tolist())) == 12


# -- what a call returns ---------------------------------------------------------------------------------------------


def like_channels_last(rows):
    return torch.empty(rows, 3, 4, 5).to(memory_format=torch.channels_last)


def like_part_of_another(rows):
    return torch.zeros(rows, 8)[:, :3]


CALLS = {
    "size": lambda rows: torch.randn(rows, 3),
    "size in a tuple": lambda rows: torch.rand((rows, 3), dtype=torch.float32),
    "named size": lambda rows: torch.rand(size=(rows, 20), device="cpu"),
    "trained": lambda rows: torch.randn(rows, 3, requires_grad=True),
    "bounds": lambda rows: torch.randint(3, 1000, (rows, 3)),
    "named bounds": lambda rows: torch.randint(low=3, high=1000, size=[rows, 3], dtype=torch.int32),
    "mean and deviation": lambda rows: torch.normal(1.0, 3.0, (rows, 7)),
    "means": lambda rows: torch.normal(torch.full((rows, 3), 5.0), 2.5),
    "deviations": lambda rows: torch.normal(5.0, torch.linspace(1, 2, 3).expand(rows, 3)),
    "means and deviations": lambda rows: torch.normal(mean=torch.ones(rows, 1), std=torch.linspace(1, 2, 3)),
    "like": lambda rows: torch.randn_like(torch.empty(rows, 3), dtype=torch.float64),
    "integers like": lambda rows: torch.randint_like(torch.empty(rows, 3), 3, 1000),
    "like channels last": lambda rows: torch.rand_like(like_channels_last(rows)),
    "like a transposed one": lambda rows: torch.rand_like(torch.empty(3, rows, 5).transpose(0, 1)),
    "like a part": lambda rows: torch.randn_like(like_part_of_another(rows)),
    "in place": lambda rows: torch.empty(rows, 3).normal_(2.0, std=0.5),
    "integers in place": lambda rows: torch.empty(rows, 3, dtype=torch.int64).random_(5, 1000),
    "channels last in place": lambda rows: like_channels_last(rows).uniform_(-1, 1),
    "rows apart": lambda rows: torch.empty(5, rows, 3).exponential_(2.0).transpose(0, 1),
    "gaps in place": lambda rows: torch.zeros(rows, 6)[:, ::2].uniform_(),
    "coins": lambda rows: torch.bernoulli(torch.empty(rows, 64), 0.5),
    "one row folded": lambda rows: torch.randn(rows * 4, 3).view(rows, 4, 3),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("parts", [[5, 4, 4], [6, 6, 1]])
def test_parts_of_a_draw_are_the_rows_of_the_whole_one_and_look_like_draws(name, parts):
    call = CALLS[name]
    of_7, of_4 = DrawnShapes(), DrawnShapes()
    with of_7:
        call(7)
    with of_4:
        call(4)
    draws = WholeDraws(sizes_by_rows([of_7.drawn_shapes, of_4.drawn_shapes], [7, 4]), sum(parts), 2**20)
    torch.manual_seed(3)
    expected, after = call(sum(parts)), torch.get_rng_state()

    torch.manual_seed(3)
    start, drawn = 0, []
    for rows in parts:
        with draws.part(start, start + rows):
            drawn.append(call(rows))
        start += rows

    assert torch.equal(torch.cat(drawn), expected)
    assert torch.equal(torch.get_rng_state(), after)
    for part, rows in zip(drawn, parts, strict=True):
        plain = call(rows)
        assert (part.dtype, part.requires_grad, part.is_leaf) == (plain.dtype, plain.requires_grad, plain.is_leaf)
        strides = zip(part.shape, part.stride(), plain.stride(), strict=True)
        assert all(of_part == of_plain for length, of_part, of_plain in strides if length > 1)
        assert part._is_view() == plain._is_view()
        assert part.untyped_storage().nbytes() == plain.untyped_storage().nbytes()


ROWS = (DrawnSize("randn", (4, 3), 0, 1),)


def in_parts(call, sizes=ROWS, most_bytes=2**20):
    draws, drawn = WholeDraws(sizes, 12, most_bytes), []
    for start in (0, 4, 8):
        with draws.part(start, start + 4):
            drawn.append(call())
    return drawn


def test_what_was_drawn_once_may_be_written_to():
    drawn = in_parts(lambda: torch.rand(3).sub_(0.5), (DrawnSize("rand", (3,), None, 0),))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_what_would_take_too_much_memory_is_drawn_in_parts():
    torch.manual_seed(3)
    drawn = in_parts(lambda: torch.randn(4, 3), most_bytes=12 * 3 * 4 - 1)
    torch.manual_seed(3)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.randn(4, 3) for _ in range(3)]))
    once = in_parts(lambda: torch.randn(4, 3), most_bytes=12 * 3 * 4)
    assert not torch.equal(once[0], once[1])


def test_further_draws_of_one_micro_batch_are_numbers_of_their_own():
    part = iter(range(3))
    drawn = in_parts(lambda: [torch.randn(4, 3) for _ in range(1 + next(part))])
    assert len({float(tensor[0, 0]) for tensors in drawn for tensor in tensors}) == 6


def test_what_may_be_for_samples_or_for_the_batch_is_told_by_its_place():
    sizes = (DrawnSize("randn", (4, 4), None, 0), *ROWS)
    drawn = in_parts(lambda: (torch.randn(4, 4), torch.randn(4, 4)), sizes)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])


def test_what_may_be_for_samples_is_never_drawn_once_where_its_place_does_not_tell():
    sizes = (DrawnSize("rand", (2,), None, 0), DrawnSize("randn", (4, 4), None, 0), *ROWS)
    drawn = in_parts(lambda: (torch.randn(4, 4), torch.rand(2), torch.randn(4, 4)), sizes)
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][2], drawn[1][2])
    longer = in_parts(lambda: torch.randn(4, 5), (DrawnSize("randn", (4, 4), None, 0), *ROWS))
    assert not torch.equal(longer[0], longer[1])


def test_what_is_drawn_in_a_branch_that_the_check_did_not_take_is_drawn_by_rows():
    torch.manual_seed(3)
    expected = torch.randn(12, 3)
    torch.manual_seed(3)
    coin = (DrawnSize("rand", (), None, 0),)
    assert torch.equal(torch.cat(in_parts(lambda: torch.randn(4, 3), coin)), expected)


def test_permutations_of_samples_stay_inside_of_their_micro_batch():
    drawn = in_parts(lambda: torch.randperm(4), (DrawnSize("randperm", (4,), 0, 1),))
    assert all(part.sort().values.tolist() == [0, 1, 2, 3] for part in drawn)


def test_what_torch_gives_a_graph_has_one():
    mean = torch.zeros(4, 3, requires_grad=True)
    sizes = (DrawnSize("normal of tensors", (4, 3), 0, 1),)
    assert all(part.requires_grad for part in in_parts(lambda: torch.normal(mean, 1.0), sizes))
    with torch.no_grad():
        assert not any(part.requires_grad for part in in_parts(lambda: torch.normal(mean, 1.0), sizes))


def test_what_the_check_did_not_see_is_drawn_in_parts():
    drawn = in_parts(lambda: (torch.randn(3), torch.rand(4, 3), torch.randn(5, 3)))
    for number in range(3):
        assert not torch.equal(drawn[0][number], drawn[1][number])


def test_sizes_that_follow_something_else_than_rows_are_unforeseen():
    once, boxes = ("randn", (5,)), [("randn", (9,)), ("randn", (3,))]
    found = sizes_by_rows([[once, boxes[0], ("rand", (7, 2))], [once, boxes[1], ("rand", (4, 2))]], [7, 4])
    assert found == (DrawnSize("rand", (7, 2), 0, 1),)
    assert sizes_by_rows([[once] * 7, [once] * 4], [7, 4]) == ()


def test_filling_fails_where_torch_fails():
    leaf = torch.zeros(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        in_parts(lambda: leaf.normal_(), (DrawnSize("normal_", (4, 3), 0, 1),))


def test_a_piece_of_a_tensor_is_filled_and_nothing_else():
    tensors = [torch.zeros(4, 6) for _ in range(3)]
    left = iter(tensors)
    in_parts(lambda: next(left)[:, ::2].normal_(), (DrawnSize("normal_", (4, 3), 0, 1),))
    assert all(tensor[:, ::2].all() and not tensor[:, 1::2].any() for tensor in tensors)


def test_modes_of_the_program_inside_and_around_still_work():
    with torch.device("meta"):
        drawn = in_parts(lambda: torch.randn(4, 3))
    assert all(part.is_meta and part.shape == (4, 3) for part in drawn)

    def on_meta():
        with torch.device("meta"):
            return torch.randn(4, 3)

    assert all(part.is_meta and part.shape == (4, 3) for part in in_parts(on_meta))


@pytest.mark.parametrize("draws", [False, True])
def test_only_parts_of_forwards_that_draw_are_watched(draws):
    weight, modes = nn.Parameter(torch.ones(6)), []

    def forward(x):
        modes.append(torch._C._len_torch_function_stack())
        return (F.dropout(x * weight) + (torch.randn_like(x) if draws else 0)).pow(2).mean()

    memory = runtime.preset("16gb", micro_batches=3)
    memory.forward_backward(forward, torch.ones(12, 6))
    assert modes[-3:] == [int(draws)] * 3
    runtime.preset("16gb").forward_backward(forward, torch.ones(12, 6))
    assert modes[-1] == 0
