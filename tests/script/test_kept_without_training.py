"""What is kept in files that only run a network: a check point that is loaded, and nothing trained or switched."""

from __future__ import annotations

import pytest

EXTRACTED = """
    import torch
    from models import Net

    net = Net()
    net.load_state_dict(torch.load("weights.pt", map_location="cpu"))

    def evaluate(net, loader):
        features, total = [], 0
        for x, y in loader:
            {run}
            {kept}
        return features, total
"""


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ("features.append(out)", [("OOM201", 10), ("OOM102", 11)]),
        ("features.append(out.cpu())", [("OOM201", 10), ("OOM102", 11)]),
        ("features.append((out, y))", [("OOM201", 10), ("OOM102", 11)]),
        ("total += criterion(out, y)", [("OOM201", 10), ("OOM101", 11)]),
        ("features.append(out.argmax(1))", [("OOM201", 10)]),
        ("features.append(out.detach().cpu())", [("OOM201", 10)]),
        ("total += criterion(out, y).item()", [("OOM201", 10)]),
    ],
)
def test_graphs_are_kept_where_nothing_trains(report, kept, found):
    assert sorted(report(EXTRACTED.format(run="out = net(x)", kept=kept))) == sorted(found)


@pytest.mark.parametrize("kept", ["features.append(out)", "total += criterion(out, y)"])
def test_without_gradients_nothing_is_kept(report, kept):
    run = f"with torch.no_grad():\n                out = net(x)\n                {kept}"
    assert report(EXTRACTED.format(run=run, kept="pass")) == []
