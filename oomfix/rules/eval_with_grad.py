"""OOM201 eval-with-grad."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import RUNS_NETWORKS, Finding, Invalid, Rule, Severity
from oomfix.script import Script


class EvalWithGrad(Rule):
    """A model runs with gradients enabled where nothing is backpropagated.

    What: a forward outside `torch.no_grad()` and `torch.inference_mode()`

    - in a validation, test or inference pass;
    - in a check of the network every few iterations (`if i % 100 == 0:`);
    - after all training (the last loop, or a framework's `trainer.fit(model)`);
    - for an action in an environment (`env.step(action)`);
    - of which only numbers are used (`criterion(model(x), y).item()`).

    Where a method of a network runs the forward for training as well, the finding is where the evaluation calls that
    method.

    Why: autograd saves the activations of every layer for a backward that never comes. `model.eval()` does not change
    that. Evaluation then needs as much memory as training, while the optimizer state is there as well: its peak over
    the weights was 9.0 times that under `no_grad` for a network of 8 blocks (bench/results/rules.md).

    Quiet when:

    - gradients are disabled by a context, a decorator or `set_grad_enabled(False)`, here or in every caller in the
      file;
    - a backward goes through the forward, or an update reads its result;
    - a framework (Lightning, Trainer) or a pipeline (diffusers) runs the pass;
    - the file holds unit tests.

    Fix: `@torch.no_grad()` on the function, or `with torch.no_grad():` around the pass. There, torch runs an
    `nn.TransformerEncoder` in `eval()` mode on a faster path, whose results differ in the last digits.
    """

    code = "OOM201"
    name = "eval-with-grad"
    severity = Severity.WARNING
    needs = RUNS_NETWORKS

    def check(self, script: Script) -> Iterator[Finding]:
        if script.is_test_module:
            return
        forwards = [forward for forward in script.evaluation_forwards if forward.records_graph]
        recorded = [forward for forward in forwards if not script.is_array_at_once(forward)]
        if not recorded:
            return
        # few scripts come to this question, and every module is a third of a millisecond of each run
        from oomfix.script.fixes.no_grad import no_grad_edits, why_not_edited

        for forward in script.distinct(script.where_asked_for(recorded)):
            yield self.finding(
                script.place(forward.node),
                "evaluation with gradients enabled: every activation is saved for a backward that never comes",
                edits=no_grad_edits(script, forward),
                by_hand=why_not_edited(script, forward),
            )

    INVALID = [
        Invalid(
            """
import torch

def validate(model, loader, criterion):
    model.eval()
    total = 0.0
    for x, y in loader:
        out = model(x)
        total += criterion(out, y).item()
    return total / len(loader)
""",
            (8,),
            """
import torch

@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    total = 0.0
    for x, y in loader:
        out = model(x)
        total += criterion(out, y).item()
    return total / len(loader)
""",
        ),
        Invalid(
            """
import torch

def run(model, loader, optimizer, train):
    for x, y in loader:
        loss = criterion(model(x), y)
        if train:
            loss.backward()
            optimizer.step()

run(model, train_loader, optimizer, train=True)
run(model, val_loader, None, train=False)
""",
            (6,),
        ),
        Invalid(
            """
import torch

for step in range(100000):
    action = network(observation).argmax().item()
    observation, reward, done, info = env.step(action)
    replay.add(observation, action, reward, done)
    loss = criterion(network(replay.sample()), targets)
    loss.backward()
    optimizer.step()
""",
            (5,),
        ),
        Invalid(
            """
import torch

for epoch in range(10):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    model.eval()
    for x, y in val_loader:
        print(criterion(model(x), y).item())
""",
            (12,),
            """
import torch

for epoch in range(10):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(criterion(model(x), y).item())
""",
        ),
        Invalid(
            """
import torch

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x)

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self(x), y)

model = Tagger()
for x, y in train_loader:
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.step()
for x, y in test_loader:
    print(model.loss(x, y).item())
""",
            (21,),
            """
import torch

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x)

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self(x), y)

model = Tagger()
for x, y in train_loader:
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.step()
with torch.no_grad():
    for x, y in test_loader:
        print(model.loss(x, y).item())
""",
        ),
        Invalid(
            """
import torch

for step in range(10000):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    print(criterion(model(test_x), test_y).item())
""",
            (8,),
        ),
    ]
    VALID = [
        """
import torch

for episode in range(1000):
    log_probabilities = []
    while not done:
        probabilities = policy(observation)
        action = torch.multinomial(probabilities, 1)
        log_probabilities.append(probabilities[action].log())
        observation, reward, done, info = env.step(action)
    loss = -torch.stack(log_probabilities).sum() * reward
    loss.backward()
    optimizer.step()
""",
        """
import torch

def validate(model, loader):
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            print(model(x).argmax(1).eq(y).sum())
""",
        """
import torch

def validate(model, loader):
    for x, y in loader:
        print(model(x).argmax(1).eq(y).sum())

def main():
    with torch.inference_mode():
        validate(model, loader)
""",
        """
import torch

for phase in ["train", "val"]:
    for x, y in loaders[phase]:
        with torch.set_grad_enabled(phase == "train"):
            out = model(x)
            loss = criterion(out, y)
            if phase == "train":
                loss.backward()
                optimizer.step()
""",
        """
import torch

guard = torch.no_grad() if evaluating else contextlib.nullcontext()
with guard:
    for x, y in loader:
        out = model(x)
""",
        """
import torch

for x, y in loader:
    losses = []
    for part, target in zip(x, y):
        losses.append(criterion(model(part), target))
    sum(losses).backward()
""",
        """
import torch

for x, y in loader:
    soft = teacher(x).detach()
    loss = criterion(student(x), soft)
    loss.backward()
    optimizer.step()
""",
    ]
