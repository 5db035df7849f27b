"""The nodes of a tree, and those of one class."""

import ast

from oomfix.script.syntax.nodes import Nodes, children, collect, walk

TREE = ast.parse("""
class Net:
    def forward(self, x, scale=None, *, mask=None, bias):
        return {**self.parts, "x": x @ self.weight + bias}

async def load(path):
    global count
    try:
        match len(path):
            case 1 | None:
                return [line for line in path if line]
            case {"name": str(name), **rest} if f"{name!r:>{count}}":
                pass
            case [first, *others] as everything:
                pass
    except OSError as error:
        raise
""")
WITHOUT_A_PLACE = (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)


def test_walking_meets_what_python_meets_but_for_operators_and_contexts():
    expected = [node for node in ast.walk(TREE) if not isinstance(node, WITHOUT_A_PLACE)]
    assert list(walk(TREE)) == expected == [node for node, _ in collect(TREE)]


def test_a_key_that_is_not_there_is_no_child():
    display = next(node for node in walk(TREE) if isinstance(node, ast.Dict))
    assert None in display.keys
    assert children(display) == [*filter(None, display.keys), *display.values]


def test_nodes_of_a_class_come_in_the_order_of_all_nodes():
    nodes = Nodes(walk(TREE))
    assert nodes.of(ast.Name) == [node for node in ast.walk(TREE) if isinstance(node, ast.Name)]
    assert nodes.of(ast.While) == []
    assert [function.name for function in nodes.functions] == ["load", "forward"]
