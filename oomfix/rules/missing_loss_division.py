"""OOM301 missing-loss-division."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import TRAINS, Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.analyses.windows import is_divided


class MissingLossDivision(Rule):
    """Gradients are accumulated over k iterations, but the loss is not divided by k.

    What: a step on every k-th iteration, or a step after an inner loop over k batches, or over k pieces of one batch
    (`x.chunk(k)`, `x.split(m)`, `x[i : i + m]`).

    Why: k backwards of a mean loss add up to k times the gradient of the mean over all samples: 4.00 times with 4
    backwards per step (bench/results/rules.md). The step is k times too long for the learning rate that was meant. Adam
    hides this; weight decay and clipping do not. Changing k to fit a card then changes the training.

    Quiet when:

    - the loss is divided by anything on its way to the backward, or is the sum over its samples (`reduction="sum"`);
    - the iteration, or what it calls, reads k for more than to ask whether the window is full, and may divide in a way
      that cannot be followed (`hook`, `p.grad`, `loss_of(out, y, 1 / k)`), unless it does so on the other branch of a
      flag;
    - each round computes the loss of the whole window, with one part of it anew (`kept[:j] + [out] + kept[j + 1 :]`);
    - a framework scales the loss;
    - the pieces are pieces of time: cut along another dimension than the first, or with a state that goes from one to
      the next.

    Fix: `oomfix.runtime` weights each part by its share of the samples, which is exact for ragged windows too. By hand,
    `(loss / k).backward()`. Gradients become k times smaller, so a learning rate that was tuned with the mistake has to
    grow.
    """

    code = "OOM301"
    name = "missing-loss-division"
    severity = Severity.ERROR
    needs = TRAINS
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        for loop in script.loops:
            if loop.window is None or loop.accumulates_by_itself or script.divides_gradients(loop):
                continue
            divided = {backward.node for backward in loop.backwards if is_divided(backward, loop.window)}
            for backward in script.distinct(loop.accumulated_backwards):
                if backward.node not in divided and not script.reads_window_size(loop, backward):
                    yield self.finding(
                        script.place(backward.node),
                        f"gradients of `{loop.window.size}` backwards add up, but the loss is not divided by their "
                        "number",
                    )

    INVALID = [
        Invalid(
            """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
            (4,),
        ),
        Invalid(
            """
for x, y in loader:
    optimizer.zero_grad()
    for part, target in zip(x.chunk(4), y.chunk(4)):
        loss = criterion(model(part), target)
        loss.backward()
    optimizer.step()
""",
            (6,),
        ),
        Invalid(
            """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    if args.apex:
        with amp.scale_loss(loss / args.steps, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    if (i + 1) % args.steps == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
            (8,),
        ),
    ]
    VALID = [
        """
for i, (x, y) in enumerate(loader):
    with torch.no_grad():
        kept.append(model(x))
    xs.append(x)
    if (i + 1) % args.accum_freq > 0:
        continue
    optimizer.zero_grad()
    for j in range(args.accum_freq):
        out = model(xs[j])
        loss = contrast(torch.cat(kept[:j] + [out] + kept[j + 1 :]))
        loss.backward()
    optimizer.step()
""",
        """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / steps
    loss.backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        """
for i, (x, y) in enumerate(loader):
    d_loss = criterion(D(x), y)
    d_loss.backward()
    d_optimizer.step()
    if i % n_critic == 0:
        g_loss = -D(G(z)).mean()
        g_loss.backward()
        g_optimizer.step()
""",
        """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    if args.accumulation > 1:
        loss = loss / args.accumulation
    scaler.scale(loss).backward()
    if (i + 1) % args.accumulation == 0:
        scaler.step(optimizer)
        scaler.update()
""",
        """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    if steps > 1:
        scaler.scale(loss / steps).backward()
    else:
        scaler.scale(loss).backward()
    if (i + 1) % steps == 0:
        scaler.step(optimizer)
        scaler.update()
""",
        """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    if large:
        (loss / steps).backward()
    else:
        loss.backward()
    if not large or (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y, weight=1 / steps)
    loss.backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        """
from torch.nn import functional as F
for x, y in loader:
    optimizer.zero_grad()
    for part, target in zip(x.split(8), y.split(8)):
        F.cross_entropy(model(part), target, reduction="sum").backward()
    optimizer.step()
""",
    ]
