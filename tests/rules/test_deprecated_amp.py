"""OOM401: what it reports, and that a rewritten script makes the same contexts, scalers and decorators as before."""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomfix.rewrite.text.edits import apply_edits
from oomfix.rules import Finding, Severity
from oomfix.rules.deprecated_amp import DeprecatedAmp
from oomfix.script import Script
from oomfix.source import Source


def findings_of(code: str, target: tuple[int, int] | None = None, path: str = "train.py") -> list[Finding]:
    return list(DeprecatedAmp().check(Script.read(Source.from_bytes(path, code.encode()), target)))


def fixed(code: str, target: tuple[int, int] | None = None) -> str:
    return apply_edits(code, [edit for finding in findings_of(code, target) for edit in finding.edits])


def made_by(code: str) -> list[tuple[str, dict[str, Any]]]:
    """What a script makes of mixed precision when it runs: names and complete arguments, defaults filled in."""
    made: list[tuple[str, dict[str, Any]]] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = {key: value for key, value in bound.arguments.items() if key not in ("self", "fwd", "bwd")}
            if name == "autocast":
                default = torch.float16 if given["device_type"] == "cuda" else torch.bfloat16
                given["dtype"] = given["dtype"] or default
                given["cache_enabled"] = given["cache_enabled"] is not False
            made.append((name, given))
            return function(*args, **kwargs)

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.autocast, "__init__", recording("autocast", torch.amp.autocast.__init__))
        patch.setattr(torch.amp.GradScaler, "__init__", recording("GradScaler", torch.amp.GradScaler.__init__))
        for name in ("custom_fwd", "custom_bwd"):
            function = recording(name, getattr(torch.amp, name))
            patch.setattr(torch.amp, name, function)
            patch.setattr(torch.amp.autocast_mode, name, function)
        exec(compile(code, "script", "exec"), {"__name__": "script"})
    return made


