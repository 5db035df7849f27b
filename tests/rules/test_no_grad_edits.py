"""The edit of OOM201: gradients off an evaluation pass, and never off anything that trains."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from oomfix.rewrite.text.edits import apply_edits
from oomfix.rules.eval_with_grad import EvalWithGrad
from oomfix.script import Script
from oomfix.source import Source
from tests.rewrite.equivalence import rewritten


def fix(code: str) -> tuple[int, str]:
    code = dedent(code).lstrip("\n")
    findings = list(EvalWithGrad().check(Script.read(Source.from_bytes("train.py", code.encode()))))
    edits = dict.fromkeys(edit for finding in findings for edit in finding.edits)
    fixed = apply_edits(code, edits)
    ast.parse(fixed)
    return len(findings), fixed if edits else ""


def test_a_helper_that_training_goes_through_is_not_decorated():
    found, fixed = fix("""
        import torch

        def forward_loss(batch):
            return criterion(model(batch.x), batch.y)

        def validate():
            for batch in val_loader:
                print(forward_loss(batch).item())

        for batch in loader:
            forward_loss(batch).backward()
        validate()
    """)
    assert (found, fixed) == (1, "")


def test_a_function_that_trains_gets_its_evaluation_loop_wrapped():
    found, fixed = fix("""
        import torch

        def fit(model, loader, val_loader):
            for x, y in loader:
                criterion(model(x), y).backward()
            model.eval()
            # how good is it?
            for x, y in val_loader:
                text = '''
        as it stands
        '''
                print(text, model(x))  # look
    """)
    assert found == 1
    assert fixed.endswith("""    model.eval()
    # how good is it?
    with torch.no_grad():
        for x, y in val_loader:
            text = '''
as it stands
'''
            print(text, model(x))  # look
""")


def test_a_function_whose_helper_trains_is_not_decorated():
    found, fixed = fix("""
        import torch

        def train_epoch(model, loader):
            for x, y in loader:
                criterion(model(x), y).backward()

        def fit(model):
            train_epoch(model, loader)
            model.eval()
            for x in val_loader:
                print(model(x))

        fit(model)
    """)
    assert found == 1
    assert "@torch.no_grad()" not in fixed
    assert (
        """    model.eval()
    with torch.no_grad():
        for x in val_loader:
            print(model(x))
"""
        in fixed
    )


def test_nested_evaluation_loops_are_wrapped_once():
    found, fixed = fix("""
        import torch
        model.eval()
        for x in loader:
            first = model(x)
            for crop in crops:
                second = model(crop)
    """)
    assert found == 2
    assert fixed.count("with torch.no_grad():") == 1
    assert fixed.index("with torch.no_grad():") < fixed.index("for x in loader")


@pytest.mark.parametrize(
    "code",
    [
        """
        from torch import nn
        def validate(model, loader):
            model.eval()
            for x in loader:
                print(model(x))
        """,
        """
        import torch as t
        def validate(model, loader):
            model.eval()
            for x in loader:
                print(model(x))
        """,
        """
        import torch
        def predict(model, x):
            return model(x)
        """,
    ],
    ids=["torch is not imported", "torch has another name", "the result goes out of sight"],
)
def test_no_edit_where_it_cannot_be_certain(code):
    assert fix(code) == (1, "")


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("torch as th", "print(model(x))", "torch is not imported as `torch`"),
        ("torch", "out = model(perturb(x))", "the code around it may need gradients"),
    ],
)
def test_a_finding_without_an_edit_says_why(name, given, reason):
    code = f"import {name}\n\ndef validate(model, loader):\n    model.eval()\n    for x in loader:\n        {given}\n"
    [finding] = EvalWithGrad().check(Script.read(Source.from_bytes("train.py", code.encode())))
    assert finding.message.endswith(f"(no automatic fix: {reason})")


EVALUATED = """
def validate(model, loader):
    model.eval()
    for x in loader:
        print(model(x))
