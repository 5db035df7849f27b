"""What a rule is: a definition with a page, examples that are its tests, and a check over a `Script`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from oomfix.script.syntax.edits import Edit

if TYPE_CHECKING:
    from oomfix.script import Place, Script


Need = bytes | tuple[bytes, ...]
"""A byte string that a file holds, or several, all of which it holds."""

TRAINS: tuple[Need, ...] = (b".backward(", b"forward_backward(", (b"scaler(", b"optim"))
"""What a file that trains holds: a backward, the runtime's call, or a scaler object that does both.

`self.scaler(x)` of a network that scales its inputs stands in files that optimize nothing.
"""

_EVALUATING = (
    b"def validate(",
    b"def validation(",
    b"def validation_",
    b"def valid(",
    b"def val(",
    b"def _evaluate(",
    b"def evaluate(model",
    b"def evaluate(net",
)
EVALUATES: tuple[Need, ...] = (b".eval(", *((b"torch", word) for word in _EVALUATING))
"""What a file that evaluates holds: the mode, or a function of a usual name.

`def test(` in a file that neither trains nor switches modes is most often a look at the shapes of a network.
"""

_ACTING = (
    b"def act(",
    b"def select_action(",
    b"def get_action(",
    b"def choose_action(",
    b"def sample_action(",
    b"def take_action(",
)
_PREDICTING = (b"def predict(", b"def infer(", b"def inference(", b"def translate(", b"def greedy_decode(")
RUNS_NETWORKS: tuple[Need, ...] = (
    *TRAINS,
    *EVALUATES,
    *((b"torch", word) for word in _ACTING),
    *((b"argmax(", word) for word in _PREDICTING),
    (b"env.step(", b"torch"),
    (b".topk(", b"predict("),
    (b"multinomial(", b"def generate"),
    (b"multinomial(", b"def sample"),
    b"torch.load",
    b"torch.hub.load",
    b"load_state_dict(",
    (b"= model(", b".numpy()"),
    (b"clip.load(", b".encode_image("),
    (b"Trainer(", b".fit("),
    (b"Trainer(", b".train("),
    (b"from_pretrained(", b").cuda("),
    (b"from_pretrained(", b"model.cuda("),
    (b"from_pretrained(", b"__main__"),
    (b"from_pretrained(", b"argparse"),
    (b"from_pretrained(", b"DataLoader"),
)
"""What a file holds that may run a network for what it gives, trained there or not."""

NOT_ONE_TENSOR = "it may not be a single tensor"
SHARED = "the statement also binds the value to another name, which may need the graph"

__all__ = [
    "EVALUATES",
    "NOT_ONE_TENSOR",
    "RUNS_NETWORKS",
    "SHARED",
    "TRAINS",
    "Edit",
    "Finding",
    "Invalid",
    "Need",
    "Rule",
    "Severity",
    "holds",
]


def holds(data: bytes, need: Need) -> bool:
    """Whether a file's bytes hold a byte string, or all of several."""
    return need in data if isinstance(need, bytes) else all(word in data for word in need)


class Severity(str, Enum):
    """How much a finding costs. The order of `rank` is what `--fail-on` compares."""

    ERROR = "error"
    """Memory grows every iteration, or gradients are wrong."""
    WARNING = "warning"
    """A higher peak than needed, or an API that is going away."""
    NOTE = "note"
    """Hygiene."""

    @property
    def rank(self) -> int:
        """0 for a note, 1 for a warning, 2 for an error."""
        return ("note", "warning", "error").index(self.value)


@dataclass(frozen=True)
class Finding:
    """One occurrence of one rule.

    Lines and columns are 1-based, columns count characters, the end is exclusive, all of them in the text of
    `Source` (a notebook's cells joined; `Source.locate` turns a line into cell and line).
    `edits` are the local fix, to be made together or not at all; empty when the rule has none here.
    """

    code: str
    name: str
    severity: Severity
    message: str
    line: int
    column: int
    end_line: int
    end_column: int
    edits: tuple[Edit, ...] = ()
    fixed_by_runtime: bool = False

    @property
    def fix(self) -> str | None:
        """`"local"` when the finding carries its edit, `"runtime"` when `apply` fixes it by calling the runtime."""
        if self.edits:
            return "local"
        return "runtime" if self.fixed_by_runtime else None


class Invalid(NamedTuple):
    """Code that a rule must report: `lines` of the findings (1-based) and, where it has an edit, the code after it."""

    code: str
    lines: tuple[int, ...]
    fixed: str | None = None


class Rule(ABC):
    """One thing that wastes GPU memory, or breaks accumulation or mixed precision.

    The docstring of the subclass is the page that `oomfix explain` shows: what, why, when it is quiet, the fix.
    A rule is added by adding a file with one subclass to `oomfix/rules/`: nothing else is registered by hand.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    needs: ClassVar[tuple[Need, ...]]
    """What the code of a file must hold, one of these, for the rule to fire; docstrings and comments do not count.

    A file with none of any rule's is never parsed.
    """
    fixed_by_runtime: ClassVar[bool] = False
    """Whether `oomfix apply` mends it by calling `oomfix.runtime`."""

    INVALID: ClassVar[list[Invalid]]
    VALID: ClassVar[list[str]]

    @abstractmethod
    def check(self, script: Script) -> Iterator[Finding]:
        """Yield every occurrence in the script."""

    def finding(
        self,
        place: Place,
        message: str,
        *,
        edits: tuple[Edit, ...] = (),
        by_hand: str | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this rule at a place of the script; `by_hand` is why it has no edits there."""
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity or self.severity,
            message=message if edits or by_hand is None else f"{message} (no automatic fix: {by_hand})",
            line=place.line,
            column=place.column,
            end_line=place.end_line,
            end_column=place.end_column,
            edits=edits,
            fixed_by_runtime=self.fixed_by_runtime,
        )
