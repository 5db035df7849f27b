"""Lists that are made with their slots, `[None] * n`, and filled by what a loop counts."""

from __future__ import annotations

import pytest

COUNTED = """
    losses = {made}
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        {kept}
"""


@pytest.mark.parametrize("made", ["[None] * len(loader)", "[0 for _ in range(100)]", "[0.0] * 100", "{}"])
@pytest.mark.parametrize(
    "kept, found",
    [
        ("losses[i] = loss", [("OOM102", 6)]),
        ("losses[i] = (loss, len(x))", [("OOM102", 6)]),
        ("losses[i] = loss.item()", []),
        ("losses[i] = loss.detach()", []),
    ],
)
def test_a_slot_for_each_iteration_keeps_its_graph(report, made, kept, found):
    assert report(COUNTED.format(made=made, kept=kept)) == found


@pytest.mark.parametrize(
    "around",
    [
        "slots = [None] * 3\n    for x, y in loader:",
        "for x, y in loader:\n        slots = [None] * 3",
    ],
)
def test_a_slot_for_each_head_is_taken_again_by_the_next_iteration(report, around):
    code = f"""
    {around}
        for head in range(3):
            slots[head] = nets[head](x)
        loss = sum(slots)
        loss.backward()
        optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize("counted", ["for i, net in enumerate(networks):", "for i in range(len(networks)):"])
def test_a_slot_for_each_network_is_one_of_a_few(report, counted):
    code = f"""
    import torch

    def evaluate(networks, x):
        outputs = [None] * len(networks)
        {counted}
            net = networks[i].eval()
            outputs[i] = net(x)
        return outputs
    """
    assert [one for one in report(code) if one[0] == "OOM102"] == []