"""


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("import torch\n" + EVALUATED, "def validate"),
        (EVALUATED.replace("    model.eval()", "    import torch\n    model.eval()"), "for x"),
        ("def helper():\n    import torch\n" + EVALUATED, None),
        (EVALUATED + "\nif __name__ == '__main__':\n    import torch\n    validate(torch.nn.Linear(2, 2), [])\n", None),
        ("from helpers import *\n" + EVALUATED, None),
        ("from helpers import *\n\ndevice = torch.device('cpu')\n" + EVALUATED, "def validate"),
        ("from helpers import *\n\ndef seed():\n    import torch\n    torch.manual_seed(0)\n" + EVALUATED, None),
        ("class Tests:\n    import torch\n" + EVALUATED, None),
        ("try:\n    import torch\nexcept ImportError:\n    pass\n" + EVALUATED, "def validate"),
    ],
    ids=[
        "at the top",
        "in the function itself",
        "in another function",
        "below",
        "perhaps from a star",
        "from a star",
        "a star, and torch in another function",
        "in a class",
        "if there is one",
    ],
)
def test_torch_is_named_where_an_import_has_bound_it(code, place):
    """A decorator runs with the file: a name that is not bound there ends the script that imports it."""
    _, fixed = fix(code)
    lines = fixed.splitlines()
    named = [index for index, line in enumerate(lines) if "torch.no_grad()" in line]
    assert [lines[index + 1].strip().startswith(place) for index in named] == ([] if place is None else [True])


def test_an_import_out_of_reach_is_the_reason_for_no_edit():
    code = "def seed():\n    import torch\n    torch.manual_seed(0)\n" + EVALUATED
    [finding] = EvalWithGrad().check(Script.read(Source.from_bytes("train.py", code.encode())))
    assert finding.message.endswith("(no automatic fix: torch is not imported as `torch`)")


def test_line_endings_and_decorators_are_kept():
    code = (
        "import torch\r\n\r\nclass T:\r\n\t@timed\r\n\tdef validate(self, loader):\r\n"
        "\t\tself.model.eval()\r\n\t\tfor x in loader:\r\n\t\t\tprint(self.model(x))\r\n"
    )
    found, fixed = fix(code)
    assert found == 1
    assert fixed == code.replace("\t@timed\r\n", "\t@timed\r\n\t@torch.no_grad()\r\n")


def test_no_edit_cuts_the_graph_that_another_forward_leaves():
    code = """
        import torch

        def roll_out(actor, critic, env):
            value = critic(env.reset())
            for t in range(100):
                action = actor(observation).argmax().item()
                observation, reward, done, info = env.step(action)
            return value
    """
    assert "    with torch.no_grad():\n        for t in range(100):" in fix(code)[1]
    assert "@torch.no_grad()\ndef roll_out" in fix(code.replace("return value", "return value.item()"))[1]
    outer = """
        import torch

        def roll_out(actor, critic, env):
            for episode in range(10):
                value = critic(env.reset())
                for t in range(100):
                    action = actor(observation).argmax().item()
                    observation, reward, done, info = env.step(action)
            return value
    """
    assert "        with torch.no_grad():\n            for t in range(100):" in fix(outer)[1]


METERED = """
    import torch

    {meter}
    def validate(model, loader, criterion, losses):
        model.eval()
        seen = {made}
        for x, y in loader:
            loss = criterion(model(x), y)
            {counted}
        return seen
