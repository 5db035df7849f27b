"""The prefilter lets through exactly the files that hold what some rule needs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.audit import Auditor
from oomfix.prefilter import Prefilter
from oomfix.rules import all_rules
from oomfix.rules.base import TRAINS, holds

NEEDS = [need for rule in all_rules() for need in rule.needs]
WORDS = sorted({word for need in NEEDS for word in ((need,) if isinstance(need, bytes) else need)})
HALVES = [half for word in WORDS for half in (word[1:], word[:-1])]
PIECES = st.sampled_from([*WORDS, *HALVES, b"cuda", b"\n", b" x "])


def codes(code: str) -> set[str]:
    """What an audit finds in a file with this text."""
    return {finding.code for finding in Auditor(all_rules()).audit("metrics.py", code.encode()).findings}


@given(data=st.lists(PIECES, max_size=4).map(b"".join))
def test_a_file_passes_exactly_when_it_holds_a_need(data: bytes):
    assert Prefilter(NEEDS).passes(data) == any(holds(data, need) for need in NEEDS)


@given(data=st.lists(st.sampled_from([b"a", b"b", b"cuda", b"zero_"]), max_size=4).map(b"".join))
def test_groups_need_all_their_words(data: bytes):
    needs = [(b"a", b"b"), (b"cuda", b"a"), b"zero_b"]
    assert Prefilter(needs).passes(data) == any(holds(data, need) for need in needs)


def test_every_need_passes_by_itself():
    for need in NEEDS:
        assert Prefilter(NEEDS).passes(need if isinstance(need, bytes) else b"".join(need))


@pytest.mark.parametrize("function", ["evaluate", "_evaluate", "validate", "validation", "val"])
def test_a_file_that_only_evaluates_is_read(function):
    code = f"import torch\ndef {function}(model, loader):\n    for x in loader:\n        print(model(x).argmax(1))\n"
    assert codes(code) == {"OOM201"}


@pytest.mark.parametrize(
    "body",
    [
        "def select_action(policy, x):\n    return policy(torch.tensor(x)).argmax().item()",
        "def predict(model, x):\n    return model(x).argmax(-1).tolist()",
        "def generate(model, x):\n    return torch.multinomial(model(x), 1).item()",
        "def sample_sequence(model, x):\n    return torch.multinomial(model(x), 1).item()",
        "def predict(net, x):\n    chances, best = net(x).softmax(-1).topk(5)\n    return best.tolist()",
        "def extract(loader):\n    for x in loader:\n        out = model(x)\n        print(out.detach().numpy())",
    ],
)
def test_a_file_that_only_predicts_is_read(body):
    assert codes(f"import torch\n{body}\n") == {"OOM201"}


def test_totals_of_a_file_that_only_evaluates_are_judged():
    code = """
def validate(model, loader):
    total = 0
    for x, y in loader:
        total += torch_loss(model(x), y)
    return total
"""
    assert {finding.code for finding in Auditor(all_rules()).audit("m.py", code.encode()).findings} == {
        "OOM101",
        "OOM201",
    }


@pytest.mark.parametrize(
    "code",
    [
        "from transformers import Trainer\ntrainer = Trainer(model)\ntrainer.train()\nprint(model(x))\n",
        "import pytorch_lightning as pl\ntrainer = pl.Trainer()\ntrainer.fit(model)\nprint(model(x))\n",
        "def score(model, x):\n    out = model(x)\n    return net(out).detach().cpu().numpy()\n",
        "import clip\nnet, prepare = clip.load(name)\nfor x in images:\n    print(net.encode_image(x).sum())\n",
    ],
    ids=["transformers", "lightning", "arrays", "clip"],
)
def test_a_file_that_evaluates_without_saying_so_is_read(code):
    assert codes(code) == {"OOM201"}


def test_few_files_of_a_large_library_are_read():
    """What is read decides what an audit costs: a need that definitions of models hold as well makes it slow."""
    (folder,) = find_spec("transformers").submodule_search_locations
    files = [path.read_bytes() for path in Path(folder).rglob("*.py")]
    prefilter = Prefilter(NEEDS)
    assert sum(map(prefilter.passes, files)) < 0.05 * len(files)


@pytest.mark.parametrize(
    ("call", "is_read"),
    [(b"loss_scaler(loss, optimizer)", True), (b"x, scale = self.scaler(x)", False), (b"loss.backward()", True)],
)
def test_a_network_that_scales_its_inputs_does_not_train(call: bytes, is_read: bool):
    assert Prefilter(TRAINS).passes(b"def forward(self, x):\n    " + call) is is_read
