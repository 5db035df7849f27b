"""Names that are taken out of an import: the rest of it stays as it was written."""

import pytest

from oomfix.rewrite.text.imported_names import without_names
from tests.rewrite.equivalence import rewritten

CASES = [
    ("from a import x, y", "x", "from a import y"),
    ("from a import x, y", "y", "from a import x"),
    ("from a import x as y, z", "y", "from a import z"),
    ("from a import x, \\\n    y, z", "y", "from a import x, \\\n    z"),
    ("from a import (x, y,)", "y", "from a import (x,)"),
    ("from a import (x,\n               y)", "x", "from a import (y)"),
    ("from a import (x,\n               y)", "y", "from a import (x)"),
    ("from a import (x,  # of x\n    y)", "y", "from a import (x  # of x\n)"),
    ("from a import (\n    x,  # of x\n    y,  # of y\n)", "x", "from a import (\n    y,  # of y\n)"),
    ("from a import (\n    x,  # of x\n    y,  # of y\n)", "y", "from a import (\n    x,  # of x\n)"),
    ("from a import (\n    x,  # of x\n    y  # of y\n)", "y", "from a import (\n    x  # of x\n)"),
    ("from a import (  # of all\n    x,\n    y,\n)", "x", "from a import (  # of all\n    y,\n)"),
    ("from a import (\n    x,  # of x\n    # above y\n    y,\n)", "x", "from a import (\n    # above y\n    y,\n)"),
    ("from a import (\n    x, y,  # of both\n    z,\n)", "y", "from a import (\n    x,  # of both\n    z,\n)"),
    ("from a import (\r\n    x,\r\n    y,\r\n)", "x", "from a import (\r\n    y,\r\n)"),
]


@pytest.mark.parametrize(("statement", "name", "left"), CASES)
def test_the_other_names_keep_their_lines_and_comments(statement, name, left):
    assert without_names(statement, {name}) == left


def test_several_names_go_at_once():
    statement = "from a import (\n    v,  # of v\n    w,\n    x,  # of x\n    y,\n)"
    assert without_names(statement, {"v", "w", "y"}) == "from a import (\n    x,  # of x\n)"


@pytest.mark.parametrize("statement", ["import a", "from a import *", "x = 1"])
def test_what_imports_no_names_is_refused(statement):
    with pytest.raises(ValueError, match=r"expected `from module import name, \.\.\.`, got '"):
        without_names(statement, {"x"})


def test_an_import_is_not_left_without_names():
    with pytest.raises(ValueError, match="no name would be left in 'from a import x, y'"):
        without_names("from a import x, y", {"x", "y"})


def test_apply_keeps_the_comments_of_the_names_that_are_still_used():
    script = """\
import torch
from torch.cuda.amp import (  # mixed precision
    autocast,
    custom_fwd,  # for the operator below
    GradScaler,  # scales the loss
)


class Double(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x):
        return 2 * x


def train(model, loader, optimizer, criterion):
    scaler = GradScaler()
    for x, y in loader:
        optimizer.zero_grad()
        with autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
    kept = "import (  # mixed precision\n    custom_fwd,  # for the operator below\n)\n"
    assert kept in rewritten(script).text
