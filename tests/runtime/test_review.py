"""Losses, windows and forwards that were once split or weighted wrongly without a word."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch
from tests.runtime.through import through

LABELS = torch.arange(64) % 20


def inputs():
    return torch.randn(64, 4).double(), torch.randn(64, 3).double()


def gradient_errors(forward, parameters, *batches, **overrides):
    """The relative error of each call's gradient against a plain backward."""
    memory, errors = runtime.preset("16gb", **{"micro_batches": 4, **overrides}), []
    for batch in batches:
        forward(*batch).backward()
        expected = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        memory.forward_backward(forward, *batch)
        for parameter, gradient in zip(parameters, expected, strict=True):
            errors.append(float((parameter.grad - gradient).abs().max() / gradient.abs().max()))
            parameter.grad = None
    return errors


def triplet(net):
    def forward(x, y):
        e = F.normalize(net(x))
        distances = torch.cdist(e, e)
        same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
        margins = (distances[:, :, None] - distances[:, None] + 0.5).clamp(min=0)
        return (margins * (same[:, :, None] & ~same[:, None])).sum() / same.sum().clamp(min=1)

    return forward


def top_of(net):
    return lambda x, y: F.mse_loss(net(x), y, reduction="none").mean(1).topk(min(16, len(x))).values.mean()


def balanced_losses(net):
    def forward(x, y):
        a, b = F.mse_loss(net(x), y), F.l1_loss(net(x), y)
        return a + b * (a / b).detach()

    return forward


def masked_mean(net):
    return lambda x, y, mask: ((net(x) - y) ** 2 * mask).sum() / mask.sum()


def test_a_loss_that_is_zero_on_the_rows_checked_is_not_split():
    net, (x, _) = nn.Linear(4, 3).double(), inputs()
    assert max(gradient_errors(triplet(net), [*net.parameters()], *[(x, LABELS)] * 3)) < 1e-12


@pytest.mark.parametrize("loss", [top_of, balanced_losses])
def test_losses_whose_parts_only_look_independent_run_whole(loss):
    net = nn.Linear(4, 3).double()
    assert max(gradient_errors(loss(net), [*net.parameters()], inputs())) < 1e-12


@pytest.mark.parametrize("masked", [[20, 40, 41, 42, 43], []])
def test_a_masked_mean_runs_whole_though_the_mask_is_full_at_first(masked):
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    mask, later = torch.ones(64, 3).double(), torch.ones(64, 3).double()
    mask[masked] = 0
    later[7] = 0
    batches = [(x, y, mask), (x, y, mask), (x, y, later)]
    assert max(gradient_errors(masked_mean(net), [*net.parameters()], *batches)) < 1e-12


def test_a_float_that_was_zero_on_the_rows_checked_is_not_averaged():
    net, x = nn.Linear(4, 100).double(), inputs()[0]
    target = net(x).argmax(1)
    wrong = torch.ones(64, dtype=torch.bool)
    wrong[[7, 22]] = False
    target[wrong] = (target[wrong] + 1) % 100

    def forward(x, y):
        out = net(x)
        return F.cross_entropy(out, y), (out.argmax(1) == y).float().sum()

    expected = forward(x, target)[1]
    got = runtime.preset("16gb", micro_batches=16).forward_backward(forward, x, target)[1]
    assert float(got) == float(expected)


