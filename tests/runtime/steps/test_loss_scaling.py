"""Loss scaling: unscaled once and no more, several optimizers, checkpoints, the scaler in the user's own hands.

On the CPU GradScaler works as on a GPU; scales are powers of two, so what was scaled and unscaled is compared bitwise.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from oomfix import runtime

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))
RATE = 0.25


class Overflowing(nn.Linear):
    """A layer whose gradient overflows when asked to."""

    overflow = False

    def forward(self, x):
        out = super().forward(x)
        if self.overflow and out.requires_grad:
            out.register_hook(lambda gradient: gradient * float("inf"))
        return out


class Lookahead:
    """A wrapper optimizer that is no torch optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=RATE, **options)


def plain(optimizer):
    return optimizer


@pytest.fixture
def memory():
    return runtime.preset("16gb", precision="fp16")


def penalty(model):
    """A loss of parameters alone, so that no value is rounded to fp16 and gradients can be compared bitwise."""
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


def gradient(model):
    return [2 * parameter.detach() for parameter in model.parameters()]


def moved(model, before):
    return [b - p.detach() for p, b in zip(model.parameters(), before, strict=True)]


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- unscaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [plain, Lookahead])
@pytest.mark.parametrize("first", ["memory", "scaler"])
@pytest.mark.parametrize("second", ["memory", "scaler"])
def test_gradients_are_unscaled_once_whoever_asks_how_often(memory, first, second, wrapped):
    model = nn.Linear(6, 4)
    optimizer, expected, before = wrapped(sgd(model)), gradient(model), values(model)
    memory.backward(penalty(model))
    for asked in (first, second):
        (memory if asked == "memory" else memory.scaler).unscale_(optimizer)
        assert equal([p.grad for p in model.parameters()], expected)
    memory.step(optimizer)
    assert equal(moved(model, before), [b - (b - RATE * g) for b, g in zip(before, expected, strict=True)])


@pytest.mark.parametrize("unscaled_by", ["memory", "scaler"])
def test_a_clipping_step_after_the_user_unscaled_clips_unscaled_gradients(memory, unscaled_by):
    model = nn.Linear(6, 4)
    optimizer, before = sgd(model), values(model)
    memory.backward(penalty(model))
    (memory if unscaled_by == "memory" else memory.scaler).unscale_(optimizer)
    memory.step(optimizer, clip_norm=0.01)
    norm = torch.cat([change.flatten() for change in moved(model, before)]).norm()
    assert float(norm) == pytest.approx(RATE * 0.01, rel=1e-4)


def test_who_unscales_through_the_scaler_clips_without_the_preset():
    model, memory = nn.Linear(6, 4), runtime.preset("16gb", precision="fp16", clip_norm=1e-6)
    optimizer, expected, before = sgd(model), gradient(model), values(model)
    memory.backward(penalty(model))
    memory.scaler.unscale_(optimizer)
    memory.step(optimizer)
    assert equal(values(model), [b - RATE * g for b, g in zip(before, expected, strict=True)])


def test_a_backward_after_unscaling_adds_to_the_gradients_in_full(memory):
    """By hand this adds scaled gradients to unscaled ones."""
    model = nn.Linear(6, 4)
    optimizer, expected, before = sgd(model), gradient(model), values(model)
    memory.backward(penalty(model))
    memory.unscale_(optimizer)
    memory.backward(penalty(model))
    memory.step(optimizer)
    assert equal(values(model), [b - RATE * 2 * g for b, g in zip(before, expected, strict=True)])


def test_a_backward_after_unscaling_again_behind_an_update_adds_to_the_gradients_in_full(memory):
    model = nn.Linear(6, 4)
    optimizer, expected, before = sgd(model), gradient(model), values(model)
    memory.backward(penalty(model))
    memory.unscale_(optimizer)
    memory.scaler.update()
    memory.unscale_(optimizer)
    memory.backward(penalty(model))
    memory.unscale_(optimizer)
    memory.step(optimizer)
    assert equal(values(model), [b - RATE * 2 * g for b, g in zip(before, expected, strict=True)])


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_kept_after_a_step_stay_in_full_in_the_next_backward(memory, fused):
    if fused and "cpu" not in torch.utils._foreach_utils._get_fused_kernels_supported_devices():
        pytest.skip("this torch has no fused step on the CPU")
    model = nn.Linear(6, 4)
    optimizer, before = sgd(model, fused=fused), values(model)
    memory.backward(penalty(model))
    memory.step(optimizer, zero_grad=False)
    memory.backward(penalty(model))
    memory.step(optimizer)
    reference = copy.deepcopy(before)
    kept = [2 * b for b in reference]
    reference = [b - RATE * g for b, g in zip(reference, kept, strict=True)]
    kept = [g + 2 * b for b, g in zip(reference, kept, strict=True)]
    assert equal(values(model), [b - RATE * g for b, g in zip(reference, kept, strict=True)])


