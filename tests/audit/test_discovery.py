"""Which files a path stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oomfix.discovery import Discovery


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    return tmp_path


def make(tree: Path, *names: str) -> None:
    for name in names:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def find(path: str, exclude: tuple[str, ...] = (), root: str | None = None) -> list[str]:
    return [found.path for found in Discovery().find(path, root or os.getcwd(), exclude)]


def test_python_files_and_notebooks_are_found_in_the_order_of_their_names(tree: Path):
    make(tree, "b.py", "a.ipynb", "a/z.py", "a-b/c.py", "notes.txt", "x.pyc")
    assert find(".") == ["a/z.py", "a-b/c.py", "a.ipynb", "b.py"]
    assert find("a") == ["a/z.py"]
    assert find("./a/") == ["a/z.py"]
    assert find(str(tree / "a")) == [str(tree / "a" / "z.py")]


def test_a_named_file_is_found_whatever_its_name(tree: Path):
    make(tree, "train", ".hidden.py", "build/x.py")
    assert find("train") == ["train"]
    assert find(".hidden.py") == [".hidden.py"]
    assert find("build/x.py") == ["build/x.py"]


def test_hidden_and_generated_folders_are_left_out_unless_named(tree: Path):
    folders = [".hidden", "__pycache__", "build", "lib/site-packages", "node_modules", "env"]
    make(tree, "a.py", "env/pyvenv.cfg", *(f"{folder}/x.py" for folder in folders))
    assert find(".") == ["a.py"]
    for folder in folders:
        assert find(folder) == [f"{folder}/x.py"]


def test_gitignores_are_respected_the_nearer_one_wins(tree: Path):
    make(tree, "a.py", "data/x.py", "sub/gen_1.py", "sub/keep.py", "sub/deep/gen_2.py", "sub/deep/gen_3.py")
    (tree / ".gitignore").write_text("# comment\n/data/\ngen_*.py\n!\n[z-a]\n")
    (tree / "sub" / "deep" / ".gitignore").write_text("!gen_2.py\n")
    assert find(".") == ["a.py", "sub/deep/gen_2.py", "sub/keep.py"]
    assert find("sub") == ["sub/deep/gen_2.py", "sub/keep.py"]


def test_an_ignored_folder_is_read_when_it_is_named(tree: Path):
    make(tree, "data/x.py", "data/y/z.py")
    (tree / ".gitignore").write_text("data/\n*.tmp\n")
    assert find("data") == ["data/x.py", "data/y/z.py"]
    assert find("data/y") == ["data/y/z.py"]
    assert find(".") == []


def test_a_gitignore_outside_of_the_repository_says_nothing(tree: Path):
    make(tree, "repository/a.py")
    (tree / ".gitignore").write_text("*.py\n")
    (tree / "repository" / ".git").mkdir()
    assert find("repository") == ["repository/a.py"]


def test_exclude_speaks_of_paths_under_the_root(tree: Path):
    make(tree, "a/old/x.py", "old/y.py", "a/z.py")
    assert find(".", exclude=("/old/",)) == ["a/old/x.py", "a/z.py"]
    assert find("a", exclude=("old/",), root=str(tree)) == ["a/z.py"]


def test_a_file_reached_by_two_links_is_found_once_under_its_real_name(tree: Path):
    make(tree, "real/x.py", "y.py")
    (tree / "another").symlink_to("real")
    (tree / "alias.py").symlink_to("y.py")
    assert find(".") == ["real/x.py", "y.py"]


def test_a_link_that_leads_out_of_the_folder_is_followed(tree: Path):
    make(tree, "outside/x.py", "inside/y.py")
    (tree / "inside" / "link").symlink_to("../outside")
    assert find("inside") == ["inside/link/x.py", "inside/y.py"]


def test_links_in_a_circle_end(tree: Path):
    make(tree, "a/x.py")
    (tree / "a" / "up").symlink_to("..")
    (tree / "a" / "self").symlink_to("self")
    assert find("a") == ["a/x.py"]


def test_paths_that_overlap_give_each_file_once(tree: Path):
    make(tree, "a/x.py", "a/y.py")
    discovery = Discovery()
    found = [[f.path for f in discovery.find(path, str(tree))] for path in ("a/x.py", "a", ".")]
    assert found == [["a/x.py"], ["a/y.py"], []]
    assert discovery.problems == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.py", "no such file or folder"),
        ("empty", "no Python files or notebooks in this folder"),
        ("ignored", "no Python files or notebooks in this folder (1 left out as ignored, hidden or generated)"),
        ("broken.py", "a link to nowhere.py, which does not exist"),
        ("pipe.py", "a FIFO, expected a file or folder"),
        ("/dev/null", "a character device, expected a file or folder"),
        ("x.py/y.py", "cannot read: Not a directory"),
    ],
)
def test_what_is_not_there_to_audit_is_said(tree: Path, path: str, message: str):
    make(tree, "x.py", "empty/notes.txt", "ignored/y.py")
    (tree / "ignored" / ".gitignore").write_text("y.py")
    (tree / "broken.py").symlink_to("nowhere.py")
    os.mkfifo(tree / "pipe.py")
    discovery = Discovery()
    assert discovery.find(path, str(tree)) == []
    assert discovery.problems == [(path, message)]


def test_a_walk_tells_what_it_cannot_read_and_goes_on(tree: Path):
    make(tree, "x.py")
    (tree / "broken.py").symlink_to("nowhere.py")
    (tree / ".#lock.py").symlink_to("user@host.1234")
    os.mkfifo(tree / "pipe.py")
    discovery = Discovery()
    assert [found.path for found in discovery.find(".", str(tree))] == ["x.py"]
    assert sorted(discovery.problems) == [
        ("broken.py", "a link to nowhere.py, which does not exist"),
        ("pipe.py", "a FIFO, expected a file"),
    ]


def test_a_folder_that_cannot_be_listed_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch):
    make(tree, "x.py", "closed/y.py")
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    discovery = Discovery()
    assert [found.path for found in discovery.find(".", str(tree))] == ["x.py"]
    assert discovery.problems == [("closed", "cannot read: Permission denied")]