def test_what_is_known_of_a_decorated_forward_is_not_used_for_another():
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    memory = runtime.preset("16gb", micro_batches=4)

    @torch.enable_grad()
    def independent(x, y):
        return F.mse_loss(net(x), y)

    @torch.enable_grad()
    def coupled(x, y):
        return F.cross_entropy(F.normalize(net(x)) @ F.normalize(y).T, torch.arange(len(x)))

    for forward in (independent, independent, independent, coupled):
        net.zero_grad()
        forward(x, y).backward()
        expected = net.weight.grad
        net.zero_grad()
        memory.forward_backward(forward, x, y)
        assert torch.allclose(net.weight.grad, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bound", ["argument", "partial", "closure"])
def test_a_flag_or_criterion_of_a_forward_is_part_of_what_is_known(bound):
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    memory = runtime.preset("16gb", micro_batches=4)

    def loss(x, y, reduction):
        return F.mse_loss(net(x), y, reduction=reduction)

    def closing_over(criterion):
        return lambda x, y: criterion(net(x), y)

    for reduction in ("mean", "mean", "mean", "sum", "mean", "sum"):
        net.zero_grad()
        loss(x, y, reduction).backward()
        expected = net.weight.grad
        net.zero_grad()
        if bound == "argument":
            memory.forward_backward(loss, x, y, reduction)
        elif bound == "partial":
            memory.forward_backward(functools.partial(loss, reduction=reduction), x, y)
        else:
            memory.forward_backward(closing_over(nn.MSELoss(reduction=reduction)), x, y)
        assert torch.allclose(net.weight.grad, expected, rtol=1e-10, atol=1e-14)


def window_gradient(batches, parameters, losses):
    """The gradient that one window over `batches` leaves behind; `losses(memory, *batch)` runs backward."""
    memory = runtime.preset("16gb")
    for batch in memory.accumulate(batches, len(batches)):
        losses(memory, *batch)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (8, 8, 8, 2), (1, 1, 1, 1), (6, 6, 6, 6)])
@pytest.mark.parametrize("extra", [0.0, 0.01])
def test_windows_of_ignored_targets_divide_by_all_targets(sizes, extra):
    net = nn.Linear(4, 5).double()
    batches = [(torch.randn(size, 6, 4).double(), torch.randint(0, 5, (size, 6))) for size in sizes]
    for index, (_, y) in enumerate(batches):
        y[0, : index + 1] = -100
    if sizes[0] == 6:
        batches[1][1][:] = -100

    def forward(x, y):
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten()) + extra * net.weight.pow(2).sum()

    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = torch.autograd.grad(forward(x, y), [*net.parameters()])
    if sizes[0] == 6 and extra:
        pytest.skip("a batch without targets has a NaN loss of its own")
    got = window_gradient(batches, [*net.parameters()], lambda memory, x, y: memory.forward_backward(forward, x, y))
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


RAGGED = [(torch.randn(n, 4).double(), torch.randn(n, 3).double()) for n in (4, 4, 2)]


@pytest.mark.parametrize("second", ["forward", "same forward", "backward"])
def test_two_losses_per_batch_of_a_ragged_window_are_both_weighed(second):
    net = nn.Linear(4, 3).double()

    def first(x, y):
        return F.mse_loss(net(x), y)

    def other(x, y):
        return first(x, -y) if second == "same forward" else F.l1_loss(net(x), y)

    def losses(memory, x, y):
        memory.forward_backward(first, x, y)
        if second == "backward":
            memory.backward(other(x, y))
        elif second == "same forward":
            memory.forward_backward(first, x, -y)
        else:
            memory.forward_backward(other, x, y)

    expected = torch.autograd.grad(sum((first(*b) + other(*b)) * len(b[0]) / 10 for b in RAGGED), [net.weight])
    (got,) = window_gradient(RAGGED, [net.weight], losses)
    assert torch.allclose(got, expected[0], rtol=1e-12)


def test_a_backward_of_ones_own_in_a_ragged_window_is_refused():
    net = nn.Linear(4, 3).double()

    def losses(memory, x, y):
        memory.forward_backward(lambda x, y: F.mse_loss(net(x), y), x, y)
        net.weight.pow(2).sum().backward()

    with pytest.raises(RuntimeError, match="Return the sum of these losses from one forward"):
        window_gradient(RAGGED, [net.weight], losses)


