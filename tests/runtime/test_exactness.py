"""A split batch has the gradients, the loss and the outputs of the whole (float64: 1e-12)."""

import copy
import dataclasses
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch, balanced

EXACT = 1e-12


def network(inputs=6, classes=4):
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, classes)).double()


def labels(size, classes=4):
    return torch.randint(0, classes, (size,), generator=torch.Generator().manual_seed(size))


def padded(size, length, classes=4):
    """Targets [size, length] of very different lengths; the last rows hold nothing but padding."""
    target = torch.randint(0, classes, (size, length))
    for row in range(size):
        target[row, max(1, (row * 3) % length) :] = -100
    target[size - 4 :] = -100
    return target


WEIGHTS = torch.tensor([0.1, 3.0, 0.0, 1.0], dtype=torch.float64)
LOSSES = {
    "mean": lambda out, y: F.cross_entropy(out, y),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "mean squared error": lambda out, y: F.mse_loss(out, F.one_hot(y, 4).double()),
    "sum of two means": lambda out, y: F.cross_entropy(out, y) + 0.3 * out.pow(2).mean(),
    "class weights": lambda out, y: F.cross_entropy(out, y, weight=WEIGHTS),
    "class weights by position": lambda out, y: F.cross_entropy(out, y, WEIGHTS),
    "smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "smoothing and weights": lambda out, y: F.cross_entropy(out, y, weight=WEIGHTS + 0.1, label_smoothing=0.1),
    "negative log likelihood": lambda out, y: F.nll_loss(F.log_softmax(out, 1), y, ignore_index=2),
    "two cross entropies": lambda out, y: F.cross_entropy(out, y, WEIGHTS) + 0.4 * F.cross_entropy(out * 2, y, WEIGHTS),
    "probabilities": lambda out, y: F.cross_entropy(out, F.one_hot(y, 4).double()),
    "written by hand": lambda out, y: -F.log_softmax(out, 1).gather(1, y[:, None]).squeeze(1).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("size", "parts"), [(12, 4), (13, 4), (7, 3), (3, 2), (64, 31)])
def test_gradients_and_loss_are_those_of_the_whole_batch(loss, size, parts, relative_error):
    model, criterion = network(), LOSSES[loss]
    reference = copy.deepcopy(model)
    x, y = torch.randn(size, 6).double(), labels(size)
    expected = criterion(reference(x), y)
    expected.backward()

    memory = runtime.preset("16gb", micro_batches=parts)
    got = memory.forward_backward(lambda x, y: criterion(model(x), y), x, y)

    assert relative_error(model, reference) < EXACT
    assert torch.allclose(got, expected, rtol=EXACT)
    assert not got.requires_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("empty", ["last", "first"])
@pytest.mark.parametrize("parts", [2, 4, 6])
def test_ignored_targets_weigh_nothing_and_micro_batches_of_them_are_skipped(smoothing, empty, parts, relative_error):
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(12, 5, 6).double(), padded(12, 5)
    if empty == "first":
        y = y.flip(0)

    def criterion(out, y):
        return F.cross_entropy(out.reshape(-1, 4), y.reshape(-1), label_smoothing=smoothing)

    expected = criterion(reference(x), y)
    expected.backward()
    memory = runtime.preset("16gb", micro_batches=parts)
    got = memory.forward_backward(lambda x, y: criterion(model(x), y), x, y)

    assert relative_error(model, reference) < EXACT
    assert torch.allclose(got, expected, rtol=EXACT)


def test_a_check_without_ignored_targets_still_finds_what_is_divided_by(relative_error):
    """The rows that are checked have no ignored target; the last micro-batch is nearly all padding."""
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(16, 6).double(), labels(16)
    y[9:] = -100
    F.cross_entropy(reference(x), y).backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert relative_error(model, reference) < EXACT


def test_targets_that_are_ignored_for_the_first_time_between_two_checks_are_weighed(relative_error):
    """A check ignores some itself: on rows without any, a mean over targets looks like one over samples."""
    model = network()
    reference, (x, y) = copy.deepcopy(model), (torch.randn(16, 6).double(), labels(16))
    memory = runtime.preset("16gb", micro_batches=4)
    for call in (1, 2, 3):
        model.zero_grad()
        y = y if call < 3 else torch.where(torch.arange(16) < 9, y, -100)
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    F.cross_entropy(reference(x), y).backward()
    assert relative_error(model, reference) < EXACT
    (known,) = memory._forwards
    assert known.split_calls == 3


