"""Contrastive losses in chunks: the gradients of the whole batch, the activations of a chunk."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from tests.torch_versions import needs_masks_in_fp64


class TwoTowers(nn.Module):
    """An image and a text encoder that share a layer, with dropout and a learned temperature."""

    def __init__(self, dropout=0.0, normalise=False):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.EmbeddingBag(50, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm = nn.BatchNorm1d(16) if normalise else nn.Identity()
        self.shared = nn.Linear(16, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def encode_image(self, pixels):
        return functional.normalize(self.shared(self.norm(self.image(pixels))), dim=-1)

    def encode_text(self, tokens):
        return functional.normalize(self.shared(self.text(tokens)), dim=-1)


def pairs(samples=22, dtype=torch.float64):
    return torch.randn(samples, 12, dtype=dtype), torch.randint(0, 50, (samples, 7))


def plain_loss(images, texts, scale):
    similarities = scale * images @ texts.T
    own = torch.arange(len(images))
    return (functional.cross_entropy(similarities, own) + functional.cross_entropy(similarities.T, own)) / 2


def whole(model, pixels, tokens):
    return plain_loss(model.encode_image(pixels), model.encode_text(tokens), model.temperature.exp())


def in_chunks(model, pixels, tokens, rows):
    images = runtime.encode_in_chunks(model.encode_image, pixels, rows=rows)
    texts = runtime.encode_in_chunks(model.encode_text, tokens, rows=rows)
    return runtime.contrastive_loss(images, texts, model.temperature.exp(), rows=rows)


@pytest.mark.parametrize("rows", [1, 5, 8, 22, 100])
def test_gradients_are_those_of_the_whole_batch(rows, relative_error):
    reference = TwoTowers().double()
    model, batch = copy.deepcopy(reference), pairs()
    expected, found = whole(reference, *batch), in_chunks(model, *batch, rows)
    expected.backward()
    found.backward()
    assert (found - expected).abs() < 1e-14
    assert relative_error(model, reference) < 1e-12


def test_backward_draws_the_random_numbers_of_forward(relative_error):
    """With the draws of each chunk known, dropout gives the gradients of those very masks."""
    model = TwoTowers(dropout=0.5).double()
    reference, (pixels, tokens) = copy.deepcopy(model), pairs(20)
    torch.manual_seed(3)
    in_chunks(model, pixels, tokens, 5).backward()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    images = torch.cat([reference.encode_image(chunk) for chunk in pixels.split(5)])
    plain_loss(images, reference.encode_text(tokens), reference.temperature.exp()).backward()
    assert relative_error(model, reference) < 1e-12
    assert torch.equal(torch.get_rng_state(), after)


def test_several_backwards_go_through_the_chunks():
    model, (pixels, _) = TwoTowers(dropout=0.3).double(), pairs()
    together, apart = ([], [])
    for gradients, backwards in ((together, 1), (apart, 2)):
        torch.manual_seed(1)
        images = runtime.encode_in_chunks(model.encode_image, pixels, rows=5)
        losses = images.square().sum(), images.sin().sum()
        parameters = [*model.image.parameters(), *model.shared.parameters()]
        for loss in (sum(losses),) if backwards == 1 else losses:
            gradients.append(torch.autograd.grad(loss, parameters, retain_graph=True))
    for whole_gradient, *parts in zip(together[0], *apart, strict=True):
        assert torch.allclose(whole_gradient, sum(parts), rtol=1e-12, atol=1e-12)


def test_running_statistics_are_updated_once_per_chunk():
    model = TwoTowers(normalise=True).double()
    reference, (pixels, tokens) = copy.deepcopy(model), pairs(20)
    in_chunks(model, pixels, tokens, 5).backward()
    for chunk in pixels.split(5):
        reference.encode_image(chunk)
    assert torch.equal(model.norm.running_mean, reference.norm.running_mean)
    assert model.norm.num_batches_tracked == 4


def test_what_an_encoder_does_besides_happens_once_per_chunk():
    """Random numbers of Python are drawn again in backward, counters of modules do not count twice."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            drawn.append(random.random())
            return drawn[-1] * super().forward(x)

    drawn, model, x = [], Counts(4, 2), torch.randn(9, 4)
    random.seed(1)
    runtime.encode_in_chunks(model, x, rows=3).sum().backward()
    after = random.random()
    assert model.calls == 3
    assert sorted(drawn[:3]) == sorted(drawn[3:]) and len(drawn) == 6
    random.seed(1)
    factors = [random.random() for _ in range(3)]
    assert drawn[:3] == factors and random.random() == after
    assert torch.allclose(
        model.weight.grad[0], sum(f * part.sum(0) for f, part in zip(factors, x.split(3), strict=True))
    )


def test_activations_are_those_of_one_chunk():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)])
    x = torch.randn(128, 64)

    def peak(encode):
        with SimulatedCard() as card:
            card.track(x)
            runtime.contrastive_loss(encode(), x, rows=8).backward()
            model.zero_grad()
            return card.peak_bytes

    assert peak(lambda: runtime.encode_in_chunks(model, x, rows=8)) < 0.55 * peak(lambda: model(x))


