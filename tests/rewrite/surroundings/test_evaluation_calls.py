"""Evaluation that collects a model's outputs runs through the manager, under no_grad; other evaluation stays."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run

TRAINING = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
if torch.cuda.is_available():
    net.cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))] * 3
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
"""
EVALUATION = """\
net.eval()
kept = []
for x, y in loader:
    out = net(x)
    probabilities = out.softmax(1)
    kept.append(probabilities)
print(float(torch.cat(kept).sum()), torch.cat(kept)[0].tolist())
"""


def after(body: str) -> str:
    result = rewritten(TRAINING + textwrap.dedent(body))
    assert rewritten(result.text).text == result.text
    return result.text


def test_collected_outputs_are_evaluated_by_the_manager_without_gradients():
    text = after(EVALUATION)
    assert "with torch.no_grad():\n    for x, y in loader:\n        out = memory.evaluate(net, x)\n" in text


def test_a_module_that_does_without_torch_evaluates_through_the_manager_of_its_try():
    head = "import torch\nfrom torch import nn\n"
    optional = f"try:\n{textwrap.indent(head, '    ')}except ImportError:\n    torch = None\n"
    assert "out = memory.evaluate(net, x)\n" in rewritten(TRAINING.replace(head, optional) + EVALUATION).text


def test_it_evaluates_the_same_to_the_bit_whole_and_in_parts():
    before = run(TRAINING + EVALUATION)
    assert_same_bits(before, run(after(EVALUATION), preset="off"))
    assert_same_bits(before, run(after(EVALUATION), preset="16gb"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("net.eval()\n", ""),
        ("    kept.append(probabilities)\n", "    print(probabilities)\n"),
        ("    kept.append(probabilities)\n", "    kept.append(y)\n"),
        ("net(x)\n    prob", "net.predict_on(x)\n    prob"),
        ("net(x)\n    prob", "net(x, batch_size=6)\n    prob"),
        ("    out = net(x)\n", "    with torch.autocast('cuda'):\n        out = net(x)\n"),
    ],
)
def test_models_in_training_mode_outputs_that_are_not_kept_and_autocast_stay(old, new):
    assert "memory.evaluate" not in after(EVALUATION.replace(old, new))
