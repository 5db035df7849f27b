"""Runs a script or notebook as `__main__` and writes down the parameters of every optimizer after each of its steps.

    python bench/apply/recorded_run.py OUT STEPS KIND SCRIPT [ARGS...]

Ends the process after STEPS steps. KIND is `plain`, or `steady`: no dropout, and batch normalisation by its running
statistics, so that a batch in parts computes what the whole one does; `double` is that in float64. Independent of
`oomfix.equivalence`, which it checks as well. A script that steps by hand is recorded at each `zero_grad` of a module.
"""

import json
import os
import random
import runpy
import sys
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import batchnorm, dropout
from torch.optim.optimizer import register_optimizer_step_post_hook


class Record:
    """The parameters after each step, as vectors; written to a file at the end."""

    def __init__(self, out: str, most: int) -> None:
        self._out, self._most = out, most
        self._owners: dict[int, tuple[int, object]] = {}
        self._vectors: list[np.ndarray] = []
        self._numbers: list[int] = []
        self.calls = self.calls_in_parts = 0

    def note(self, owner: object, parameters: Iterable[torch.Tensor]) -> None:
        """One step; `owner` made it, and is kept so that no other object gets its address."""
        self._numbers.append(self._owners.setdefault(id(owner), (len(self._owners), owner))[0])
        flat = [torch.view_as_real(p) if p.is_complex() else p for p in (one.detach() for one in parameters)]
        self._vectors.append(torch.cat([one.reshape(-1).double() for one in flat]).numpy().copy())
        if len(self._vectors) >= self._most:
            self.save()
            sys.stdout.flush()
            os._exit(0)  # whatever the script would still do, threads and all

    def save(self) -> None:
        """Write the file."""
        np.savez(self._out, *self._vectors, numbers=self._numbers, parts=[self.calls_in_parts, self.calls])


def watch(record: Record) -> None:
    """Record the steps of every optimizer, and of scripts that have none; count batches in parts."""
    stepped = set()

    def step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped.add(id(optimizer))
        record.note(optimizer, [p for group in optimizer.param_groups for p in group["params"]])

    register_optimizer_step_post_hook(step)
    zero_grad = nn.Module.zero_grad

    def zero(module: nn.Module, *args: object, **kwargs: object) -> None:
        if not stepped and os.environ.get("BY_HAND"):
            record.note(module, module.parameters())
        zero_grad(module, *args, **kwargs)

    nn.Module.zero_grad = zero
    from oomfix.runtime.calls.iteration import Iteration

    run = Iteration.run

    def counted(iteration: Iteration, parts: int, *args: object) -> object:
        record.calls += 1
        record.calls_in_parts += parts > 1
        return run(iteration, parts, *args)

    Iteration.run = counted


def hold_steady() -> None:
    """Take out of torch what makes a batch in parts another computation than the whole."""

    def normalised(module: batchnorm._BatchNorm, x: torch.Tensor) -> torch.Tensor:
        mean = torch.zeros(x.shape[1]) if module.running_mean is None else module.running_mean
        variance = torch.ones(x.shape[1]) if module.running_var is None else module.running_var
        return functional.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)

    def unchanged(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return x

    batchnorm._BatchNorm.forward = normalised
    dropout._DropoutNd.forward = lambda module, x: x
    for kind in (dropout.Dropout, dropout.Dropout1d, dropout.Dropout2d, dropout.Dropout3d, dropout.AlphaDropout):
        kind.forward = lambda module, x: x
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, unchanged)
    attention = functional.scaled_dot_product_attention

    def without_dropout(q, k, v, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(q, k, v, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout
    made = nn.RNNBase.__init__

    def recurrent(module: nn.RNNBase, *args: object, **kwargs: object) -> None:
        made(module, *args, **{**kwargs, "dropout": 0.0} if "dropout" in kwargs else kwargs)

    nn.RNNBase.__init__ = recurrent


def compute_in_double() -> None:
    """What is float32 in a script is float64."""
    torch.set_default_dtype(torch.float64)
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.FloatTensor = torch.DoubleTensor


def main(out: str, most: str, kind: str, script: str, *arguments: str) -> None:
    """Run the script."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    record = Record(out, int(most))
    watch(record)
    if kind in ("steady", "double"):
        hold_steady()
    if kind == "double":
        compute_in_double()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        if script.endswith(".ipynb"):
            exec(compile(code_of(script), script, "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(script, run_name="__main__")
    finally:
        record.save()


def code_of(notebook: str) -> str:
    """The code of a notebook's cells, without magics."""
    with open(notebook, encoding="utf-8") as file:
        cells = [cell for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(cell["source"]) for cell in cells).split("\n")
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
