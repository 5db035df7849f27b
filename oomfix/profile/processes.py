"""Processes that a script starts by itself: they see no simulated card, and no run waits for them for ever."""

import multiprocessing
from multiprocessing.process import BaseProcess

from oomfix.profile.patches import Patches
from oomfix.profile.refusals import CannotSimulate

_PATIENCE_SECONDS = 60.0


class Processes:
    """Watches over the processes that a script starts.

    Attributes:
        started: whether there were any.
    """

    def __init__(self, patches: Patches) -> None:
        self.started = False
        start, join = BaseProcess.start, BaseProcess.join

        def start_and_note(process: BaseProcess) -> None:
            self.started = True
            start(process)

        def join_for_a_while(process: BaseProcess, timeout: float | None = None) -> None:
            join(process, _PATIENCE_SECONDS if timeout is None else timeout)
            if timeout is None and process.is_alive():
                for child in multiprocessing.active_children():
                    child.kill()
                raise CannotSimulate(
                    f"it waits for a process that it started ({process.name}), and one process is simulated"
                )

        patches.set(BaseProcess, start=start_and_note, join=join_for_a_while)