def test_gradients_filled_with_zeros_after_unscaling_start_anew(memory):
    model = nn.Linear(6, 4)
    optimizer, expected, before = sgd(model), gradient(model), values(model)
    memory.backward(penalty(model))
    memory.unscale_(optimizer)
    optimizer.zero_grad(set_to_none=False)
    memory.backward(penalty(model))
    memory.step(optimizer)
    assert equal(values(model), [b - RATE * g for b, g in zip(before, expected, strict=True)])


def test_two_steps_with_one_gradient_are_two_steps(memory):
    model = nn.Linear(6, 4)
    optimizer, expected, before = sgd(model), gradient(model), values(model)
    memory.backward(penalty(model))
    memory.step(optimizer, zero_grad=False)
    memory.step(optimizer)
    assert equal(values(model), [b - RATE * g - RATE * g for b, g in zip(before, expected, strict=True)])


def test_gradients_of_an_unscaled_loss_are_refused(memory):
    model = nn.Linear(6, 4)
    penalty(model).backward()
    with pytest.raises(RuntimeError, match=r"not scaled for fp16: run the backward through memory\.forward_backward"):
        memory.step(sgd(model))


# -- the scaler in the user's hands ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [plain, Lookahead])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_loop_written_for_a_grad_scaler_runs_with_ours(memory, overflow, wrapped):
    model = Overflowing(6, 4)
    optimizer, scaler = wrapped(sgd(model)), memory.scaler
    theirs = torch.amp.GradScaler("cpu")
    reference = copy.deepcopy(model)
    their_optimizer = sgd(reference)
    for step in range(3):
        for net, scales, steps in ((model, scaler, optimizer), (reference, theirs, their_optimizer)):
            net.overflow = overflow and step == 1
            scales.scale(F.cross_entropy(net(X), Y)).backward()
            scales.unscale_(steps)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scales.step(steps)
            scales.update()
            steps.zero_grad()
        assert scaler.get_scale() == theirs.get_scale()
    assert equal(values(model), values(reference))
    assert memory.skipped_steps == overflow
    assert scaler.state_dict() == theirs.state_dict()


def test_update_by_the_user_after_our_step_counts_once(memory):
    model = Overflowing(6, 4)
    model.overflow = True
    optimizer = sgd(model)
    memory.backward(F.cross_entropy(model(X), Y))
    scale = memory.scaler.get_scale()
    memory.step(optimizer)
    for _ in range(2):
        memory.scaler.update()
        assert memory.scaler.get_scale() == scale / 2
    memory.backward(F.cross_entropy(model(X), Y))
    assert memory.scaler.get_scale() == scale / 2


def test_a_step_of_the_scaler_without_update_is_followed_by_one(memory):
    model = Overflowing(6, 4)
    optimizer = sgd(model)
    for overflow in (True, False):
        model.overflow = overflow
        memory.backward(F.cross_entropy(model(X), Y))
        memory.scaler.step(optimizer)
        optimizer.zero_grad()
    assert memory.scaler.get_scale() == 2.0**15


def test_losses_are_scaled_in_tuples_and_from_generators(memory):
    model = nn.Linear(6, 4)
    losses = (penalty(model), 3 * penalty(model))
    memory.backward(penalty(model))
    for scaled in (memory.scaler.scale(losses), tuple(memory.scaler.scale(loss for loss in losses))):
        assert equal(scaled, [loss * 2.0**16 for loss in losses])


def test_a_found_infinity_counts_without_a_step(memory):
    """Whoever looks at the norm and leaves the step out would else never get a smaller scale."""
    model = Overflowing(6, 4)
    model.overflow, optimizer = True, sgd(model)
    for exponent in (16, 15, 14):
        memory.backward(F.cross_entropy(model(X), Y))
        assert memory.scaler.get_scale() == 2.0**exponent
        memory.unscale_(optimizer)
        assert not math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        memory.zero_grad(optimizer)


