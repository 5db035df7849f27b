"""New lines are no longer than those of the file: broken inside their brackets, comments above."""

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.rewrite.text.edits import apply_edits
from oomfix.rewrite.text.layout import Layout
from oomfix.rewrite.text.long_lines import long_line_edits
from oomfix.source import Source
from tests.rewrite.equivalence import rewritten

NAMES = "first_of_all_inputs, second_of_all_inputs"


def broken(text: str, before: str = "") -> str:
    """A text that a file became, whose lines were no longer than 79 or those of `before`."""
    edits = long_line_edits(Layout(Source.from_bytes("train.py", before.encode())), text)
    return apply_edits(text, edits)


@pytest.mark.parametrize(
    ("long", "expected"),
    [
        (
            f"output = memory.forward(model, {NAMES}, third=3)",
            f"output = memory.forward(\n    model, {NAMES}, third=3\n)",
        ),
        (
            f"the_output = 0.5 * (call({NAMES}) - a_mean).sum(1)",
            f"the_output = (\n    0.5 * (call({NAMES}) - a_mean).sum(1)\n)",
        ),
        (
            f"the_output = -call({NAMES}, third).sum(1)[0].item()",
            f"the_output = -call(\n    {NAMES}, third\n).sum(1)[0].item()",
        ),
        (
            f"with_all(0.5 * (call({NAMES}) - a_mean).sum(1)) | {{}}",
            f"with_all(\n    0.5 * (call({NAMES}) - a_mean).sum(1)\n) | {{}}",
        ),
        (
            f"yield 0.5 * (memory.forward(model, {NAMES}) - a_mean).squeeze(1)[0]",
            f"yield 0.5 * (\n    memory.forward(model, {NAMES}) - a_mean\n).squeeze(1)[0]",
        ),
        (
            f"the_last = call({NAMES}) if ready else call(last)",
            f"the_last = (\n    call({NAMES}) if ready else call(last)\n)",
        ),
        (
            f"the_last = call({NAMES}) if settings['of_the_second'] > 0 else None",
            f"the_last = (\n    call({NAMES})\n    if settings['of_the_second'] > 0\n    else None\n)",
        ),
        (
            f"the_last = call({NAMES}) if one else two if three_of_four else None, None",
            f"the_last = call(\n    {NAMES}\n) if one else two if three_of_four else None, None",
        ),
        (
            f"if ready:\n    loss[first] = criterion(model({NAMES}), target_of_all_inputs)",
            f"if ready:\n    loss[first] = criterion(\n        model({NAMES}), target_of_all_inputs\n    )",
        ),
        (
            "loss_of_all = first_of_all + 0.5 * second_of_all - 0.001 * third_of_all.entropy()",
            "loss_of_all = (\n    first_of_all + 0.5 * second_of_all - 0.001 * third_of_all.entropy()\n)",
        ),
        (
            "of_all[i] += first_of_all_inputs + second_of_all_inputs * third_of_all_inputs  # sum",
            "# sum\nof_all[i] += first_of_all_inputs + second_of_all_inputs * third_of_all_inputs",
        ),
        (
            f"yield sum_of_both_of_all, call(first) + call({NAMES})",
            f"yield sum_of_both_of_all, call(first) + call(\n    {NAMES}\n)",
        ),
        (
            f"call({NAMES}).attribute[first_of_all:].method(1).another",
            f"call(\n    {NAMES}\n).attribute[first_of_all:].method(1).another",
        ),
        (
            f"call({NAMES},third_of_all_inputs,{NAMES},fourth_input)",
            f"call(\n    {NAMES},third_of_all_inputs,\n    {NAMES},fourth_input\n)",
        ),
        (
            f"call({NAMES}, other_function(third_of_all, {NAMES}))",
            f"call(\n    {NAMES},\n    other_function(third_of_all, {NAMES})\n)",
        ),
        (
            f"call(first, {NAMES}, third_of_all_inputs, fourth,\n     fifth, last)",
            f"call(first, {NAMES}, third_of_all_inputs,\n     fourth,\n     fifth, last)",
        ),
        (
            f"call(\n    first, call(second, third), {NAMES}, fourth_of_all)",
            f"call(\n    first, call(second, third), {NAMES},\n    fourth_of_all)",
        ),
        (f"call({NAMES})  {' ' * 40}# of inputs", f"call({NAMES})  {' ' * 19}# of inputs"),
        (
            f"    call({NAMES})  # and what is said of all of the inputs".strip(),
            f"# and what is said of all of the inputs\ncall({NAMES})",
        ),
        (
            f"    total = call(first,\n{' ' * 17}{NAMES}) + 1  # and what is said".strip(),
            f"# and what is said\ntotal = call(first,\n{' ' * 17}{NAMES}) + 1",
        ),
        (
            f"total = call({NAMES},  # and what is said of both\n    {NAMES}) + 1  # and what is said of it all",
            f"# and what is said of both\n# and what is said of it all\ntotal = call({NAMES},\n    {NAMES}) + 1",
        ),
        (
            f"total = call(\n    first_of_all, {NAMES},  # and what is said\n    last)",
            f"total = call(\n    # and what is said\n    first_of_all, {NAMES},\n    last)",
        ),
        (
            f"with memory.autocast({NAMES}), torch.no_grad():\n    pass",
            f"with memory.autocast(\n    {NAMES}\n), torch.no_grad():\n    pass",
        ),
    ],
)
def test_a_long_line_is_broken_where_a_formatter_would(long, expected):
    assert broken(long + "\n") == expected + "\n"
    assert broken(expected + "\n") == expected + "\n"


