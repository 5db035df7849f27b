"""OOM202 no-autocast."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import TRAINS, Finding, Invalid, Rule, Severity
from oomfix.script import Script


class NoAutocast(Rule):
    """A training forward runs in full precision.

    Why: under autocast, matrix products and convolutions run in 16 bits, and most activations are saved in 16 bits:
    about half the activation memory (56% for blocks of two linear layers and a normalisation, which stays in fp32;
    bench/results/rules.md). The tensor cores are used, too. Weights, gradients and optimizer state stay in fp32.

    Quiet when:

    - autocast is around the forward, also behind a flag or on its other branch, unless the file sets the flag to a
      constant that is false (`AMP = False`);
    - a framework (Accelerate, Fabric, DeepSpeed, apex) decides the precision;
    - the loss is scaled although there is no autocast in the file: the network may have it;
    - nothing in the file mentions a GPU, unless other files make the networks and decide where they run;
    - the forward is on the side of `if torch.cuda.is_available()` for no GPU;
    - the forward is passed to `memory.forward_backward`, which brings autocast along.

    Fix: `oomfix.runtime`, which uses bf16 where the card has it, and otherwise fp16 with a gradient scaler.
    """

    code = "OOM202"
    name = "no-autocast"
    severity = Severity.WARNING
    needs = TRAINS
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        precision = script.precision
        if not script.loops or not script.may_run_on_cuda or precision.trains_in_half:
            return
        if precision.uses_apex or precision.names_mixed_precision:
            return
        bare = [
            forward
            for loop in script.loops
            if loop.framework is None and not precision.is_scaled_without_autocast(loop)
            for forward in loop.forwards
            if forward.site.autocast is None
            and script.is_forward_of_network(forward)
            and not precision.has_autocast_alternative(forward)
            and not precision.runs_without_gpu(forward)
        ]
        for forward in script.distinct(bare):
            yield self.finding(
                script.place(forward.node),
                "training forward runs in full precision, without autocast",
            )

    INVALID = [
        Invalid(
            """
model = Net().cuda()
for x, y in loader:
    out = model(x.cuda())
    loss = criterion(out, y.cuda())
    loss.backward()
    optimizer.step()
""",
            (4,),
        ),
        Invalid(
            """
def train(model, loader, optimizer):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
""",
            (4,),
        ),
        Invalid(
            """
import torch
use_cuda = torch.cuda.is_available()
for x, y in loader:
    if use_cuda and args.big:
        out = model(x.cuda())
    elif use_cuda:
        out = model(x.cuda(), 2)
    else:
        out = model(x)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()
""",
            (6, 8),
        ),
    ]
    VALID = [
        """
import torch
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
ctx = torch.autocast("cuda", dtype=torch.bfloat16) if args.amp else contextlib.nullcontext()
for x, y in loader:
    with ctx:
        loss = criterion(model(x), y)
    loss.backward()
""",
        """
import torch
for x, y in loader:
    if args.amp:
        with torch.cuda.amp.autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
    else:
        loss = criterion(model(x), y)
        loss.backward()
""",
        """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = criterion(model(x), y)
    accelerator.backward(loss)
""",
        """
import deepspeed
net, optimizer, _, scheduler = deepspeed.initialize(args=args, model=Net(), config=config)
for x, y in loader:
    loss = criterion(net(x.cuda()), y.cuda())
    net.backward(loss)
    net.step()
""",
        """
import torch
from project.precision import autocast_like
for x, y in loader:
    with torch.autocast("cuda"):
        features = encoder(x.cuda())
    with autocast_like(features):
        loss = criterion(decoder(features), y.cuda())
    loss.backward()
""",
        """
model = Net()
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
""",
        """
import torch
torch.cuda.empty_cache()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
device = "cpu"
model = Net().to(device)
for x, y in loader:
    loss = criterion(model(x.to(device)), y.to(device))
    loss.backward()
""",
    ]