def test_a_graph_behind_the_inputs_of_a_ragged_window_is_corrected():
    encoder, net = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
    loss = sum(F.mse_loss(net(encoder(x)), y) * len(x) / 10 for x, y in RAGGED)
    (expected,) = torch.autograd.grad(loss, [encoder.weight])
    (got,) = window_gradient(
        RAGGED,
        [encoder.weight],
        lambda memory, x, y: memory.forward_backward(lambda x, y: F.mse_loss(net(x), y), encoder(x), y),
    )
    assert torch.allclose(got, expected, rtol=1e-12)


def test_backward_in_a_window_counts_samples_of_a_collated_list():
    net, x, y = nn.Linear(4, 3).double(), torch.randn(5, 4).double(), torch.randn(5, 3).double()
    (expected,) = torch.autograd.grad(F.mse_loss(net(x), y), [net.weight])
    batches = [[x[:4], y[:4]], [x[4:], y[4:]]]
    (got,) = window_gradient(batches, [net.weight], lambda memory, x, y: memory.backward(F.mse_loss(net(x), y)))
    assert torch.allclose(got, expected, rtol=1e-12)


def test_parameters_unfrozen_between_checks_get_the_right_gradient():
    first, second = nn.Linear(4, 8).double(), nn.Linear(8, 5).double()
    parameters = [*first.parameters(), *second.parameters()]
    memory = runtime.preset("16gb", micro_batches=4)
    for call in range(1, 8):
        first.requires_grad_(call >= 5)
        x, y = torch.randn(16, 4).double(), torch.randint(0, 5, (16,))
        y[[2, 3, 9]] = -100
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        expected = torch.autograd.grad(F.cross_entropy(second(first(x).relu()), y), trained)
        memory.forward_backward(lambda x, y: F.cross_entropy(second(first(x).relu()), y), x, y)
        for parameter, gradient in zip(trained, expected, strict=True):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-10, atol=1e-14)
            parameter.grad = None


def test_a_hook_on_a_parameter_outside_all_modules_forces_whole_batches():
    w, (x, y) = nn.Parameter(torch.randn(4, 3).double()), inputs()
    w.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    assert max(gradient_errors(lambda x, y: F.mse_loss(x @ w, y), [w], (x, y))) < 1e-12


def test_a_hook_that_comes_after_the_first_calls_gets_the_gradient_of_the_whole_batch_once():
    """On a parameter outside of all modules, which only the graph shows; the third call is not one to check."""
    w, (x, y), seen = nn.Parameter(torch.randn(4, 3).double()), inputs(), []
    memory = runtime.preset("16gb", micro_batches=4)
    for call in range(1, 6):
        if call == 3:
            w.register_hook(seen.append)
        w.grad = None
        memory.forward_backward(lambda x, y: F.mse_loss(x @ w, y), x, y)
    (known,) = memory._forwards
    assert known.split_calls == 2
    assert len(seen) == 3
    torch.testing.assert_close(seen[0], torch.autograd.grad(F.mse_loss(x @ w, y), [w])[0], rtol=1e-12, atol=1e-15)


def test_an_argument_that_was_whole_stays_whole_beside_a_batch_as_long():
    net, x, centres = nn.Linear(4, 3).double(), inputs()[0], torch.randn(8, 3).double()

    def forward(x, centres):
        return torch.cdist(net(x), centres).min(1).values.mean()

    batches = [(x, centres), (x, centres), (x[:8], centres)]
    assert max(gradient_errors(forward, [*net.parameters()], *batches)) < 1e-12


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(4, 3), torch.zeros(8, 3)

    def forward(self, x):
        before = self.hidden if len(self.hidden) == len(x) else x.new_zeros(len(x), 3)
        self.hidden = self.cell(x, before.detach())
        return self.hidden


