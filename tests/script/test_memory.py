"""What the manager's calls mean to the audit."""

from __future__ import annotations

import pytest

TOP = """
import torch
from torch import nn
from oomfix import runtime

memory = runtime.preset("16gb")
model, frozen = nn.Linear(4, 2).cuda(), nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_forward_through_the_manager_is_one_of_the_loop_in_its_precision(read, report):
    code = TOP + (
        "for x, y in loader:\n"
        "    loss = criterion(memory.forward(model, x), y)\n"
        "    memory.backward(loss)\n"
        "    memory.step(optimizer)\n"
    )
    (loop,) = read(code).loops
    assert (loop.to_json()["forwards"], loop.to_json()["amp"]) == ([9], "framework")
    assert report(code) == []


def test_what_a_forward_through_the_manager_gives_carries_a_graph(report):
    code = TOP + (
        "kept = []\n"
        "for x, y in loader:\n"
        "    out = memory.forward(model, x)\n"
        "    memory.backward(criterion(out, y))\n"
        "    memory.step(optimizer)\n"
        "    kept.append(out)\n"
    )
    assert [finding for finding, _ in report(code)] == ["OOM102"]


def test_evaluation_through_the_manager_records_no_graph(report):
    code = TOP + ("kept = []\nfor x, y in loader:\n    model.eval()\n    kept.append(memory.evaluate(model, x))\n")
    assert report(code) == []


def test_batches_accumulated_by_the_manager_are_divided_and_stepped(report):
    code = TOP + (
        "for i, (x, y) in enumerate(memory.accumulate(loader, 4)):\n"
        "    def forward(x, y):\n"
        "        return criterion(model(x), y)\n"
        "\n"
        "    memory.forward_backward(forward, x, y)\n"
        "    if memory.window_closed:\n"
        "        memory.step(optimizer)\n"
    )
    assert report(code) == []


@pytest.mark.parametrize(
    ("loss", "test", "codes"),
    [
        ("loss", "(i + 1) % 4 == 0", ["OOM301", "OOM302"]),
        ("loss / 4", "(i + 1) % 4 == 0", ["OOM302"]),
        ("loss / 4", "(i + 1) % 4 == 0 or (i + 1) == len(loader)", []),
    ],
)
def test_a_window_that_the_manager_is_not_told_of_is_judged(report, loss, test, codes):
    code = (
        f"{TOP}"
        "for i, (x, y) in enumerate(loader):\n"
        "    def forward(x, y):\n"
        "        loss = criterion(model(x), y)\n"
        f"        return {loss}\n"
        "    memory.forward_backward(forward, x, y)\n"
        f"    if {test}:\n"
        "        memory.step(optimizer)\n"
    )
    assert [code for code, _ in report(code)] == codes


def test_the_manager_scales_for_its_own_autocast_and_not_for_torchs(report):
    code = TOP + (
        "for x, y in loader:\n"
        "    with {context}:\n"
        "        loss = criterion(model(x), y)\n"
        "    memory.backward(loss)\n"
        "    memory.step(optimizer)\n"
    )
    assert report(code.format(context='memory.autocast("cuda")')) == []
    assert report(code.format(context='torch.autocast("cuda", dtype=torch.bfloat16)')) == []
    assert report(code.format(context='torch.autocast("cuda")')) == [("OOM304", 10)]


def test_a_class_whose_method_hands_its_forward_to_the_manager_trains(report):
    code = TOP + (
        "class Agent:\n"
        "    def __init__(self):\n"
        "        self.net, self.target = nn.Linear(4, 2).cuda(), nn.Linear(4, 2).cuda()\n"
        "        self.target.eval()\n"
        "\n"
        "    def learn(self, x, r):\n"
        "        def forward(x, r):\n"
        "            wanted = r + self.target(x).detach().max(1)[0]\n"
        "            return criterion(self.net(x).max(1)[0], wanted)\n"
        "\n"
        "        loss = memory.forward_backward(forward, x, r)\n"
        "        memory.step(optimizer)\n"
        "        return loss.item()\n"
    )
    assert [finding for finding, _ in report(code) if finding == "OOM201"] == []


@pytest.mark.parametrize("backward", ["accelerator.backward(loss)", "loss_scaler(loss, optimizer)", "loss.backward()"])
def test_a_loss_that_something_else_runs_the_backward_of_keeps_its_graph(report, backward):
    code = TOP + (
        "kept, total = [], 0.0\n"
        "for x, y in loader:\n"
        "    def forward(x, y):\n"
        "        out = model(x)\n"
        "        return criterion(out, y), out\n"
        "\n"
        "    loss, out = memory.loss(forward, x, y)\n"
        f"    {backward}\n"
        "    optimizer.step()\n"
        "    kept.append(out)\n"
        "    total += loss\n"
    )
    added = code.strip().split("\n").index("    total += loss") + 1
    leaks = [finding for finding in report(code) if finding[0] in ("OOM101", "OOM102", "OOM201")]
    assert leaks == [("OOM101", added)]
