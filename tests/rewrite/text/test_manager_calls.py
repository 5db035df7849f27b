"""A model's call over several lines, as a call of the manager: broken and aligned as the file does it."""

import ast
import textwrap

import pytest

from oomfix.rewrite.text.edits import apply_edits
from oomfix.rewrite.text.layout import Layout
from oomfix.rewrite.text.manager_calls import through_manager
from oomfix.source import Source

NETS = ("net", "self.networks.one")


def written(before: str) -> str:
    """A statement after its outermost call of `net`, and those inside of it, went to the manager."""
    source = Source.from_bytes("train.py", textwrap.dedent(before).encode())
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in NETS]
    text = apply_edits(source.text, through_manager(Layout(source), calls, "memory.evaluate"))
    ast.parse(text)
    return text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("out = net(x, y)\n", "out = memory.evaluate(net, x, y)\n"),
        ("out = net()\n", "out = memory.evaluate(net)\n"),
        (
            "out = net(x,\n          y=1)  # first\n",
            "out = memory.evaluate(net, x,\n                      y=1)  # first\n",
        ),
        (
            "out = self.networks.one(x,\n                        y)\n",
            "out = memory.evaluate(self.networks.one, x,\n                      y)\n",
        ),
        ("out = net(\n    x,\n    y,\n)\n", "out = memory.evaluate(\n    net,\n    x,\n    y,\n)\n"),
        ("out = net(\n    x, y\n)\n", "out = memory.evaluate(\n    net, x, y\n)\n"),
        (
            "out = net(\n    # the batch\n    x,\n    y)\n",
            "out = memory.evaluate(\n    # the batch\n    net,\n    x,\n    y)\n",
        ),
        ("out = net(x,\n    y)\n", "out = memory.evaluate(net, x,\n    y)\n"),
        (
            "out = net(x, '''\n          a''',\n          y)\n",
            "out = memory.evaluate(net, x, '''\n          a''',\n                      y)\n",
        ),
        (
            "if 1:\n\tout = net(x,\n\t          y)\n",
            "if 1:\n\tout = memory.evaluate(net, x,\n\t                      y)\n",
        ),
    ],
)
def test_the_arguments_stand_below_each_other_as_before(before, after):
    assert written(before) == after


def test_lines_below_a_call_that_gets_too_long_go_below_its_parenthesis():
    aligned = f"out = net(first_of_all_inputs, second_of_all_inputs, fourth,\n          {'x' * 67})\n"
    assert written(aligned) == (
        f"out = memory.evaluate(\n    net, first_of_all_inputs, second_of_all_inputs, fourth,\n    {'x' * 67})\n"
    )


def test_a_call_in_the_arguments_of_another_goes_through_the_manager_too():
    after = written("out = net(net(\n    x,\n    y), net(z))\n")
    assert ast.unparse(ast.parse(after)) == (
        "out = memory.evaluate(net, memory.evaluate(net, x, y), memory.evaluate(net, z))"
    )


@pytest.mark.parametrize("given", ["part for part in x", "net(part for part in x) for x in y", "\n    a for a in x\n"])
def test_a_generator_that_was_the_only_argument_gets_parentheses(given):
    inner = given.replace("net(part for part in x)", "memory.evaluate(net, (part for part in x))")
    assert written(f"out = net({given})\n") == f"out = memory.evaluate(net, ({inner}))\n"
    assert written(f"out = net(({given}))\n") == f"out = memory.evaluate(net, ({inner}))\n"


def test_line_ends_are_those_of_the_file():
    assert written("out = net(\r\n    x,\r\n)\r\n") == "out = memory.evaluate(\r\n    net,\r\n    x,\r\n)\r\n"