def test_state_in_an_attribute_is_noticed(caplog):
    model, memory = Recurrent(), runtime.preset("16gb", micro_batches=4)
    for _ in range(3):
        memory.forward_backward(lambda x: model(x).pow(2).mean(), torch.randn(8, 4))
    assert "keeps state" in caplog.text
    assert model.hidden.shape == (8, 3)


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8, 1, 8), (1, 8, 8, 1, 8)])
def test_a_batch_of_one_sample_does_not_overrule_what_more_samples_showed(sizes):
    net, memory = nn.Linear(4, 3).double(), runtime.preset("16gb", micro_batches=4)

    def dice(x, y):
        p = net(x).sigmoid()
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())

    for begin, size in enumerate(sizes):
        x, y = inputs()[0][begin : begin + size], (inputs()[1][begin : begin + size] > 0).double()
        expected = torch.autograd.grad(dice(x, y), net.weight)[0]
        net.zero_grad()
        memory.forward_backward(dice, x, y)
        assert torch.allclose(net.weight.grad, expected, rtol=1e-10)


def test_tokens_ignored_later_do_not_weigh_a_term_over_rows_wrongly():
    table, head = nn.Embedding(20, 8).double(), nn.Linear(8, 20).double()
    parameters = [*table.parameters(), *head.parameters()]

    def forward(tokens, labels):
        hidden = table(tokens)
        return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()) + hidden.pow(2).mean()

    tokens, labels = torch.randint(0, 20, (16, 6)), torch.randint(0, 20, (16, 6))
    ignored = labels.clone()
    ignored[:5, 2:] = -100
    batches = [(tokens, labels)] * 4 + [(tokens, ignored)] * 3
    assert max(gradient_errors(forward, parameters, *batches)) < 1e-12


def custom_backward_before_a_deep_head():
    def coupled(gradient):
        return gradient / gradient.norm()

    first, head = nn.Linear(4, 3), nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model = nn.ModuleList([first, head]).double()
    return model, lambda x, y: F.mse_loss(head(through(coupled)(first(x))), y)


def test_a_coupling_that_only_early_gradients_show_is_seen():
    model, forward = custom_backward_before_a_deep_head()
    x, y = inputs()
    assert max(gradient_errors(forward, [*model.parameters()], (x, y))) < 1e-12


def test_a_cross_entropy_that_is_hidden_in_compiled_code_weighs_by_samples_in_a_window():
    net = nn.Linear(4, 3).double()
    x, labels = inputs()[0][:24], LABELS[:24] % 3

    class Recomputed(torch.autograd.Function):  # hides the graph of the loss, as compiled code does
        @staticmethod
        def forward(ctx, weight, x, y):
            with torch.enable_grad():
                inner = weight.detach().requires_grad_()
                loss = F.cross_entropy(x @ inner.T, y)
                (ctx.gradient,) = torch.autograd.grad(loss, inner)
            return loss.detach()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.gradient, None, None

    expected = torch.autograd.grad(F.cross_entropy(x @ net.weight.T, labels), net.weight)[0]
    memory = runtime.preset("16gb")
    for rows, targets in memory.accumulate([(x[:8], labels[:8]), (x[8:16], labels[8:16]), (x[16:], labels[16:])], 3):
        memory.forward_backward(lambda x, y: Recomputed.apply(net.weight, x, y), rows, targets)
    assert torch.allclose(net.weight.grad, expected, rtol=1e-10)


def test_a_forward_without_arguments_weighs_by_the_batch_of_the_loader():
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    expected = torch.autograd.grad(F.mse_loss(net(x[:20]), y[:20]), net.weight)[0]
    memory = runtime.preset("16gb")
    for a, b in memory.accumulate([(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:20], y[16:20])], 3):
        memory.forward_backward(lambda a=a, b=b: F.mse_loss(net(a), b))
    assert torch.allclose(net.weight.grad, expected, rtol=1e-10)


def normalised_gradient(output):
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / gradient.norm())
    return output


def hook_on_an_activation(net):
    return lambda x, y: F.mse_loss(normalised_gradient(net(x)), y)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("loss", [balanced_losses, hook_on_an_activation])
