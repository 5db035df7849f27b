"""Which argument of a call goes to which parameter."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.script.syntax.parameters import bind_call

_NAMES = ["a", "b", "c", "d"]


@st.composite
def _signatures(draw):
    """Parameters of up to five kinds, as they are written."""
    only_placed, both, only_named = (draw(st.integers(0, 2)) for _ in range(3))
    with_default = draw(st.integers(0, only_placed + both))
    names = [
        f"{name}{number}"
        for name, count in zip("pbn", (only_placed, both, only_named), strict=True)
        for number in range(count)
    ]
    placed, named = names[: only_placed + both], names[only_placed + both :]
    parts = [name if index < len(placed) - with_default else f"{name}=None" for index, name in enumerate(placed)]
    parts[only_placed:only_placed] = ["/"] * bool(only_placed)
    rest = draw(st.booleans())
    parts += ["*rest"] if rest else ["*"] * bool(named)
    parts += [f"{name}=None" if draw(st.booleans()) else name for name in named]
    parts += ["**others"] * draw(st.booleans())
    return ", ".join(parts)


_ARGUMENTS = st.tuples(
    st.lists(st.sampled_from(["1", "*[1]", "*[1, 2]", "*[]"]), max_size=4),
    st.lists(st.sampled_from(["p0", "p1", "b0", "b1", "n0", "n1", "x"]), max_size=3, unique=True),
    st.lists(st.sampled_from(["**{}", "**{'n0': 1}", "**{'b1': 1}", "**{'y': 1}"]), max_size=2),
)


def _parameters(signature):
    return ast.parse(f"def f({signature}): pass").body[0].args


@given(_signatures(), _ARGUMENTS, st.booleans())
def test_arguments_go_where_python_puts_them(signature, arguments, of_object):
    placed, named, mappings = arguments
    written = ", ".join([*placed, *(f"{name}=1" for name in named), *mappings])
    call = ast.parse(f"f({written})", mode="eval").body
    scope = {}
    exec(f"def f({signature}): return dict(locals())", scope)
    found = bind_call(call, _parameters(signature), of_object=of_object)
    try:
        bound = eval(f"f({'0, ' * of_object}{written})", scope)
    except TypeError:
        plain = not mappings and "*[" not in written
        assert not (plain and found.fits) or (of_object and found.of_object is None)
        return
    assert found.fits
    bound = {name: value for name, value in bound.items() if value not in (None, (), {})}
    taken = {parameter.arg for parameter, _ in found.all} | {getattr(found.of_object, "arg", None)}
    assert set(bound) <= taken | ({"rest"} if of_object else set())
    assert {parameter.arg for parameter, _ in found.given} <= set(bound)
    for parameter, argument in found.given:
        if parameter.arg not in ("rest", "others"):
            assert bound[parameter.arg] == eval(ast.unparse(argument))


@pytest.mark.parametrize(
    ("signature", "arguments", "given", "perhaps"),
    [
        ("x, y=0", "1, y=2", "x=1 y=2", ""),
        ("x, *rest", "1, 2, 3", "x=1 rest=2 rest=3", ""),
        ("x, /, **others", "1, x=2", "x=1 others=2", ""),
        ("x, y, *, z", "*pair, z=1", "z=1", "x=*pair y=*pair"),
        ("x, y, z", "1, *pair, 2", "x=1", "y=*pair z=*pair y=2 z=2"),
        ("x, *, z=0, **others", "1, **more", "x=1", "z=more others=more"),
        ("self, x", "1", "self=1", ""),
    ],
)
def test_what_is_unpacked_may_go_to_each_parameter_that_is_left(signature, arguments, given, perhaps):
    found = bind_call(ast.parse(f"f({arguments})", mode="eval").body, _parameters(signature))
    for pairs, expected in ((found.given, given), (found.perhaps, perhaps)):
        assert " ".join(f"{parameter.arg}={ast.unparse(argument)}" for parameter, argument in pairs) == expected


def test_the_object_of_a_method_takes_the_first_parameter():
    found = bind_call(ast.parse("agent.act(state)", mode="eval").body, _parameters("self, state"), of_object=True)
    assert [parameter.arg for parameter, _ in found.given] == ["state"]
    assert found.of_object.arg == "self"
