"""Results of earlier runs: taken when nothing changed, and only then."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from oomfix.audit import Auditor
from oomfix.cache import Cache, State, digest
from oomfix.discovery import Discovery
from oomfix.results import FileReport
from oomfix.rules import all_rules
from oomfix.runner import Job, run

LOAD = 'import torch\nx = torch.load("a.pt")  # oomfix: ignore[OOM101]\ny = torch.load("b.pt")\n'
LONG_AGO = 1_600_000_000


class CountingAuditor(Auditor):
    """Counts the files that are really audited."""

    def __init__(self) -> None:
        super().__init__(all_rules())
        self.audited: list[str] = []

    def audit(self, path, data, target_torch=None, *, parse_always=False) -> FileReport:
        self.audited.append(os.path.basename(path))
        return super().audit(path, data, target_torch, parse_always=parse_always)


class Project:
    """A folder that is audited again and again with one cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        self.caches = folder / "cache"

    def write(self, name: str, text: str, written: float | None = LONG_AGO) -> None:
        (self.folder / name).write_text(text)
        if written is not None:
            os.utime(self.folder / name, (written, written))

    def audit(self, version: str = "1", named: str | None = None) -> tuple[list[str], list[FileReport]]:
        """The names of the files that had to be audited, and all reports."""
        cache = Cache(str(self.caches), str(self.folder), version)
        auditor = CountingAuditor()
        found = Discovery().find(str(self.folder / named if named else self.folder), str(self.folder))
        reports = run(auditor, [Job(file, None, cache) for file in found], 1)
        cache.save()
        return sorted(auditor.audited), reports

    def cache_file(self) -> Path:
        (file,) = self.caches.iterdir()
        return file


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    # the state change time cannot be set back, so the clock is set forward: what was written now is old
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 60_000_000_000)
    return Project(tmp_path)


def test_what_did_not_change_is_not_audited_again_and_reported_the_same(project: Project):
    project.write("a.py", LOAD)
    project.write("b.py", "x = 1\n")
    project.write("c.py", "x = (\nbackward")
    project.write("d.py", "for x in y:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n")
    first, reports = project.audit()
    second, again = project.audit()
    assert first == ["a.py", "b.py", "c.py", "d.py"]
    assert second == []
    assert again == reports
    assert [len(report.findings) for report in reports[:3]] == [2, 0, 0]
    assert len(reports[3].loops) == 1


def test_a_file_whose_content_changed_is_audited_again_even_if_its_size_and_time_did_not(project: Project):
    project.write("a.py", LOAD)
    project.audit()
    project.write("a.py", LOAD.replace("load", "save"))
    audited, (report,) = project.audit()
    assert audited == ["a.py"]
    assert report.findings == ()


def test_a_touched_file_is_read_but_not_audited(project: Project):
    project.write("a.py", LOAD)
    _, reports = project.audit()
    project.write("a.py", LOAD, written=LONG_AGO + 5)
    assert project.audit() == ([], reports)


def test_a_file_written_as_it_was_read_is_not_believed_by_its_time(tmp_path: Path):
    """Two writes within one tick of the clock, the second one behind the audit's back."""
    project = Project(tmp_path)
    project.write("a.py", LOAD, written=None)
    project.audit()
    (entry,) = json.loads(project.cache_file().read_bytes().split(b"\n", 1)[1]).values()
    assert entry[0] is None
    assert entry[1] == digest(LOAD.encode())


def test_a_file_from_the_future_is_not_believed_by_its_time(project: Project):
    project.write("a.py", LOAD, written=time.time() + 1_000_000)
    project.audit()
    (entry,) = json.loads(project.cache_file().read_bytes().split(b"\n", 1)[1]).values()
    assert entry[0] is None


def test_another_version_starts_anew(project: Project):
    project.write("a.py", LOAD)
    project.audit()
    assert project.audit(version="2")[0] == ["a.py"]
    assert project.audit(version="2")[0] == []


@pytest.mark.parametrize("damage", [b"", b"\0" * 40, b"oomfix cache 1 00000000\n{}", None, "cut", "flip"])
def test_a_damaged_cache_is_ignored_and_written_anew(project: Project, damage: bytes | str | None):
    project.write("a.py", LOAD)
    _, reports = project.audit()
    file = project.cache_file()
    content = file.read_bytes()
    if damage is None:
        file.unlink()
        file.mkdir()
    else:
        broken = {"cut": content[:-20], "flip": content.replace(b"OOM205", b"OOM204")}
        file.write_bytes(broken[damage] if isinstance(damage, str) else damage)
    assert project.audit() == (["a.py"], reports)
    if damage is not None:
        assert file.read_bytes() == content


def test_a_file_that_is_named_is_parsed_although_the_walk_had_passed_over_it(project: Project):
    project.write("a.py", "x = (\n")
    assert project.audit()[1] == [FileReport(parsed=False)]
    audited, (report,) = project.audit(named="a.py")
    assert audited == ["a.py"]
    assert report.errors == ("cannot parse: line 1: '(' was never closed",)
    assert project.audit(named="a.py") == ([], [report])


def test_two_processes_keep_what_the_other_wrote(project: Project):
    project.write("a.py", LOAD)
    project.write("b.py", LOAD)
    one = Cache(str(project.caches), str(project.folder), "1")
    other = Cache(str(project.caches), str(project.folder), "1")
    for cache, name in ((one, "a.py"), (other, "b.py")):
        path = project.folder / name
        cache.put(str(path), State.of(path.stat()), digest(LOAD.encode()), FileReport(errors=(name,)))
        cache.save()
    third = Cache(str(project.caches), str(project.folder), "1")
    assert [third.knows(str(project.folder / name)) for name in ("a.py", "b.py")] == [True, True]


def test_files_that_are_gone_leave_the_cache(project: Project):
    project.write("a.py", LOAD)
    project.write("b.py", LOAD)
    project.audit()
    (project.folder / "a.py").unlink()
    project.write("c.py", LOAD)
    project.audit()
    names = {Path(path).name for path in json.loads(project.cache_file().read_bytes().split(b"\n", 1)[1])}
    assert names == {"b.py", "c.py"}


def test_a_cache_folder_that_cannot_be_made_costs_only_time(project: Project):
    project.write("a.py", LOAD)
    project.caches.write_text("a file stands where the folder should")
    assert project.audit()[0] == ["a.py"]
    assert project.audit()[0] == ["a.py"]


def test_nothing_but_the_cache_file_is_left(project: Project):
    project.write("a.py", LOAD)
    project.audit()
    assert len(list(project.caches.iterdir())) == 1
    assert [path.name for path in project.folder.iterdir()] == ["a.py"]