"""
METER = "class Meter:\n        def update(self, value):\n            self.value = value.item()\n"


@pytest.mark.parametrize(
    ("meter", "made", "counted", "certain"),
    [
        ("", "Meter()", "seen.update(loss.item(), x.size(0))", True),
        ("", "Meter()", "seen.update(accuracy(x), len(x))", True),
        ("", "Meter()", "seen.update(time.time() - start)", True),
        (METER, "Meter()", "seen.update(loss.detach())", True),
        ("", "Meters()", "seen.update_meter('loss', loss.item(), n=len(x))", True),
        ("", "Agent()", "seen.update(x)", False),
        ("", "Agent()", "seen.update_policy(loss.item())", False),
        ("", "Agent()", "seen.learn(loss.item())", False),
        ("", "Agent()", "seen.update(memory, 64)", False),
        ("", "Agent()", "seen.update(x, y.argmax().item(), len(memory))", False),
        ("", "tqdm(total=9)", "seen.update(1)", True),
        ("", "tqdm(total=9)", "seen.update(x.shape[0])", True),
    ],
)
def test_a_meter_trains_nothing(meter, made, counted, certain):
    found, fixed = fix(METERED.format(meter=meter, made=made, counted=counted))
    assert found == 1
    assert ("@torch.no_grad()\ndef validate" in fixed) is certain


ATTACKED = """
    import torch

    def robust_accuracy(model, loader, attacks):
        model.eval()
        adversary = attacks.LinfPGDAttack(model, eps=0.1)
        correct = 0
        for x, y in loader:
            {made}
            correct += (model(x).argmax(1) == y).sum().item()
        return correct
"""


@pytest.mark.parametrize(
    ("made", "certain"),
    [
        ("x = adversary.perturb(x, y)", False),
        ("x = pgd_attack(model, x, y)", False),
        ("x = x + ig.attribute(x)", False),
        ("x = x + attacks.last_pgd()", True),
        ("x = x + noise(x)", True),
    ],
)
def test_an_attack_needs_gradients(made, certain):
    found, fixed = fix(ATTACKED.format(made=made))
    assert found == 1
    assert ("no_grad" in fixed) is certain


HELD = """
    import torch
    from torch.distributions import Categorical

    class Policy(torch.nn.Module):
        def forward(self, x):
            return self.layers(x)

        def distribution(self, x):
            return Categorical(logits=self.forward(x))

        def get_action(self, x):
            return self.distribution(x).sample()
"""


def test_a_method_that_gives_its_caller_a_graph_keeps_it_where_a_training_elsewhere_may_call_it():
    found, fixed = fix(HELD)
    assert found == 1
    assert fixed.count("no_grad") == 1
    assert "    @torch.no_grad()\n    def get_action(" in fixed


def test_each_function_that_takes_the_graph_off_such_a_helper_is_decorated():
    code = dedent("""
        import torch

        def logits_of(model, x):
            return model(x.flatten(1))

        def logits_of_pairs(model, x, y):
            return logits_of(model, x) - logits_of(model, y)

        def validate(model, loader):
            model.eval()
            for x, y in loader:
                print(logits_of_pairs(model, x, y).argmax(1))

        def predict(model, x):
            return logits_of(model, x).argmax(1).item()
    """)
    text = rewritten(code).text
    assert text.count("no_grad") == 2
    assert "@torch.no_grad()\ndef validate(" in text
    assert "@torch.no_grad()\ndef predict(" in text


def test_a_helper_that_gives_numbers_is_decorated_itself():
    code = HELD.replace("Categorical(logits=self.forward(x))", "self.forward(x).argmax(1)").replace(".sample()", "")
    assert "    @torch.no_grad()\n    def distribution(" in fix(code)[1]


def test_a_helper_of_a_script_is_decorated_itself():
    found, fixed = fix(HELD + "\n    policy = Policy()\n    print(policy.get_action(torch.zeros(4)))\n")
    assert found == 1
    assert "    @torch.no_grad()\n    def distribution(" in fixed


def test_what_is_named_for_evaluation_is_decorated_whatever_it_returns():
    code = """
        import torch

        class Trainer:
            def fit(self):
                for x, y in self.loader:
                    criterion(self.model(x), y).backward()
                    self.optimizer.step()
                print(self.validate()[0])

            def validate(self):
                outputs = [self.model(x) for x in self.val_loader]
                return report(outputs), 0.5
    """
    assert "    @torch.no_grad()\n    def validate(" in fix(code)[1]


ACTING = """
    import torch
    from torch.distributions import Categorical

    class Player:
        def __init__(self, net):
            self.net = net
            self.kept = []

        def act(self, state):
            {body}
            return action.item()
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("drawn = Categorical(self.net(state)); action = drawn.sample(); self.log_prob = drawn.log_prob(action)", 0),
        ("drawn = Categorical(self.net(state)); action = drawn.sample(); self.kept.append(drawn.log_prob(action))", 0),
        ("out, self.hidden = self.net(state, self.hidden); action = out.argmax()", 1),
        ("action = self.net(state).argmax(); self.last = action", 1),
    ],
    ids=["log probability", "list of them", "recurrent state", "number"],
)
def test_what_an_action_leaves_on_its_object_may_be_trained_on_by_another_file(body, found):
    assert fix(ACTING.format(body=body))[0] == found