def test_similarities_are_never_made_as_a_whole():
    first, second = torch.randn(512, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    one = 4 * 512 * 512

    def peak(loss):
        with SimulatedCard() as card:
            loss().backward()
            return card.peak_bytes

    assert peak(lambda: plain_loss(first, second, 2.0)) >= 2 * one
    assert peak(lambda: runtime.contrastive_loss(first, second, 2.0, rows=16)) < 0.3 * one


def test_containers_come_back_whole():
    layer, x = nn.Linear(4, 2), torch.randn(7, 4)

    def encode(batch):
        return {"once": layer(batch["x"]), "both": (batch["x"], -batch["x"]), "name": "linear"}

    found = runtime.encode_in_chunks(encode, {"x": x, "factor": 3}, rows=3)
    assert torch.allclose(found["once"], layer(x)) and found["name"] == "linear"
    assert torch.equal(found["both"][0], x) and torch.equal(found["both"][1], -x)


def test_a_batch_without_samples_comes_back_empty():
    model = TwoTowers()
    found = runtime.encode_in_chunks(model.encode_image, torch.randn(0, 12), rows=4)
    assert found.shape == (0, 8)
    found.sum().backward()
    assert not model.image[0].weight.grad.any()


def test_without_gradients_nothing_is_run_twice():
    calls = []
    with torch.no_grad():
        found = runtime.encode_in_chunks(lambda x: calls.append(len(x)) or 2 * x, torch.ones(7, 2), rows=3)
    assert calls == [3, 2, 2] and not found.requires_grad


def test_under_autocast_the_second_run_computes_in_the_same_type(relative_error):
    model = TwoTowers()
    reference, batch = copy.deepcopy(model), pairs(16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = whole(reference, *batch), in_chunks(model, *batch, 4)
    expected.backward()
    found.backward()
    assert relative_error(model, reference) < 0.03


def test_the_manager_runs_it_whole_and_the_chunks_keep_it_small(relative_error):
    model = TwoTowers().double()
    reference, batch = copy.deepcopy(model), pairs(24)
    whole(reference, *batch).backward()
    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    memory.forward_backward(lambda pixels, tokens: in_chunks(model, pixels, tokens, 4), *batch)
    assert relative_error(model, reference) < 1e-12
    assert memory.report().whole_because


@needs_masks_in_fp64
def test_clip_from_transformers():
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 60, "max_position_embeddings": 8, "bos_token_id": 58, "eos_token_id": 59},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    model = CLIPModel(config).double()
    reference = copy.deepcopy(model)
    pixels, tokens = torch.randn(10, 3, 16, 16, dtype=torch.float64), torch.randint(0, 60, (10, 8))
    reference(pixel_values=pixels, input_ids=tokens, return_loss=True).loss.backward()

    def encode(pixels, tokens):
        output = model(pixel_values=pixels, input_ids=tokens)
        return output.image_embeds, output.text_embeds

    images, texts = runtime.encode_in_chunks(encode, pixels, tokens, rows=4)
    runtime.contrastive_loss(images, texts, model.logit_scale.exp()).backward()
    # the gradient of a key's bias is zero but for rounding: errors are measured by the largest gradient of all
    gradients = list(zip(model.parameters(), reference.parameters(), strict=True))
    largest = max(float(expected.grad.abs().max()) for _, expected in gradients)
    assert max(float((found.grad - expected.grad).abs().max()) for found, expected in gradients) < 1e-12 * largest


def test_no_samples_have_no_contrastive_loss():
    with pytest.raises(ValueError, match=r"first, second: got shapes \(0, 8\) and \(0, 8\), .* of one sample or more"):
        runtime.contrastive_loss(torch.zeros(0, 8), torch.zeros(0, 8))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="rows: got 0"):
        runtime.encode_in_chunks(nn.Identity(), torch.ones(4, 2), rows=0)
    with pytest.raises(ValueError, match=r"encode: returned a tensor of shape \(\) for 2 samples"):
        runtime.encode_in_chunks(torch.Tensor.mean, torch.ones(4, 2), rows=2)
    with pytest.raises(ValueError, match=r"got shapes \(4, 2\) and \(3, 2\)"):
        runtime.contrastive_loss(torch.ones(4, 2), torch.ones(3, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_backward_draws_the_random_numbers_of_forward(relative_error):
    model = TwoTowers(dropout=0.5).double().cuda()
    reference, (pixels, tokens) = copy.deepcopy(model), (tensor.cuda() for tensor in pairs(20))
    torch.manual_seed(3)
    images = runtime.encode_in_chunks(model.encode_image, pixels, rows=5)
    texts = runtime.encode_in_chunks(model.encode_text, tokens, rows=5)
    runtime.contrastive_loss(images, texts, model.temperature.exp()).backward()
    torch.manual_seed(3)
    images = torch.cat([reference.encode_image(chunk) for chunk in pixels.split(5)])
    expected = runtime.contrastive_loss(images, reference.encode_text(tokens), reference.temperature.exp())
    expected.backward()
    assert relative_error(model, reference) < 1e-12