def test_a_mean_over_targets_plus_a_mean_over_samples_is_split_where_targets_are_ignored(relative_error):
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(16, 6).double(), labels(16)
    y[9:] = -100

    def criterion(out, y):
        return F.cross_entropy(out, y) + out.pow(2).mean()

    criterion(reference(x), y).backward()
    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(lambda x, y: criterion(model(x), y), x, y)
    assert relative_error(model, reference) < EXACT
    assert memory.report().forwards[0].micro_batches == 4


def test_a_mean_over_tokens_plus_a_mean_over_samples_is_not_taken_for_a_mean_over_tokens(relative_error):
    """On rows without padding both means fit; the check has to make the difference itself."""
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(16, 5, 6).double(), torch.randint(0, 4, (16, 5))
    y[6:10, 1:] = -100

    def criterion(out, y):
        return F.cross_entropy(out.reshape(-1, 4), y.reshape(-1)) + out.pow(2).mean()

    criterion(reference(x), y).backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x, y: criterion(model(x), y), x, y)
    assert relative_error(model, reference) < EXACT


def test_two_cross_entropies_over_different_targets_run_whole(relative_error):
    model = network()
    reference = copy.deepcopy(model)
    x, y, z = torch.randn(16, 6).double(), labels(16), labels(16).flip(0)
    z[5:14] = -100

    def criterion(out, y, z):
        return F.cross_entropy(out, y) + F.cross_entropy(-out, z)

    criterion(reference(x), y, z).backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x, y, z: criterion(model(x), y, z), x, y, z)
    assert relative_error(model, reference) < EXACT


def test_segmentation_masks_are_weighted_by_their_pixels(relative_error):
    model = nn.Conv2d(3, 4, 3, padding=1).double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 3, 6, 6).double(), torch.randint(0, 4, (8, 6, 6))
    y[5:, 1:] = 255
    F.cross_entropy(reference(x), y, ignore_index=255).backward()

    def forward(x, y):
        return F.cross_entropy(model(x), y, ignore_index=255)

    runtime.preset("16gb", micro_batches=4).forward_backward(forward, x, y)
    assert relative_error(model, reference) < EXACT


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def test_tied_weights_get_both_gradients(relative_error):
    model = Tied()
    reference = copy.deepcopy(model)
    x = torch.randint(0, 11, (9, 7))
    F.cross_entropy(reference(x)[:, :-1].reshape(-1, 11), x[:, 1:].reshape(-1)).backward()

    def forward(x):
        return F.cross_entropy(model(x)[:, :-1].reshape(-1, 11), x[:, 1:].reshape(-1))

    runtime.preset("16gb", micro_batches=4).forward_backward(forward, x)
    assert relative_error(model, reference) < EXACT


def test_sparse_gradients_are_added_up():
    model = nn.Embedding(11, 8, sparse=True).double()
    reference = copy.deepcopy(model)
    x = torch.randint(0, 11, (9, 7))
    reference(x).pow(2).mean().backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x: model(x).pow(2).mean(), x)
    assert model.weight.grad.is_sparse
    assert torch.allclose(model.weight.grad.to_dense(), reference.weight.grad.to_dense(), rtol=EXACT)


def test_frozen_parameters_stay_without_gradient(relative_error):
    model = network()
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    x, y = torch.randn(10, 6).double(), labels(10)
    F.cross_entropy(reference(x), y).backward()
    runtime.preset("16gb", micro_batches=3).forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert model[0].weight.grad is None
    assert relative_error(model, reference) < EXACT


@pytest.mark.parametrize("parts", [1, 3])
def test_inputs_that_require_grad_get_theirs(parts):
    model = network()
    x, y = torch.randn(10, 6).double().requires_grad_(), labels(10)
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x])
    memory = runtime.preset("16gb", micro_batches=parts)
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert torch.allclose(x.grad, expected, rtol=EXACT)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_graph_behind_the_inputs_is_run_backward_once(parts):
    encoder, head = network(classes=6), network()
    x, y = torch.randn(10, 6).double(), labels(10)
    expected = torch.autograd.grad(F.cross_entropy(head(encoder(x)), y), list(encoder.parameters()))
    passes = []
    encoder[0].weight.register_hook(lambda gradient: passes.append(1))
    memory = runtime.preset("16gb", micro_batches=parts)
    memory.forward_backward(lambda z, y: F.cross_entropy(head(z), y), encoder(x), y)
    assert len(passes) == 1
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-11)


def test_gradients_are_added_to_those_that_were_there(relative_error):
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(10, 6).double(), labels(10)
    memory = runtime.preset("16gb", micro_batches=3)
    for _ in range(2):
        F.cross_entropy(reference(x), y).backward()
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert relative_error(model, reference) < EXACT


# -- what a batch may be ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    image: torch.Tensor
    label: torch.Tensor
    name: str = "pair"


