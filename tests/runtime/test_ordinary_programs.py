"""Training programs as people write them: gradients, results and weights are those of whole batches, split or not."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification import comparison
from oomfix.runtime.verification.verify import check


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def rows(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def labels(*shape, seed=2):
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(seed))


def gradients_apart(model, forward, batches, **overrides):
    """The largest difference, over calls and parameters, between our gradients and those of a plain backward."""
    memory, worst = runtime.preset("16gb", **{"micro_batches": 3, **overrides}), 0.0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for batch in batches:
        expected = torch.autograd.grad(forward(*batch), parameters)
        model.zero_grad()
        memory.forward_backward(forward, *batch)
        pairs = zip(parameters, expected, strict=True)
        worst = max([worst, *(float((p.grad - e).abs().max() / e.abs().max().clamp(min=1e-3)) for p, e in pairs)])
    return worst


def whole_because(**overrides):
    """Why the batches of the only forward so far are not split; None if they are."""
    (report,) = runtime.preset("16gb", **{"micro_batches": 3, **overrides}).report().forwards
    return report.whole_because


def adapted(model, x, y):
    """The weights of `model` after a step on one task, with the graph of that step."""
    weights = dict(model.named_parameters())
    loss = F.cross_entropy(functional_call(model, weights, (x,)), y)
    gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
    return {name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients, strict=True)}


def test_learning_to_learn_is_split_by_tasks():
    """The gradient of a cross entropy is differentiated again, and the node of that keeps no divisor."""
    model = network()

    def forward(support, support_labels, query, query_labels):
        losses = []
        for x, y, test_x, test_y in zip(support, support_labels, query, query_labels, strict=True):
            losses.append(F.cross_entropy(functional_call(model, adapted(model, x, y), (test_x,)), test_y))
        return torch.stack(losses).mean()

    batches = [(rows(n, 7, 6), labels(n, 7), rows(n, 7, 6, seed=3), labels(n, 7, seed=4)) for n in (6, 6, 5)]
    assert gradients_apart(model, forward, batches) < 1e-12
    assert whole_because() is None


def test_a_cross_entropy_for_each_sample_in_a_loop_is_split_for_any_number_of_samples():
    """What each divides by is in one sample; that other micro-batches have fewer of them is no reason to stay whole."""
    model = network()

    def forward(tokens, targets):
        return torch.stack([F.cross_entropy(model(x), y) for x, y in zip(tokens, targets, strict=True)]).mean()

    batches = [(rows(n, 5, 6), labels(n, 5)) for n in (12, 12, 7, 5)]
    batches[2][1][0, 1:4] = -100
    assert gradients_apart(model, forward, batches) < 1e-12
    assert whole_because() is None


def verdict_of(forward, model, batch, most_rows):
    return check(forward, Batch(batch, {}), list(model.modules()), most_rows)


def focal_of_the_mean(model):
    def forward(x, y):
        loss = F.cross_entropy(model(x), y)
        return (1 - (-loss).exp()) ** 2 * loss

    return forward


@pytest.mark.parametrize("most_rows", [2, 3, 5, 9])
def test_a_part_of_a_check_without_targets_shows_nothing(most_rows, monkeypatch):
    """Two rows are what an out-of-memory error leaves of a check: one of them held out, any function would pass."""
    model = network()
    monkeypatch.setattr("oomfix.runtime.verification.few_rows._FEWEST_ROWS", min(3, most_rows))
    if most_rows == 2:
        monkeypatch.setattr("oomfix.runtime.verification.few_rows.telling", lambda most: 2)
    batch = rows(12, 6), labels(12)
    assert verdict_of(focal_of_the_mean(model), model, batch, most_rows).rule is None
    assert verdict_of(lambda x, y: F.cross_entropy(model(x), y), model, batch, most_rows).rule is not None


@pytest.mark.parametrize("labelled", [1, 2, 3])
def test_a_function_of_a_mean_over_few_labelled_samples_is_seen(labelled):
    model, targets = network(), torch.full((24,), -100)
    targets[[3, 17, 22][:labelled]] = 1
    plain = verdict_of(lambda x, y: F.cross_entropy(model(x), y), model, (rows(24, 6), targets), 5)
    found = verdict_of(focal_of_the_mean(model), model, (rows(24, 6), targets), 5)
    assert plain.rule is not None
    assert (found.rule is None) == (labelled > 1)


def test_what_one_labelled_sample_showed_is_not_believed_of_batches_with_more():
    """With one label in a batch, any function of the mean over labels is split rightly; with two it is not."""
    model = network()
    batches = []
    for labelled in ([3], [5], [5, 17], [1, 8, 22], [4]):
        targets = torch.full((24,), -100)
        targets[labelled] = 1
        batches.append((rows(24, 6), targets))
    assert gradients_apart(model, focal_of_the_mean(model), batches) < 1e-12
    runtime.reset()
    assert gradients_apart(model, lambda x, y: F.cross_entropy(model(x), y), batches) < 1e-12
    assert whole_because() is None


def margins(model):
    return lambda a, p, n: F.relu(F.pairwise_distance(model(a), model(p)) - F.pairwise_distance(model(a), model(n)) + 9)


def of_those_above_zero_by_count(loss):
    return loss.sum() / ((loss > 0).sum() + 1e-12)


def of_those_above_zero_by_number(loss):
    return loss.sum() / max((loss > 0).sum().item(), 1)


def of_those_above_zero_by_index(loss):
    return loss[loss > 0].mean()


def of_those_above_zero_by_weight(loss):
    hard = loss.gt(0).double()
    return (loss * hard).sum() / hard.sum().clamp(min=1)


SELECTED_MEANS = [
    of_those_above_zero_by_count,
    of_those_above_zero_by_number,
    of_those_above_zero_by_index,
    of_those_above_zero_by_weight,
]


@pytest.mark.parametrize("reduce", SELECTED_MEANS)
def test_a_mean_over_hard_samples_is_seen_while_all_are_hard(reduce):
    """The triplets of an untrained network all have a loss; later ones do not, and the mean is over those that do."""
    model, triplets = network(), (rows(12, 6), rows(12, 6, seed=3), rows(12, 6, seed=4))
    losses = margins(model)
    assert (losses(*triplets) > 0).all()
    verdict = verdict_of(lambda a, p, n: reduce(losses(a, p, n)), model, triplets, 5)
    # where what the mean divides by can be read, parts weigh that
    reads = reduce is not of_those_above_zero_by_number
    assert (verdict.rule is not None, bool(verdict.divisors)) == (reads, reads)


def mean_of_class_means(loss, y):
    return torch.stack([loss[y == label].mean() for label in y.unique()]).mean()


def per_class(loss, y):
    return loss.sum() / len(torch.unique(y, return_counts=True)[0])


@pytest.mark.parametrize("reduce", [mean_of_class_means, per_class])
@pytest.mark.parametrize("most_rows", [3, 5])
def test_a_mean_over_the_classes_of_a_batch_is_seen_where_each_row_has_its_own(reduce, most_rows):
    model, batch = network(), (rows(12, 6), torch.arange(12))

    def forward(x, y):
        return reduce(model(x).pow(2).sum(1), y)

    assert verdict_of(forward, model, batch, most_rows).rule is None


def test_classes_that_are_counted_for_each_sample_still_split():
    model, masks = network(), torch.arange(12)[:, None].remainder(5).clamp(max=3) * torch.arange(6)

    def forward(x, masks):
        losses = [out.pow(2).sum() / len(mask.unique()) for out, mask in zip(model(x), masks, strict=True)]
        return torch.stack(losses).mean()

    assert verdict_of(forward, model, (rows(12, 6), masks), 5).rule is not None


def test_a_mean_over_targets_that_are_known_is_seen_while_all_are():
    model = network()

    def forward(x, y):
        known = ~y.isnan()
        return F.mse_loss(model(x)[known], y[known])

    assert verdict_of(forward, model, (rows(12, 6), rows(12, 4, seed=3)), 5).units == "targets"


def test_masks_are_looked_at_on_fewer_rows_where_memory_runs_out_in_between(monkeypatch):
    model, triplets, refused = network(), (rows(12, 6), rows(12, 6, seed=3), rows(12, 6, seed=4)), []

    def compare(forward, batch, modules, rows, how, *others, **named):
        if how.mask_gaps and not refused:
            refused.append(len(rows))
            raise OutOfMemoryError("CUDA out of memory.")
        return comparison.compare(forward, batch, modules, rows, how, *others, **named)

    monkeypatch.setattr("oomfix.runtime.verification.few_rows.compare", compare)
    losses = margins(model)
    found = verdict_of(lambda a, p, n: of_those_above_zero_by_count(losses(a, p, n)), model, triplets, 5)
    assert found.units == "targets"
    assert refused == [8]


def test_thresholds_that_only_weigh_each_sample_still_split():
    model, x, y = network(), rows(12, 6), labels(12)

    def forward(x, y):
        out = model(x)
        confident = out.softmax(1).max(1).values > 0.01
        padded = torch.arange(12) < 20  # as long as the batch, and no mask of samples
        loss = F.cross_entropy(out, y, reduction="none") * confident
        return loss.mean() * padded.double().mean(), (out.argmax(1) == y).sum(), confident

    assert verdict_of(forward, model, (x, y), 5).rule is not None


def by_clamped_tensor(kept):
    return kept.sum().clamp(min=1)


def by_larger_number(kept):
    return max(kept.sum().item(), 1)


@pytest.mark.parametrize("count", [by_clamped_tensor, by_larger_number])
def test_a_count_that_is_at_least_one_is_seen_where_a_part_has_none(count):
    """Of rows with 0, 1 and 0 that count, two parts divide by 1 as the whole does: that looks like a sum."""
    model, targets = network(), torch.zeros(12, dtype=torch.long)
    targets[4] = 1

    def forward(x, y):
        return F.cross_entropy(model(x), y, reduction="none").sum() / count(y > 0)

    for most_rows in (3, 5):
        assert verdict_of(forward, model, (rows(12, 6), targets), most_rows).rule is None


def of_an_attack(model, optimizer):
    def forward(x, y):
        attacked = x.clone().requires_grad_(True)
        F.cross_entropy(model(attacked), y).backward()
        optimizer.zero_grad()
        return F.cross_entropy(model(x + 0.1 * attacked.grad.sign()), y)

    return forward


def beginning_with_zero_grad(model, optimizer):
    def forward(x, y):
        optimizer.zero_grad()
        return F.cross_entropy(model(x), y)

    return forward


def with_a_backward_of_its_own(model, optimizer):
    def forward(x, y):
        model(x).pow(2).mean().backward()
        return F.cross_entropy(model(x), y)

    return forward


@pytest.mark.parametrize("make", [of_an_attack, beginning_with_zero_grad, with_a_backward_of_its_own])
@pytest.mark.parametrize("filled", [False, True], ids=["none before", "zeros before"])
def test_a_forward_that_changes_gradients_itself_runs_whole(make, filled):
    """A micro-batch would drop what those before it gave, or add its own backward once more."""
    model, plain = network(), network()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    forward, as_written = make(model, optimizers[0]), make(plain, optimizers[1])
    memory, x, y = runtime.preset("16gb", micro_batches=3), rows(12, 6), labels(12)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not filled)
        as_written(x, y).backward()
        memory.forward_backward(forward, x, y)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
        assert whole_because() is not None


@pytest.mark.parametrize("make", [of_an_attack, beginning_with_zero_grad, with_a_backward_of_its_own])
@pytest.mark.parametrize("filled", [False, True], ids=["taken off", "filled with zeros"])
@pytest.mark.parametrize("more", [{}, {"micro_batches": 3}], ids=["whole", "in parts"])
def test_a_forward_resets_the_gradients_of_the_call_before(make, filled, more):
    """Nothing else does: they are there when it begins, as they would be without a manager."""
    model, plain = network(), network()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for optimizer in optimizers:
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=not filled)
    forward, as_written = make(model, optimizers[0]), make(plain, optimizers[1])
    memory, x, y = runtime.preset("16gb", **more), rows(12, 6), labels(12)
    for _ in range(5):
        as_written(x, y).backward()
        memory.forward_backward(forward, x, y)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_a_term_that_an_epoch_kept_on_the_model_turns_on_is_seen_at_once():
    """The forward reads the attribute, not the model's own code."""
    model = network()
    model.epoch = 0

    def forward(x, y):
        out = model(x)
        return F.cross_entropy(out, y) + (out.var(0).sum() if model.epoch else 0)

    batch = rows(12, 6), labels(12)
    assert gradients_apart(model, forward, [batch] * 5) < 1e-12
    model.epoch = 1
    assert gradients_apart(model, forward, [batch] * 2) < 1e-12