# -- several optimizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen_before", [False, True], ids=["first iteration", "later"])
def test_gradients_held_while_the_scale_changes_are_stepped_in_full(memory, seen_before):
    """G's backward, D's backward and step with an overflow, another backward, and only then G's step."""
    generator, critic = nn.Linear(6, 4), Overflowing(6, 4)
    of_generator, of_critic = sgd(generator), sgd(critic)
    if seen_before:
        memory.backward(penalty(generator) + penalty(critic))
        memory.step(of_generator)
        memory.step(of_critic)
    expected, before = gradient(generator), values(generator)
    memory.backward(penalty(generator))
    critic.overflow = True
    memory.backward(F.cross_entropy(critic(X), Y))
    scale = memory.scaler.get_scale()
    memory.step(of_critic)
    critic.overflow = False
    memory.backward(F.cross_entropy(critic(X), Y))
    assert memory.scaler.get_scale() == scale / 2
    memory.step(of_generator)
    assert equal(values(generator), [b - RATE * g for b, g in zip(before, expected, strict=True)])


def test_gradients_that_are_unscaled_stay_so_while_the_scale_changes(memory):
    generator, critic = nn.Linear(6, 4), Overflowing(6, 4)
    of_generator, of_critic = sgd(generator), sgd(critic)
    expected, before = gradient(generator), values(generator)
    critic.overflow = True
    memory.backward(penalty(generator))
    memory.backward(F.cross_entropy(critic(X), Y))
    memory.unscale_(of_generator)
    memory.step(of_critic)
    memory.scaler.update()
    memory.step(of_generator)
    assert equal(values(generator), [b - RATE * g for b, g in zip(before, expected, strict=True)])


def test_parameters_of_no_optimizer_do_not_hold_the_scale_up(memory):
    model, forgotten = Overflowing(6, 4), nn.Parameter(torch.ones(()))
    model.overflow, optimizer = True, sgd(model)
    for exponent in (16, 15, 14):
        memory.backward(F.cross_entropy(model(X) * forgotten, Y))
        assert memory.scaler.get_scale() == 2.0**exponent
        memory.step(optimizer)


def test_sparse_gradients_follow_the_scale(memory):
    table, other = nn.Embedding(5, 3, sparse=True), Overflowing(6, 4)
    of_table, of_other = sgd(table), sgd(other)
    before = table.weight.detach().clone()
    memory.backward(table(torch.tensor([1, 3])).sum())
    other.overflow = True
    memory.backward(F.cross_entropy(other(X), Y))
    memory.step(of_other)
    memory.backward(penalty(other))
    memory.step(of_table)
    expected = torch.zeros(5, 3)
    expected[[1, 3]] = RATE
    assert torch.equal(before - table.weight, before - (before - expected))


class Unscaled:
    """What should come out: one model and its SGD, without any scale.

    As with torch's own scaler, what `unscale_` found holds for the step, whatever the gradients are set to in between.
    """

    def __init__(self, model):
        self.values, self.gradients, self.skipped = values(model), None, 0
        self.found, self.stepped = False, False

    def overflowed(self):
        return not all(gradient.isfinite().all() for gradient in self.gradients)

    def unscale(self):
        self.found = self.found or (self.gradients is not None and not self.stepped and self.overflowed())

    def backward(self, factor):
        self.found, self.stepped = False, False
        added = [2 * factor * value for value in self.values]
        self.gradients = (
            added if self.gradients is None else [a + b for a, b in zip(self.gradients, added, strict=True)]
        )

    def step(self):
        if self.gradients is None:
            return
        if self.found or self.overflowed():
            self.skipped += 1
        else:
            self.values = [v - RATE * g for v, g in zip(self.values, self.gradients, strict=True)]
        self.found, self.stepped = False, True


MODELS = st.integers(0, 1)
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), MODELS, st.sampled_from([1.0, 1.0, 1.0, float("inf")])),
    st.tuples(st.just("step"), MODELS, st.booleans()),
    st.tuples(st.just("zero_grad"), MODELS, st.booleans()),
    st.tuples(st.just("unscale"), MODELS, st.booleans()),
    st.tuples(st.just("update"), MODELS, st.booleans()),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTIONS, max_size=14))
