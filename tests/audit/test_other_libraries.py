"""Scripts of libraries that are written like torch are theirs to judge."""

from __future__ import annotations

import pytest

from oomfix.audit import Auditor
from oomfix.rewrite.local import findings_of
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