def test_a_ratio_of_losses_is_seen_whatever_is_added_below_it():
    """Two means that are equal up to 1e-8 hide how their gradients are weighed, unless losses that differ count too."""
    model = network()

    def balanced(x, y):
        out = model(x)
        first, second = F.cross_entropy(out, y), F.mse_loss(out[:, 0], x[:, 0])
        return first + second * (first / (second + 1e-8)).detach()

    for seed in range(12):
        batch = rows(12, 6, seed=seed), labels(12, seed=seed)
        assert verdict_of(balanced, model, batch, 5).rule is None


def test_what_two_lone_samples_show_alike_is_not_believed(monkeypatch):
    """A correlation over one sample is 0 for any, and of two samples it is 1 or -1: as if two losses were added."""
    model, x = network(), rows(12, 6)

    def forward(x, y):
        out = model(x)[:, 0]
        return 1 - F.cosine_similarity(out - out.mean(), y - y.mean(), dim=0)

    with torch.no_grad():
        opposite = -model(x)[:, 0]
    # what running out of memory leaves of a check
    monkeypatch.setattr("oomfix.runtime.verification.few_rows._FEWEST_ROWS", 2)
    monkeypatch.setattr("oomfix.runtime.verification.few_rows.telling", lambda most: 2)
    found = verdict_of(forward, model, (x, opposite), 2)
    assert found.rule is None