class Encoding(dict):
    """A mapping with attributes, like those of tokenizers."""

    note = None


class Namespace(dict):
    """A mapping whose attributes are its entries, and which knows no others."""

    __getattr__ = dict.__getitem__


class OwnAttributes(dict):
    """A mapping that is its own namespace."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


def pair_of(kind, x, y):
    if kind == "encoding":
        batch = Encoding(image=x, label=y)
        batch.note = "kept"
        return batch
    return {
        "dataclass": Pair(x, y),
        "dict": {"image": x, "label": y, "scale": 2.0},
        "read-only mapping": MappingProxyType({"image": x, "label": y}),
        "namespace": Namespace(image=x, label=y),
        "own attributes": OwnAttributes(image=x, label=y),
        "list of samples": [{"image": a, "label": b} for a, b in zip(x, y, strict=True)],
        "tuple of samples": tuple((a, b) for a, b in zip(x, y, strict=True)),
        "tensor and dict": (x, {"label": y}),
        "tensor and list": (x, y.tolist()),
        "views and dict": ((x / 2, x / 2), {"label": y}),
        "tensors and none": (x, y, None),
    }[kind]


def unpacked(batch):
    if isinstance(batch, list):
        return torch.stack([s["image"] for s in batch]), torch.stack([s["label"] for s in batch])
    if isinstance(batch, tuple) and isinstance(batch[0], tuple) and isinstance(batch[1], tuple):
        return torch.stack([s[0] for s in batch]), torch.stack([s[1] for s in batch])
    if isinstance(batch, tuple):
        x = sum(batch[0]) if isinstance(batch[0], tuple) else batch[0]
        return x, torch.as_tensor(batch[1]["label"] if isinstance(batch[1], dict) else batch[1])
    if isinstance(batch, Pair | Namespace | OwnAttributes):
        assert not isinstance(batch, Pair) or batch.name == "pair"
        return batch.image, batch.label
    assert not isinstance(batch, Encoding) or batch.note == "kept"
    return batch["image"], batch["label"]


@pytest.mark.parametrize(
    "kind",
    [
        *("encoding", "dataclass", "dict", "read-only mapping", "namespace", "own attributes"),
        *("list of samples", "tuple of samples"),
        *("tensor and dict", "tensor and list", "views and dict", "tensors and none"),
    ],
)
def test_containers_are_split_and_keep_their_type(kind, relative_error):
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(10, 6).double(), labels(10)
    F.cross_entropy(reference(x), y).backward()
    sizes = []

    def forward(batch):
        x, y = unpacked(batch)
        sizes.append(len(x))
        return F.cross_entropy(model(x), y)

    runtime.preset("16gb", micro_batches=5).forward_backward(forward, pair_of(kind, x, y))
    assert sizes[-5:] == [2, 2, 2, 2, 2]
    assert relative_error(model, reference) < EXACT


def test_detection_targets_are_split_with_their_images(relative_error):
    """Images of different sizes with a different number of boxes each, losses in a dict, as in torchvision."""
    model = network(inputs=3, classes=4)
    reference = copy.deepcopy(model)
    images = [torch.randn(3, 5 + i, 4).double() for i in range(7)]
    targets = [{"boxes": torch.rand(1 + i % 3, 4).double()} for i in range(7)]

    def losses(model, images, targets):
        outputs = [model(image.mean((1, 2))) for image in images]
        box = torch.stack([(o - t["boxes"]).pow(2).mean() for o, t in zip(outputs, targets, strict=True)])
        terms = {"box": box.mean(), "size": torch.stack(outputs).pow(2).mean()}
        return terms["box"] + terms["size"], terms

    expected, expected_terms = losses(reference, images, targets)
    expected.backward()
    memory = runtime.preset("16gb", micro_batches=3)
    _, terms = memory.forward_backward(lambda i, t: losses(model, i, t), images, targets)
    assert relative_error(model, reference) < EXACT
    for name, value in expected_terms.items():
        assert torch.allclose(terms[name], value, rtol=EXACT)


def test_what_has_no_rows_is_passed_whole():
    weights = torch.ones(4).double()
    seen = []

    def forward(x, y, weights, flag, mask=None):
        seen.append((len(x), len(weights), flag, mask.shape))
        return F.cross_entropy(x.requires_grad_(), y, weights)

    memory = runtime.preset("16gb", micro_batches=2)
    x = torch.randn(8, 4).double()
    memory.forward_backward(forward, x, labels(8), weights, "text", mask=torch.ones(5, 5))
    assert seen[-1] == (4, 4, "text", (5, 5))


def test_a_batch_of_one_runs_whole(relative_error):
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(1, 6).double(), labels(1)
    F.cross_entropy(reference(x), y).backward()
    runtime.preset("16gb", micro_batches=4).forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert relative_error(model, reference) == 0.0


def test_packed_sequences_run_whole_and_it_is_said_once(caplog):
    model = nn.GRU(3, 4)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in (5, 4, 3, 2)])
    memory = runtime.preset("16gb", micro_batches=2)
    for _ in range(3):
        memory.forward_backward(lambda p: model(p)[1].pow(2).mean(), packed, batch_size=4)
    assert caplog.text.count("a packed sequence in the batch cannot be cut") == 1


class Graphs:
    """Several graphs as one, as libraries for graph networks batch them: an object that can be moved."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graphs(self.nodes.to(device))


