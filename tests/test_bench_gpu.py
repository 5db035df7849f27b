"""One command runs what needs a GPU: parts that fail or hang are told, and do not keep the others from running."""

import os
import sys

import pytest

from bench import gpu


def test_parts_run_in_order_and_each_says_how_it_ended(monkeypatch, tmp_path, capfd):
    """A part that hangs is ended; what it wrote before stays."""
    said = tmp_path / "said.txt"
    monkeypatch.setattr(gpu, "TESTS", said)
    parts = {
        "tests": gpu.Part(("-c", "print('hanging'); import signal; signal.pause()"), 0.02),
        "breaks": gpu.Part(("-c", "raise SystemExit(3)"), 1),
        "works": gpu.Part(("-c", "import bench.gpu; print('worked')"), 1),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    endings = gpu.run_all(list(parts), 25)
    assert [ending.split(" after")[0] for ending in endings.values()] == ["ended", "failed", "done"]
    assert said.read_text() == "hanging\n"
    assert "worked" in capfd.readouterr().out
    assert gpu.run_all(["works"], 0.1)["works"].startswith("no time left")


def test_the_parts_fit_the_time_of_all_with_what_each_may_take():
    """Parts are ended by their own limits; together these may pass the 25 minutes, the first of them may not."""
    assert sum(gpu.PARTS[name].minutes for name in ("tests", "comparison", "calibration")) <= 25
    for part in gpu.PARTS.values():
        assert part.minutes <= 10


@pytest.mark.parametrize(("status", "ending"), [(0, "done"), (3, "failed")])
def test_what_the_parts_wrote_is_copied_and_told(monkeypatch, tmp_path, capfd, status, ending):
    results, copies = tmp_path / "results", tmp_path / "new" / "copies"
    results.mkdir()
    (results / "older.md").write_text("older")
    os.utime(results / "older.md", (0, 0))
    page = results / "techniques-cuda.md"
    script = f"import pathlib; pathlib.Path({str(page)!r}).write_text('page'); raise SystemExit({status})"
    monkeypatch.setattr(gpu, "RESULTS", results)
    monkeypatch.setattr(gpu, "PARTS", {"techniques": gpu.Part(("-c", script), 1)})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--parts", "techniques", "--to", str(copies)])
    assert gpu.main() == (status != 0)
    assert {path.name: path.read_text() for path in copies.iterdir()} == {"techniques-cuda.md": "page"}
    said = capfd.readouterr().out
    assert f"techniques: {ending} after " in said and "written: techniques-cuda.md" in said


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert "no CUDA device here" in capsys.readouterr().err
