"""What a called name says of a network, where nothing else does."""

from __future__ import annotations

import pytest

from oomfix.script.named_like import looks_like_forward, looks_like_module


@pytest.mark.parametrize(
    "name",
    [
        "netG",
        "netD_A",
        "net_b",
        "network",
        "self.q_network",
        "my_model",
        "resNet",
        "GE",
        "D_A",
        "self.encoder",
        "unet",
        "G_ema",
        "g_ema",
    ],
)
def test_networks_are_known_by_their_names(name):
    assert looks_like_module(name)


@pytest.mark.parametrize(
    "name",
    [
        # a verb, also in camel case, also behind what it happens at
        *("self.saveModel", "loadNet", "hook.after_build_model", "self.describe_network", "learner.adapt_task_model"),
        # what only begins like one
        "logger.network_update",
        # capitals that stand for something else
        *("GAE", "DCT", "ELU", "DTW"),
        *("onehot_encoder", "label_encoder"),
        *("meta_test_generator", "task_gen"),
        "table.head",
    ],
)
def test_what_is_done_with_a_network_or_named_otherwise_is_none(name):
    assert not looks_like_module(name)


@pytest.mark.parametrize("name", ["pred_goal", "predict", "segment", "segmentation", "encode_text"])
def test_methods_that_run_a_part_of_a_network_are_known_by_their_names(name):
    assert looks_like_forward(name)


@pytest.mark.parametrize("name", ["prediction_mask", "segment_ids", "segments", "softargmax", "adapt"])
def test_those_that_prepare_or_read_results_are_not(name):
    assert not looks_like_forward(name)
