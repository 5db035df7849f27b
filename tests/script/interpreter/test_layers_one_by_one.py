"""Networks whose layers a loop runs one by one."""

from __future__ import annotations

import pytest

LOOP = """
    import torch
    from project import Net

    model = Net().cuda()
    {first}
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in loader:
        out = x.cuda()
        for {each}:
            {body}
        loss = (out - y.cuda()).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
FORWARD = 10


def found(report, each, body, first="pass"):
    return report(LOOP.format(first=first, each=each, body=body))


@pytest.mark.parametrize(
    "each",
    [
        "name, layer in model._modules.items()",
        "layer in model._modules.values()",
        "layer in model.children()",
        "name, layer in model.named_children()",
        "layer in list(model.children())[:-1]",
        "layer in model.features",
        "i, layer in enumerate(model.features.children())",
    ],
)
def test_layers_are_called(report, each):
    assert found(report, each, "out = layer(out)") == [("OOM202", FORWARD)]


def test_layers_of_a_list_are_called(report):
    assert found(report, "layer in layers[:-1]", "out = layer(out)", "layers = list(model.children())") == [
        ("OOM202", FORWARD)
    ]


@pytest.mark.parametrize(
    ("each", "body"),
    [
        ("layer in model.children()", "layer.reset_parameters()"),
        ("name, parameter in model.named_parameters()", "out = parameter(out)"),
        ("convert in table.steps", "out = convert(out)"),
        ("key, convert in functions.items()", "out = convert(out)"),
    ],
)
def test_other_loops_call_none(report, each, body):
    assert found(report, each, body) == []


def test_layers_of_a_frozen_network_give_no_gradients_to_keep(report):
    code = """
        import torch
        from project import Net, Head

        base, head = Net().cuda(), Head().cuda()
        for parameter in base.parameters():
            parameter.requires_grad = False
        base.eval()
        optimizer = torch.optim.Adam(head.parameters())
        for x, y in loader:
            features = x.cuda()
            for layer in base.children():
                features = layer(features)
            with torch.autocast("cuda", torch.bfloat16):
                loss = (head(features) - y.cuda()).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []
