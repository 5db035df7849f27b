"""Notebooks: cells joined, IPython's syntax tolerated, positions told by cell."""

from __future__ import annotations

import ast
import json

import pytest

from oomfix.parsing import Unreadable
from oomfix.source import Source


def read(*cells: tuple[str, str], **metadata: object) -> Source:
    rows = [{"cell_type": kind, "source": source.splitlines(keepends=True)} for kind, source in cells]
    return Source.from_bytes("a.ipynb", json.dumps({"metadata": metadata, "cells": rows}).encode())


def test_a_line_is_told_by_its_cell_among_all_cells():
    source = read(("code", "a = 1\nb = 2"), ("markdown", "# text"), ("code", "\nloss = 3\n"))
    loss = source.tree.body[-1]
    assert source.segment(loss) == "loss = 3"
    assert source.locate(loss.lineno) == (3, 2)
    assert source.locate(source.tree.body[1].lineno) == (1, 2)


@pytest.mark.parametrize(
    "magic",
    [
        "%matplotlib inline",
        "!pip install -q it's",
        "?torch.nn",
        "torch.nn?",
        "model.fit??",
        "files = !ls | head",
        "out = %timeit -o train()",
        "%time train(model)",
        "!echo '''",
        "%cd /content/drive",
        "pip install -q torch",
        "cd /content/drive",
        "ls -la *.pt",
    ],
)
@pytest.mark.parametrize("indent", ["", "    "])
def test_a_magic_becomes_one_line_that_parses(magic: str, indent: str):
    block = "if True:\n" if indent else ""
    source = read(("code", f"{block}{indent}x = 1\n{indent}{magic}\n{indent}y = 2\n"))
    assert source.problems == ()
    names = {node.id: node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    first = 2 if indent else 1
    assert (names["x"], names["y"]) == (first, first + 2)


@pytest.mark.parametrize("code", ["time = (3\n", "head (x) y\n", "pip, x = 3 4\n", "pipe install\n"])
def test_a_broken_line_that_begins_like_a_command_is_told(code: str):
    assert read(("code", code)).problems != ()


def test_a_continued_command_keeps_the_lines_below_in_place():
    source = read(("code", "!pip install a \\\n    b \\\n    c\ny = 2\n"))
    assert source.problems == ()
    assert source.tree.body[-1].lineno == 4


def test_what_only_looks_like_a_magic_stays():
    code = "x = ('%d items'\n     % count)\ntext = '''\n!ls\n%cd\n'''\n%matplotlib inline\n"
    source = read(("code", code))
    assert source.problems == ()
    assert source.segment(source.tree.body[0]) == "x = ('%d items'\n     % count)"
    assert source.tree.body[1].value.value == "\n!ls\n%cd\n"


@pytest.mark.parametrize("magic", ["%%bash", "%%html", "%%writefile train.py", "%%javascript -x"])
def test_a_cell_for_something_else_is_blank(magic: str):
    source = read(("code", f"{magic}\nfor f in *; do echo $f; done\n"), ("code", "y = 2"))
    assert source.problems == ()
    assert source.locate(source.tree.body[0].lineno) == (2, 1)
    assert len(source.tree.body) == 1


@pytest.mark.parametrize("magic", ["%%time", "%%capture out", "%%timeit -n 3"])
def test_a_cell_that_is_only_measured_is_read(magic: str):
    source = read(("code", f"\n{magic}\nloss.backward()\n"))
    assert source.locate(source.tree.body[0].lineno) == (1, 3)


@pytest.mark.parametrize("indent", ["    ", "\t", "  "])
def test_a_cell_that_is_indented_as_a_whole_is_read_as_ipython_does(indent: str):
    code = f"\n{indent}%matplotlib inline\n{indent}if a:\n{indent}{indent}loss = 3\n\n{indent}total = 4\n"
    source = read(("code", "x = 1"), ("code", code))
    assert source.problems == ()
    total = source.tree.body[-1]
    assert source.locate(total.lineno) == (2, 6)
    assert source.written_column(total.lineno, total.col_offset + 1) == len(indent) + 1
    assert source.written(total.lineno) == f"{indent}total = 4"


def test_a_line_that_is_not_indented_as_the_first_is_an_error_as_in_ipython():
    assert read(("code", "    x = 1\n  y = 2")).problems == ("cell 1: cannot parse: line 2: unexpected indent",)


@pytest.mark.parametrize("code", ["%%bash\nls", "!pip install \\\n  torch\nx = 1", "%%time\nx = 1", "y = (\n"])
def test_lines_are_kept_as_the_notebook_has_them(code: str):
    source = read(("code", code), ("code", "z = 3"))
    lines = [*code.split("\n"), "z = 3"]
    assert [source.written(number) for number in range(1, len(source.lines) + 1)] == lines


def test_a_broken_cell_is_told_and_the_others_are_read():
    source = read(("code", "x = 1"), ("code", "y = (\n"), ("code", "z = 3"))
    assert source.problems == ("cell 2: cannot parse: line 1: '(' was never closed",)
    assert [node.targets[0].id for node in source.tree.body] == ["x", "z"]
    assert source.locate(source.tree.body[-1].lineno) == (3, 1)


def test_top_level_await_is_no_problem():
    assert read(("code", "await train()")).problems == ()


def test_nbformat_3_is_read_too():
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["x = 1\n", "y = 2"]}]}]}
    assert len(Source.from_bytes("a.ipynb", json.dumps(old).encode()).tree.body) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = 1\n", "not a notebook: line 1 is not JSON"),
        (b"", "not a notebook: line 1 is not JSON"),
        (b"\xff\x00\x01", "not a notebook: not UTF-8"),
        (b"[]", "not a notebook: JSON without a list of cells"),
        (b'{"cells": 3}', "not a notebook: JSON without a list of cells"),
        (b'{"worksheets": []}', "not a notebook: JSON without a list of cells"),
        (b'{"cells": [], "metadata": {"language_info": {"name": "R"}}}', "a notebook in R, expected Python"),
        (b'{"cells": [], "metadata": {"kernelspec": {"language": "julia"}}}', "a notebook in julia, expected Python"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_python_notebook_is_told_in_one_line(data: bytes, message: str):
    with pytest.raises(Unreadable) as caught:
        Source.from_bytes("a.ipynb", data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cell", [None, 3, {}, {"cell_type": "code"}, {"cell_type": "code", "source": [1, None]}])
def test_a_malformed_cell_is_passed_over(cell: object):
    good = {"cell_type": "code", "source": "x = 1"}
    source = Source.from_bytes("a.ipynb", json.dumps({"cells": [cell, good]}).encode())
    assert source.locate(source.tree.body[0].lineno) == (2, 1)


def test_a_notebook_is_not_written_as_if_it_were_its_cells():
    with pytest.raises(ValueError, match=r"a\.ipynb: a notebook cannot be encoded"):
        read(("code", "x = 1")).encode("x = 2")
