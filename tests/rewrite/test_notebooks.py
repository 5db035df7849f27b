"""Cells of a notebook are rewritten in place; every other byte of it stays."""

import json

import pytest
from click.testing import CliRunner

from oomfix.rewrite.command import apply
from oomfix.rewrite.notebook_json import replace_sources

RUN = CliRunner()
IMPORTS = """\
%matplotlib inline
!pip install -q a \\
    b
import torch
from torch import nn
"""
MODEL = """\
%%time
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0
"""
LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)  # caf\u00e9
    loss.backward()
    optimizer.step()
    %time total += loss.item()"""
REWRITTEN = """\
for x, y in loader:
    def forward(x, y):
        loss = nn.functional.cross_entropy(model(x), y)  # caf\u00e9
        return loss

    loss = memory.forward_backward(forward, x, y)
    memory.step(optimizer)
    %time total += loss.item()"""
SETUP = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
CELLS = [
    {"cell_type": "markdown", "metadata": {}, "source": ["# Training /\n", "text"]},
    {"cell_type": "code", "execution_count": 1, "metadata": {"id": "a"}, "outputs": [{"x": 1e5}], "source": IMPORTS},
    {"cell_type": "code", "metadata": {}, "outputs": [], "source": "%%bash\nfor f in *; do echo $f; done\n"},
    {"cell_type": "code", "metadata": {}, "outputs": [], "source": MODEL},
    {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": LOOP},
]


def lines(source: str) -> list[str]:
    return source.splitlines(keepends=True)


def with_sources(form, sources: dict[int, str]) -> list[dict]:
    cells = [dict(cell) for cell in CELLS]
    for number, source in sources.items():
        cells[number]["source"] = source
    return [cell if isinstance(cell["source"], list) else cell | {"source": form(cell["source"])} for cell in cells]


def apply_to(path, *options: str):
    return RUN.invoke(apply, ["--preset", "16gb", *options, str(path)])


EXPECTED = {
    1: IMPORTS.replace(
        "from torch import nn", 'from oomfix import runtime\nfrom torch import nn\n\nmemory = runtime.preset("16gb")'
    ),
    3: MODEL.replace("optimizer =", "memory.prepare(model)\noptimizer ="),
    4: REWRITTEN,
}


@pytest.mark.parametrize("form", [str, lines], ids=["one string", "lines"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 1, "\t"])
def test_only_the_sources_of_rewritten_cells_change(tmp_path, form, ascii_only, indent):
    path = tmp_path / "train.ipynb"
    rest = {"metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4, "nbformat_minor": 5}

    def document(sources: dict[int, str]) -> str:
        return json.dumps({"cells": with_sources(form, sources), **rest}, ensure_ascii=ascii_only, indent=indent) + "\n"

    path.write_text(document({}), encoding="utf-8")
    done = apply_to(path)
    assert done.exit_code == 0, done.output
    assert f"{path}:cell 5:1  micro-batched\n" in done.output
    assert path.read_text(encoding="utf-8") == document(EXPECTED)


def test_spelling_of_what_stays_is_kept(tmp_path):
    """Escapes that no writer of notebooks would choose, blanks, a key given twice, floats: all as they were."""
    path = tmp_path / "train.ipynb"
    source = ", ".join(json.dumps(line) for line in lines(LOOP.replace("caf\u00e9", "a/b")))
    odd = source.replace("for x, y in", "\\u0066or x, y in").replace("a/b", "a\\/b")
    before = (
        '{ "nbformat":4,"metadata" :{"x":1.0e-3,  "\\u0061":[ ]},"cells": "twice",\n"cells"  : [ {"cell_type":"code",'
        f'"source":{json.dumps(lines(SETUP))}}} ,{{"source" : [{odd}],"cell_type":"code"}}  ] }}'
    )
    path.write_text(before)
    assert apply_to(path).exit_code == 0
    after = path.read_text()
    head, tail = before.index('"import torch'), before.index('],"cell_type":"code"}  ]')
    assert after.startswith(before[:head])
    assert after.endswith(before[tail:])
    assert '["\\u0066or x, y in loader:\\n", "    def forward(x, y):\\n"' in after


def test_encoding_and_line_ends_within_cells_stay(tmp_path):
    path = tmp_path / "train.ipynb"
    cells = [{"cell_type": "code", "source": (SETUP + LOOP).replace("\n", "\r\n")}]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"cells": cells}).encode())
    assert apply_to(path).exit_code == 0
    data = path.read_bytes()
    assert data.startswith(b"\xef\xbb\xbf{")
    (cell,) = json.loads(data.decode("utf-8-sig"))["cells"]
    assert cell["source"].replace("\r\n", "").count("\n") == 0
    assert cell["source"].endswith(REWRITTEN.replace("\n", "\r\n"))


def test_a_cell_that_is_indented_as_a_whole_stays_so(tmp_path):
    path = tmp_path / "train.ipynb"
    text = "    text = '''\nleft\n'''\n    \n" + "".join(f"    {line}" for line in lines(LOOP)) + "\n  \n"
    cells = [{"cell_type": "code", "source": SETUP}, {"cell_type": "code", "source": text}]
    path.write_text(json.dumps({"cells": cells}))
    assert apply_to(path).exit_code == 0
    after = json.loads(path.read_text())["cells"][1]["source"]
    rewritten = "".join(f"    {line}" if line.strip() else line for line in lines(REWRITTEN))
    assert after == "    text = '''\nleft\n'''\n    \n" + rewritten + "\n  \n"


def test_a_second_run_changes_nothing(tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": with_sources(lines, {})}))
    apply_to(path)
    once = path.read_bytes()
    assert apply_to(path, "--check").exit_code == 0
    assert path.read_bytes() == once


@pytest.mark.parametrize("cells", [[], [CELLS[0]], [{"cell_type": "code", "source": []}]])
def test_a_notebook_without_code_is_left_alone(tmp_path, cells):
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    done = apply_to(path)
    assert (done.exit_code, done.output) == (0, "nothing to rewrite: no training loop\n")


@pytest.mark.parametrize("magic", ["%time out = model(x)", "files = !ls {x}", "%timeit model(x)", "!echo $loss"])
def test_what_a_magic_reads_and_binds_is_known_to_the_rewrite(tmp_path, magic):
    """A forward behind `%time` goes into the function with the loss; what a magic reads later is returned."""
    path = tmp_path / "train.ipynb"
    timed = "out" in magic
    first = magic if timed else "out = model(x)"
    body = [first, "loss = nn.functional.cross_entropy(out, y)", "loss.backward()", "optimizer.step()"]
    body += [] if timed else [magic]
    loop = "for x, y in loader:\n    optimizer.zero_grad()\n" + "".join(f"    {line}\n" for line in body)
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": SETUP + loop}]}))
    done = apply_to(path)
    assert done.exit_code == 0, done.output
    after = json.loads(path.read_text())["cells"][0]["source"]
    if timed:
        assert "    def forward(x, y):\n        %time out = model(x)\n        loss = nn" in after
    else:
        assert f"    memory.step(optimizer)\n    {magic}\n" in after
    assert ("loss = memory.forward_backward(forward, x, y)" in after) is ("loss" in magic)


def test_a_magic_that_a_rewrite_moves_keeps_its_lines(tmp_path):
    path = tmp_path / "train.ipynb"
    loop = "for x in loader:\n    if True:\n        !echo \\\n  a\n        out = model(x)\n        print(out)\n"
    cells = [{"cell_type": "code", "source": f"import torch\nmodel.eval()\ntotal = 0\n{loop}"}]
    path.write_text(json.dumps({"cells": cells}))
    done = apply_to(path)
    assert done.exit_code == 0, done.output
    assert "        !echo \\\n  a\n" in json.loads(path.read_text())["cells"][0]["source"]


def test_a_fix_that_would_reach_over_cells_is_refused_in_words(monkeypatch, tmp_path):
    from oomfix.rewrite import files

    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": with_sources(lines, {})}))
    before = path.read_bytes()

    def indents_all(source, rules, options):
        text = "with torch.no_grad():\n" + "".join(f"    {line}" for line in lines(source.text))
        return files.Applied(text, (), (), ())

    monkeypatch.setattr(files, "apply_to", indents_all)
    done = apply_to(path)
    assert done.exit_code == 2
    assert "what would change reaches over several cells" in done.output
    assert path.read_bytes() == before


def test_a_cell_that_mixes_line_ends_is_left_alone_and_told(tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": SETUP + LOOP.replace("\n", "\r\n", 1)}]}))
    before = path.read_bytes()
    done = apply_to(path)
    assert done.exit_code == 2
    assert "cell 1: it mixes line ends" in done.output
    assert path.read_bytes() == before


def test_a_rewrite_that_loses_a_magic_is_refused(monkeypatch, tmp_path):
    from oomfix.rewrite import files

    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": with_sources(lines, {})}))
    before = path.read_bytes()

    def without_magics(source, rules, options):
        return files.Applied("".join(line for line in lines(source.text) if " magic " not in line), (), (), ())

    monkeypatch.setattr(files, "apply_to", without_magics)
    done = apply_to(path)
    assert done.exit_code == 2
    assert "cell 2: what would change moves its magics" in done.output
    assert path.read_bytes() == before


def test_a_broken_cell_is_told_and_the_others_are_rewritten(tmp_path):
    path = tmp_path / "train.ipynb"
    cells = [*with_sources(lines, {}), {"cell_type": "code", "source": "x = (\n"}]
    path.write_text(json.dumps({"cells": cells}))
    done = apply_to(path)
    assert done.exit_code == 2
    assert "cell 6: cannot parse: line 1: '(' was never closed" in done.output
    after = json.loads(path.read_text())["cells"]
    assert "".join(after[4]["source"]) == REWRITTEN
    assert after[5] == cells[5]


def test_notebooks_in_other_languages_are_an_error_only_where_they_are_named(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [], "metadata": {"language_info": {"name": "R"}}}))
    (tmp_path / "b.py").write_text("x = 1\n")
    assert apply_to(tmp_path).exit_code == 0
    done = apply_to(path)
    assert done.exit_code == 2
    assert "a notebook in R, expected Python" in done.output


def test_diff_and_json_name_the_cell(tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": with_sources(lines, {})}))
    before = path.read_bytes()
    diff = apply_to(path, "--diff").output
    assert f"--- a{path}, cell 5\n+++ b{path}, cell 5\n@@ -1,6 +1,8 @@\n" in diff
    assert "+    memory.step(optimizer)\n" in diff
    assert " magic " not in diff
    report = json.loads(apply_to(path, "--check", "--format", "json").output)
    assert report["loops"] == [
        {"path": str(path), "cell": 5, "line": 1, "end_line": 6, "rewrite": "micro-batched", "reason": None}
    ]
    cell = lines(LOOP)
    for edit in reversed([edit for edit in report["files"][0]["edits"] if edit["cell"] == 5]):
        cell[edit["line"] - 1 : edit["end_line"]] = [edit["replacement"]]
    assert "".join(cell) == REWRITTEN
    assert path.read_bytes() == before


def test_lines_of_other_cells_are_named_with_their_cell_and_what_holds_for_all_loops_is_said_once(tmp_path):
    path = tmp_path / "train.ipynb"
    look = "print(1)\nprint(model.weight.grad.norm())\n"
    cells = [{"cell_type": "code", "source": source} for source in (SETUP + LOOP, LOOP, look)]
    path.write_text(json.dumps({"cells": cells}))
    done = apply_to(path, "--check")
    reader = "line 2 of cell 3 reads `model.weight.grad`, a gradient that may be scaled"
    assert done.output.splitlines()[:3] == [
        f"{path}:cell 1:6  micro-batched",
        f"{path}:cell 1:6  losses are not scaled, so no fp16: {reader}",
        f"{path}:cell 2:1  micro-batched",
    ]
    cells[0]["source"] = SETUP + LOOP.replace("loss.backward()", "loss.backward(create_graph=True)")
    path.write_text(json.dumps({"cells": cells[:1]}))
    done = apply_to(path, "--check", "--format", "json")
    (loop,) = json.loads(done.stdout)["loops"]
    assert loop["reason"] == "the backward in line 9 keeps its graph for another one, or starts from a gradient"


def test_what_is_left_to_be_done_by_hand_is_named_with_its_cell(tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": with_sources(lines, {3: f'{MODEL}old = torch.load("old.pt")'})}))
    assert f"{path}:cell 4:5  OOM205 not fixed: " in apply_to(path).output
    path.write_text(
        json.dumps({"cells": with_sources(lines, {3: f'{MODEL}model.load_state_dict(torch.load("old.pt"))'})})
    )
    assert f"{path}:cell 4:5  OOM205 fixed" in apply_to(path).output


def test_a_cell_of_imports_ends_with_the_manager(tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": with_sources(lines, {1: IMPORTS.rstrip()})}))
    apply_to(path)
    cell = "".join(json.loads(path.read_text())["cells"][1]["source"])
    assert cell.endswith('\n\nmemory = runtime.preset("16gb")')


def test_the_manager_is_made_in_the_cell_that_imports_torch_and_not_in_one_that_may_be_left_out(tmp_path):
    path = tmp_path / "train.ipynb"
    drive = {"cell_type": "code", "metadata": {}, "outputs": [], "source": "from google.colab import drive\n"}
    cells = with_sources(lines, {})
    path.write_text(json.dumps({"cells": [*cells[:2], drive | {"source": lines(drive["source"])}, *cells[3:]]}))
    apply_to(path)
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    assert sources[1] == EXPECTED[1]
    assert sources[2] == drive["source"]


HELPER = """\
# one step
def update(loss):
    loss.backward()
    optimizer.step()"""
CALLED = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    update(loss)"""


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("before", [0, 1])
def test_a_cell_that_held_nothing_but_a_helper_that_is_written_out_goes(tmp_path, before, indent):
    path = tmp_path / "train.ipynb"
    named = {"a": lines(SETUP), "b": lines(CALLED)}
    kept = [{"cell_type": "code", "id": name, "outputs": [], "source": source} for name, source in named.items()]
    cells = list(kept)
    cells.insert(before, {"cell_type": "code", "id": "c", "metadata": {}, "outputs": [], "source": lines(HELPER)})
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=indent))
    result = RUN.invoke(apply, ["--preset", "16gb", str(path)])
    assert "`update` is written out where it was called" in " ".join(result.output.split())
    notebook = json.loads(path.read_text())
    assert [cell["id"] for cell in notebook["cells"]] == ["a", "b"]
    assert "memory.forward_backward(forward, x, y)\n    memory.step(optimizer)" in "".join(
        notebook["cells"][1]["source"]
    )
    assert path.read_text() == json.dumps(notebook, indent=indent)
    written = path.read_bytes()
    RUN.invoke(apply, ["--preset", "16gb", str(path)])
    assert path.read_bytes() == written


