"""A batch that may not be split climbs the runtime's ladder on a simulated card, as it would on a real one."""

import textwrap
from pathlib import Path

import pytest

from oomfix.profile.process import run_script
from tests.torch_versions import needs_counts_of_holders

pytestmark = pytest.mark.usefixtures("forked")

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from oomfix import runtime

    memory = runtime.preset("16gb", precision="fp32")
    # 12 blocks that keep 32 MiB each, beside 24 MiB of weights in all
    blocks = (nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(12))
    model = memory.prepare(nn.Sequential(*blocks).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8192, 512).cuda()

    def forward(x):
        return model(x).std(0).mean()

    for _ in range(2):
        memory.forward_backward(forward, x)
        memory.step(optimizer)
    with open(sys.argv[1], "w") as file:
        file.write(str(memory.report()))
"""


@pytest.mark.parametrize(
    ("budget_gib", "taken"),
    [
        (1.3, []),
        (1.0, ["checkpointing 12 blocks"]),
        (0.93, ["checkpointing 12 blocks", "activations in host memory"]),
    ],
)
def test_a_smaller_card_takes_more_rungs(tmp_path, budget_gib, taken):
    script, report = tmp_path / "train.py", tmp_path / "report.txt"
    script.write_text(textwrap.dedent(SCRIPT))
    options = ["--gpu", "t4", "--coupled", "--budget", str(budget_gib), "--steps", "9"]
    found, _ = run_script(str(script), [str(report)], options, {})
    assert found["out_of_memory"] is found["error"] is None
    lines = Path(report).read_text().splitlines()
    assert [line.split(": ")[1].split(" since")[0] for line in lines if "since training call 1" in line] == taken


KEPT = """
    import torch
    from torch import nn
    from oomfix import runtime

    memory = runtime.preset("16gb", precision="fp32")

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 2048), nn.Linear(2048, 64)

        def forward(self, x):
            hidden = self.first(x).tanh()
            # 64 MiB, which nobody reads
            self.seen = hidden * 1
            return self.second(hidden)

    model = memory.prepare(nn.Sequential(*(Keeping() for _ in range(12))).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8192, 64).cuda()
    for _ in range(3):
        memory.forward_backward(lambda x: model(x).std(0).mean(), x)
        memory.step(optimizer)
"""


@needs_counts_of_holders
def test_tensors_that_modules_keep_leave_a_card_that_is_too_small_for_them(tmp_path):
    """Twelve of 64 MiB, where the context leaves 0.6 of 1.2 GiB; checkpointing leaves them where they are."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(KEPT))
    found, _ = run_script(str(script), [], ["--gpu", "t4", "--coupled", "--budget", "1.2", "--steps", "3"], {})
    assert found["out_of_memory"] is found["error"] is None
    assert found["steps"][-1]["live_bytes"] < 100 * 2**20
    # in steady state: a few maps at a time
    assert found["steps"][-1]["peak_allocated_bytes"] < 450 * 2**20
