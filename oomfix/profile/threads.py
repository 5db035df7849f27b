"""Threads of a script (prefetchers, pools, training beside a server) see the card as the main thread does."""

import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from oomfix.profile.boundary import CardTrace
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.patches import Patches
from oomfix.profile.progress import EnoughSteps


class Threads:
    """Lets threads that the script starts work on the simulated card.

    Args:
        patches: where `threading` is patched.
        trace: what their operations are written down in.
    """

    def __init__(self, patches: Patches, trace: CardTrace) -> None:
        self._trace = trace
        self._ended: BaseException | None = None
        start = threading.Thread.start

        def start_on_card(thread: threading.Thread) -> None:
            run = thread.run
            thread.run = lambda: self._run(run)  # type: ignore[method-assign]
            start(thread)

        patches.set(threading.Thread, start=start_on_card)

    def _run(self, run: Any) -> None:
        try:
            with _Elsewhere(self._trace):
                run()
        except (EnoughSteps, OutOfMemoryError) as exception:
            self._ended = self._ended or exception

    def raise_what_ended_one(self) -> None:
        """Once the main thread is done: raise what ended another.

        Raises:
            EnoughSteps: it had trained for as many steps as were asked for.
            OutOfMemoryError: it ran out of memory.
        """
        if self._ended is not None:
            raise self._ended


class _Elsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The trace in another thread: dispatch modes are those of one thread."""

    def __init__(self, trace: CardTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.__torch_dispatch__(func, types, args, kwargs)