@pytest.mark.parametrize(("ahead", "outputs"), [("", [{"text": "said"}]), ("# steps\n\n", []), ("%precision 3\n", [])])
def test_a_cell_that_held_a_helper_and_more_stays(tmp_path, ahead, outputs):
    path = tmp_path / "train.ipynb"
    sources = [(SETUP, []), (ahead + HELPER, outputs), (CALLED, [])]
    cells = [{"cell_type": "code", "outputs": printed, "source": text} for text, printed in sources]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    RUN.invoke(apply, ["--preset", "16gb", str(path)])
    notebook = json.loads(path.read_text())
    assert [cell["outputs"] for cell in notebook["cells"]] == [[], outputs, []]
    assert notebook["cells"][1]["source"].strip() == ahead.strip()
    assert "memory.forward_backward" in notebook["cells"][2]["source"]


@pytest.mark.parametrize("gone", [{1}, {2}, {4}, {1, 2}, {3, 4}, {1, 4}, {2, 3, 4}])
@pytest.mark.parametrize("indent", [None, 2])
def test_cells_that_a_rewrite_empties_go_wherever_they_stand(gone, indent):
    cells = [{"cell_type": "code", "source": [f"a = {number}"], "outputs": []} for number in range(1, 5)]
    data = json.dumps({"cells": cells, "nbformat": 4}, indent=indent)
    left = [cell for number, cell in enumerate(cells, start=1) if number not in gone]
    expected = json.dumps({"cells": left, "nbformat": 4}, indent=indent)
    assert replace_sources(data.encode(), dict.fromkeys(gone, "\n")).decode() == expected
