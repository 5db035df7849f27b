"""Bytes to text, tree and positions, and back."""

from __future__ import annotations

import ast
import codecs
import json
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.parsing import Unreadable, split_lines
from oomfix.source import Source

NEWLINES = st.sampled_from(["\n", "\r\n", "\r"])
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters="'\\"), max_size=8)


@given(words=st.lists(WORDS, max_size=6), newlines=st.lists(NEWLINES, min_size=6, max_size=6), bom=st.booleans())
def test_a_utf8_file_comes_back_to_the_byte(words: list[str], newlines: list[str], bom: bool):
    text = "".join(f"x = '{word}'{newline}" for word, newline in zip(words, newlines, strict=False))
    data = (codecs.BOM_UTF8 if bom else b"") + text.encode()
    source = Source.from_bytes("a.py", data)
    assert source.text == text
    assert source.encode(source.text) == data


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "iso-8859-15", "cp1251", "utf-8"])
def test_a_declared_encoding_comes_back_to_the_byte(encoding: str):
    text = f"# -*- coding: {encoding} -*-\r\nname = '{'Ж' if encoding == 'cp1251' else 'é'}'\r\n"
    source = Source.from_bytes("a.py", text.encode(encoding))
    assert source.text == text
    assert source.encode(source.text) == text.encode(encoding)


def test_text_that_the_encoding_lacks_is_refused_not_replaced():
    source = Source.from_bytes("a.py", "# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    with pytest.raises(UnicodeEncodeError):
        source.encode("x = 'Ж'")


@given(words=st.lists(WORDS, min_size=1, max_size=5), newlines=st.lists(NEWLINES, min_size=5, max_size=5))
def test_every_name_is_found_where_ast_says_it_is(words: list[str], newlines: list[str]):
    text = "".join(
        f"if '{word}':{newline}\tvalue_{index} = '{word}'{newline}\f\f{newline}"
        for index, (word, newline) in enumerate(zip(words, newlines, strict=False))
    )
    source = Source.from_bytes("a.py", text.encode())
    names = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name)]
    assert len(names) == len(words)
    for node in names:
        assert source.segment(node) == node.id
        line, column = source.position(source.offset(node.lineno, node.col_offset))
        assert line == node.lineno
        assert source.lines[line - 1][column - 1 :].startswith(node.id)


@given(word=WORDS)
def test_columns_count_characters_although_ast_counts_bytes(word: str):
    source = Source.from_bytes("a.py", f"x = '{word}'; y = torch.load('{word}', p)\n".encode())
    call = source.tree.body[1].value
    assert source.segment(call) == f"torch.load('{word}', p)"
    assert source.position(source.offset(1, call.col_offset)) == (1, len(word) + 13)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_lines_end_where_python_ends_them(newline: str):
    text = f"a = 1{newline}b = '\x0c\x1c\u2028'{newline}{newline}c = 2"
    source = Source.from_bytes("a.py", text.encode())
    assert source.lines == ["a = 1", "b = '\x0c\x1c\u2028'", "", "c = 2"]
    assert source.tree.body[-1].lineno == 4
    assert [text[start] for start in (source.line_starts[0], source.line_starts[3])] == ["a", "c"]


def test_the_byte_order_mark_shifts_no_column():
    source = Source.from_bytes("a.py", codecs.BOM_UTF8 + b"x = torch.load(p)\n")
    assert source.segment(source.tree.body[0].value) == "torch.load(p)"