@pytest.mark.parametrize(
    "kept",
    [
        f"call({NAMES})  # type: ignore[arg-type]  # of a stub",
        f"call({NAMES}, third_of_all_inputs)  # noqa: E501",
        f"text = 'a string that is too long by itself: ' 'call({NAMES})'",
        f"name = f'a string that is too long by itself: {{call({NAMES})}}'",
        f"# a comment that is as long as it is: call({NAMES}, third)",
        f"total = first_of_all_inputs + second_of_all_inputs + \\\n    {'x' * 80}",
        f"one_of_all = call({NAMES}, third_of_all_inputs) \\\n    + 1",
        f"call({NAMES})  # a comment that is too long for a line of its own: {NAMES}",
        f'text = """\ncall({NAMES}, third_of_all_inputs, fourth)\n"""',
        f'call({NAMES}, third_of_all_inputs, """of several\n lines""", 4)',
        f"an_identifier_{'x' * 80}()",
        f"name = lambda first_of_all=1: first_of_all + {'x' * 41}.second_of_all_inputs()",
        "one = 1; the_loss = first_of_all + 0.005 * second_of_all - 0.001 * third_of_all.entropy()",
        f"for one in of_all: output = call({NAMES}, third_of_all_inputs); found.extend(output)",
        "if 1: the_loss = first_of_all + 0.005 * second_of_all - 0.001 * third_of_all.entropy()",
        "assert first_of_all_inputs + second_of_all_inputs == third_of_all_inputs + 0.5 * last",
        "one = \\\n    two = first_of_all + 0.5 * second_of_all - 0.01 * third_of_all.entropy() - last",
    ],
)
def test_what_cannot_be_broken_stays(kept):
    assert broken(kept + "\n") == kept + "\n"


def test_lines_of_the_file_stay_and_say_how_long_lines_are():
    long = f"call({NAMES}, third_of_all_inputs, and_the_4th)\n"
    assert broken(long) != long
    assert broken(long, before=long) == long
    assert broken(f"if 1: {long}", before=f"{'#' * 90}\n") == f"if 1: {long}"
    inside = long[len("call(") : -len(")\n")]
    assert broken(f"a = {long}", before=long) == f"a = call(\n    {inside}\n)\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_those_of_the_file(end):
    text = f"x = 1{end}call({NAMES}, third_of_all_inputs, and_the_4th){end}y = 2{end}"
    expected = f"x = 1{end}call({end}    {NAMES}, third_of_all_inputs, and_the_4th{end}){end}y = 2{end}"
    assert broken(text, before=f"x = 1{end}") == expected


words = st.text("abcdefghij", min_size=1, max_size=24)
expressions = st.recursive(
    words | st.just("'a, (b'") | st.just("f'{a}, [b'"),
    lambda inner: st.one_of(
        st.builds("{}({})".format, words, st.lists(inner, max_size=5).map(", ".join)),
        st.builds("[{}]".format, st.lists(inner, max_size=5).map(",".join)),
        st.builds("({})".format, inner),
        st.builds("{} + {}".format, inner, inner),
        st.builds("{}[{}].T".format, words, inner),
    ),
    max_leaves=25,
)


@given(st.lists(st.builds("{} = {}".format, words, expressions), min_size=1, max_size=4))
def test_no_statement_changes_its_meaning(statements):
    text = textwrap.indent("\n".join(f"{line}  # what it is" for line in statements), "        ")
    text = f"for of in them:\n    if of:\n{text}\n"
    try:
        before = ast.dump(ast.parse(text))
    except SyntaxError:  # a keyword among the words
        return
    after = broken(text)
    assert ast.dump(ast.parse(after)) == before
    assert after.count("# what it is") == len(statements)
    assert broken(after) == after


def test_a_loss_that_moves_into_a_function_is_broken_and_stays_so():
    text = textwrap.dedent("""\
        import torch
        from torch import nn

        model = nn.Linear(4, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in loader:
            output = model(inputs.cuda())
            loss = nn.functional.cross_entropy(output, targets.cuda(), reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """)
    after = rewritten(text).text
    assert '        loss = nn.functional.cross_entropy(\n            output, targets.cuda(), reduction="sum"\n' in after
    assert max(map(len, text.splitlines())) == 79
    assert rewritten(after).text == after
