"""OOM401 deprecated-amp."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.fixes.amp_names import AmpImport, AmpNames, AmpUse, Role, renamed


class DeprecatedAmp(Rule):
    """Mixed precision uses `torch.cuda.amp` or `torch.cpu.amp`, deprecated since torch 2.4.

    What: every call and every decorator use of `autocast`, `GradScaler`, `custom_fwd` and `custom_bwd` from
    `torch.cuda.amp` and `torch.cpu.amp`, under whatever name, and every import statement that brings in one of them or
    one of the modules. It is a note where the target torch is below 2.4, which has not deprecated them yet, and on an
    import that is only a fallback for an older torch.

    Why: torch warns at each place of use, once per process, and any release may drop deprecated names. `torch.amp` has
    the same functions and takes the device as an argument: a script that names its device in one place trains on
    another card, or on the CPU, without a change.

    Quiet when:

    - the functions come from `torch.amp`, `torch.autocast` or apex;
    - a name is bound to those of `torch.amp` first, and to the deprecated ones only where an older torch has no others;
    - the class is only named, as in an annotation;
    - what is imported is not deprecated, such as `torch.cuda.amp.common`.

    Fix: `torch.amp` with the device. Positional arguments of autocast become keywords, since their order differs. An
    import and everything that uses it change together, and names that `torch.amp` lacks stay where they were. Nothing
    is rewritten where that could change the meaning:

    - a name that is bound twice, passed on as a value, or exported;
    - a class derived from `GradScaler`;
    - a file that chooses between versions by itself;
    - a target torch without the new name (`torch.amp.GradScaler` came with 2.3, `custom_fwd` and `custom_bwd` with
      2.4).
    """

    code = "OOM401"
    name = "deprecated-amp"
    severity = Severity.WARNING
    needs = (
        b"cuda.amp",
        b"cpu.amp",
        b"torch.cuda import",
        b"torch.cpu import",
        b"cuda as ",
        b"cpu as ",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        names = AmpNames(script.source)
        if not names.imports and not names.uses:
            return
        # imported here: most scripts have nothing to replace
        from oomfix.script.fixes.amp_edits import AmpRewriter

        rewriter = AmpRewriter(script.source, names, script.target_torch)
        reported: list[AmpImport | AmpUse] = [*names.imports]
        reported += [use for use in names.uses if _is_reported(use) and not names.prefers_new(use)]
        for item in sorted(reported, key=lambda item: (item.place.lineno, item.place.col_offset)):
            node = item.place
            rewrite = rewriter.rewrite_of(item)
            old_target = script.target_torch is not None and script.target_torch < (2, 4)
            yield self.finding(
                script.place(node),
                _message(item),
                severity=Severity.NOTE if old_target or names.is_version_fallback(node) else None,
                edits=rewrite.edits,
                by_hand=rewrite.reason,
            )

    INVALID = [
        Invalid(
            """
import torch
scaler = torch.cuda.amp.GradScaler(enabled=use_amp)
with torch.cuda.amp.autocast(use_amp, torch.bfloat16):
    loss = model(x)
""",
            (3, 4),
            """
import torch
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
with torch.amp.autocast("cuda", enabled=use_amp, dtype=torch.bfloat16):
    loss = model(x)
""",
        ),
        Invalid(
            """
from torch.cuda.amp import GradScaler, autocast as half
scaler = GradScaler(1024.0)
with half():
    loss = model(x)
""",
            (2, 3, 4),
            """
from torch.amp import GradScaler, autocast as half
scaler = GradScaler("cuda", 1024.0)
with half("cuda"):
    loss = model(x)
""",
        ),
        Invalid(
            """
import torch.cuda.amp as amp
with amp.autocast():
    loss = model(x)
""",
            (2, 3),
            """
import torch.amp as amp
with amp.autocast("cuda"):
    loss = model(x)
""",
        ),
        Invalid(
            """
from torch.cuda import Event, amp
start = Event()
@amp.autocast(enabled=False)
def loss_of(x):
    return model(x)
""",
            (2, 4),
            """
from torch import amp
from torch.cuda import Event
start = Event()
@amp.autocast("cuda", enabled=False)
def loss_of(x):
    return model(x)
""",
        ),
        Invalid(
            """
import torch
from torch.cuda.amp import custom_bwd, custom_fwd
class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        return x * x
    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        return grad
""",
            (3, 6, 10),
            """
import torch
from torch.amp import custom_bwd, custom_fwd
class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32, device_type="cuda")
    def forward(ctx, x):
        return x * x
    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad
""",
        ),
        Invalid(
            """
from config import *
scaler = T.cuda.amp.GradScaler()
with T.cuda.amp.autocast():
    loss = model(x)
""",
            (3, 4),
            """
from config import *
scaler = T.amp.GradScaler("cuda")
with T.amp.autocast("cuda"):
    loss = model(x)
""",
        ),
        Invalid(
            """
try:
    from torch.cuda.amp import autocast
except ImportError:
    autocast = None
with autocast():
    loss = model(x)
""",
            (3, 6),
            """
try:
    from torch.cuda.amp import autocast
except ImportError:
    autocast = None
with autocast():
    loss = model(x)
""",
        ),
    ]
    VALID = [
        """
import other as T
from config import *
scaler = T.cuda.amp.GradScaler()
data.cuda.amplitude()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda"), torch.amp.autocast("cpu"):
    loss = model(x)
""",
        """
from apex import amp
model, optimizer = amp.initialize(model, optimizer)
""",
        """
from torch.cuda.amp.common import amp_definitely_not_available
""",
        """
def evaluate(model, x, autocast):
    with autocast():
        return model(x)
""",
    ]


def _is_reported(use: AmpUse) -> bool:
    """What only names the class, or hands it on, prints no warning by itself."""
    return use.role in (Role.CALL, Role.DECORATOR)


def _message(item: AmpImport | AmpUse) -> str:
    if isinstance(item, AmpImport):
        old = ", ".join(f"`{path}`" for _, path in item.names)
        return f"imports {old}, deprecated since torch 2.4: use `torch.amp`, which takes the device as an argument"
    _, device, *_ = item.path.split(".")
    arguments = f'device_type="{device}"' if item.api in ("custom_fwd", "custom_bwd") else f'"{device}"'
    old = f"torch.{device}.amp.{item.api}"
    return f"`{old}` is deprecated since torch 2.4: use `{renamed(item.path)}({arguments})`"