def test_a_literal_that_python_warns_of_passes_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Source.from_bytes("a.py", b"x = '\\d'\ny = 1 is 1\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "a binary file (it holds null bytes), expected Python"),
        (b"\xff\xfei\x00m\x00", "UTF-16 text, expected UTF-8: save it as UTF-8"),
        (b"a = 1\nx = 'caf\xe9'\n", "not UTF-8: byte 0xe9 in line 2"),
        (b"# coding: utf-8\n\nx = 'caf\xe9'\n", "not UTF-8: byte 0xe9 in line 3"),
        (b"# coding: latin1000\nx = 1\n", "unknown encoding: latin1000"),
        (b"# coding: rot13\nk = 1\n", "'rot13' is not a text encoding"),
        (b"# coding: ascii\nx = 'caf\xc3\xa9'\n", "line 2 is not in the declared 'ascii'"),
        (codecs.BOM_UTF8 + b"# coding: latin-1\n", "declares another encoding"),
        (b"x = 1\nprint 'x'\n", "cannot parse: line 2: Missing parentheses in call to 'print' (Python 2?)"),
        (b"try:\n    x\nexcept E, e:\n    y\n", "line 3: multiple exception types must be parenthesized (Python 2?)"),
        (b"import torch\n!pip install timm\n", "cannot parse: line 2: invalid syntax (a command of IPython?)"),
        (b"x = (\n", "cannot parse: line 1: '(' was never closed"),
        (b"x = 1 +\n", "cannot parse: line 1: invalid syntax"),
        (b"x = " + b"-" * 100_000 + b"1", "cannot parse: nested too deeply"),
        (b"x = " + b"(" * 5_000, "too many nested parentheses"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(data: bytes, message: str):
    with pytest.raises(Unreadable) as caught:
        Source.from_bytes("a.py", data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_good_python_3_is_not_called_python_2():
    with pytest.raises(Unreadable) as caught:
        Source.from_bytes("a.py", b"print('x')\nprint(\n")
    assert "Python 2" not in str(caught.value)


def test_fifty_thousand_lines_keep_their_numbers():
    source = Source.from_bytes("a.py", b"x = 1\n" * 50_000 + b"y = 2\n")
    assert source.position(source.offset(50_001, 4)) == (50_001, 5)


def test_an_empty_file_is_a_module_of_one_empty_line():
    source = Source.from_bytes("a.py", b"")
    assert (source.tree.body, source.lines, source.line_starts) == ([], [""], [0])


def test_split_lines_keeps_every_character():
    text = "a\rb\r\nc\n\rd"
    assert split_lines(text) == ["a", "b", "c", "", "d"]


@pytest.mark.parametrize(
    ("code", "newer"),
    [
        ("def f[T](x): pass", (3, 12)),
        ("async def f[T](x): pass", (3, 12)),
        ("class A[T]: pass", (3, 12)),
        ("type Batch = tuple[int, int]", (3, 12)),
        ("""print(f"{f"{f"{d}"}"}")""", (3, 12)),
        ("""print(t"{d}")""", (3, 14)),
    ],
)
def test_syntax_of_a_newer_python_is_told_as_such(code: str, newer: tuple[int, int]):
    data = f"x = 1\n{code}\n".encode()
    if sys.version_info >= newer:
        assert len(Source.from_bytes("a.py", data).tree.body) == 2
        return
    with pytest.raises(Unreadable) as caught:
        Source.from_bytes("a.py", data)
    assert str(caught.value).startswith("cannot parse: line 2: ")
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    told = f" (syntax of Python 3.{newer[1]}? oomfix runs on Python {running}, which is older)"
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize("code", ["x = = 1", "def f(x: pass", "print 'x'", "raise E, 'x'", "type(x) = 3"])
def test_other_errors_do_not_blame_the_interpreter(code: str):
    with pytest.raises(Unreadable) as caught:
        Source.from_bytes("a.py", code.encode())
    assert "older" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '"""loss.backward()"""\n',
        "'''Train.\n\n    loss.backward()\n'''\nx = 1\n",
        'class A:\n    """loss.backward()"""\n    def f(self):\n        """\n        loss.backward()\n        """\n',
        'async def f():\n    """é loss.backward()"""\n    pass\n',
        "# loss.backward()\n",
        "def f():\n    pass\n    \t# loss.backward()\r\n",
        "x = 1\r# loss.backward()\ry = 2\r",
    ],
)
def test_what_is_only_mentioned_is_not_in_the_code(text: str):
    assert b".backward(" not in Source.from_bytes("a.py", text.encode()).code


@pytest.mark.parametrize(
    "text",
    [
        "loss.backward()\n",
        '"""é"""; loss.backward()\n',
        'def f(): """Runs."""; loss.backward()\n',
        'x = """\n# not a comment"""; loss.backward()\n',
        "x = 'a\\\n# b'; loss.backward()\n",
        'print(f"""\n# {loss.backward()}\n""")\n',
        'f"""{loss.backward()}"""\n',
        'def f():\n    """Runs."""\n    loss.backward()\n',
        "# a comment\rloss.backward()\r",
        "x = 1  # a comment\nloss.backward()  # another\n",
    ],
)
def test_whatever_runs_is_in_the_code(text: str):
    assert b".backward(" in Source.from_bytes("a.py", text.encode()).code


def test_the_code_of_a_notebook_is_that_of_its_cells():
    cells = [
        {"cell_type": "markdown", "source": ["call loss.backward()"], "metadata": {}},
        {"cell_type": "code", "source": ["optimizer.step()"], "metadata": {}, "outputs": [], "execution_count": None},
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    code = Source.from_bytes("a.ipynb", json.dumps(notebook).encode()).code
    assert b"optimizer.step()" in code
    assert b".backward(" not in code
