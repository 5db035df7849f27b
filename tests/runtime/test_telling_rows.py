"""The few rows of a check, and what is compared on them, tell apart what other rows would not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.rows import choose_rows
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.verification.verify import check


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def rows(count, seed=1):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)).double()


def verdict_of(forward, model, batch, most_rows, trains=True):
    return check(forward, Batch(batch, {}), list(model.modules()), most_rows, with_gradients=trains)


def detections(*counts):
    return [rows(5, seed) for seed in range(len(counts))], [{"boxes": torch.randn(n, 4).double()} for n in counts]


def boxes_apart(model, images, targets):
    pairs = zip(images, targets, strict=True)
    return [F.smooth_l1_loss(model(x)[: len(t["boxes"])], t["boxes"], reduction="none").sum() for x, t in pairs]


def test_a_mean_over_boxes_is_no_mean_over_images_though_two_rows_average_what_a_third_has():
    model = network()

    def over_boxes(images, targets):
        return sum(boxes_apart(model, images, targets)) / sum(len(target["boxes"]) for target in targets)

    def over_images(images, targets):
        return torch.stack(boxes_apart(model, images, targets)).mean()

    batch = detections(1, 2, 3, 4, 1, 2)
    assert verdict_of(over_boxes, model, batch, 3).units == "targets"
    images = verdict_of(over_images, model, batch, 3)
    assert (images.rule is not None, images.units) == (True, "rows")


def test_pairs_inside_a_batch_are_taken_apart_by_odd_numbers_of_rows():
    model = network()

    def of_pairs(x):
        out = model(x)
        return (out[::2] - out[1::2]).pow(2).mean()

    for most_rows in range(2, 13):
        assert verdict_of(of_pairs, model, (rows(12),), most_rows).rule is None


def halves_exchanged(x):
    half = len(x) // 2
    return torch.cat([x[half : 2 * half], x[:half], x[2 * half :]])


def neighbours_exchanged(x):
    order = torch.arange(len(x)) ^ 1
    return x[order.clamp(max=len(x) - 1)]


def flipped(x):
    return x.flip(0)


@pytest.mark.parametrize("others", [halves_exchanged, neighbours_exchanged, flipped])
@pytest.mark.parametrize(
    ("size", "most_rows"), [(4, 1), (4, 2), (5, 3), (6, 2), (7, 4), (8, 4), (9, 5), (12, 6), (20, 7), (16, 8), (31, 15)]
)
@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
@pytest.mark.parametrize("trains", [True, False])
def test_pairs_by_place_are_seen_where_all_are_far_apart_and_one_is_left_over(others, size, most_rows, reduce, trains):
    """A margin that all pairs keep is 0 in any part; what is left over of an odd number is paired with itself.

    An evaluation has no gradients that would show as much on four rows.
    """
    model, x = network(), rows(size) + 100 * torch.arange(size).double()[:, None]

    def forward(x, other):
        return reduce(F.relu(1 - (x - other(x)).norm(dim=1)) + 0.1 * model(x).pow(2).mean(1))

    def apart(x):
        return forward(x, torch.zeros_like)

    assert verdict_of(lambda x: forward(x, others), model, (x,), most_rows, trains).rule is None
    assert verdict_of(apart, model, (x,), most_rows, trains).rule is not None


@pytest.mark.parametrize("others", [halves_exchanged, neighbours_exchanged, flipped])
@pytest.mark.parametrize(("size", "most_rows"), [(4, 1), (5, 2), (8, 3), (9, 5), (16, 8), (31, 15)])
def test_pairs_by_place_that_show_in_gradients_alone_are_seen(others, size, most_rows):
    """A straight-through term is 0 whatever it holds; half a batch in two rows and a single one is paired alike."""
    model, x = network(), rows(size)

    def forward(other):
        def of_pairs(x):
            term = (model(x) * model(other(x)).detach()).sum()
            return (model(x) - 1).pow(2).sum() + term - term.detach()

        return of_pairs

    assert verdict_of(forward(others), model, (x,), most_rows).rule is None
    assert verdict_of(forward(lambda x: x), model, (x,), most_rows).rule is not None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("other", [halves_exchanged, neighbours_exchanged, flipped, lambda x: x.roll(1, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_by_place_are_seen_in_batches_of_two_and_three(size, other, seed):
    model, x = network(), rows(size, seed)

    def forward(x):
        return (model(x) - 0.5 * model(other(x))).pow(2).mean(), model(x)

    assert verdict_of(forward, model, (x,), 1).rule is None
    assert verdict_of(lambda x: model(x).max(), model, (x,), 1).rule is None
    assert verdict_of(lambda x: (model(x).pow(2).mean(), model(x)), model, (x,), 1).rule is not None


class Experts(nn.Module):
    """Each sample goes to one of four experts; one that comes after those that its expert has room for is dropped."""

    def __init__(self, room, numbered):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(6, 4, bias=False), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.room, self.numbered = room, numbered

    def forward(self, x):
        shares, chosen = self.gate(x).softmax(1).max(1)
        room = max(int(self.room * len(x) / 4), 4)
        result = x
        for number, expert in enumerate(self.experts):
            here = chosen == number
            places = here.nonzero().flatten()[:room]
            if self.numbered:
                ones = F.one_hot(chosen, 4)
                served = ((ones.cumsum(0) * ones).sum(1) <= room) & here
                result = result + (expert(x) * shares[:, None]) * served[:, None]
            elif len(places):
                result = result.index_add(0, places, expert(x[places]) * shares[places, None])
        return result


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("room", [1.25, 2.0, 3.0])
def test_experts_that_drop_what_they_have_no_room_for_are_seen_though_a_few_rows_drop_nothing(room, numbered):
    model, classes = Experts(room, numbered).double(), torch.arange(64) % 4
    forward = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    for seed in range(4):
        assert verdict_of(forward, model, (rows(64, seed), classes), 24).rule is None


def test_experts_that_drop_nothing_are_split():
    model, classes = Experts(1e9, False).double(), torch.arange(64) % 4
    forward = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    assert verdict_of(forward, model, (rows(64), classes), 24).rule is not None


def test_a_figure_of_what_no_row_has_is_put_together_only_where_it_is_a_mean_or_a_sum():
    """Of rows none of which is far off, the exponential of how many are is 1, as its mean would be."""
    model = network()

    def forward(figure):
        return lambda x: (model(x).pow(2).mean(), figure((x.abs() > 9).double().mean()))

    assert verdict_of(forward(torch.exp), model, (rows(12),), 6).rule is None
    assert verdict_of(forward(lambda mean: mean), model, (rows(12),), 6).rule is not None
    assert verdict_of(forward(lambda mean: 3 * mean + 1), model, (rows(12),), 6).rule is not None


def test_what_was_refused_is_allowed_where_two_lots_of_rows_allow_it():
    """Of the rows that are looked at first, none has what would show."""
    model, seen, hidden = network(), torch.randn(24, 20).double(), torch.randn(24, 20).double()
    hidden[:, 6], hidden[20, 6] = 0, 1
    forward = lambda x: (model(x[:, :6]).pow(2).mean(), x[:, 6].mean().exp())  # noqa: E731
    refused = verdict_of(forward, model, (seen,), 6)
    assert refused.rule is None
    assert verdict_of(forward, model, (hidden,), 6).rule is not None
    modules = list(model.modules())
    assert check(forward, Batch((hidden,), {}), modules, 6, earlier=refused).rule is None
    hidden[20, 6] = 0
    assert check(forward, Batch((hidden,), {}), modules, 6, earlier=refused).rule is not None


def test_complex_results_are_put_together_up_to_the_order_of_sums():
    model = nn.Linear(60, 8).double()

    def forward(x):
        found = torch.fft.fft(torch.view_as_complex(model(x).view(-1, 4, 2)))
        return found.abs().mean(), found

    for seed in range(8):
        x = torch.randn(12, 60, generator=torch.Generator().manual_seed(seed)).double()
        assert verdict_of(forward, model, (x,), 4).rule is not None


def test_a_sparse_matrix_beside_the_batch_does_not_stand_in_the_way():
    model, edges = network(), torch.eye(6).double().roll(1, 0).to_sparse()
    forward = lambda x: model(torch.sparse.mm(edges, x.T).T).pow(2).mean()  # noqa: E731
    assert verdict_of(forward, model, (rows(12),), 6).rule is not None


@pytest.mark.parametrize("kept", [lambda out: out[::2], lambda out: out[: len(out) // 2 * 2 : 2]])
@pytest.mark.parametrize("size", range(4, 13))
def test_a_mean_over_every_other_sample_is_seen(kept, size):
    model = network()
    for most_rows in range(2, (size + 1) // 2 + 1):
        verdict = verdict_of(lambda x: kept(model(x)).pow(2).mean(), model, (rows(size),), most_rows)
        assert verdict.rule is None


def test_a_term_of_a_loose_parameter_that_is_zero_still_shows_in_its_gradient():
    """A sum over samples, and a term once per batch: log variances begin at 0."""
    model, variance = network(), nn.Parameter(torch.zeros(1).double())

    def forward(x):
        return (model(x).pow(2).sum(1) * (-variance).exp()).sum() + variance.sum()

    def without(x):
        return (model(x).pow(2).sum(1) * (-variance).exp()).sum()

    assert verdict_of(forward, model, (rows(12),), 4).rule is None
    assert verdict_of(without, model, (rows(12),), 4).rule is not None


@pytest.mark.parametrize("given", ["noise", "[noise]"])
def test_rows_of_a_trained_argument_that_no_part_is_cut_from_still_show_in_its_gradient(given):
    """A noise for the largest batch, zero at first, of which each batch takes as many rows as it has."""
    model, noise = nn.Linear(4, 1), torch.zeros(7, 4, requires_grad=True)

    def forward(x, noise):
        noise = noise if isinstance(noise, torch.Tensor) else noise[0]
        return (model(x + noise[: len(x)]) ** 2).mean()

    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    x = torch.randn(6, 4)
    memory.forward_backward(forward, x, eval(given))
    found, noise.grad = noise.grad, None
    forward(x, noise).backward()
    torch.testing.assert_close(found, noise.grad)


def test_sequences_that_differ_in_length_for_the_first_time_are_checked_at_once():
    """Padding to the longest of a batch is none while all are alike; the third call is not one to check."""
    model, plain = network(), network()

    def mean_over_padding(model):
        return lambda sequences: model(nn.utils.rnn.pad_sequence(sequences, batch_first=True)).pow(2).mean()

    memory = runtime.preset("16gb", micro_batches=3)
    forward = mean_over_padding(model)
    for lengths in ([4] * 12, [4] * 12, [2 + index % 5 for index in range(12)]):
        batch = [rows(length, seed) for seed, length in enumerate(lengths)]
        model.zero_grad()
        plain.zero_grad()
        memory.forward_backward(forward, batch)
        mean_over_padding(plain)(batch).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_a_forward_hook_that_comes_after_a_check_is_checked_at_once():
    """It leaves no node in the graph, and centres what the batch gives; the third call is not one to check."""

    def centred(module, args, out):
        out.data.sub_(out.data.mean(0))

    model, plain, x = network(), network(), rows(12)
    memory = runtime.preset("16gb", micro_batches=3)
    for call in range(1, 4):
        if call == 3:
            model.register_forward_hook(centred)
            plain.register_forward_hook(centred)
        model.zero_grad()
        memory.forward_backward(lambda x: model(x).pow(2).mean(), x)
    plain(x).pow(2).mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_what_batches_of_two_rows_could_not_show_is_checked_at_the_first_larger_one():
    """Samples of a class depend on each other, which is in no small batch; the third call is not one to check."""
    model, plain = network(), network()

    def forward(model):
        def of_a_class(x, y):
            if len(x) > 1 and model.training and torch.is_grad_enabled() and model is not plain:
                raise OutOfMemoryError("CUDA out of memory.")
            out, rare = model(x), (y == 2)[:, None]
            centre = (out * rare).sum(0) / (rare.sum() + 1)
            return out.pow(2).sum() + ((out - centre) * rare).pow(2).sum()

        return of_a_class

    memory = runtime.preset("16gb", checkpointing="off", offloading="off")
    two, eight = (rows(2), torch.tensor([0, 1])), (rows(8), torch.tensor([0, 2, 2, 1, 2, 0, 2, 1]))
    memory.forward_backward(forward(model), *two)
    memory.forward_backward(forward(model), *two)
    model.zero_grad()
    with pytest.raises(runtime.DoesNotFitError, match="depend on each other"):
        memory.forward_backward(forward(model), *eight)
    assert all(parameter.grad is None for parameter in model.parameters())


def flooding(loss):
    return (loss - 0.05).abs() + 0.05


def free_bits(loss):
    return loss.clamp(min=0.01)


def of_the_larger(loss):
    return torch.maximum(loss, torch.tensor(0.02).double())


def branching(loss):
    return loss if bool((loss > 100).any()) else 2 * loss


def branching_on_a_number(loss):
    numbers = [one.item() for one in loss.view(-1)]
    return loss if any(number > 100 for number in numbers) else 2 * loss


@pytest.mark.parametrize("bend", [flooding, free_bits, of_the_larger, branching, branching_on_a_number])
def test_a_threshold_for_the_mean_of_a_batch_is_seen_far_from_it(bend):
    model = network()
    apart, together = lambda x: bend(model(x).pow(2).mean(1)).mean(), lambda x: bend(model(x).pow(2).mean())
    assert verdict_of(apart, model, (rows(12),), 5).rule is not None
    assert verdict_of(together, model, (rows(12),), 5).rule is None


@pytest.mark.parametrize("bend", [flooding, branching, branching_on_a_number])
def test_a_threshold_for_a_cross_entropy_is_seen_though_its_targets_can_be_held_out(bend):
    model, labels = network(), torch.arange(12) % 4
    apart = lambda x, y: bend(F.cross_entropy(model(x), y, reduction="none")).mean()  # noqa: E731
    together = lambda x, y: bend(F.cross_entropy(model(x), y))  # noqa: E731
    assert verdict_of(apart, model, (rows(12), labels), 5).rule is not None
    assert verdict_of(together, model, (rows(12), labels), 5).rule is None


@pytest.mark.parametrize(
    "chosen",
    [
        lambda losses: torch.max(losses[0], losses[1]),
        lambda losses: torch.fmin(losses[0], losses[1]),
        lambda losses: losses.max(),
        lambda losses: losses.min(0).values,
        lambda losses: losses[losses.argmax()],
        lambda losses: losses.sort().values[0],
        lambda losses: losses.topk(1).values.sum(),
        lambda losses: torch.cat([losses, losses.new_full((1,), -1.0)]).median(),
        lambda losses: losses.norm(p=float("inf")),
        lambda losses: F.l1_loss(losses, losses.new_full((2,), 0.5)),
    ],
)
@pytest.mark.parametrize("most_rows", [4, 6])
def test_which_of_two_means_a_batch_chooses_by_their_size_is_seen_though_a_few_rows_choose_the_same(chosen, most_rows):
    model, apart = network(), torch.tensor([0.0, 9.0]).double()

    def of_each(x):
        return torch.stack([chosen(model(sample).pow(2)[:2] + apart) for sample in x]).mean()

    def of_all(x):
        return chosen(model(x).pow(2).mean(0)[:2] + apart)

    assert verdict_of(of_each, model, (rows(12),), most_rows).rule is not None
    assert verdict_of(of_all, model, (rows(12),), most_rows).rule is None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_numbers_that_torch_cannot_compare_are_split_as_others_are(dtype):
    model, labels = network(), (torch.arange(12) % 4).to(dtype)

    def forward(x, y):
        return F.cross_entropy(model(x), y.float().long())

    assert verdict_of(forward, model, (rows(12), labels), 5).rule is not None


def test_a_threshold_is_seen_where_no_targets_can_be_held_out():
    """Labels of one byte have no room for -100."""
    model, labels = network(), (torch.arange(12) % 4).to(torch.uint8)

    def forward(x, y):
        return flooding(F.cross_entropy(model(x), y))

    assert verdict_of(forward, model, (rows(12), labels), 5).rule is None


def test_a_number_that_is_read_and_not_compared_still_splits():
    model = network()

    def forward(x):
        loss = model(x).pow(2).mean()
        return loss, loss.item(), copy.deepcopy(loss.item()), f"{loss.item():.0f}"[:0]

    assert verdict_of(forward, model, (rows(12),), 5).rule is not None


def test_a_threshold_per_dimension_of_what_is_averaged_over_the_batch_is_seen():
    model = network()

    def free_bits_per_dimension(x):
        return model(x).pow(2).mean(0).clamp(min=0.001).sum()

    assert verdict_of(free_bits_per_dimension, model, (rows(12),), 5).rule is None


def test_thresholds_of_parameters_and_of_samples_in_a_loop_still_split():
    model, scale = network(), nn.Parameter(torch.ones(()).double())

    def of_a_parameter(x):
        return (scale.clamp(max=100.0) * torch.relu(model(x))).mean()

    def in_a_loop(x):
        return torch.stack([torch.relu(model(sample)).abs().mean().clamp(min=0.1) for sample in x]).mean()

    assert verdict_of(of_a_parameter, model, (rows(12),), 5).rule is not None
    assert verdict_of(in_a_loop, model, (rows(12),), 5).rule is not None


@pytest.mark.parametrize("mask", ["one class each", "all of one length", "full", "weights", "lengths"])
def test_a_mean_over_what_a_mask_leaves_is_seen_where_it_leaves_as_much_of_each_sample(mask):
    model, x = network(), rows(12)
    left = {
        "one class each": F.one_hot(torch.arange(12) % 4, 4).double(),
        "all of one length": torch.tensor([1.0, 1.0, 0.0, 0.0]).double().repeat(12, 1),
        "full": torch.ones(12, 4).double(),
        "weights": torch.full((12, 1), 1 / 12).double(),
        "lengths": torch.full((12, 1), 3),
    }[mask]

    def over_what_is_left(x, left):
        return (model(x).pow(2) * left).sum() / left.sum()

    def over_samples(x, left):
        return (model(x).pow(2) * left).sum(1).mean()

    assert verdict_of(over_what_is_left, model, (x, left), 5).units == "targets"
    assert verdict_of(over_samples, model, (x, left), 5).rule is not None


@pytest.mark.parametrize("distribution", ["normal", "categorical"])
def test_a_distribution_that_checks_its_arguments_hides_no_mask(distribution):
    """What it compares for itself is no mask: with a gap, it would refuse its arguments, and the check tell nothing."""
    model, actions = network(), torch.arange(12) % 4

    def of_likely_actions(x, actions):
        out = model(x)
        if distribution == "normal":
            surprise = -torch.distributions.Normal(out, torch.ones_like(out)).log_prob(torch.zeros_like(out))
        else:
            surprise = -torch.distributions.Categorical(logits=out).log_prob(actions)
        return surprise[surprise < 1e3].mean()

    assert verdict_of(of_likely_actions, model, (rows(12), actions), 5).units == "targets"


@pytest.mark.parametrize("labels", [[0, 1, 2, 3] * 3, [3] * 6 + [0] * 6])
def test_sequences_that_must_lie_by_length_are_looked_at_in_the_order_of_the_batch(labels):
    """`pack_padded_sequence` asks for the longest first, as the batch has them."""
    torch.manual_seed(0)
    recurrent, head = nn.LSTM(6, 8, batch_first=True).double(), nn.Linear(8, 4).double()
    lengths, targets = torch.tensor([9, 9, 8, 7, 7, 6, 5, 4, 4, 3, 2, 1]), torch.tensor(labels)

    def forward(x, lengths, targets):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return F.cross_entropy(head(recurrent(packed)[1][0][-1]), targets)

    x = torch.randn(12, 9, 6, generator=torch.Generator().manual_seed(1)).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    for _ in range(4):
        recurrent.zero_grad()
        memory.forward_backward(forward, x, lengths, targets)
    split = recurrent.weight_ih_l0.grad.clone()
    recurrent.zero_grad()
    forward(x, lengths, targets).backward()
    torch.testing.assert_close(split, recurrent.weight_ih_l0.grad, rtol=1e-12, atol=1e-14)
    (known,) = memory._forwards
    assert known.split_calls == 4


def of_each_class(out, y):
    chosen = [y == label for label in range(4)]
    return [F.cross_entropy(out[rows], y[rows]) for rows in chosen if rows.any()]


def of_each_sample(out, y):
    return F.cross_entropy(out, y, reduction="none")


@pytest.mark.parametrize(
    "grouped",
    [
        lambda out, y: sum(of_each_class(out, y)),
        lambda out, y: torch.stack(of_each_class(out, y)).mean(),
        lambda out, y: (of_each_sample(out, y) / torch.bincount(y)[y]).sum(),
        lambda out, y: (of_each_sample(out, y) / torch.bincount(y)[y]).mean(),
    ],
    ids=["sum of means", "mean of means", "shares, summed", "shares, averaged"],
)
def test_a_weight_that_the_samples_of_a_class_share_is_seen_though_few_rows_are_of_a_class_each(grouped):
    model = network()

    def by_class(x, y):
        return grouped(model(x), y)

    def by_sample(x, y):
        return sum(F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]) for row in range(len(x)))

    for labels in ([0, 1, 2, 3] * 2, [3, 0, 0, 1, 2, 3, 3, 1]):
        batch = rows(8), torch.tensor(labels)
        for most_rows in (2, 3, 4):
            assert verdict_of(by_class, model, batch, most_rows).rule is None
            assert verdict_of(by_sample, model, batch, most_rows).rule is not None


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
@pytest.mark.parametrize("size", [8, 16, 40])
def test_a_weight_that_the_samples_of_a_class_share_is_seen_though_all_rows_are_of_a_class_each(size, reduce):
    model = network()

    def by_class(x, y):
        return reduce(model(x).pow(2).mean(1) / torch.bincount(y)[y])

    def by_sample(x, y):
        return reduce(model(x).pow(2).mean(1) / (1 + y))

    batch = rows(size), torch.arange(size)
    for most_rows in (2, size // 2):
        assert verdict_of(by_class, model, batch, most_rows).rule is None
        assert verdict_of(by_sample, model, batch, most_rows).rule is not None


def hardest(distances, same):
    hardest_positive, hardest_negative = (distances * same).amax(1), (distances + 1e3 * same).amin(1)
    return F.relu(hardest_positive - hardest_negative + 0.3)


def hardest_by_indices(distances, same):
    positive = (distances * same).argmax(dim=1, keepdim=True)
    negative = torch.min(input=distances + 1e3 * same, dim=1, keepdim=True)[1]
    return torch.clamp(input=distances.gather(1, positive) - distances.gather(1, negative) + 0.3, min=0)


def hardest_in_a_loop(distances, same):
    rooted = distances.clamp(min=1e-12)
    apart = [
        F.relu(row.max() - (row + 1e3 * alike).min() + 0.3) for row, alike in zip(rooted * same, same, strict=True)
    ]
    return torch.stack(apart)


def all_pairs(distances, same):
    return torch.max(0.3 - distances, torch.zeros(())) * ~same


@pytest.mark.parametrize("size", [8, *(pytest.param(size, marks=pytest.mark.slow) for size in (12, 16))])
@pytest.mark.parametrize("term", [hardest, hardest_by_indices, hardest_in_a_loop, all_pairs])
def test_pairs_that_are_all_far_apart_in_a_few_rows_are_seen_beside_another_term(term, size):
    """In the rest of the batch they may not be, and the other term makes a loss that is not 0."""
    model = network()

    def forward(x, y):
        out = model(x)
        far = 20 * out
        return term(torch.cdist(far, far), y[:, None] == y).mean() + F.cross_entropy(out, y)

    for seed in range(6):
        batch = (rows(size, seed), torch.arange(size) // (size // 4))
        for most_rows in (2, 5, 8):
            assert verdict_of(forward, model, batch, most_rows).rule is None


def test_extremes_within_samples_and_of_none_of_their_dimensions_still_split():
    """Over classes, over the length that all samples of a batch have, over all of them for a log, in a loop."""
    model = network()

    def forward(x, y, lengths):
        out = model(x)
        steps = torch.arange(1, int(lengths.max()) + 1)
        steps = F.relu(out[:, None] * (steps * (steps <= lengths[:, None]))[..., None])  # [samples, length, classes]
        pooled = steps.max(1).values + steps.amax((1, 2))[:, None]
        best = torch.stack([torch.max(sample, 0).values[:2].sum() for sample in steps])
        return F.cross_entropy(pooled, y) + best.mean() + torch.max(out, out.flip(1)).mean(), out.argmax(1)

    lengths = torch.tensor([3, 4, 5, 3, 4, 5, 3, 5])
    for most_rows in (2, 5, 8):
        assert verdict_of(forward, model, (rows(8), torch.arange(8) % 4, lengths), most_rows).rule is not None


def pairs_by_indices(out):
    first, second = torch.triu_indices(len(out), len(out), 1)
    return F.relu(0.3 - (20 * out[first] - 20 * out[second]).norm(dim=1)).sum()


def sums_over_the_batch(out):
    return torch.clamp((out @ out.T).exp().sum(1) - 1e3, min=0).mean()


def sums_of_two(out):
    return torch.max(torch.zeros(()), (out @ out.T).exp().sum(1) - 1e3).sum()


def in_place(out):
    return (torch.cdist(out, out).sum(1) - 1e3).relu_().sum()


@pytest.mark.parametrize("term", [pairs_by_indices, sums_over_the_batch, sums_of_two, in_place])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_a_hinge_hides_that_is_closed_on_a_few_rows_is_seen(term, noise):
    model = network()

    def forward(x, y):
        out = model(x + noise * torch.randn_like(x) if noise else x)
        return term(out) + F.cross_entropy(out, y)

    for most_rows in (2, 5, 8):
        assert verdict_of(forward, model, (rows(12), torch.arange(12) % 4), most_rows).rule is None


@pytest.mark.parametrize(("noise", "loops"), [(0.0, False), (0.1, False), (0.0, True)])
def test_hinges_of_samples_that_are_closed_on_a_few_rows_still_split(noise, loops):
    """One by one, of boxes that do not meet, in a loop."""
    model = network()

    def forward(x, y):
        out = model(x + noise * torch.randn_like(x) if noise else x)
        meeting = (torch.minimum(out[:, 2:], x[:, 2:4]) - torch.maximum(out[:, :2], x[:, :2] + 50)).clamp(min=0)
        losses = F.relu(out.abs().sum(1) - 50) + meeting.prod(1)
        if loops:
            apart = [F.relu(one.exp() - 50 * (label > 1)).sum() for one, label in zip(out, y, strict=True)]
            losses = losses + torch.stack(apart)
        return losses.mean() + F.cross_entropy(out, y)

    for most_rows in (2, 5, 8):
        assert verdict_of(forward, model, (rows(12), torch.arange(12) % 4), most_rows).rule is not None


def test_a_closed_hinge_that_cannot_be_opened_leaves_it_at_what_the_rows_showed():
    """A root of what goes in is no number."""
    model = network()

    def forward(x, y):
        out = model(x)
        return F.relu(out.abs().sum(1) - 50).sqrt().mean() + F.cross_entropy(out, y)

    assert verdict_of(forward, model, (rows(12), torch.arange(12) % 4), 5).rule is not None


@pytest.mark.parametrize("width", [1, 4096, 4097, 9000])
def test_masks_of_any_width_are_split(width):
    """Narrow rows are looked at many at a time, wide ones as few as a check may hold."""
    model, mask = network(), torch.ones(12, width).double()
    mask[::2, width // 2 :] = 0

    def over_what_is_left(x, mask):
        return (model(x).pow(2).sum(1, keepdim=True) * mask).sum() / mask.sum()

    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    memory.forward_backward(over_what_is_left, rows(12), mask)
    split = model[0].weight.grad.clone()
    model.zero_grad()
    over_what_is_left(rows(12), mask).backward()
    torch.testing.assert_close(split, model[0].weight.grad, rtol=1e-12, atol=1e-14)
    (known,) = memory._forwards
    assert known.split_calls == 1


def test_choosing_rows_takes_no_more_memory_than_a_few_of_them():
    mask = torch.ones(64, 9000)
    mask[::2, 4500:] = 0
    with SimulatedCard() as card:
        choose_rows(Batch((mask,), {}), 4)
    # two comparisons with a number, and what they make together
    assert card.peak_bytes < 4 * 4 * 9000


def test_choosing_among_many_labels_takes_few_operations():
    with SimulatedCard() as card:
        choose_rows(Batch((torch.arange(4096) % 7 - 1,), {}), 4)
    assert card.allocations < 16


@pytest.mark.parametrize("number", range(8))
def test_flags_that_few_rows_have_are_looked_at_on_those_rows(number):
    """Of eight flags, each of one row, the rows that show some leave out others."""
    model = network()
    flags = [torch.eye(12, dtype=torch.double)[2 + one] for one in range(8)]

    def forward(x, *flags):
        errors, flag = model(x).pow(2).sum(1), flags[number]
        return (errors * flag).sum() / max(float(flag.sum()), 1.0) + errors.mean()

    def plain(x, *flags):
        return (model(x).pow(2).sum(1) * flags[number]).mean()

    batch = [rows(12), *flags]
    verdict = verdict_of(forward, model, batch, 4)
    assert verdict.rule is None or verdict.counted_means
    assert verdict_of(plain, model, batch, 4).units == "rows"