def test_batched_graphs_run_whole_and_it_is_said_once(caplog):
    model, graphs = network(), Graphs(torch.randn(8, 6).double())
    memory = runtime.preset("16gb", micro_batches=2)
    for _ in range(3):
        memory.forward_backward(lambda graphs: model(graphs.nodes).pow(2).mean(), graphs, batch_size=4)
    assert caplog.text.count("a Graphs in the batch cannot be cut") == 1


def test_nested_tensors_run_whole():
    model, sizes = network(), []
    nested = torch.nested.nested_tensor([torch.randn(n, 6).double() for n in (5, 4, 3, 2)])

    def forward(nested):
        sizes.append(nested.size(0))
        return torch.stack([model(one).pow(2).mean() for one in nested.unbind()]).mean()

    runtime.preset("16gb", micro_batches=2).forward_backward(forward, nested)
    assert sizes == [4]


class Doubled(torch.autograd.Function):
    """Keeps its input under the name that torch has for the leaf of a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_what_a_function_keeps_for_its_backward_is_taken_for_no_leaf(relative_error):
    model = network()
    reference, x = copy.deepcopy(model), torch.randn(8, 6).double()
    Doubled.apply(reference(x)).pow(2).mean().backward()
    runtime.preset("16gb", micro_batches=2).forward_backward(lambda x: Doubled.apply(model(x)).pow(2).mean(), x)
    assert relative_error(model, reference) < EXACT


def test_micro_batches_differ_by_one_sample_at_most():
    assert [stop - start for start, stop in balanced(11, 4)] == [3, 3, 3, 2]
    assert [len(part) for part in torch.tensor_split(torch.arange(11), 4)] == [3, 3, 3, 2]


def test_the_batch_size_is_what_most_inputs_agree_on():
    assert Batch((torch.ones(3, 3), torch.ones(8, 2), torch.ones(8)), {}).size == 8
    assert Batch((["a", "b", "c"],), {"images": torch.ones(3, 2)}).size == 3
    assert Batch((torch.ones(5),), {}, size=1).size == 1


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_wrong_batch_size_is_refused_by_name(size):
    with pytest.raises(ValueError, match=rf"batch_size: got {size}"):
        runtime.preset("16gb").forward_backward(lambda x: x.mean(), torch.ones(2), batch_size=size)


@pytest.mark.parametrize("result", [None, 3.0, {"value": torch.ones(())}, torch.ones(2)])
def test_a_forward_without_a_loss_is_refused_by_name(result):
    with pytest.raises(ValueError, match="forward: returned"):
        runtime.preset("16gb").forward_backward(lambda x: result, torch.ones(2))


@pytest.mark.parametrize("masked", [False, True])
def test_cross_entropies_over_words_and_sentences_are_split(masked):
    """Each word counts, or only masked ones do: then a part holds another share of words than of sentences."""
    torch.manual_seed(0)
    body, words, sentences = nn.Linear(8, 16).double(), nn.Linear(16, 5).double(), nn.Linear(16, 2).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)

    def forward(x, of_words, of_sentences):
        hidden = torch.tanh(body(x))
        loss = F.cross_entropy(words(hidden).flatten(0, 1), of_words.flatten())
        return loss + F.cross_entropy(sentences(hidden.mean(1)), of_sentences)

    x, of_words = torch.randn(12, 7, 8).double(), torch.randint(0, 5, (12, 7))
    of_words = of_words.masked_fill(torch.rand(12, 7) < 0.5, -100) if masked else of_words
    batch = x, of_words, torch.randint(0, 2, (12,))
    forward(*batch).backward()
    expected, body.weight.grad = body.weight.grad, None
    memory.forward_backward(forward, *batch)
    torch.testing.assert_close(body.weight.grad, expected, rtol=1e-12, atol=1e-14)
    (report,) = memory.report().forwards
    assert report.micro_batches == 3
