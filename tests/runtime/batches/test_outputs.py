"""What a forward returns besides the loss comes back as if the batch had been whole."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.batches.outputs import Concatenate, First, Weight
from oomfix.runtime.batches.rule_choice import close

X = torch.randn(13, 6, generator=torch.Generator().manual_seed(1)).double()
MODEL = nn.Linear(6, 4).double()
Both = namedtuple("Both", "out count")

EXTRAS = {
    "rows": lambda out: out,
    "rows in dimension 1": lambda out: out.T.contiguous(),
    "rows folded with others": lambda out: out.reshape(-1),
    "count as a number": lambda out: int((out > 0).sum()),
    "count as a tensor": lambda out: (out > 0).sum(),
    "count as floats": lambda out: (out > 0).sum().float(),
    "mean": lambda out: out.mean(),
    "mean as a number": lambda out: out.mean().item(),
    "mean per class": lambda out: out.mean(0),
    "histogram": lambda out: torch.bincount(out.argmax(1), minlength=4),
    "classes": lambda out: out.argmax(1),
    "constant": lambda out: 7,
    "text": lambda out: "text",
    "nothing": lambda out: None,
    "list of samples": lambda out: [{"score": row.sum()} for row in out],
    "list of kinds": lambda out: [out, out.mean(), int((out > 0).sum())],
    "nested": lambda out: {"a": (out, [out.sum(), None]), "b": Both(out, (out > 0).sum())},
    "array": lambda out: out.detach().numpy(),
    "array of counts": lambda out: np.bincount(out.detach().argmax(1).numpy(), minlength=4),
    "object": lambda out: SimpleNamespace(scores=out, pairs=[SimpleNamespace(key=out * 2)], name="text"),
    "largest": lambda out: out.max(),  # no rule fits: the batch runs whole
    "spread": lambda out: out.std(),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and not b.requires_grad
        return torch.allclose(a.double(), b.double(), rtol=1e-12)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.allclose(a, b, rtol=1e-12)
    if isinstance(a, SimpleNamespace):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == pytest.approx(b, rel=1e-12) if isinstance(a, float) else a == b)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_what_it_would_be_for_the_whole_batch(extra):
    def forward(x):
        out = MODEL(x)
        return out.pow(2).mean(), EXTRAS[extra](out)

    with torch.no_grad():
        _, expected = forward(X)
    _, got = runtime.preset("16gb", micro_batches=4).forward_backward(forward, X)
    assert same(expected, got)


def test_the_cache_of_a_transformer_comes_back_with_its_output():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens, sizes = torch.randint(0, 20, (8, 5)), []

    def forward(tokens):
        sizes.append(len(tokens))
        return model(tokens, labels=tokens)

    whole = forward(tokens)
    got = runtime.preset("16gb", micro_batches=4).forward_backward(forward, tokens)
    assert sizes[-4:] == [2, 2, 2, 2]
    assert torch.allclose(got.logits, whole.logits, rtol=1e-10)
    keys = [output.past_key_values.layers[1].keys for output in (got, whole)]
    assert torch.allclose(*keys, rtol=1e-10)
    assert not keys[0].requires_grad


def test_a_count_that_is_zero_on_the_checked_rows_is_a_count():
    def forward(x):
        out = MODEL(x)
        return out.pow(2).mean(), (x[:, 0] > 50).float().sum()

    x = X.clone()
    x[6, 0], x[11, 0] = 60.0, 70.0
    _, count = runtime.preset("16gb", micro_batches=4).forward_backward(forward, x)
    assert float(count) == 2.0


def test_a_loss_under_its_name_in_a_mapping():
    result = runtime.preset("16gb", micro_batches=4).forward_backward(
        lambda x: {"out": MODEL(x), "loss": MODEL(x).pow(2).sum()}, X
    )
    assert torch.allclose(result["loss"], MODEL(X).pow(2).sum(), rtol=1e-12)
    assert torch.allclose(result["out"], MODEL(X), rtol=1e-12)


class Namespace(dict):
    __getattr__ = dict.__getitem__


class OwnAttributes(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


@pytest.mark.parametrize("kind", [Namespace, OwnAttributes])
def test_attributes_of_a_mapping_are_the_entries_of_the_whole_batch(kind):
    def forward(x):
        out = MODEL(x)
        return out.pow(2).mean(), kind(logits=out, size=len(x))

    _, found = runtime.preset("16gb", micro_batches=4).forward_backward(forward, X)
    assert type(found) is kind
    assert torch.allclose(found.logits, MODEL(X), rtol=1e-12)
    assert found["logits"] is found.logits


def test_large_outputs_are_never_held_twice():
    weight = nn.Parameter(torch.ones(1))
    x = torch.randn(64, 1)

    def forward(x):
        out = (x * weight).expand(64 if len(x) == 64 else len(x), 4096) * 1.0  # [rows, 4096]
        return out.mean(), out

    memory = runtime.preset("16gb", micro_batches=16)
    with SimulatedCard() as card:
        _, out = memory.forward_backward(forward, x)
    whole_bytes = out.numel() * 4
    assert card.peak_bytes < 1.6 * whole_bytes
    assert out.shape == (64, 4096)


def test_rows_are_no_view_and_may_be_detached_in_place():
    runtime.reset()
    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    _, out = memory.forward_backward(lambda x: ((out := MODEL(x)).pow(2).mean(), out), X)
    assert torch.equal(out.detach_(), MODEL(X))


def test_rows_of_unforeseen_length_still_come_back_in_order():
    collector = Concatenate(0).collector(6)
    pieces = [torch.arange(4), torch.arange(3), torch.arange(9)]
    for piece in pieces:
        collector.add(piece, Weight(2, 2))
    assert torch.equal(collector.result(), torch.cat(pieces))


def test_what_need_not_be_equal_is_taken_from_the_first():
    collector = First().collector(4)
    collector.add("a", Weight(2, 2))
    collector.add("b", Weight(2, 2))
    assert collector.result() == "a"


LARGEST = MODEL(X[:12])[:, 0].max().item()


def has_the_largest(out):
    return bool(out[:, 0].max() > LARGEST - 1e-9)


def other_kinds():
    """What a forward returns besides its loss in its first two calls, and in the third, which is not checked."""
    yield "another key", lambda out, late: {"mean": out.mean()} if not late else {"count": (out > 0).sum().float()}
    yield "more values", lambda out, late: (out, out.mean()) if not late else (out, out.mean(), out.sum())
    yield "a float for a count", lambda out, late: 0 if not late else out.mean()
    yield "a count for a mean", lambda out, late: out.mean() if not late else (out > 0).sum()
    yield "a tensor for nothing", lambda out, late: None if not late else out
    yield "a number for rows", lambda out, late: out if not late else out.mean()
    yield "a list for rows", lambda out, late: out if not late else list(out)
    yield "rows for a list", lambda out, late: list(out) if not late else out
    yield "an array of objects", lambda out, late: out.detach().numpy() if not late else "text"
    yield "a flag of one part", lambda out, late: late and has_the_largest(out)
    yield "a text of one part", lambda out, late: "text" * (1 + (late and has_the_largest(out)))
    yield "a number of one part", lambda out, late: 3 + (late and has_the_largest(out))
    yield "rows padded to the longest", lambda out, late: out[:, : 4 if not late or has_the_largest(out) else 2]


@pytest.mark.parametrize("other", [make for _, make in other_kinds()], ids=[name for name, _ in other_kinds()])
def test_a_result_of_another_kind_than_was_checked_comes_back_as_of_the_whole_batch(other, caplog):
    x, late = X[:12], torch.tensor(False)

    def forward(x):
        out = MODEL(x)
        return out.pow(2).mean(), other(out, bool(late))

    memory = runtime.preset("16gb", micro_batches=4)
    for call in (1, 2, 3):
        late.fill_(call == 3)
        MODEL.zero_grad()
        _, got = memory.forward_backward(forward, x)
        gradient = MODEL.weight.grad
        with torch.no_grad():
            _, expected = forward(x)
        assert same(expected, got)
        assert torch.allclose(torch.autograd.grad(forward(x)[0], MODEL.weight)[0], gradient, rtol=1e-12)
    # in parts where the check of that call found how such results are put together, else whole
    assert caplog.text.count("run whole") <= 1


def test_the_entries_of_a_model_output_keep_their_order_beside_a_cache():
    """A mapping that leaves out what is None would forget where the loss stood; users write `out[0]`."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Cache:
        def __init__(self, keys):
            self.keys = keys

    net = nn.Linear(6, 4).double()

    def forward(x):
        out = net(x)
        return CausalLMOutputWithPast(loss=out.pow(2).mean(), logits=out, past_key_values=Cache(2 * out))

    x = torch.randn(12, 6).double()
    result, whole = runtime.preset("16gb", micro_batches=3).forward_backward(forward, x), forward(x)
    *first, cache = list(whole)  # transformers calls it "past_key_values", and from 5.24 on "cache"
    assert list(result) == [*first, cache] and first == ["loss", "logits"]
    assert torch.allclose(result[0], whole[0], rtol=1e-12)
    assert torch.allclose(result.to_tuple()[1], whole.logits, rtol=1e-12)
    assert torch.allclose(result[cache].keys, whole[cache].keys, rtol=1e-12)


def test_infinity_is_close_to_no_number():
    """A loss of a part that divides by 0 explains nothing of that of all rows."""
    one, infinite = torch.tensor(1.0), torch.tensor(float("inf"))
    assert not close(one, infinite) and not close(infinite, one)
    assert close(infinite, infinite) and not close(infinite, -infinite)
