"""Scripts of libraries that are written like torch are theirs to judge."""

from __future__ import annotations

import pytest

from oomfix.audit import Auditor
from oomfix.rewrite.surroundings.local import findings_of
from oomfix.rules import all_rules
from oomfix.source import Source

SCRIPT = """
{imports}

for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
for x, y in val_loader:
    print(model(x).argmax(1))
"""


def found(imports: str) -> list[str]:
    data = SCRIPT.format(imports=imports).encode()
    rules = all_rules()
    codes = [finding.code for finding in Auditor(rules).audit("train.py", data).findings]
    assert codes == [finding.code for finding in findings_of(Source.from_bytes("train.py", data), rules)]
    return codes


@pytest.mark.parametrize(
    "imports", ["import paddle", "from tinygrad.tensor import Tensor", "import mindspore.nn as nn"]
)
def test_nothing_is_found_where_another_library_trains(imports):
    assert found(imports) == []


@pytest.mark.parametrize(
    "imports", ["import torch", "import paddle, torch", "import paddle\nfrom helpers import *", ""]
)
def test_torch_beside_it_or_nothing_known_is_judged(imports):
    assert found(imports) == ["OOM203", "OOM201"]


BY_HAND = """
{imports}

class Network:
    def train(self, batches):
        for x, y in batches:
            error = self.loss_layer.{backward}(y)
            for layer in reversed(self.layers):
                {handed}
            self.optimizer.zero_grad()
"""


def found_by_hand(imports: str, handed: str, backward: str = "backward") -> list[str]:
    data = BY_HAND.format(imports=imports, handed=handed, backward=backward).encode()
    return [finding.code for finding in Auditor(all_rules()).audit("train.py", data).findings]


@pytest.mark.parametrize(
    ("imports", "handed"),
    [
        ("import copy", "error = layer.backward(error)"),
        ("", "layer.backward(error)"),
        ("import numpy as np", "layer.step()"),
    ],
)
def test_nothing_is_found_where_layers_hand_the_gradient_on(imports, handed):
    assert found_by_hand(imports, handed) == []


@pytest.mark.parametrize(
    ("imports", "handed", "backward"),
    [
        ("import torch", "error = layer.backward(error)", "backward"),
        ("import copy", "layer.step()", "backward"),  # `loss = engine.backward(loss)` of a framework
        ("import copy", "layer.backward(error)", "forward"),
    ],
)
def test_a_loss_that_a_framework_gives_back_is_torch_s(imports, handed, backward):
    assert found_by_hand(imports, handed, backward) == ["OOM203"]