def test_a_coupling_that_only_gradients_show_is_seen_at_the_check_after_it_begins(loss, draws):
    net, (x, y) = nn.Linear(4, 3).double(), inputs()

    def forward(x, y, late):
        if draws:
            x = x + 0 * torch.rand_like(x)
        return loss(net)(x, y) if bool(late) else F.mse_loss(net(x), y)

    begins = torch.tensor([False, True])
    batches = [(x, y, begins[0])] * 3 + [(x, y, begins[1])] * 4
    assert max(gradient_errors(forward, [*net.parameters()], *batches)) < 1e-12


@pytest.mark.parametrize("parts", [1, 2])
def test_cross_entropies_with_targets_of_their_own_weigh_by_samples_in_a_window(parts):
    net, x = nn.Linear(4, 6).double(), inputs()[0][:16]
    first, second = torch.arange(16) % 3, torch.arange(16) % 2
    first[8:14] = -100  # of the second batch only

    def forward(x, a, b):
        output = net(x)
        return F.cross_entropy(output[:, :3], a) + F.cross_entropy(output[:, 3:], b)

    batches = [(x[:8], first[:8], second[:8]), (x[8:], first[8:], second[8:])]
    expected = torch.autograd.grad(sum(forward(*batch) / 2 for batch in batches), net.weight)[0]
    memory = runtime.preset("16gb", micro_batches=parts)
    for batch in memory.accumulate(batches, 2):
        memory.forward_backward(forward, *batch)
    assert torch.allclose(net.weight.grad, expected, rtol=1e-12)


@pytest.mark.parametrize("parts", [1, 2])
def test_cross_entropies_with_the_same_targets_weigh_by_targets_in_a_window(parts):
    net, x, y = nn.Linear(4, 6).double(), inputs()[0][:16], torch.arange(16) % 3
    y[9:14] = -100

    def forward(x, y):
        output = net(x)
        return F.cross_entropy(output[:, :3], y) + 0.4 * F.cross_entropy(output[:, 3:], y)

    expected = torch.autograd.grad(forward(x, y), net.weight)[0]
    memory = runtime.preset("16gb", micro_batches=parts)
    for batch in memory.accumulate([(x[:8], y[:8]), (x[8:], y[8:])], 2):
        memory.forward_backward(forward, *batch)
    assert torch.allclose(net.weight.grad, expected, rtol=1e-12)


@pytest.mark.parametrize("difference", ["ignored label", "class weights"])
def test_cross_entropies_that_count_the_same_targets_differently_weigh_by_samples_in_a_window(difference):
    net, x, y = nn.Linear(4, 6).double(), inputs()[0][:16], torch.arange(16) % 2
    y[9:14] = 2  # in the second batch only

    def forward(x, y):
        output = net(x)
        other = {"ignore_index": 2} if difference == "ignored label" else {"weight": torch.tensor([1.0, 1, 3]).double()}
        return F.cross_entropy(output[:, :3], y) + F.cross_entropy(output[:, 3:], y, **other)

    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    expected = torch.autograd.grad(sum(forward(*batch) / 2 for batch in batches), net.weight)[0]
    memory = runtime.preset("16gb")
    for batch in memory.accumulate(batches, 2):
        memory.forward_backward(forward, *batch)
    assert torch.allclose(net.weight.grad, expected, rtol=1e-12)


def test_targets_that_part_ways_within_a_window_are_refused():
    net, x, y = nn.Linear(4, 6).double(), inputs()[0][:16], torch.arange(16) % 3
    other = y.clone()
    other[9:14] = -100

    def forward(x, a, b):
        output = net(x)
        return F.cross_entropy(output[:, :3], a) + F.cross_entropy(output[:, 3:], b)

    memory = runtime.preset("16gb")
    windows = memory.accumulate([(x[:8], y[:8], y[:8]), (x[8:], y[8:], other[8:])], 2)
    memory.forward_backward(forward, *next(windows))
    with pytest.raises(RuntimeError, match="cannot be weighed apart any more"):
        memory.forward_backward(forward, *next(windows))


