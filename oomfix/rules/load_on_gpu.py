"""OOM205 load-on-gpu."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.fixes.added_keyword import added_keyword
from oomfix.script.syntax.edits import quote_of


class LoadOnGpu(Rule):
    """`torch.load` without `map_location` loads a checkpoint back onto the GPU it was saved from.

    Why: a checkpoint saved from a GPU holds CUDA tensors, and loading it allocates all of them on that GPU, beside the
    model and the optimizer that are already there: the weights, and twice that again for Adam's state, 3.0 times the
    weights in all (bench/results/rules.md). They stay as long as any name leads to the checkpoint. With several
    processes, every rank does so on GPU 0.

    Quiet when: `map_location` is given, by name or as the second argument.

    Fix: `torch.load(path, map_location="cpu")`; `load_state_dict` copies to wherever the parameters are. A whole model
    or a tensor that is loaded this way has to be moved to its device afterwards.
    """

    code = "OOM205"
    name = "load-on-gpu"
    severity = Severity.WARNING
    needs = (
        b"torch.load",
        b"torch as ",
        b"torch import load",
        b"torch.serialization",
        (b"torch import ", b" load("),
        (b"torch import ", b"(load("),
    )

    def check(self, script: Script) -> Iterator[Finding]:
        for call in script.imports.calls("torch.load", "torch.serialization.load"):
            if len(call.args) > 1 or any(keyword.arg in ("map_location", None) for keyword in call.keywords):
                continue
            if any(isinstance(argument, ast.Starred) for argument in call.args):
                continue
            quote = quote_of(script.source)
            keyword = f"map_location={quote}cpu{quote}"
            yield self.finding(
                script.place(call),
                "`torch.load` without `map_location` loads the checkpoint onto the GPU it was saved from",
                edits=added_keyword(script.source, call, keyword) if script.only_loads_state(call) else (),
                by_hand="what it loads may go elsewhere than into `load_state_dict`",
            )

    INVALID = [
        Invalid(
            """
import torch
model.load_state_dict(torch.load("best.pt"))
""",
            (3,),
            """
import torch
model.load_state_dict(torch.load("best.pt", map_location="cpu"))
""",
        ),
        Invalid(
            """
from torch import load as read
state = read(
    path,
    weights_only=True,
)
model.load_state_dict(state["model"])
""",
            (3,),
            """
from torch import load as read
state = read(
    path,
    weights_only=True,
    map_location="cpu",
)
model.load_state_dict(state["model"])
""",
        ),
        Invalid(
            """
from torch import nn, load
model.load_state_dict(load("best.pt"))
""",
            (3,),
            """
from torch import nn, load
model.load_state_dict(load("best.pt", map_location="cpu"))
""",
        ),
        Invalid(
            """
import torch
weights = torch.load("best.pt").get("state_dict")
model.load_state_dict(weights)
""",
            (3,),
            """
import torch
weights = torch.load("best.pt", map_location="cpu").get("state_dict")
model.load_state_dict(weights)
""",
        ),
        Invalid(
            """
import torch

def resume(path):
    checkpoint = torch.load(path)
    print("resumed")
""",
            (5,),
            """
import torch

def resume(path):
    checkpoint = torch.load(path, map_location="cpu")
    print("resumed")
""",
        ),
        Invalid(
            """
import torch
model = torch.load("model.pt")
predict(model(x.cuda()))
""",
            (3,),
        ),
    ]
    VALID = [
        """
import torch
torch.load(path, map_location=device)
torch.load(path, "cpu")
torch.load(path, **options)
""",
        """
import json
json.load(open(path))
""",
    ]
