"""What older versions of torch, or of what tests run on it, do not have: marks for tests, with the reason they say."""

import importlib.metadata

import pytest
import torch
from torch.torch_version import TorchVersion


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skip before `version` of torch, the first that was run and has `what`."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"needs torch {version}: {what}")


_transformers = TorchVersion(importlib.metadata.version("transformers"))


def needs_transformers(version: str, what: str) -> pytest.MarkDecorator:
    """As `needs_torch`, for transformers."""
    return pytest.mark.skipif(_transformers < version, reason=f"needs transformers {version}: {what}")


needs_fused_on_cpu = needs_torch("2.4", "fused optimizers on the CPU")
# 2.3 has no torch.distributed.fsdp.fully_shard, that of 2.6 runs on cards alone; neither can be brought back
needs_fully_shard = needs_torch("2.13", "FSDP2 on the CPU, and its way back after an error")
needs_masks_in_fp64 = needs_transformers("5", "masks of CLIP in fp64")
needs_counts_of_holders = pytest.mark.skipif(
    not hasattr(torch.Tensor, "_use_count"), reason="this torch does not say how many hold a tensor"
)
# 2.3 does not take the masks of 4; what 2.6 makes of models of 5 returns None, without oomfix too
needs_compiled_transformers = needs_torch("2.6" if _transformers < "5" else "2.13", "a compiler for this transformers")
