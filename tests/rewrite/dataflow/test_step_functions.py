"""Functions that make one step each time they are called, by a loop in another file."""

import json

import pytest
from click.testing import CliRunner

from oomfix.rewrite.command import apply
from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import apply as rewritten_loop

AGENT = """\
import torch
from torch import nn


class Agent:
    def __init__(self):
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(6, 1)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=0.01)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.calls = 0

    def learn(self, state, action, target):
        self.calls += 1
        loss = nn.functional.mse_loss(self.critic(torch.cat([state, action], 1)), target)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if self.calls % 2 == 0:
            actor_loss = -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
        return loss.item()
"""
# the file of the loop looks at the gradients that the last call has left
LOOP = """
agent = Agent()
for _ in range(6):
    loss = agent.learn(torch.randn(8, 4), torch.randn(8, 2), torch.randn(8, 1))
    print(f"{loss:.8f} {agent.critic.weight.grad.norm().item():.8f}")
"""


def outcomes(text: str) -> list[tuple[int, str, str | None, str | None]]:
    return [(loop.line, loop.rewrite, loop.reason, loop.function) for loop in rewritten(text).loops]


def test_a_method_that_steps_is_rewritten_as_the_iteration_of_the_loop_that_calls_it():
    assert outcomes(AGENT) == [(12, "micro-batched", None, "learn")]
    before = run(AGENT + LOOP)
    assert_same_bits(before, run(rewritten(AGENT).text + LOOP, preset="off"))
    split = run(rewritten(AGENT, micro_batches=3).text + LOOP)
    assert split.calls_in_parts == 9
    assert_close(before, split)


def test_an_optimizer_that_a_function_given_to_the_class_makes_steps_like_any_other():
    agent = AGENT.replace("torch.optim.Adam(", "make(").replace(", lr=0.01)", ")").replace("(self):", "(self, make):")
    loop = LOOP.replace("Agent()", "Agent(lambda given: torch.optim.Adam(given, lr=0.01))")
    assert outcomes(agent) == [(12, "micro-batched", None, "learn")]
    before = run(agent + loop)
    assert_same_bits(before, run(rewritten(agent).text + loop, preset="off"))
    split = run(rewritten(agent, micro_batches=3).text + loop)
    assert split.calls_in_parts == 9
    assert_close(before, split)


def test_gradients_stay_for_the_other_file_which_may_read_them():
    text = rewritten(AGENT).text
    assert text.count("optimizer.zero_grad()") == 2
    assert "memory.step(self.critic_optimizer, zero_grad=False)\n" in text
    one = AGENT[: AGENT.index("        if self.calls")].replace(
        "        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=0.01)\n", ""
    )
    assert "self.critic_optimizer.zero_grad()\n" in rewritten(one).text


def test_applying_twice_changes_nothing():
    once = rewritten(AGENT).text
    assert rewritten(once).text == once
    assert [rewrite for _, rewrite, *_ in outcomes(once)] == ["none"]


@pytest.mark.parametrize(
    "callers",
    [
        "\nagent = Agent()\nagent.learn(torch.ones(8, 4), torch.ones(8, 2), torch.ones(8, 1))\n",
        "\n\ndef test_learn():\n    import pytest\n",
    ],
    ids=["called here, once", "a file of tests"],
)
def test_a_step_that_this_file_makes_once_is_no_loop_of_another_file(callers):
    assert outcomes(AGENT + callers) == []
    assert "memory" not in rewritten(AGENT + callers).text


def test_with_a_loop_in_this_file_it_is_a_loop_of_this_file():
    ((line, rewrite, _, function),) = outcomes(AGENT + LOOP)
    assert (line, rewrite, function) == (26, "micro-batched", None)


def test_a_step_whose_network_runs_elsewhere_is_told_and_stays(tmp_path):
    text = AGENT.replace("self.critic(torch.cat([state, action], 1))", "state").replace(
        "-self.critic(torch.cat([state, self.actor(state)], 1)).mean()", "state.mean()"
    )
    (tmp_path / "agent.py").write_text(text)
    done = CliRunner().invoke(apply, ["--preset", "16gb", str(tmp_path / "agent.py")])
    assert done.exit_code == 0
    assert (
        "agent.py:12  left alone, in `learn`, whose loop is in another file: "
        "it is not seen which network its loss goes through\n" in done.output
    )
    assert (tmp_path / "agent.py").read_text() == text


def test_it_is_no_loop_of_the_json_and_its_edits_are(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    done = CliRunner().invoke(apply, ["--preset", "16gb", str(tmp_path / "agent.py"), "--format", "json", "--check"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["loops"] == []
    assert "memory.forward_backward(" in "".join(edit["replacement"] for edit in report["files"][0]["edits"])


def test_a_folder_without_a_path_lists_files_that_step(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(apply, ["--preset", "16gb", "--check"])
    assert done.exit_code == 1
    assert "1 file would be rewritten: 1 training loop (1 micro-batched; 1 in other files)" in done.output


def test_a_target_network_that_is_frozen_leaves_the_one_it_is_a_copy_of_in_training():
    """Of a class of the file, whose objects are told apart by where they are made."""
    result = rewritten("""\
import copy
import torch
import torch.nn.functional as F
from torch import nn

class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

class Agent:
    def __init__(self):
        self.net = Q()
        self.target = copy.deepcopy(self.net)
        for p in self.target.parameters():
            p.requires_grad = False
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def learn(self, x, y):
        with torch.no_grad():
            y = y + 0.9 * self.target(x)
        loss = F.mse_loss(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
""")
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]


def test_a_part_of_the_batch_that_is_called_after_the_model_is_given_to_the_function():
    text, forms = rewritten_loop("""\
        def step(x):
            data_for_model = x[:, :-1]
            out = model(data_for_model)
            loss = F.mse_loss(out, x[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    assert "memory.forward_backward(forward, data_for_model, x)" in text
