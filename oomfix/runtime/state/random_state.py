"""Random number generators of torch, Python, NumPy and of the program's own, set back to where they were."""

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class OutsideTorch:
    """The state of Python's and NumPy's random number generators when it was made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        # through the package: numpy 2 imports its generators when they are first used, in the forward perhaps
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)

    def moved(self) -> bool:
        """Whether one of them has been drawn from since."""
        if random.getstate() != self._python:
            return True
        return self._numpy is not None and not _same(sys.modules["numpy"].random.get_state(legacy=False), self._numpy)

    def restore(self) -> None:
        """Set them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class RandomState:
    """The state of random number generators when it was made.

    Args:
        outside_torch: Python's and NumPy's too, which takes longer than all of torch's.
        own: generators that the program made for itself.
        of_cpu: torch's for the CPU, a copy of 5 kB.
    """

    def __init__(self, outside_torch: bool = True, own: Iterable[Any] = (), of_cpu: bool = True) -> None:
        self._cpu = torch.get_rng_state() if of_cpu else None
        # asking a GPU before CUDA runs would start it
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._own = [(generator, _state_of(generator)) for generator in own]
        self._outside = OutsideTorch() if outside_torch else None

    def moved(self) -> bool:
        """Whether any of the generators has been drawn from since."""
        if self.moved_on_cpu():
            return True
        if self._cuda is not None and not torch.equal(torch.cuda.get_rng_state(), self._cuda):
            return True
        return self.moved_outside_torch() or any(not _same(_state_of(own), state) for own, state in self._own)

    def moved_on_cpu(self) -> bool:
        """Whether torch's generator for the CPU has been drawn from since; False if it was not kept."""
        return self._cpu is not None and not torch.equal(torch.get_rng_state(), self._cpu)

    def moved_outside_torch(self) -> bool:
        """Whether Python's or NumPy's generator has been drawn from since; False if these were not kept."""
        return self._outside is not None and self._outside.moved()

    def moved_besides_torch(self) -> bool:
        """Whether a generator of Python or NumPy, the program's own ones too, has been drawn from since."""
        owned = [(own, state) for own, state in self._own if not isinstance(own, torch.Generator)]
        return self.moved_outside_torch() or any(not _same(_state_of(own), state) for own, state in owned)

    def restore_besides_torch(self) -> None:
        """Set the generators of Python and NumPy back, the program's own ones too."""
        for generator, state in self._own:
            if not isinstance(generator, torch.Generator):
                _set_state(generator, state)
        if self._outside is not None:
            self._outside.restore()

    def draw_ahead(self, count: int) -> None:
        """Draw `count` numbers from every generator of Python or NumPy, so that others follow."""
        numpy: Any = sys.modules.get("numpy")
        owned = [own for own, _ in self._own if not isinstance(own, torch.Generator)]
        for generator in (random, *([] if numpy is None else [numpy.random]), *owned):
            for _ in range(count):
                generator.random()

    def restore(self) -> None:
        """Set the generators back."""
        if self._cpu is not None:
            torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for generator, state in self._own:
            _set_state(generator, state)
        if self._outside is not None:
            self._outside.restore()


def is_generator(value: Any) -> bool:
    """Whether `value` is a random number generator of torch, Python or NumPy that a program holds itself."""
    kind = type(value)
    known = _is_generator_type.get(kind)
    if known is None:
        numpy: Any = sys.modules.get("numpy")
        of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
        known = _is_generator_type[kind] = issubclass(kind, (torch.Generator, random.Random, *of_numpy))
    return known


_is_generator_type: dict[type, bool] = {}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_same(state[key], other[key]) for key in state)
    if isinstance(state, tuple):
        return all(map(_same, state, other))
    same = state == other
    return bool(same if isinstance(same, bool) else same.all())  # of numbers, or of arrays and tensors


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