@pytest.mark.parametrize("nested", [dict, list])
def test_what_was_whole_inside_a_container_stays_whole_in_a_batch_as_long(nested):
    net, x, centres = nn.Linear(4, 3).double(), inputs()[0], torch.randn(8, 3).double()

    def forward(batch):
        x, (centres,) = (batch["x"], batch["more"].values()) if nested is dict else (batch[0], batch[1].values())
        return torch.cdist(net(x), centres).min(1).values.mean()

    def batch(x):
        more = {"centres": centres}
        return {"x": x, "more": more} if nested is dict else [x, more]

    batches = [(batch(x),), (batch(x),), (batch(x[:8]),)]
    assert max(gradient_errors(forward, [*net.parameters()], *batches)) < 1e-12


@pytest.mark.parametrize("tokens_tell", [False, True])
def test_labels_to_ignore_are_looked_at_before_tokens_where_three_rows_are_checked(tokens_tell):
    table, net = nn.Embedding(50, 4).double(), nn.Linear(4, 3).double()
    tokens, labels = torch.randint(1, 50, (12, 6)), torch.randint(0, 3, (12, 6))
    labels[7, 1:] = -100
    if tokens_tell:
        tokens[4, 3:] = 0

    def forward(tokens, labels):
        counts = labels != -100
        losses = F.cross_entropy(net(table(tokens)).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view_as(labels) * counts).sum() / counts.sum()

    assert max(gradient_errors(forward, [*net.parameters(), *table.parameters()], (tokens, labels))) < 1e-12


def test_positions_and_masks_of_the_length_do_not_make_it_the_batch_size():
    net, x = nn.Linear(4, 4).double(), torch.randn(26, 12, 4).double()
    positions, mask, sizes = torch.randn(12, 4).double(), torch.ones(12, 12).double(), []

    def forward(x, positions, mask):
        sizes.append(len(x))
        return (mask @ (net(x) + positions)).pow(2).mean()

    expected = torch.autograd.grad(forward(x, positions, mask), net.weight)[0]
    memory = runtime.preset("16gb", micro_batches=2)
    for begin in memory.accumulate([0, 8, 16, 24], 4):
        memory.forward_backward(forward, x[begin : begin + 8], positions, mask)
    assert torch.allclose(net.weight.grad, expected, rtol=1e-12)
    memory.forward_backward(forward, x[:8], positions, mask)
    assert sizes[-2:] == [4, 4]


def test_a_time_major_batch_is_not_cut_along_time():
    x, lengths, labels = torch.randn(12, 8, 4), torch.full((8,), 12), torch.zeros(8)
    assert Batch((x, lengths, labels), {}).size == 8
    assert Batch((x, torch.randn(8, 4), torch.randn(8, 2)), {}).size == 8


def test_a_coupling_that_nothing_but_gradients_shows_is_seen_at_the_128th_call(caplog):
    """Neither flags nor numbers nor functions change when it begins."""
    net, (x, y) = nn.Linear(4, 3).double(), inputs()
    begun = torch.tensor(False)

    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            return output.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / gradient.norm() if bool(begun) else gradient

    memory = runtime.preset("16gb", micro_batches=2)
    for call in range(1, 129):
        begun.fill_(call > 70)
        net.zero_grad()
        memory.forward_backward(lambda x, y: F.mse_loss(Normalised.apply(net(x)), y), x, y)
        assert ("another gradient" in caplog.text) == (call == 128)
    assert "127 earlier call(s) were split" in caplog.text
    expected = torch.autograd.grad(F.mse_loss(Normalised.apply(net(x)), y), net.weight)[0]
    assert torch.allclose(net.weight.grad, expected, rtol=1e-12)
