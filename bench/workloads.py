"""The named workloads of the benches: what they train, at full size and small enough for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from bench.profile_models import resnet50
from oomfix import runtime

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A model and its loss.

    Attributes:
        name: model, input size and batch size.
        build: makes the model, on the CPU.
        batch: makes a batch of tensors [samples, ...], on the CPU.
        loss: of a model on a batch; "plain" is the loss that everybody writes.
        losses: the kinds of loss there are.
        only_the_optimizer: so few activations that the peak is that of the optimizer's step.
        only_its_own: it is there for techniques that have a loss of their own.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Batch, str], torch.Tensor]
    losses: tuple[str, ...] = ("plain",)
    only_the_optimizer: bool = False
    only_its_own: bool = False


def vit(size: int, samples: int, **sizes: Any) -> Workload:
    """An image classifier as transformers builds it; without `sizes` it is ViT-B/16."""
    config = transformers.ViTConfig(image_size=size, num_labels=1000, **sizes)
    return Workload(
        f"ViT-B/16, {size} px, batch {samples}" if not sizes else f"ViT of 4 layers, {size} px, batch {samples}",
        lambda: transformers.ViTForImageClassification(config),
        lambda: (torch.randn(samples, 3, size, size), torch.randint(0, 1000, (samples,))),
        lambda model, batch, kind: functional.cross_entropy(model(batch[0]).logits, batch[1]),
    )


def gpt2(tokens: int, samples: int, **sizes: Any) -> Workload:
    """A language model as transformers builds it; without `sizes` it is GPT-2 124M."""
    config = transformers.GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)
    name = "GPT-2 124M" if "n_layer" not in sizes else f"GPT-2 of {config.n_layer} layers"

    def loss(model: Any, batch: Batch, kind: str) -> torch.Tensor:
        (ids,) = batch
        # the targets are shifted, not the logits: a part of the logits would be copied
        target = functional.pad(ids[:, 1:], (0, 1), value=-100)
        if kind == "linear":
            hidden = model.transformer(ids).last_hidden_state
            return runtime.linear_cross_entropy(hidden, model.lm_head.weight, target)
        if kind == "torch linear":
            hidden = model.transformer(ids).last_hidden_state.flatten(0, 1)
            options = nn.LinearCrossEntropyOptions()
            weight = model.lm_head.weight
            return functional.linear_cross_entropy(hidden, weight, target.flatten(), options=options)
        if kind == "chunked":
            return runtime.chunked_cross_entropy(model(ids).logits, target)
        return model(ids, labels=ids).loss

    return Workload(
        f"{name}, {tokens} tokens, batch {samples}",
        lambda: transformers.GPT2LMHeadModel(config),
        lambda: (torch.randint(0, config.vocab_size, (samples, tokens)),),
        loss,
        ("plain", "chunked", "linear"),
    )


def written_out(tokens: int, samples: int, **sizes: Any) -> Workload:
    """GPT-2 whose attention is written out as products and a softmax."""
    plain = gpt2(tokens, samples, attn_implementation="eager", **sizes)

    def loss(model: Any, batch: Batch, kind: str) -> torch.Tensor:
        model.config._attn_implementation = ATTENTIONS.get(kind, "eager")
        return plain.loss(model, batch, "plain")

    return replace(
        plain, name=f"{plain.name}, attention written out", loss=loss, losses=("plain", *ATTENTIONS), only_its_own=True
    )


ATTENTIONS = {"attention": "oomfix", "attention in blocks": "oomfix-blocks"}


def _attention(rows: int | None) -> Callable[..., tuple[torch.Tensor, None]]:
    """`runtime.attention` as transformers calls attention: tensors [samples, heads, tokens, features]."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float = 0.0,
        **other: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        found = runtime.attention(query, key, value, causal=True, dropout=dropout, rows=rows)
        return found.transpose(1, 2).contiguous(), None

    return attend


transformers.AttentionInterface.register("oomfix", _attention(None))
transformers.AttentionInterface.register("oomfix-blocks", _attention(128))


def resnet(size: int, samples: int) -> Workload:
    """ResNet-50."""
    return Workload(
        f"ResNet-50, {size} px, batch {samples}",
        resnet50,
        lambda: (torch.randn(samples, 3, size, size), torch.randint(0, 1000, (samples,))),
        lambda model, batch, kind: functional.cross_entropy(model(batch[0]), batch[1]),
    )


class UNet(nn.Module):
    """The usual U-Net: `depth` halvings of the resolution, two convolutions at each."""

    def __init__(self, width: int, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(self._double, [3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down:
            x = block(x if not skipped else functional.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        return self.head(x)


def unet(size: int, samples: int, width: int = 64) -> Workload:
    """A U-Net; 31 M parameters at width 64."""
    return Workload(
        f"U-Net {width} wide, {size} px, batch {samples}",
        lambda: UNet(width),
        lambda: (torch.randn(samples, 3, size, size), torch.randint(0, 2, (samples, size, size))),
        lambda model, batch, kind: functional.cross_entropy(model(batch[0]), batch[1]),
    )


def clip(samples: int, rows: int, **sizes: Any) -> Workload:
    """An image and a text tower with CLIP's loss; without `sizes` they are those of CLIP ViT-B/32."""
    config = transformers.CLIPConfig(text_config=sizes.get("text", {}), vision_config=sizes.get("vision", {}))
    pixels = config.vision_config.image_size
    tokens, words = config.text_config.max_position_embeddings, config.text_config.vocab_size

    def loss(model: Any, batch: Batch, kind: str) -> torch.Tensor:
        images, ids = batch

        def encode(images: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output = model(pixel_values=images, input_ids=ids)
            return output.image_embeds, output.text_embeds

        if kind == "plain":
            return model(pixel_values=images, input_ids=ids, return_loss=True).loss
        encoded = runtime.encode_in_chunks(encode, images, ids, rows=rows)
        return runtime.contrastive_loss(*encoded, model.logit_scale.exp())

    return Workload(
        f"CLIP ViT-B/32, batch {samples}" if not sizes else f"CLIP of 2 layers, batch {samples}",
        lambda: transformers.CLIPModel(config),
        lambda: (torch.randn(samples, 3, pixels, pixels), torch.randint(0, words - 2, (samples, tokens))),
        loss,
        ("plain", "in chunks"),
    )


FULL = {
    "vit": vit(224, 64),
    "gpt2": gpt2(1024, 16),
    "gpt2-short": replace(gpt2(128, 1), only_the_optimizer=True),
    "gpt2-written-out": written_out(1024, 16),
    "resnet": resnet(224, 64),
    "unet": unet(256, 32),
    "clip": clip(512, 64),
}

_TOWER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {
    "vit": vit(64, 8, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4),
    "gpt2": gpt2(128, 4, n_embd=128, n_layer=4, n_head=4, vocab_size=16384, n_positions=128),
    "gpt2-short": gpt2(32, 1, n_embd=256, n_layer=6, n_head=4, vocab_size=8192, n_positions=32),
    "gpt2-written-out": written_out(256, 4, n_embd=128, n_layer=4, n_head=4, vocab_size=4096, n_positions=256),
    "resnet": resnet(64, 4),
    "unet": unet(32, 4, 16),
    "clip": clip(
        64, 16,
        text={**_TOWER, "vocab_size": 1000, "max_position_embeddings": 16, "bos_token_id": 998, "eos_token_id": 999},
        vision={**_TOWER, "image_size": 64, "patch_size": 8},
    ),
}  # fmt: skip