@pytest.mark.parametrize("arranged", [lambda views, y: ([views, y],), lambda views, y: (views, y)])
def test_views_of_a_batch_in_a_list_are_cut_along_their_samples(arranged):
    """Two augmentations of twelve images are a batch of twelve, not of two."""
    model = network()

    def of_views(views, y):
        first, second = views
        return F.cross_entropy(model(first), y) + F.mse_loss(model(second), model(first).detach())

    def forward(*batch):
        return of_views(*(batch if len(batch) == 2 else batch[0]))

    batches = [arranged([rows(n, 6), rows(n, 6, seed=3)], labels(n)) for n in (12, 12, 7)]
    assert [Batch(batch, {}).size for batch in batches] == [12, 12, 7]
    assert gradients_apart(model, forward, batches) < 1e-12
    assert whole_because() is None


def test_a_list_of_samples_stays_one_though_they_are_as_long_as_something_else():
    sequences, table = [rows(12, 6, seed=n) for n in range(5)], rows(12, 6)
    assert Batch((sequences, labels(5), table), {}).size == 5


LAYOUTS = {
    "channels last": lambda: rows(9, 3, 2, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: rows(9, 8, 3).transpose(1, 2),
    "every other column": lambda: rows(9, 3, 16)[:, :, ::2],
    "the same for all": lambda: rows(3, 8).expand(9, 3, 8),
    "a mask": lambda: torch.ones(9, 8, 3).double().transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_split_however_it_lies_in_memory(layout):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()

    def loss(x, y):
        return F.cross_entropy(model(x.flatten(2)).sum(1), y)

    assert gradients_apart(model, loss, [(LAYOUTS[layout](), labels(9, seed=seed)) for seed in range(3)]) < 1e-12
    assert whole_because() is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_empty_batch_is_run_and_shows_nothing(precision):
    """fp16 is checked for gradients of gradients at the first call, whatever that brings."""
    model = network().float()
    memory = runtime.preset("16gb", micro_batches=3, precision=precision)

    def forward(x, y):
        return F.cross_entropy(model(x), y, reduction="sum")

    for count in (0, 12, 0):
        loss = memory.forward_backward(forward, rows(count, 6).float(), labels(count))
        assert (loss == 0) == (count == 0)
    assert whole_because(precision=precision) is None


@pytest.mark.parametrize("overrides", [{"micro_batches": 3}, {"micro_batches": "auto"}], ids=["split", "whole"])
@pytest.mark.parametrize("forgotten", ["x", "y", "model"])
def test_what_was_left_on_the_meta_device_gives_the_error_of_torch(overrides, forgotten):
    """Not one of our own, from code that the user never wrote."""
    model, batch = network(), {"x": rows(12, 6), "y": labels(12)}
    if forgotten == "model":
        model = model.to("meta")
    else:
        batch[forgotten] = batch[forgotten].to("meta")

    def forward(x, y):
        return F.cross_entropy(model(x), y)

    said = []
    for run in (forward, lambda **batch: runtime.preset("16gb", **overrides).forward_backward(forward, **batch)):
        with pytest.raises(RuntimeError) as raised:
            run(**batch)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_model_may_call_a_list_of_its_own_modules():
    """`self.modules = []` hides the method of `nn.Module`, which torch itself does without."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.modules = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
            self.layers = nn.ModuleList(self.modules)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Network(), torch.randn(6, 4)
    memory = runtime.preset("8gb", precision="fp32", micro_batches=3)  # checkpoints blocks from the start
    optimizer = torch.optim.SGD(memory.prepare(model).parameters(), lr=0.1)
    expected = torch.autograd.grad((model(x) ** 2).mean(), list(model.parameters()))
    memory.forward_backward(lambda x: (model(x) ** 2).mean(), x)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
    memory.step(optimizer)


class Compiled(nn.Module):
    """Two layers, which count their calls where they are told to."""

    calls: torch.Tensor

    def __init__(self, counts: bool):
        super().__init__()
        self.first, self.second, self.counts = nn.Linear(4, 8), nn.Linear(8, 1), counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return self.second(torch.tanh(self.first(x))) * (1 + self.calls)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("preset", ["8gb", "16gb"])
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "not prepared"])
@pytest.mark.parametrize("counts", [True, False], ids=["counts", "counts nothing"])
def test_a_network_of_torch_jit_is_split_if_its_buffers_allow_it(preset, prepared, counts):
    """It has no forward in Python, and no dictionaries of parameters and buffers."""
    memory = runtime.preset(preset, precision="fp32", micro_batches=3)
    alone, model = Compiled(counts), Compiled(counts)
    model.load_state_dict(alone.state_dict())
    if prepared:
        memory.prepare(model)
    model = torch.jit.script(model)

    def forward(x):
        return (model(x) ** 2).mean()

    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (alone, model)]
    for _ in range(3):
        x = torch.randn(6, 4)
        (alone(x) ** 2).mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        memory.forward_backward(forward, x)
        memory.step(optimizers[1])
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
    assert model.calls == alone.calls
    (report,) = memory.report().forwards
    assert (report.whole_because is not None) is counts


class Adapter(nn.Module):
    """A frozen layer and a product of two matrices beside it, the second of which begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(8, width) * 0.02)
        self.up = nn.Parameter(torch.zeros(width, 8))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def test_adapters_that_begin_at_0_are_split_from_the_first_call_on():
    """The gradients behind the matrix that is 0 are 0, whatever the loss is."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapter(600), nn.GELU(), Adapter(600)).double()
    batches = [(rows(12, 600, seed=seed), labels(12, seed=seed)) for seed in range(3)]
    assert gradients_apart(model, lambda x, y: F.cross_entropy(model(x), y), batches) < 1e-12
    (known,) = runtime.preset("16gb", micro_batches=3)._forwards
    assert known.split_calls == len(batches)


def test_samples_that_depend_on_each_other_behind_adapters_are_seen():
    torch.manual_seed(0)
    model = nn.Sequential(Adapter(600), nn.GELU(), Adapter(600)).double()

    def forward(x, y):
        out = model(x)
        return F.cross_entropy(out, y) + (out.mean(0) ** 2).sum()

    assert verdict_of(forward, model, (rows(12, 600), labels(12)), 5).rule is None


def test_a_large_head_that_begins_at_0_hides_nothing():
    """It is the only parameter with a gradient at first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 4000, bias=False)).double()
    nn.init.zeros_(model[2].weight)
    apart = verdict_of(lambda x, y: F.cross_entropy(model(x), y), model, (rows(12, 6), labels(12)), 5)
    together = verdict_of(
        lambda x, y: F.cross_entropy(model(x) - model(x).mean(0), y), model, (rows(12, 6), labels(12)), 5
    )
    assert apart.rule is not None
    assert together.rule is None
