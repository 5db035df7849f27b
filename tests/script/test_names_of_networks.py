"""What a called name says of a network, where nothing else does."""

from __future__ import annotations

import pytest

from oomfix.script.facts.named_like import looks_like_forward, looks_like_module, looks_like_part


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
        "pretrained_model",
        "finetuned_net",
        *("actorCritic", "valueNetwork", "targetActor", "imageEncoder"),
        *("loader.encoder", "model_loader.encoder"),
        "GreedySearchDecoder",
    ],
)
def test_networks_are_known_by_their_names(name):
    assert looks_like_module(name)


@pytest.mark.parametrize(
    "name",
    [
        # a verb, also in camel case, also behind what it happens at
        *("self.saveModel", "loadNet", "hook.after_build_model", "self.describe_network", "learner.adapt_task_model"),
        *("spec.loader.exec_module", "pretrain_model", "fine_tune_net"),
        *("draw.drawModel", "visualise_policy", "profile_model", "parseNet", "utils.call_model"),
        *("stopping.store_model", "dump_net", "serialize_model", "tracker.watch_model", "unloadModel"),
        # what only begins like one
        *("logger.network_update", "logger.critical"),
        # capitals that stand for something else
        *("GAE", "DCT", "ELU", "DTW"),
        *("onehot_encoder", "label_encoder", "labelEncoder"),
        *("factor", "tractor"),
        *("meta_test_generator", "task_gen"),
        "table.head",
        # what the data came with
        *("val_loader.encoder", "self.train_dataset.encoder", "dataloader.generator"),
        # a search
        *("GreedyDecoder", "beam_decoder", "BeamCTCDecoder", "ctc_decoder"),
        # how many there are
        *("self.num_models", "nb_networks", "n_critics"),
    ],
)
def test_what_is_done_with_a_network_or_named_otherwise_is_none(name):
    assert not looks_like_module(name)


@pytest.mark.parametrize("name", ["pred_goal", "predict", "segment", "segmentation", "encode_text", "p_losses"])
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
        ("self.train_loader.encoder(y)", []),
        ("self.dataset.generator(y)", []),
        ("self.parts.generator(out)", ["OOM202"]),
        ("self.parts.encoder(y)", ["OOM202"]),
    ],
)
def test_what_a_loss_a_converter_or_a_loader_does_for_a_network_is_none(report, called, found):
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


@pytest.mark.parametrize(("term", "found"), [("loss", ["OOM202"]), ("0.0 * loss.item() + w.sum()", [])])
def test_what_is_named_like_a_setter_sets_nothing_where_its_result_is_backpropagated(report, term, found):
    code = f"""
        import torch
        from torch import nn

        class FewShot(nn.Module):
            def __init__(self, backbone):
                super().__init__()
                self.backbone = backbone

            def train_loop(self, loader, optimizer, w):
                for x, _ in loader:
                    optimizer.zero_grad(set_to_none=True)
                    loss = self.set_forward_loss(x.cuda())
                    ({term}).backward()
                    optimizer.step()
    """
    assert [code for code, _ in report(code)] == found


@pytest.mark.parametrize(("targets", "found"), [("action, log_prob", ["OOM202"]), ("action, bounds", [])])
def test_a_method_that_gives_a_log_probability_runs_its_network(report, targets, found):
    code = f"""
        import torch
        from nets import Policy

        policy = Policy().cuda()
        optimizer = torch.optim.Adam(policy.parameters())
        for state, wanted in memory:
            {targets} = policy.get_action(state.cuda())
            loss = torch.mean(-({targets.split(", ")[1]}) * wanted)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    """
    assert [code for code, _ in report(code)] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("loss = model.train(batch.cuda())", ["OOM202"]),
        ("loss = model.eval(batch.cuda())", ["OOM202"]),
        ("loss = criterion(model.train(True), batch)", []),
    ],
)
def test_a_loss_may_come_from_a_method_that_is_named_like_the_mode(report, line, found):
    code = f"""
        import torch
        from nets import Ranker

        model = Ranker().to("cuda:0")
        optimizer = torch.optim.Adam(model.parameters())
        for batch in batches:
            {line}
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    """
    assert [code for code, _ in report(code)] == found


