"""Which calls run in a node, through the functions of the file."""

import ast

from oomfix.rewrite.dataflow.calls_run import CallsRun
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import Nodes, walk

TREE = ast.parse("""
def first(x):
    second(x)
    return network(x)

def second(x):
    return first(x)

def other(x):
    return shift(lambda: scale(x))

def unused(x):
    return never(x)

second(x)
out = other(first(x))
""")
IMPORTS = Imports(TREE, Nodes(walk(TREE)))
FOLLOWED, JOINED = TREE.body[-2:]


def names(calls):
    return sorted(map(last_name, calls))


def test_functions_that_call_each_other_run_each_others_calls_whichever_is_asked_first():
    for nodes in ((TREE.body[0], FOLLOWED), (FOLLOWED, TREE.body[0])):
        calls = CallsRun(FunctionsCalled(IMPORTS))
        assert all("network" in names(calls.by(node)) for node in nodes)


def test_a_node_runs_what_stands_in_it_and_in_each_function_once():
    calls = CallsRun(FunctionsCalled(IMPORTS))
    assert names(calls.by(JOINED)) == ["first", "first", "network", "other", "scale", "second", "shift"]


def test_what_stands_in_the_node_itself_is_told_apart():
    calls = CallsRun(FunctionsCalled(IMPORTS))
    assert names(calls.in_functions([JOINED.value])) == ["scale", "shift"]
