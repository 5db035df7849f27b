"""Variables that a function assigns outside of itself, looked at as if they were attributes of an object."""

import dis
import functools
import types
from collections.abc import Iterator, MutableMapping
from typing import Any


class Variables(MutableMapping[str, Any]):
    """The variables outside of `function` that it assigns: those it calls nonlocal or global, as far as bound."""

    def __init__(self, function: types.FunctionType) -> None:
        code = function.__code__
        nonlocals, self._of_module = assigned_outside(code)
        closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in closure if name in nonlocals}
        self._globals = function.__globals__

    def __getitem__(self, name: str) -> Any:
        if name not in self._cells:
            return self._globals[name]
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            del self._globals[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in (*self._cells, *self._of_module) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.lru_cache(maxsize=256)
def assigned_outside(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names that `code`, or a function inside it, assigns in an enclosing function, and in the module."""
    nonlocals: set[str] = set()
    of_module: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF"):
            nonlocals.add(instruction.argval)
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            of_module.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = assigned_outside(constant)
            nonlocals |= inner
            of_module |= more
    return frozenset(nonlocals & {*code.co_freevars}), frozenset(of_module)