def assert_same_without_warning(before: str, after: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = made_by(before)
        warnings.simplefilter("error", FutureWarning)
        made = made_by(after)
    # custom_fwd(cast_inputs=...) is called a second time by its own partial, in the old API only with all arguments
    assert [call for call in made if call[0] in ("autocast", "GradScaler")] == [
        call for call in expected if call[0] in ("autocast", "GradScaler")
    ]
    assert {str(call) for call in made} == {str(call) for call in expected}


REWRITTEN = {
    "full path": (
        "import torch\nwith torch.cuda.amp.autocast(): pass\n",
        'import torch\nwith torch.amp.autocast("cuda"): pass\n',
    ),
    "torch under another name": (
        "import torch as T\nwith T.cuda.amp.autocast(): pass\nT.cpu.amp.GradScaler()\n",
        'import torch as T\nwith T.amp.autocast("cuda"): pass\nT.amp.GradScaler("cpu")\n',
    ),
    "submodule of the full path": (
        "import torch\ntorch.cuda.amp.autocast_mode.autocast()\ntorch.cuda.amp.grad_scaler.GradScaler()\n",
        'import torch\ntorch.amp.autocast("cuda")\ntorch.amp.GradScaler("cuda")\n',
    ),
    "from import": (
        "from torch.cuda.amp import autocast, GradScaler\nwith autocast(): pass\nGradScaler()\n",
        'from torch.amp import autocast, GradScaler\nwith autocast("cuda"): pass\nGradScaler("cuda")\n',
    ),
    "from import in parentheses with comments": (
        "from torch.cuda.amp import (\n    autocast,  # contexts\n    GradScaler,  # scaling\n)\nautocast()\n",
        'from torch.amp import (\n    autocast,  # contexts\n    GradScaler,  # scaling\n)\nautocast("cuda")\n',
    ),
    "module as a name": (
        "import torch.cuda.amp as amp, os\namp.autocast(os.sep == '/')\namp.autocast_mode.autocast()\n",
        "import torch.amp as amp, os\n"
        "amp.autocast('cuda', enabled=os.sep == '/')\namp.autocast_mode.autocast('cuda')\n",
    ),
    "module from torch.cuda": (
        "from torch.cuda import amp as A\nA.GradScaler(8.0, 3.0)\n",
        'from torch import amp as A\nA.GradScaler("cuda", 8.0, 3.0)\n',
    ),
    "module itself": (
        "import torch.cuda.amp\nwith torch.cuda.amp.autocast(): pass\n",
        'import torch.amp\nwith torch.amp.autocast("cuda"): pass\n',
    ),
    "modules that become one": (
        "import torch.cuda.amp\nimport torch.cpu.amp\ntorch.cpu.amp.autocast()\ntorch.cuda.amp.autocast()\n",
        'import torch.amp\ntorch.amp.autocast("cpu")\ntorch.amp.autocast("cuda")\n',
    ),
    "modules that become one in one statement": (
        "import torch.cuda.amp, torch.cpu.amp, os\ntorch.cpu.amp.autocast()\n",
        'import torch.amp, os\ntorch.amp.autocast("cpu")\n',
    ),
    "submodules": (
        "from torch.cuda.amp.autocast_mode import autocast\nfrom torch.cuda.amp.grad_scaler import GradScaler\n"
        "autocast(); GradScaler()\n",
        'from torch.amp import autocast\nfrom torch.amp import GradScaler\nautocast("cuda"); GradScaler("cuda")\n',
    ),
    "star": (
        "from torch.cuda.amp import *\nwith autocast(False): GradScaler(enabled=False)\n",
        'from torch.amp import *\nwith autocast("cuda", enabled=False): GradScaler("cuda", enabled=False)\n',
    ),
    "split from torch.cuda": (
        '"""Doc."""\nfrom __future__ import annotations\n# above\nfrom torch.cuda import amp, Event as E  # behind\n'
        "amp.autocast()\nE\n",
        '"""Doc."""\nfrom __future__ import annotations\n# above\nfrom torch import amp\n'
        'from torch.cuda import Event as E  # behind\namp.autocast("cuda")\nE\n',
    ),
    "split of what torch.amp lacks": (
        "def f():\n    from torch.cuda.amp import (\n        autocast,\n        amp_definitely_not_available as none,\n"
        "    )\n    none()\n    return autocast()\nf()\n",
        "def f():\n    from torch.amp import autocast\n    from torch.cuda.amp import (\n"
        '        amp_definitely_not_available as none,\n    )\n    none()\n    return autocast("cuda")\nf()\n',
    ),
    "torch.cuda under another name, torch unknown": (
        "from torch import cuda as c\nc.is_available()\nc.amp.autocast()\nc.amp.GradScaler()\n",
        'import torch\nfrom torch import cuda as c\nc.is_available()\ntorch.amp.autocast("cuda")\n'
        'torch.amp.GradScaler("cuda")\n',
    ),
    "torch.cuda under another name, torch known": (
        "import torch\nimport torch.cuda as c\nc.amp.autocast()\n",
        'import torch\nimport torch.cuda as c\ntorch.amp.autocast("cuda")\n',
    ),
    "import in a try without an alternative": (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    raise SystemExit(1)\nautocast()\n",
        'try:\n    from torch.amp import autocast\nexcept ImportError:\n    raise SystemExit(1)\nautocast("cuda")\n',
    ),
    "two functions with imports of their own": (
        "def f():\n    from torch.cuda.amp import autocast\n    return autocast()\n"
        "def g():\n    from torch.cpu.amp import autocast\n    return autocast()\nf(), g()\n",
        'def f():\n    from torch.amp import autocast\n    return autocast("cuda")\n'
        'def g():\n    from torch.amp import autocast\n    return autocast("cpu")\nf(), g()\n',
    ),
    "assignment": (
        "import torch\nac = torch.cuda.amp.autocast\nwith ac(False): pass\n",
        'import torch\nac = torch.amp.autocast\nwith ac("cuda", enabled=False): pass\n',
    ),
    "module by assignment, in a function": (
        "import torch\ndef f():\n    amp = torch.cuda.amp\n    return amp.GradScaler(enabled=False)\nf()\n",
        'import torch\ndef f():\n    amp = torch.amp\n    return amp.GradScaler("cuda", enabled=False)\nf()\n',
    ),
    "partial": (
        "from functools import partial\nfrom torch.cuda.amp import autocast\n"
        "half = partial(\n    autocast, enabled=True)\nwith half(): pass\n",
        "from functools import partial\nfrom torch.amp import autocast\n"
        'half = partial(\n    autocast, "cuda", enabled=True)\nwith half(): pass\n',
    ),
    "partial of GradScaler": (
        "from functools import partial\nfrom torch.cuda.amp import GradScaler\npartial(GradScaler, 8.0)(3.0)\n",
        'from functools import partial\nfrom torch.amp import GradScaler\npartial(GradScaler, "cuda", 8.0)(3.0)\n',
    ),
    "isinstance and annotations go with the class": (
        "import torch\nfrom torch.cuda.amp import autocast\n"
        "s: torch.cuda.amp.GradScaler = torch.cuda.amp.GradScaler()\n"
        "assert isinstance(s, (int, torch.cuda.amp.GradScaler))\ndef f(c: autocast | None = None) -> autocast: ...\n",
        'import torch\nfrom torch.amp import autocast\ns: torch.amp.GradScaler = torch.amp.GradScaler("cuda")\n'
        "assert isinstance(s, (int, torch.amp.GradScaler))\ndef f(c: autocast | None = None) -> autocast: ...\n",
    ),
    "decorators": (
        "from torch.cuda.amp import autocast, custom_bwd as B, custom_fwd as F\n@autocast()\ndef f(): pass\n"
        "@F\ndef g(c): pass\n@F(cast_inputs=None)\ndef h(c): pass\n@B\ndef i(c): pass\nj = B(lambda c: c)\n",
        'from torch.amp import autocast, custom_bwd as B, custom_fwd as F\n@autocast("cuda")\ndef f(): pass\n'
        '@F(device_type="cuda")\ndef g(c): pass\n@F(cast_inputs=None, device_type="cuda")\ndef h(c): pass\n'
        '@B(device_type="cuda")\ndef i(c): pass\nj = B(lambda c: c, device_type="cuda")\n',
    ),
    "positional arguments": (
        "import torch\ntorch.cuda.amp.autocast((True), (torch.float16), False)\n",
        'import torch\ntorch.amp.autocast("cuda", enabled=(True), dtype=(torch.float16), cache_enabled=False)\n',
    ),
    "argument with commas of its own": (
        "import torch\ntorch.cuda.amp.autocast(bool(lambda a, b: (a, b)), torch.float16)\n",
        'import torch\ntorch.amp.autocast("cuda", enabled=bool(lambda a, b: (a, b)), dtype=torch.float16)\n',
    ),
    "arguments over several lines": (
        "import torch\ntorch.cuda.amp.autocast(  # half (of it)\n    True,  # on, always\n"
        "    dtype=torch.float16,\n)\n",
        'import torch\ntorch.amp.autocast(  # half (of it)\n    "cuda", enabled=True,  # on, always\n'
        "    dtype=torch.float16,\n)\n",
    ),
    "starred arguments of GradScaler": (
        "import torch\nscale = (2.0, 3.0)\ntorch.cuda.amp.GradScaler(*scale, **{'enabled': False})\n",
        "import torch\nscale = (2.0, 3.0)\ntorch.amp.GradScaler('cuda', *scale, **{'enabled': False})\n",
    ),
    "an autocast inside another keeps its dtype": (
        "import torch\nwith torch.cuda.amp.autocast(dtype=torch.bfloat16):\n    torch.cuda.amp.autocast()\n"
        "    torch.cuda.amp.autocast(enabled=False)\n",
        'import torch\nwith torch.amp.autocast("cuda", dtype=torch.bfloat16):\n'
        '    torch.amp.autocast("cuda", dtype=torch.float16)\n    torch.amp.autocast("cuda", enabled=False)\n',
    ),
    "an autocast beside another in its only dtype": (
        "import torch as T\nfrom torch import half\nT.cuda.amp.autocast(True, half); T.cuda.amp.autocast()\n",
        'import torch as T\nfrom torch import half\nT.amp.autocast("cuda", enabled=True, dtype=half); '
        'T.amp.autocast("cuda")\n',
    ),
    "a default dtype that the script sets": (
        "import torch as T\nT.set_autocast_gpu_dtype(T.float16); T.cuda.amp.autocast(True)\n",
        "import torch as T\nT.set_autocast_gpu_dtype(T.float16); "
        'T.amp.autocast("cuda", dtype=T.float16, enabled=True)\n',
    ),
    "not ASCII": (
        "import torch\nprint('größe', 'ünï'); torch.cuda.amp.autocast(True)\n",
        "import torch\nprint('größe', 'ünï'); torch.amp.autocast('cuda', enabled=True)\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), REWRITTEN.values(), ids=REWRITTEN)
def test_every_form_becomes_torch_amp(before: str, after: str) -> None:
    assert fixed(before) == after


@pytest.mark.parametrize(("before", "after"), REWRITTEN.values(), ids=REWRITTEN)
def test_the_rewritten_script_runs_the_same_without_the_warning(before: str, after: str) -> None:
    assert_same_without_warning(before, after)


@pytest.mark.parametrize("before", [before for before, _ in REWRITTEN.values()], ids=REWRITTEN)
def test_rewriting_again_changes_nothing(before: str) -> None:
    once = fixed(before)
    assert findings_of(once) == []


@pytest.mark.parametrize("before", [before for before, _ in REWRITTEN.values()], ids=REWRITTEN)
def test_each_finding_alone_leaves_a_script_that_runs_the_same(before: str) -> None:
    """`--select`, suppressions and editors make the edits of some findings only."""
    for finding in findings_of(before):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            after = apply_edits(before, finding.edits)
            assert after != before
            assert {str(call) for call in made_by(after)} == {str(call) for call in made_by(before)}


@pytest.mark.parametrize(("before", "after"), REWRITTEN.values(), ids=REWRITTEN)
def test_line_endings_of_windows_are_kept(before: str, after: str) -> None:
    assert fixed(before.replace("\n", "\r\n")) == after.replace("\n", "\r\n")


KEPT = {
    "a name that is bound again": (
        "from torch.cuda.amp import autocast\nautocast()\nautocast = print\n",
        [1, 2],
    ),
    "a name of two devices": (
        "if cpu:\n    from torch.cpu.amp import autocast\nelse:\n    from torch.cuda.amp import autocast\nautocast()\n",
        [2, 4, 5],
    ),
    "a star import beside another": (
        "from torch.cuda.amp import *\nfrom helpers import *\nautocast()\n",
        [1, 3],
    ),
    "what torch.amp lacks through a star import": (
        "from torch.cuda.amp import *\nautocast()\namp_definitely_not_available()\n",
        [1, 2],
    ),
    "handed on as a value": (
        "from torch.cuda.amp import autocast, GradScaler\ncontext = autocast if fp16 else nullcontext\nGradScaler()\n",
        [1, 3],
    ),
    "an attribute that holds the function": (
        "import torch\nclass A:\n    def __init__(self):\n        self.autocast = torch.cuda.amp.autocast\n"
        "        self.scaler = torch.cuda.amp.GradScaler\n"
        "    def run(self):\n        with self.autocast(enabled=True):\n            self.scaler()\n",
        [7, 8],
    ),
    "an attribute that holds the module": (
        "import torch\nclass A:\n    def __init__(self):\n        self.amp = torch.cuda.amp\n"
        "    def run(self):\n        return self.amp.autocast()\n",
        [6],
    ),
    "an imported name in an attribute": (
        "from torch.cuda.amp import autocast\nclass A:\n    def __init__(self):\n        self.autocast = autocast\n"
        "    def run(self):\n        return self.autocast()\n",
        [1, 6],
    ),
    "an attribute of an object of the script": (
        "import torch\nfrom settings import cfg\ncfg.cast = torch.cuda.amp.autocast\n"
        "def run(x):\n    with cfg.cast():\n        cfg.other()\n",
        [5],
    ),
    "an attribute of what a function is given": (
        "import torch\ndef run(cfg, amp):\n    cfg.cast = torch.cuda.amp.autocast if amp else nothing\n"
        "    with cfg.cast(): pass\ndef other(cfg):\n    cfg.cast()\n",
        [4],
    ),
    "an attribute of what a star import brings": (
        "import torch\nfrom settings import *\ncfg.scaler = torch.cuda.amp.GradScaler\ncfg.scaler()\n",
        [4],
    ),
    "one side of a choice": (
        "import torch\nhalf = torch.cuda.amp.autocast if args.amp else suppress\nwith half(): pass\n",
        [3],
    ),
    "one side of a choice in an attribute": (
        "import torch\nclass A:\n    def __init__(self, amp):\n"
        "        self.cast = torch.cuda.amp.autocast if amp else nothing\n"
        "    def run(self):\n        return self.cast()\n",
        [6],
    ),
    "an attribute that is set to it under a flag": (
        "import torch, contextlib\nclass A:\n    def __init__(self, amp):\n        self.cast = contextlib.suppress\n"
        "        if amp:\n            self.cast = torch.cuda.amp.autocast\n"
        "    def run(self):\n        return self.cast()\n",
        [8],
    ),
    "a choice between devices": (
        "import torch\nhalf = torch.cuda.amp.autocast if gpu else torch.cpu.amp.autocast\nwith half(): pass\n",
        [3],
    ),
    "a partial whose positional arguments would mean others": (
        "import torch\nfrom functools import partial\nhalf = partial(torch.cuda.amp.autocast)\nwith half(): pass\n",
        [4],
    ),
    "a module handed on": ("from torch.cuda import amp\namp.autocast()\nsetup(amp)\n", [1, 2]),
    "something of the module that torch.amp lacks": (
        "from torch.cuda import amp\namp.autocast()\namp.common.amp_definitely_not_available()\n",
        [1, 2],
    ),
    "a class derived from the scaler": (
        "from torch.cuda.amp import GradScaler\nclass Mine(GradScaler):\n    pass\nGradScaler()\n",
        [1, 4],
    ),
    "starred arguments of autocast": ("import torch\ntorch.cuda.amp.autocast(*flags)\n", [2]),
    "a dtype to say without a name for torch": (
        "from torch.cuda.amp import autocast\nwith autocast(dtype=best):\n    autocast()\n",
        [1, 2, 3],
    ),
    "a starred argument behind a keyword": (
        "import torch\ntorch.cuda.amp.GradScaler(enabled=False, *scale)\n",
        [2],
    ),
    "a bare generator": ("import torch\ntorch.cuda.amp.autocast(x for x in y)\n", [2]),
    "a bare decorator that takes the function for its argument": (
        "import torch\n@torch.cuda.amp.autocast\ndef f(): pass\n",
        [2],
    ),
    "partial with a positional argument": (
        "from functools import partial\nfrom torch.cuda.amp import autocast\npartial(autocast, False)\nautocast()\n",
        [2, 4],
    ),
    "partial that may get one": (
        "from functools import partial\nfrom torch.cuda.amp import autocast\npartial(autocast)\nautocast()\n",
        [2, 4],
    ),
    "exported by __all__": (
        "from torch.cuda.amp import autocast\n__all__ = ['autocast']\nautocast()\n",
        [1, 3],
    ),
    "exported by its mark": ("from torch.cuda.amp import autocast  # noqa: F401\n", [1]),
    "an attribute of a class": ("class A:\n    from torch.cuda.amp import autocast\n", [2]),
    "compared by type": (
        "import torch\ns = torch.cuda.amp.GradScaler()\ntype(s) is torch.cuda.amp.GradScaler\n",
        [2],
    ),
    "a module that the file patches": (
        "import torch\ntorch.cuda.amp.autocast = fake\ntorch.cuda.amp.autocast()\n",
        [3],
    ),
    "an f-string": ("import torch\nprint(f'{torch.cuda.amp.autocast()}')\n", [2]),
    "torch means something else": (
        "from torch import cuda\ntorch = None\ncuda.amp.autocast()\n",
        [3],
    ),
    "a statement to split on a shared line": (
        "if x: from torch.cuda import amp, Event; amp.autocast()\n",
        [1, 1],
    ),
    "names to split with comments between them": (
        "from torch.cuda import (\n    amp,  # half\n    Event,\n)\namp.autocast()\n",
        [1, 5],
    ),
    "the old names first, the new where they are gone": (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    from torch.amp import autocast\n"
        "autocast()\n",
        [2, 5],
    ),
}


@pytest.mark.parametrize(("code", "lines"), KEPT.values(), ids=KEPT)
def test_what_could_mean_something_else_is_reported_with_its_reason_and_kept(code: str, lines: list[int]) -> None:
    findings = findings_of(code)
    assert sorted(finding.line for finding in findings) == lines
    assert [finding.edits for finding in findings] == [()] * len(lines)
    assert all("(no automatic fix: " in finding.message for finding in findings)


def test_a_fallback_for_an_older_torch_is_a_note_on_its_import_alone() -> None:
    findings = findings_of(
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n"
        "with autocast('cuda'): pass\n"
    )
    assert [(finding.line, finding.severity, finding.edits) for finding in findings] == [(4, Severity.NOTE, ())]


def test_a_choice_by_version_is_a_note_and_kept() -> None:
    findings = findings_of(
        "import torch\nif hasattr(torch.amp, 'GradScaler'):\n    s = torch.amp.GradScaler('cuda')\n"
        "else:\n    s = torch.cuda.amp.GradScaler()\n"
    )
    assert [(finding.line, finding.severity, finding.edits) for finding in findings] == [(5, Severity.NOTE, ())]


@pytest.mark.parametrize(
    "code",
    [
        "from apex import amp\namp.autocast()\n",
        "from torch import amp\namp.autocast('cuda')\n",
        "from torch import autocast\nwith autocast('cuda'): pass\n",
        "from .cuda.amp import autocast\nautocast()\n",
        "from .torch.cuda.amp import autocast\nautocast()\n",
        "import torch\ndef f(torch):\n    torch.cuda.amp.autocast()\n",
        "from torch.cuda.amp.common import amp_definitely_not_available\n",
        "import torch\nx = torch.cuda.amp.autocast\n",
        "import torch\ndef f(s: torch.cuda.amp.GradScaler): return isinstance(s, torch.cuda.amp.GradScaler)\n",
        "import torch.cuda.amplifier\ntorch.cuda.amplifier.autocast()\n",
        "import torch\nclass A:\n    def __init__(self, ctx):\n        self.ctx = torch.cuda.amp.autocast\n"
        "        self.ctx = ctx\n        self.ctx()\n",
        "import torch\n"
        "half = torch.amp.autocast if hasattr(torch.amp, 'autocast') else torch.cuda.amp.autocast\nhalf()\n",
        "import torch\nclass A:\n    def __init__(self):\n        self.ctx = torch.cuda.amp.autocast\n"
        "class B:\n    def run(self):\n        self.ctx()\n",
        "import torch\ncfg.cast = torch.cuda.amp.autocast\ncfg.cast = torch.amp.autocast\ncfg.cast()\n",
        "import torch\ncfg = A()\ncfg.cast = torch.cuda.amp.autocast\ncfg = B()\ncfg.cast()\n",
        "import torch\ncfg.cast = torch.cuda.amp.autocast\nother.cast()\ncfg.sub.cast()\n",
    ],
)
def test_what_only_looks_like_it_is_silent(code: str) -> None:
    assert findings_of(code) == []


def test_a_local_name_hides_an_import_where_it_stands_and_nowhere_else() -> None:
    code = (
        "from torch.cuda.amp import autocast\ndef f(autocast):\n    autocast(1)\n"
        "[autocast(2) for autocast in x]\nautocast()\n"
    )
    assert [finding.line for finding in findings_of(code)] == [1, 5]
    assert fixed(code) == code.replace("cuda.amp", "amp").replace("autocast()", 'autocast("cuda")')


def test_one_finding_per_statement_and_call_at_the_line_where_it_starts() -> None:
    code = "import torch\nfrom torch.cuda.amp import (\n    autocast,\n    GradScaler,\n)\nautocast(\n)\nGradScaler()\n"
    findings = findings_of(code)
    assert [(finding.line, finding.column, finding.end_line) for finding in findings] == [
        (2, 1, 5),
        (6, 1, 7),
        (8, 1, 8),
    ]


@pytest.mark.parametrize(
    ("name", "target", "rewritten"),
    [
        ("autocast", (1, 9), False),
        ("autocast", (1, 10), True),
        ("GradScaler", (2, 2), False),
        ("GradScaler", (2, 3), True),
        ("custom_fwd", (2, 3), False),
        ("custom_fwd", (2, 4), True),
    ],
)
def test_nothing_is_rewritten_to_what_the_target_torch_lacks(
    name: str, target: tuple[int, int], rewritten: bool
) -> None:
    code = f"from torch.cuda.amp import {name}\n{name}(f)\n"
    assert (fixed(code, target) != code) is rewritten
    severity = Severity.WARNING if target >= (2, 4) else Severity.NOTE
    assert {finding.severity for finding in findings_of(code, target)} == {severity}


def test_a_package_may_export_what_it_imports() -> None:
    code = "from torch.cuda.amp import autocast\nautocast()\n"
    assert [finding.edits for finding in findings_of(code, path="package/__init__.py")] == [(), ()]
    assert all(finding.edits for finding in findings_of(code))


# (import statement, prefix of the names it makes known); {d} is the device
IMPORTS = st.sampled_from(
    [
        ("import torch", "torch.{d}.amp."),
        ("import torch as T", "T.{d}.amp."),
        ("import torch.{d}.amp", "torch.{d}.amp."),
        ("import torch.{d}.amp as amp", "amp."),
        ("import os, torch.{d}.amp as amp, sys", "amp."),
        ("from torch.{d} import amp", "amp."),
        ("from torch.{d} import amp as a, is_available", "a."),
        ("from torch.{d} import is_available, amp", "amp."),
        ("from torch import {d}", "{d}.amp."),
        ("import torch.{d} as dev", "dev.amp."),
        ("from torch.{d}.amp import autocast, GradScaler", ""),
        ("from torch.{d}.amp import (\n    autocast,\n    GradScaler,\n)", ""),
        ("from torch.{d}.amp import *", ""),
        ("from torch.{d}.amp.autocast_mode import autocast; from torch.{d}.amp.grad_scaler import GradScaler", ""),
    ]
)
VALUES = {
    "enabled": "not 1",
    "dtype": "D",
    "cache_enabled": "(bool(0))",
    "init_scale": "2. ** 3",
    "growth_factor": "(4.)",
}


@st.composite
def arguments(draw: st.DrawFn, parameters: tuple[str, ...]) -> str:
    positional = draw(st.integers(0, len(parameters)))
    chosen = [VALUES[name] for name in parameters[:positional]]
    named = draw(st.permutations(parameters[positional:]))
    chosen += [f"{name}={VALUES[name]}" for name in named[: draw(st.integers(0, len(named)))]]
    separator = draw(st.sampled_from([", ", ",", ",\n    ", ",  # so\n    "]))
    opening, end = draw(st.sampled_from([("", ""), (" ", " "), ("\n    ", "\n"), ("  # (why)\n    ", ",\n")]))
    return f"{opening}{separator.join(chosen)}{end if chosen else ''}"


@st.composite
def scripts(draw: st.DrawFn) -> str:
    statement, prefix = draw(IMPORTS)
    device = draw(st.sampled_from(["cuda", "cpu"]))
    dtype = {"cuda": "float16", "cpu": "bfloat16"}[device]
    lines = [f"from torch import {dtype} as D", statement.replace("{d}", device)]
    prefix = prefix.replace("{d}", device)
    autocast, scaler = f"{prefix}autocast", f"{prefix}GradScaler"
    for form in draw(
        st.lists(st.sampled_from(["with", "decorator", "scaler", "alias", "function", "kept"]), max_size=4)
    ):
        given = draw(arguments(("enabled", "dtype", "cache_enabled")))
        scale = draw(arguments(("init_scale", "growth_factor")))
        lines += {
            "with": [f"with {autocast}({given}) as c, {autocast}(): pass"],
            "decorator": [f"@{autocast}({given})", "def f(): pass"],
            "scaler": [f"s = {scaler}({scale})"],
            "alias": [f"def g():\n    ac = {autocast}\n    return ac({given})", "g()"],
            "function": [f"def h(s: {scaler} = {scaler}({scale})):\n    return isinstance(s, {scaler})", "assert h()"],
            "kept": [f"k = [{autocast}({given}), {scaler}({scale})]"],
        }[form]
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    if newline == "\r\n":
        lines.insert(0, "# größe")
    return newline.join(newline.join(line.split("\n")) for line in lines) + newline


@settings(max_examples=150, deadline=None)
@given(code=scripts())
def test_any_import_and_any_use_run_the_same_without_the_warning(code: str) -> None:
    after = fixed(code)
    ast.parse(after)
    assert "cuda.amp" not in after and "cpu.amp" not in after
    assert findings_of(after) == []
    assert after.count("\r\n") in (0, after.count("\n"))
    assert_same_without_warning(code, after)
