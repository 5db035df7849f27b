"""Models as torchvision and timm build them, and the packages' own where they are installed: checkpointed bitwise."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard


class BasicBlock(nn.Module):
    """torchvision's residual block: normalised, with activations in place."""

    def __init__(self, channels, width, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.downsample = shortcut if stride != 1 or channels != width else None

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision.models.ResNet: stages `layer1`, `layer2`, ... of blocks."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def features(self, x):
        return self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.features(x)), 1))


class VisionTransformer(nn.Module):
    """torchvision.models.VisionTransformer: `encoder.layers`, an ordered dictionary of blocks in a Sequential."""

    def __init__(self):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 16, 8, 8)
        self.encoder = nn.Module()
        blocks = ((f"encoder_layer_{i}", nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)) for i in range(3))
        self.encoder.layers = nn.Sequential(OrderedDict(blocks))
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(16, 5)))

    def forward(self, x):
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        return self.heads(self.encoder.layers(tokens)[:, 0])


class Segmentation(nn.Module):
    """torchvision.models.segmentation: a dictionary with "out", upsampled to the size of the image."""

    def __init__(self):
        super().__init__()
        self.backbone, self.classifier = ResNet(), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        out = self.classifier(self.backbone.features(x))
        return OrderedDict(out=F.interpolate(out, size=x.shape[-2:], mode="bilinear", align_corners=False))


class DropPath(nn.Module):
    """timm's stochastic depth."""

    def forward(self, x):
        kept = torch.rand(len(x), *[1] * (x.dim() - 1)) < 0.8
        return x * kept / 0.8 if self.training else x


class TimmBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.drop_path = DropPath()

    def forward(self, x):
        return x + self.drop_path(self.mlp(self.norm(x)))


class TimmTransformer(nn.Module):
    """timm's documented interface: `set_grad_checkpointing`, and `checkpoint_seq` over its blocks."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 8, 8)
        self.blocks = nn.Sequential(*[TimmBlock() for _ in range(3)])
        self.head = nn.Linear(16, 5)
        self.grad_checkpointing = False

    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.head(x.mean(1))


def torchvision_model(name, **arguments):
    def build():
        return getattr(pytest.importorskip("torchvision").models, name)(weights=None, num_classes=5, **arguments)

    return pytest.param(build, id=f"torchvision {name}")


def timm_model(name, **arguments):
    def build():
        return pytest.importorskip("timm").create_model(name, num_classes=5, **arguments)

    return pytest.param(build, id=f"timm {name}")


STUBS = [ResNet, VisionTransformer, Segmentation, TimmTransformer]
INSTALLED = [
    torchvision_model("resnet18"),
    torchvision_model("convnext_tiny"),
    torchvision_model("swin_t"),
    torchvision_model("mobilenet_v3_small"),
    torchvision_model("vit_b_32", image_size=64),
    timm_model("resnet18"),
    timm_model("vit_tiny_patch16_224", img_size=64, drop_path_rate=0.1),
    timm_model("convnext_atto"),
    timm_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2),
    timm_model("efficientnet_b0"),
]


def trained(build, memory):
    """Parameters and buffers after two steps, and the bytes that the second forward left on the card."""
    torch.manual_seed(0)
    model = build().train()
    if memory is not None:
        memory.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        pixels, target = torch.randn(4, 3, 64, 64), torch.arange(4)
        with SimulatedCard() as card:
            output = model(pixels)
            logits = output["out"].mean((2, 3)) if isinstance(output, dict) else output
            loss = F.cross_entropy(logits, target)
            del output, logits
            held_bytes = card.current_bytes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()), held_bytes


@pytest.mark.parametrize("build", [*STUBS, *INSTALLED])
def test_a_prepared_model_trains_bitwise_and_keeps_less(build):
    plain, plain_bytes = trained(build, None)
    found, held_bytes = trained(build, runtime.preset("16gb", checkpointing="on"))
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert held_bytes < 0.75 * plain_bytes
