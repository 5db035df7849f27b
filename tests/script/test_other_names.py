"""A network that is given another name is known under that one, too."""

from __future__ import annotations

import pytest

RENAMED = """
    import torch

    def train(model, loader, device, several):
        model.to(device).train()
        optimizer = torch.optim.SGD(model.parameters())
        core = {named}
        for x, y in loader:
            loss = criterion(core(x.to(device)), y)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    "named",
    [
        "model",
        "model.to(device)",
        "model.module if several else model",
        "getattr(model, 'module', model)",
        "model.forward",
        "model.__call__",
        "torch.compile(model) if several else model",
        "torch.nn.DataParallel(model) if several else model",
        "(model, loader)[0]",
        "[model][0]",
        "{'core': model}['core']",
    ],
)
def test_another_name_of_a_network_is_one(report, named):
    assert report(RENAMED.format(named=named)) == [("OOM202", 8)]


@pytest.mark.parametrize(
    "named", ["loader", "model if several else loader", "getattr(model, 'normalize', None)", "model.normalize"]
)
def test_a_name_of_something_else_may_be_a_function(report, named):
    assert report(RENAMED.format(named=named)) == []


def test_a_network_in_eval_mode_is_so_under_another_name(report):
    code = """
        import torch

        def show(model, images, device):
            model.eval()
            core = model
            for image in images:
                print(core(image.to(device)).argmax(1))
    """
    assert report(code) == [("OOM201", 7)]


@pytest.mark.parametrize(
    ("names", "values", "found"),
    [
        ("core, step", "model, optimizer", [("OOM202", 6)]),
        ("step, (core, other)", "optimizer, (model, x)", [("OOM202", 6)]),
        ("core, step", "scale, optimizer", []),
        ("step, core", "model, scale", []),
    ],
)
def test_names_are_given_side_by_side(report, names, values, found):
    code = f"""
        def train(model, scale, loader, optimizer, x):
            model.cuda()
            {names} = {values}
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(core(x.cuda()), y)
                loss.backward()
                optimizer.step()
    """
    assert report(code) == found
