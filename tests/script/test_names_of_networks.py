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


@pytest.mark.parametrize(
    ("called", "found"),
    [
        ("self.loss.generator(out)", []),
        ("self.converter.encoder(y)", []),
        ("self.parts.generator(out)", ["OOM202"]),
        ("self.parts.encoder(y)", ["OOM202"]),
    ],
)
def test_what_a_loss_or_a_converter_does_for_a_network_is_none(report, called, found):
    code = f"""
        import torch
        from parts import Net, Parts

        class Trainer:
            def __init__(self, loss, converter):
                self.net, self.loss, self.converter, self.parts = Net().cuda(), loss, converter, Parts()

            def train(self, loader):
                for x, y in loader:
                    with torch.autocast("cuda", torch.bfloat16):
                        out = self.net(x)
                    loss = criterion(out, {called})
                    loss.backward()
                    self.optimizer.step()
    """
    assert [code for code, _ in report(code)] == found


@pytest.mark.parametrize(("method", "found"), [("get_current_q_values", ["OOM202"]), ("get_batch_of_numbers", [])])
def test_a_method_that_gives_q_values_runs_its_network(report, method, found):
    code = f"""
        import torch

        class Agent:
            def learn(self):
                self.dqn.train()
                states, actions, wanted = self.memory.sample(32)
                values = self.dqn.{method}(states.cuda(), actions)
                loss = torch.nn.functional.mse_loss(values, wanted)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()

            def run(self, steps):
                for _ in range(steps):
                    self.learn()
    """
    assert [code for code, _ in report(code)] == found