@pytest.mark.parametrize(
    ("method", "found"),
    [("get_current_q_values", ["OOM202"]), ("get_probs_and_values", ["OOM202"]), ("get_batch_of_numbers", [])],
)
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


@pytest.mark.parametrize(("name", "found"), [("wrapped", ["OOM201", "OOM202"]), ("maml", ["OOM202"])])
def test_what_is_made_around_a_network_runs_it_and_may_adapt_where_it_is_evaluated(report, name, found):
    code = f"""
        import torch

        def main(args, trained, validated):
            model = choose(args)
            {name} = Wrapped(model)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(args.steps):
                total = 0.0
                for batch in trained:
                    loss, accuracy = {name}(args, batch.cuda())
                    total += loss
                optimizer.zero_grad(set_to_none=True)
                total.backward()
                optimizer.step()
            for batch in validated:
                loss, accuracy = {name}(args, batch.cuda())
                print(loss.item())
    """
    assert [code for code, _ in report(code)] == found


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ('{"small": ResNet18, "large": ResNet50}', []),
        ('{"small": vision.resnet18, "large": vision.resnet50}', []),
        ("load_all()", ["OOM201"]),
    ],
)
def test_an_entry_of_a_table_of_classes_makes_a_network(report, table, found):
    code = f"""
        import torch
        from torchvision import models as vision
        from project import *

        models = {table}

        def evaluate(names, batch):
            best = torch.nn.ModuleList([Normalized(models[name](classes=10), mean=[0.5]) for name in names])
            best.eval()
            return best
    """
    assert [code for code, _ in report(code)] == found


def test_a_network_is_called_as_it_is_switched(report):
    code = """
        import torch

        class Fitter:
            def fit_batch(self, batches):
                self.optimizer.zero_grad(set_to_none=True)
                for xs, ys in batches:
                    out = self.model.train()(xs.to(self.device))
                    loss = self.criterion(out, ys.to(self.device))
                    loss.backward()
                self.optimizer.step()
    """
    assert report(code) == [("OOM202", 7)]


@pytest.mark.parametrize(("part", "found"), [("shape_layer", [13, 14]), ("extract_embedding", [13])])
def test_a_layer_of_a_network_that_is_handed_in_runs(report, part, found):
    code = f"""
        import torch
        from project import Shapes

        class Transition(torch.nn.Module):
            def __init__(self, source_model):
                super().__init__()
                self.source_model = source_model
                self.moving = torch.nn.Linear(3, 4).cuda()
                self.optimizer = torch.optim.Adam(self.moving.parameters())

            def fit(self, points):
                for x in points:
                    moved = self.moving(x)
                    distances = self.source_model.{part}(moved)
                    loss = Shapes.nearest(distances).mean()
                    self.optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    self.optimizer.step()
    """
    assert report(code) == [("OOM202", line) for line in found]


@pytest.mark.parametrize("name", ["append_layer", "insert_block", "pop_head"])
def test_what_puts_a_part_into_a_network_is_no_part(name):
    assert not looks_like_part(name)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("GAN(**saved['settings'])", []),
        ("GAN(depth=2)", []),
        ("GAN(batch)", [("OOM201", 5)]),
        ("gan(x=batch)", [("OOM201", 5)]),
    ],
)
def test_capitals_that_are_given_settings_alone_are_a_class(report, made, found):
    code = f"""
        import torch
        from project.models import *

        def test(saved, batch):
            made = {made}
            return made
    """
    assert report(code) == found


@pytest.mark.parametrize(
    ("bound", "found"),
    [("tokenizer.get_symbol", []), ("parts.encode_all", [("OOM201", 5)]), ("parts.decoder", [("OOM201", 5)])],
)
def test_what_is_bound_to_a_function_named_by_a_verb_is_no_network(report, bound, found):
    assert (
        report(f"""
        def sample(tokenizer, parts, words):
            decoder = {bound}
            print(*words)
            for word in words:
                print(decoder(word).argmax().item())
    """)
        == found
    )