def test_no_edit_cuts_the_graph_that_another_forward_leaves_in_a_list():
    body = "drawn = Categorical(self.net(state)); action = drawn.sample(); self.kept.append(drawn.log_prob(action)); {}"
    found, fixed = fix(ACTING.format(body=body.format("print(self.net(state).max().item())")))
    assert (found, fixed) == (1, "")


TRIED_AMONG_LOSSES = """\
import torch
import torch.nn.functional as F

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def loss_of(outputs, x):
    one = F.mse_loss(outputs, x)
    {in_function}
    return one


for x in train_loader:
    optimizer.zero_grad()
    outputs, loss = model(x), 0
    for part in (0, 1):
        one = F.mse_loss(outputs[part], x[part])
        {in_loop}
        loss = loss + one
    loss = loss + loss_of(outputs, x)
    loss.backward()
    optimizer.step()
    for part in (0, 1):
        {behind}
        print(loss.item())
"""


@pytest.mark.parametrize("place", ["in_function", "in_loop", "behind"])
def test_gradients_are_not_taken_off_what_a_loss_is_made_of(place):
    """A network is tried on other samples where a loss is computed from what it gave for those of training."""
    places = dict.fromkeys(("in_function", "in_loop", "behind"), "pass")
    code = TRIED_AMONG_LOSSES.format(**{**places, place: "print(model(torch.rand(2, 4)).mean().item())"})
    found, fixed = fix(code)
    assert found == 1
    assert ("no_grad" in fixed) == (place == "behind")


POTENTIAL = """
    import torch

    def fit(model, loader, val_loader):
        for x, y in loader:
            criterion(model(x), y).backward()
        model.eval()
        for x, y in val_loader:
            print(criterion(model(x), y).item())
        for count in range(3):
            {made}
            print(model.decode(z).mean().item())
"""


@pytest.mark.parametrize(
    "made",
    [
        "z = torch.randn(8, 2).requires_grad_(True).to(device)",
        "z = torch.randn(8, 2, requires_grad=True)",
        "z.requires_grad_()",
        "z.requires_grad = True",
    ],
)
def test_a_network_that_is_evaluated_on_inputs_with_gradients_keeps_them_everywhere(made):
    assert fix(POTENTIAL.format(made=made)) == (2, "")


@pytest.mark.parametrize(
    "made",
    [
        "z = torch.randn(8, 2).requires_grad_(False)",
        "z = torch.randn(8, 2, requires_grad=False)",
        "z.requires_grad = False",
        "w.requires_grad_()",
        "z = torch.randn(8, 2)",
    ],
)
def test_inputs_without_gradients_and_gradients_of_others_keep_no_evaluation_from_no_grad(made):
    found, fixed = fix(POTENTIAL.format(made=made))
    assert found == 2
    assert fixed.count("with torch.no_grad():") == 2
