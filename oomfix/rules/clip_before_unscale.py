"""OOM303 clip-before-unscale."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script


class ClipBeforeUnscale(Rule):
    """Gradients are clipped while they are still multiplied by the loss scale.

    Why: a GradScaler multiplies the loss, and with it the gradients, by 65536 and more. Clipping these to a norm of 1.0
    divides nearly every true gradient by the scale: what reaches the optimizer has a norm of 1.5e-05 instead of 1.0
    (bench/results/rules.md), and changes whenever the scale does.

    Quiet when: `scaler.unscale_(optimizer)` ran after the backward, or the loss was not scaled on this path.

    Fix: call `scaler.unscale_(optimizer)` on the line before. `memory.step` does it in the right order.
    """

    code = "OOM303"
    name = "clip-before-unscale"
    severity = Severity.ERROR
    needs = (b"clip_grad",)
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        scaled = [
            clip
            for clip in script.trace.clips
            if "scaled" in clip.gradients
            and not script.precision.is_without_scaler(clip.site)
            and not script.precision.is_unscaled_where_scaled(clip)
        ]
        for clip in script.distinct(scaled):
            yield self.finding(
                script.place(clip.node),
                "clips gradients that are still multiplied by the loss scale: call `scaler.unscale_(optimizer)` first",
            )

    INVALID = [
        Invalid(
            """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
            (8,),
        ),
        Invalid(
            """
import torch
for x, y in loader:
    loss = criterion(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if args.unscale:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
            (11,),
        ),
        Invalid(
            """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    if args.unscale:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
""",
            (12,),
        ),
        Invalid(
            """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", enabled=args.amp):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    if args.amp:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
            (10,),
        ),
    ]
    VALID = [
        """
import torch
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
for x, y in loader:
    with torch.autocast("cuda", enabled=args.amp):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    if args.amp:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
        """
import torch
def train(model, loader, optimizer, scaler, use_amp):
    for x, y in loader:
        with torch.autocast("cuda", enabled=use_amp):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
for x, y in loader:
    if args.amp:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    else:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda") if args.fp16 else None
while step < steps:
    for _ in range(accumulation):
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = model(next(batches)) / accumulation
        if scaler is not None:
            scaler.scale(loss).backward()
        else:
            loss.backward()
    if scaler:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
        """
import torch
for micro_step, batch in enumerate(loader):
    train_step(model, batch, self.scaler)
if self.scaler is not None:
    self.scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    self.scaler.step(optimizer)
else:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

def train_step(model, batch, scaler):
    if scaler is not None:
        scaler.scale(model(batch)).backward()
    else:
        model(batch).backward()
""",
    ]