@example(
    [
        ("backward", 0, float("inf")),
        ("backward", 1, 1.0),
        ("unscale", 1, True),
        ("unscale", 1, False),
        ("step", 0, False),
        ("update", 0, False),
        ("step", 1, False),
    ]
)
@example([("backward", 0, float("inf")), ("step", 0, False), ("zero_grad", 0, False), ("step", 0, False)])
def test_in_any_order_two_optimizers_step_as_if_nothing_were_scaled(actions):
    """Bitwise. The scale grows at every update, and halves at every overflow."""
    runtime.reset()
    memory = runtime.preset("16gb", precision="fp16")
    memory.scaler.set_growth_interval(1)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers, expected = [sgd(model) for model in models], [Unscaled(model) for model in models]
    for action, which, how in actions:
        model, optimizer, reference = models[which], optimizers[which], expected[which]
        if action == "backward":
            memory.backward(how * penalty(model))
            reference.backward(how)
        elif action == "step":
            memory.step(optimizer, zero_grad=how)
            reference.step()
            reference.gradients = None if how else reference.gradients
        elif action == "zero_grad":
            optimizer.zero_grad(set_to_none=how)
            zeros = None if reference.gradients is None else [torch.zeros_like(g) for g in reference.gradients]
            reference.gradients = None if how else zeros
        elif action == "unscale":
            (memory if how else memory.scaler).unscale_(optimizer)
            reference.unscale()
            if reference.gradients is not None:
                assert all(
                    torch.equal(p.grad, g) or not g.isfinite().all()
                    for p, g in zip(model.parameters(), reference.gradients, strict=True)
                )
        elif how:
            memory.scaler.update()
        else:
            memory.scaler.state_dict()
        assert equal(values(model), reference.values)
    assert memory.skipped_steps == sum(reference.skipped for reference in expected)


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True], ids=["overflowed before", "overflowed last"])
def test_a_run_resumed_from_a_checkpoint_is_bitwise_the_run_that_went_on(last):
    def train(model, optimizer, steps):
        memory = runtime.preset("16gb", precision="fp16")
        for step in steps:
            model.overflow = step in (1, 3 if last else 2)
            memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
            memory.step(optimizer)
        return memory.scaler

    model = Overflowing(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = train(model, optimizer, range(4))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    saved = copy.deepcopy(saved)
    went_on = train(model, optimizer, range(4, 8)).state_dict()

    runtime.reset()
    resumed = Overflowing(6, 4)
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    runtime.preset("16gb", precision="fp16").scaler.load_state_dict(saved["scaler"])
    assert train(resumed, optimizer, range(4, 8)).state_dict() == went_on
    assert equal(values(resumed), values(model))
    assert saved["scaler"]["scale"] == 2.0**14


def test_a_loaded_state_is_not_changed_by_what_was_found_before(memory):
    model = Overflowing(6, 4)
    state = memory.scaler.state_dict()
    model.overflow, optimizer = True, sgd(model)
    memory.backward(F.cross_entropy(model(X), Y))
    memory.step(optimizer)
    memory.scaler.load_state_dict(state)
    memory.backward(F.cross_entropy(model(X), Y))
    assert memory.scaler.state_dict() == state


def test_a_checkpoint_loaded_before_the_script_turns_fp16_on_is_used(monkeypatch):
    """Under OOMFIX_PRESET=off the script's own autocast decides, and it comes after the checkpoint."""
    monkeypatch.setenv("OOMFIX_PRESET", "off")
    memory = runtime.preset("16gb")
    memory.scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": 64.0})
    assert memory.scaler.state_dict() == {}
    with memory.autocast("cpu", dtype=torch.float16):
        pass
    assert memory.scaler.state_dict()["scale"] == 64.0


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fused_step_is_known_of_with_the_next_or_with_the_checkpoint_and_waits_for_nothing(memory):
    model, x, y = Overflowing(6, 4).cuda(), X.cuda(), Y.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    known = []
    for overflow in (False, False, True, False):
        model.overflow = overflow
        memory.backward(F.cross_entropy(model(x), y))
        try:
            torch.cuda.set_sync_debug_mode("error" if known else "default")
            memory.step(optimizer, scheduler)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        known.append((scheduler.last_epoch, memory.skipped_steps))
    assert known == [(0, 0), (1, 0), (2, 0), (2, 1)]
    memory.scaler.state_dict()
    assert (scheduler.last_epoch, memory.skipped_steps) == (3, 1)
