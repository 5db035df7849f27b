"""Forward passes that repeat are answered without being run, and nothing of what is reported changes by it."""

import textwrap

import pytest

from oomfix.profile import run as runner

# tens of forwards before the first step, and an accumulated one; `calls` counts what was run
SCRIPT = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    calls = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 64)
            self.seen = 0

        def forward(self, x, y=None):
            calls.append(len(x))
            {inside}
            hidden = self.first(x).relu()
            logits = self.second(hidden)
            return logits, None if y is None else F.cross_entropy(logits, y)

    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    {before}

    def batch():
        return torch.randn(256, 64).cuda() {of_batch}, torch.randint(64, (256,)).cuda()

    @torch.no_grad()
    def evaluate():
        losses = torch.zeros(40)
        for i in range(40):
            x, y = batch()
            with torch.autocast("cuda", dtype=torch.float16):
                logits, loss = model(x, y)
            losses[i] = loss.item()
            {evaluated}

    evaluate()
    for step in range(2):
        for micro in range(12):
            x, y = batch()
            with torch.autocast("cuda", dtype=torch.float16):
                logits, loss = model(x, y)
            (loss / 12).backward()
            {trained}
        optimizer.step()
        optimizer.zero_grad()
    print(len(calls))
"""
PLAIN = {"inside": "", "before": "", "of_batch": "", "evaluated": "", "trained": ""}
ALL = 40 + 2 * 12


@pytest.fixture
def simulate(tmp_path, capsys):
    def simulated(**parts):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(SCRIPT).format(**{**PLAIN, **parts}))
        found = runner.run(str(script), [], steps=5)
        assert found["error"] is None, found["error"]
        return found, int(capsys.readouterr().out.split()[-1])

    return simulated


@pytest.fixture
def simulate_all(simulate, monkeypatch):
    def simulated(**parts):
        with monkeypatch.context() as patched:
            patched.setattr(runner, "Repeats", lambda *_: None)
            return simulate(**parts)

    return simulated


def test_what_is_reported_is_to_the_byte_what_running_everything_reports(simulate, simulate_all):
    (few, run_of_few), (found, run) = simulate(), simulate_all()
    assert run == ALL
    assert run_of_few < 0.7 * ALL
    for name in found.keys() - {"timeline", "assumptions", "top_tensors"}:
        assert few[name] == found[name], name
    tensors = [[(t["nbytes"], t["category"], t["shape"]) for t in one["top_tensors"]] for one in (few, found)]
    assert tensors[0] == tensors[1]
    assert any("needs what the same one needed" in sentence for sentence in few["assumptions"])
    assert not any("needs what the same one needed" in sentence for sentence in found["assumptions"])


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"evaluated": "kept.append(logits)"}, marks=pytest.mark.slow),
        {"trained": "kept.append(loss)"},
        pytest.param({"inside": "kept.append(x * 2)"}, marks=pytest.mark.slow),
    ],
    ids=["outputs are kept", "graphs are kept", "the forward keeps a tensor"],
)
def test_what_grows_or_moves_is_run_until_it_does_not(simulate, simulate_all, parts):
    (few, _), (found, _) = simulate(**parts), simulate_all(**parts)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "growth_bytes_per_step", "steps", "fits"):
        assert few[name] == found[name], name


@pytest.mark.parametrize(
    "parts",
    [
        {"inside": "self.seen += 1"},
        {"before": "model.first.register_forward_hook(lambda *_: None)"},
        {"inside": "y is None or y.cpu()"},
    ],
    ids=["an attribute changes", "a hook may do anything", "numbers from the host are read"],
)
def test_a_forward_that_may_differ_is_run(simulate, parts):
    assert simulate(**parts)[1] == ALL


def test_gradients_of_inputs_and_of_functions_are_computed(simulate):
    simulate(of_batch=".requires_grad_()", trained="assert x.grad is not None")
    looks = "torch.autograd.grad(model(x, y)[1], list(model.parameters()))"
    _, run = simulate(before="x, y = torch.randn(256, 64).cuda(), torch.zeros(256).long().cuda(); " + looks)
    assert run == ALL + 1
