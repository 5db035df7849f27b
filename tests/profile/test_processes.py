"""Scripts that start processes of their own: they are told apart, and none is waited for without end."""

import pytest

from oomfix.profile import processes
from oomfix.profile.refusals import CannotSimulate

STARTS = """
import multiprocessing

def work(lock):
    lock.acquire()

context = multiprocessing.get_context("fork")
lock = context.Lock()
{before}
process = context.Process(target=work, args=(lock,))
process.start()
process.join()
"""


def test_a_process_that_waits_for_others_is_not_waited_for(simulate, monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(CannotSimulate, match="it waits for a process that it started"):
        simulate(STARTS.format(before="lock.acquire()"))


def test_where_all_work_is_done_by_other_processes_that_is_said(simulate):
    with pytest.raises(CannotSimulate, match="is it what it starts other processes for"):
        simulate(STARTS.format(before=""))
