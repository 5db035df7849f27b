"""Threads of a script work on the simulated card: what they move counts, and what ends them ends the run."""

import textwrap

import pytest

from oomfix.profile import run as runner

START = """
    import queue
    import threading
    from concurrent.futures import ThreadPoolExecutor
    import torch
    from torch import nn

    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x in batches:
            assert x.is_cuda and x.device == torch.device("cuda", 0)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
MAIN = "train(torch.randn(256, 1024).cuda() for _ in range(4))"
PREFETCHER = """
    class Prefetcher(threading.Thread):
        def __init__(self):
            super().__init__(daemon=True)
            self.ready, self.stream = queue.Queue(maxsize=1), torch.cuda.Stream()

        def run(self):
            for _ in range(4):
                with torch.cuda.stream(self.stream):
                    self.ready.put(torch.randn(256, 1024).pin_memory().to("cuda", non_blocking=True))
            self.ready.put(None)

    prefetcher = Prefetcher()
    prefetcher.start()
    train(iter(lambda: prefetcher.ready.get(timeout=20), None))
"""
POOL = """
    with ThreadPoolExecutor(2) as pool:
        train(pool.map(lambda _: torch.zeros(256, 1024, device="cuda"), range(4)))
"""
BESIDE = """
    thread = threading.Thread(target=train, args=([torch.randn(256, 1024).cuda() for _ in range(1)] * 4,))
    thread.start()
    thread.join()
"""


@pytest.fixture
def simulate(tmp_path):
    def simulated(code, **options):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(START) + textwrap.dedent(code))
        found = runner.run(str(script), [], steps=3, **options)
        assert found["error"] is None, found["error"]
        return found

    return simulated


@pytest.mark.parametrize("code", [PREFETCHER, POOL, BESIDE], ids=["a prefetcher", "a pool", "training in a thread"])
def test_what_threads_move_and_make_counts(simulate, code):
    found, alone = simulate(code), simulate(MAIN)
    assert found["stopped"] and len(found["steps"]) == 3
    assert found["breakdown"]["weights"] == alone["breakdown"]["weights"]
    # a batch of 1 MiB, and those that wait
    batches = (found["peak_allocated_bytes"] - alone["peak_allocated_bytes"]) / 2**20
    assert 0 <= batches <= 4


def test_a_thread_that_runs_out_of_memory_ends_the_run(simulate):
    # a batch of 64 MiB fits, what the layer makes of it does not
    found = simulate(BESIDE.replace("256", "2**14"), budget_bytes=100 * 2**20)
    assert "out of memory" in found["out_of_memory"]


def test_a_thread_of_its_own_does_not_say_where_the_main_thread_is(simulate):
    """Inside an operation fake tensors are on the host; other threads see them on the card all the same."""
    code = """
        stop = threading.Event()
        seen = set()

        def watch():
            while not stop.is_set():
                seen.add(str(model.weight.device))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for _ in range(300):
            model(torch.zeros(8, 1024, device="cuda"))
        stop.set()
        watcher.join()
        assert seen == {"cuda:0"}, seen
    """
    simulate(code)
