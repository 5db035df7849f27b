"""The arrows of the design: which parts of the package may import which."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "oomfix"
FILES = {
    ".".join(("oomfix", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import that may run, those inside of functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from statements(child)


def imported(path: Path) -> set[str]:
    """The modules that a file imports; of the package, those whose names it takes."""
    found = set()
    for statement in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        else:
            inner = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= {name if name in FILES else str(statement.module) for name in inner}
    return found


IMPORTS = {module: imported(path) for module, path in FILES.items()}


def part_of(module: str) -> str:
    """The folder or file at the top of the package that a module is in."""
    return ".".join(module.split(".")[:2])


def test_no_file_imports_what_imports_it():
    own = {module: {name for name in names if name in FILES} - {module} for module, names in IMPORTS.items()}
    try:
        TopologicalSorter(own).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def folder_of(module: str) -> str:
    """The folder inside of a part that a module is in; the module itself where it is in none."""
    return ".".join(module.split(".")[:3])


@pytest.mark.parametrize("part", ["oomfix.script", "oomfix.rewrite", "oomfix.runtime"])
def test_the_folders_of_a_part_import_each_other_one_way_only(part):
    arrows: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        if module.startswith(part):
            folder = folder_of(module)
            inside = {folder_of(name) for name in names if name in FILES and name.startswith(part)}
            arrows.setdefault(folder, set()).update(inside - {folder})
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    ("part", "below"),
    [
        ("oomfix.runtime", {"oomfix.presets"}),
        ("oomfix.presets", set()),
        ("oomfix.source", {"oomfix.parsing", "oomfix.notebook"}),
        ("oomfix.script", {"oomfix.source"}),
        ("oomfix.rules", {"oomfix.script", "oomfix.source"}),
    ],
)
def test_a_part_imports_only_what_lies_below_it(part, below):
    inside = {part_of(name) for module in FILES if part_of(module) == part for name in IMPORTS[module]}
    assert {name for name in inside if name.startswith("oomfix.")} - {part} <= below


def test_only_what_trains_or_simulates_imports_torch():
    using = {
        part_of(module) for module, names in IMPORTS.items() if any(name.split(".")[0] == "torch" for name in names)
    }
    assert using == {"oomfix.runtime", "oomfix.profile", "oomfix.equivalence"}


def test_what_runs_beside_a_training_imports_nothing_of_the_command_line():
    beside = {"oomfix.runtime", "oomfix.profile", "oomfix.equivalence"}
    heavy = {"click", "rich", "libcst"}
    found = {
        (module, name)
        for module, names in IMPORTS.items()
        for name in names
        if part_of(module) in beside and name.split(".")[0] in heavy
    }
    assert found <= {("oomfix.profile.command", "click"), ("oomfix.profile.progress", "rich.progress")}


def test_the_simulation_knows_one_file_of_the_runtime():
    """What it changes there for a while is written down there, where whoever changes a check sees it."""
    used = {name for module in FILES if part_of(module) == "oomfix.profile" for name in IMPORTS[module]}
    assert {name for name in used if name.startswith("oomfix.runtime")} == {"oomfix.runtime.simulation"}


@pytest.mark.parametrize("module", [name for name in FILES if part_of(name) in ("oomfix.script", "oomfix.rewrite")])
def test_what_every_audit_imports_compiles_no_regular_expression_at_once(module):
    """`Pattern` compiles those that are used: all of them take as long as following a script of 250 lines."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    at_once = (node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef))
    paths = {ast.unparse(node) for part in at_once for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    assert "re.compile" not in paths
