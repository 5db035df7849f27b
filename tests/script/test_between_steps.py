"""Evaluations between the steps of one training loop, and what only looks like them."""

from __future__ import annotations

import pytest

TRAINED = """
    def epoch(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            {switch}
            out = {network}(x)
            {use}
            model.train()
"""


def test_the_network_in_eval_mode_behind_its_own_step_is_evaluated(report):
    code = TRAINED.format(switch="model.eval()", network="model", use="total += criterion(out, y).item()")
    assert report(code) == [("OOM201", 8), ("OOM202", 4)]


@pytest.mark.parametrize(
    ("switch", "network", "use"),
    [
        ("teacher.eval()", "teacher", "soft = out.detach()"),
        ("model.train()", "model", "soft = out.detach()"),
        ("model.eval()", "model", "criterion(out, y).backward()"),
    ],
)
def test_another_network_another_mode_or_a_backward_is_none(report, switch, network, use):
    assert ("OOM201", 8) not in report(TRAINED.format(switch=switch, network=network, use=use))


def test_a_generator_in_eval_mode_may_make_samples_for_its_discriminator(report):
    assert not report("""
        for x in loader:
            G.eval()
            fake = G(noise())
            (bce(D(fake.detach())) + bce(D(x))).backward()
            opt_d.step()
            G.train()
            bce(D(G(noise()))).backward()
            opt_g.step()
    """)


@pytest.mark.parametrize(("mode", "evaluated"), [("eval", True), ("train", False)])
def test_a_look_through_two_networks_evaluates_both_where_both_are_in_eval_mode(report, mode, evaluated):
    reported = report(f"""
        for x, y in loader:
            encoder.train(), decoder.train()
            code = encoder(x)
            criterion(decoder(code), y).backward()
            optimizer.step()
            encoder.eval()
            decoder.{mode}()
            code = encoder(x)
            print(psnr(decoder(code), y))
    """)
    assert (("OOM201", 8) in reported) is evaluated


RENDERED = """
    from elsewhere import render

    def set_up(width):
        encoder = ImageEncoder(width)

        def encode(x):
            return {result}

        return encode

    encode = set_up(8)
    for i, rays in enumerate(batches):
        loss = mse(render(rays, encode, model), target)
        loss.backward()
        optimizer.step()
        if i % 100 == 0:
            print(mse(render(test_rays, encode, model), target).item())
"""


@pytest.mark.parametrize(("result", "expected"), [("encoder(x)", []), ("encoder(x).item()", [("OOM201", 7)])])
def test_what_a_function_returns_to_a_call_out_of_sight_leaves_with_its_graph(report, result, expected):
    assert report(RENDERED.format(result=result)) == expected


@pytest.mark.parametrize("name", ["perceptual_loss", "style_criterion"])
def test_a_loss_through_a_network_in_eval_mode_may_be_backpropagated(report, name):
    code = f"""
        def {name}(net, out, target):
            net.eval()
            return squares(net(out), net(target))

        net = torch.load("vgg.pt", map_location="cpu")
    """
    assert report(code) == []
    assert report(code.replace(name, "validation_loss")) == [("OOM201", 3)]


def test_a_perceptual_loss_may_be_an_object(report):
    code = """
        import torch

        class PerceptualLoss:
            def __init__(self, network: Network):
                self.network = network

            def __call__(self, out, target):
                self.network.eval()
                return squares(self.network(out), self.network(target))

        network = torch.load("vgg.pt", map_location="cpu")
    """
    assert report(code) == []
    assert report(code.replace("PerceptualLoss", "Comparison")) == [("OOM201", 9)]


@pytest.mark.parametrize("name", ["PositionalEncoder", "FourierFeatures", "FreqEncoder"])
def test_an_encoding_of_positions_is_no_network(report, name):
    code = f"""
        import torch
        from elsewhere import {name}

        encoder = {name}(3, 10)
        network = torch.load("nerf.pt", map_location="cpu")
        for rays in test_rays:
            encoded = encoder(rays)
            with torch.no_grad():
                show(network(encoded))
    """
    assert report(code) == []
    assert report(code.replace(name, "ImageEncoder")) == [("OOM201", 7)]
