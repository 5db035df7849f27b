"""Loops over a few phases: what a name may be in a round decides which branches run in it."""

from __future__ import annotations

import pytest

PASS = """
    import torch
    {before}
    model.cuda()
    for epoch in range(10):
        for {header}:
            for x, y in {loader}:
                loss = criterion(model(x), y)
                if {trains}:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                print(loss.item())
"""

EVALUATED = [("OOM201", 7), ("OOM202", 7)]
ONLY_TRAINED = [("OOM202", 7)]


def passing(header: str, before: str = "pass", loader: str = "loaders[phase]", trains: str = "phase == 'train'") -> str:
    return PASS.format(header=header, before=before, loader=loader, trains=trains)


@pytest.mark.parametrize(
    "parts",
    [
        {"header": "phase in ['train']"},
        {"header": "phase in ('train',)"},
        {"header": "phase in phases", "before": "phases = ['train']"},
        {"header": "phase in phases", "before": "phases = ('train',)"},
        {"header": "phase, loader in [('train', train_loader)]", "loader": "loader"},
        {"header": "training in [True]", "loader": "loader", "trains": "training"},
        {"header": "phase in ['train', 'extra']", "trains": "phase != 'val'"},
    ],
    ids=lambda parts: parts["header"],
)
def test_where_all_phases_train_nothing_evaluates(report, parts):
    assert report(passing(**parts)) == ONLY_TRAINED


@pytest.mark.parametrize(
    "parts",
    [
        {"header": "phase in ['train', 'val']"},
        {"header": "phase in phases", "before": "phases = ['train', 'val']"},
        {"header": "phase in phases", "before": "phases = ['train']; phases.append('val')"},
        {"header": "phase in phases", "before": "phases = ['train']; phases += ['val']"},
        {"header": "phase in phases", "before": "phases = ['train'] if quick else ['train', 'val']"},
        {"header": "phase, loader in loaders.items()", "loader": "loader"},
        {"header": "phase, loader in zip(['train', 'val'], [first, second])", "loader": "loader"},
        {"header": "phase, loader in (('train', first), ('val', second))", "loader": "loader"},
        {"header": "i, phase in enumerate(phases)"},
        {"header": "training, loader in [(True, first), (False, second)]", "loader": "loader", "trains": "training"},
    ],
    ids=lambda parts: f"{parts['header']} {parts.get('before', '')}",
)
def test_a_phase_that_does_not_train_evaluates(report, parts):
    assert report(passing(**parts)) == EVALUATED


def test_what_a_phase_is_decides_in_the_function_that_it_is_given_to(report):
    code = """
        import torch

        def run(model, loader, training):
            for x, y in loader:
                loss = criterion(model(x.cuda()), y)
                if training:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

        for {header}:
            run(model, loader, phase == "train")
    """
    both = report(code.format(header='phase, loader in [("train", first), ("val", second)]'))
    assert both == [("OOM201", 5), ("OOM202", 5)]
    assert report(code.format(header='phase, loader in [("train", first)]')) == [("OOM202", 5)]
