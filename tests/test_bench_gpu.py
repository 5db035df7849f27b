"""One command runs what needs a GPU: parts that fail or hang are told, and do not keep the others from running."""

import sys

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


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert "no CUDA device here" in capsys.readouterr().err
