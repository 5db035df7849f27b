"""OOM104 undetached-state."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import TRAINS, Finding, Invalid, Rule, Severity
from oomfix.script import Script


class UndetachedState(Rule):
    """A recurrent state is carried into the next iteration with its graph.

    Why: the state links the graph of each iteration to the one before, so nothing of any earlier iteration can be
    freed. The backward of the next iteration either fails ("Trying to backward through the graph a second time") or,
    with `retain_graph=True`, goes back through all of them: memory and time grow with every batch. Where nothing is
    backpropagated, as in a loop that generates text, the graph grows until the loop ends (a warning). One GRU cell with
    512 rows of 256 keeps 3.5 MiB more in every iteration (bench/results/rules.md).

    Quiet when:

    - the state is detached, also by a helper such as `repackage_hidden`, or only every k-th iteration;
    - it is reset in each iteration, or computed without gradients;
    - the iterations are the time steps of one loss.

    Fix: detach it before it is used again, tuples item by item: `hidden = tuple(h.detach() for h in hidden)`. Around a
    loop without a backward, `with torch.no_grad():`.
    """

    code = "OOM104"
    name = "undetached-state"
    severity = Severity.ERROR
    needs = (*TRAINS, b".eval(")

    def check(self, script: Script) -> Iterator[Finding]:
        for statement, name, trains in script.carried_states():
            yield self.finding(
                script.place(statement),
                f"`{name}` is carried into the next iteration's forward with its graph: "
                + ("detach it" if trains else "nothing is backpropagated here, so disable gradients"),
                severity=Severity.ERROR if trains else Severity.WARNING,
            )

    INVALID = [
        Invalid(
            """
hidden = model.init_hidden(batch_size)
for x, y in loader:
    out, hidden = model(x, hidden)
    loss = criterion(out, y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
""",
            (4,),
        ),
        Invalid(
            """
def generate(model, token, length):
    model.eval()
    hidden, text = None, []
    for _ in range(length):
        out, hidden = model(token, hidden)
        token = out.argmax(-1)
        text.append(token.item())
    return text
""",
            (6,),
        ),
    ]
    VALID = [
        """
hidden = model.init_hidden(batch_size)
for x, y in loader:
    hidden = tuple(h.detach() for h in hidden)
    out, hidden = model(x, hidden)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()
""",
        """
def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)

hidden = model.init_hidden(batch_size)
for x, y in loader:
    hidden = repackage_hidden(hidden)
    out, hidden = model(x, hidden)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()
""",
        """
for x, y in loader:
    hidden = model.init_hidden(batch_size)
    out, hidden = model(x, hidden)
    criterion(out, y).backward()
    optimizer.step()
""",
        """
for x, y in loader:
    hidden, loss = None, 0
    for token in x:
        out, hidden = model(token, hidden)
        loss = loss + criterion(out, y)
    loss.backward()
    optimizer.step()
""",
        """
hidden = None
for i, (x, y) in enumerate(loader):
    out, hidden = model(x, hidden)
    loss = loss + criterion(out, y)
    if (i + 1) % 20 == 0:
        loss.backward()
        optimizer.step()
        hidden, loss = hidden.detach(), 0
""",
    ]
