"""The techniques on the architectures that people train: steps are bitwise those of the plain loop."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.techniques import offloading
from tests.torch_versions import needs_masks_in_fp64

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank correction, as LoRA puts in its place."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def words(model):
    return lambda ids: model(input_ids=ids, labels=ids).loss, (torch.randint(0, 64, (4, 10)),)


def images(model):
    def loss(pixels, target):
        return nn.functional.cross_entropy(model(pixel_values=pixels).logits, target)

    return loss, (torch.randn(4, 3, 32, 32), torch.arange(4))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    # checkpointing switches the cache off; keys that went through it have other strides and round differently
    config.use_cache = False
    return words(model := transformers.GPT2LMHeadModel(config)), model


def bert():
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **LAYERS)
    return words(model := transformers.BertForMaskedLM(config)), model


def llama_with_lora():
    config = transformers.LlamaConfig(vocab_size=64, **LAYERS)
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return words(model), model


def vit():
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=5, **LAYERS)
    return images(model := transformers.ViTForImageClassification(config)), model


def swin():
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5
    )
    return images(model := transformers.SwinForImageClassification(config)), model


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, num_labels=5)
    return images(model := transformers.ConvNextForImageClassification(config)), model


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)

    def loss(pixels, labels):
        return model(pixel_values=pixels, labels=labels).loss

    return (loss, (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4, 32, 32)))), model


def clip():
    tower = {**LAYERS, "projection_dim": 16}
    text = {**tower, "vocab_size": 64, "max_position_embeddings": 10, "bos_token_id": 62, "eos_token_id": 63}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))

    def loss(pixels, ids):
        return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss

    return (loss, (torch.randn(4, 3, 32, 32), torch.arange(40).view(4, 10))), model


ARCHITECTURES = [gpt2, bert, llama_with_lora, vit, swin, convnext, segformer, clip]


def trained(build, checkpoints=False, offloads=False, in_backward=False):
    """The parameters after two AdamW steps, and the bytes that forward left on the card before the second backward."""
    torch.manual_seed(0)
    (loss, batch), model = build()
    model.train()
    if checkpoints:
        assert runtime.enable_checkpointing(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        with SimulatedCard() as card:
            with runtime.offload_activations(0) if offloads else nullcontext():
                value = loss(*batch)
            held_bytes = card.current_bytes
        with runtime.optimizer_in_backward(optimizer) if in_backward else nullcontext():
            value.backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()), held_bytes


def assert_bitwise(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("build", ARCHITECTURES, ids=lambda build: build.__name__)
def test_checkpointing_is_bitwise_and_keeps_less(build):
    plain, plain_bytes = trained(build)
    found, held_bytes = trained(build, checkpoints=True)
    assert_bitwise(found, plain)
    assert held_bytes < 0.75 * plain_bytes


@pytest.mark.parametrize("build", ARCHITECTURES, ids=lambda build: build.__name__)
def test_offloading_in_blocks_and_steps_in_backward_are_bitwise(build, monkeypatch):
    monkeypatch.setattr(offloading, "_on_accelerator", lambda tensor: True)
    plain, _ = trained(build)
    assert_bitwise(trained(build, offloads=True, in_backward=True)[0], plain)
    assert_bitwise(trained(build, checkpoints=True, offloads=True)[0], plain)


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=[needs_masks_in_fp64] * (build is clip)) for build in ARCHITECTURES],
    ids=lambda build: build.__name__,
)
def test_the_manager_gives_the_gradients_of_the_whole_batch(build):
    """Checkpointed and in two micro-batches, but for CLIP, whose samples are compared with each other."""
    torch.manual_seed(0)
    (loss, batch), model = build()
    batch = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)
    model.double().train()
    for module in model.modules():
        # the statistics of a part are others, and it draws other numbers
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    loss(*batch).backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    memory = runtime.preset("16gb", checkpointing="on", micro_batches=2)
    memory.prepare(model)
    memory.forward_backward(loss, *batch)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    # the logits of Llama's own loss are fp32
    tolerance = 1e-7 if build is llama_with_lora else 1e-12
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < tolerance * largest
    report = memory.report()
    names = {technique.name.split()[0] for technique in report.techniques}
    assert names == ({"checkpointing"} if build is clip else {"checkpointing", "micro-batches"})
    assert [reason[:13] for reason in report.whole_because.values()] == (["samples depen"] if build is clip else [])
