"""Scripts with the f-strings of Python 3.12 are read on older versions too, each finding in its place."""

import ast

import pytest

from oomfix.newer_fstrings import in_older_form
from oomfix.parsing import Unreadable, parse

NEWER = [
    ('f"{d["a"]} {x}"', "f\"{d['a']} {x}\""),
    ("f'{d['a']:>{width['b']}}'", 'f\'{d["a"]:>{width["b"]}}\''),
    ('''f"{"\\n".join(lines)}"''', '''f"{'__'.join(lines)}"'''),
    ('f"{f"{x}"}"', "f\"{f'{x}'}\""),
    ('f"""{d["a"]}\n{x}"""', 'f"""{d[\'a\']}\n{x}"""'),
    ('rf"\\d{d["a"]!r}"', "rf\"\\d{d['a']!r}\""),
    ('f"{{}} {d["it\'s"]}"', "f\"{{}} {d['it_s']}\""),
    ('f"{d[b"a"]}" "{"', 'f"{d[b\'a\']}" "{"'),
]


@pytest.mark.parametrize(("newer", "older"), NEWER)
def test_quotes_and_escapes_inside_of_fields_are_told_as_before_3_12(newer, older):
    text = f"first = '{{'\nlog({newer}); behind = 1\n"
    assert in_older_form(text) == text.replace(newer, older)
    tree = parse(text)
    (behind,) = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "behind")
    lines = text[: text.index("behind")].split("\n")
    assert (behind.lineno, behind.col_offset) == (len(lines), len(lines[-1]))


@pytest.mark.parametrize(
    "text",
    [
        "print(f'{x}', f\"{d['a']}\", '{\"', \"\"\"f'{d['a']}'\"\"\")  # f'{d['a']}'\n",
        'f"{d["a"]',
        'f"{d["a"',
        'f"{f"{f"{x}"}"}"',
        'f"{d[\n"a"]}"',
        'f"{"\\',
        'f"{"\\\n"}"',
        'f"{d["""a"""]}"',
    ],
)
def test_what_needs_no_other_form_or_has_none_stays(text):
    assert in_older_form(text) is None


def test_a_script_that_is_wrong_in_another_place_is_refused_for_that():
    with pytest.raises(Unreadable, match="cannot parse: line 2: "):
        parse('f"{d["a"]}"\nfor\n')


def test_a_finding_behind_such_a_string_is_reported_where_it_is(tmp_path):
    from oomfix.audit import Auditor
    from oomfix.rules import all_rules

    script = 'import torch\nprint(f"{d["a"]}"); state = torch.load(path)\n'
    report = Auditor(all_rules()).audit("train.py", script.encode())
    assert [(found.code, found.line, found.column) for found in report.findings] == [("OOM205", 2, 29)]
    assert script.split("\n")[1][28:].startswith("torch.load")
