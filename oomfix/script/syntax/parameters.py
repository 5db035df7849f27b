"""Which argument of a call goes to which parameter of the function that it calls."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from oomfix.script.syntax.nodes import children

Argument = TypeVar("Argument")


@dataclass(frozen=True)
class Bound(Generic[Argument]):
    """Where the arguments of a call go.

    Attributes:
        given: parameters, each with the argument that it takes; `*args` and `**kwargs` may take several.
        perhaps: what the call unpacks, and what stands behind `*` there, with each parameter that may take some of it.
        missing: the parameters without a default to which nothing goes.
        spare: the arguments that no parameter takes.
        of_object: the parameter for the object whose method is called; None for any other call.
    """

    given: list[tuple[ast.arg, Argument]]
    perhaps: list[tuple[ast.arg, Argument]]
    missing: list[ast.arg]
    spare: list[Argument]
    of_object: ast.arg | None

    @property
    def fits(self) -> bool:
        """Whether a function can be called so."""
        return not self.missing and not self.spare

    @property
    def all(self) -> list[tuple[ast.arg, Argument]]:
        """What parameters take or may take."""
        return [*self.given, *self.perhaps]

    def arguments(self, name: str) -> Iterator[Argument]:
        """What the parameter of a name takes, for certain."""
        return (argument for parameter, argument in self.given if parameter.arg == name)


def bind(
    parameters: ast.arguments,
    placed: Sequence[Argument],
    named: Iterable[tuple[str | None, Argument]] = (),
    *,
    starred: int | None = None,
    of_object: bool = False,
) -> Bound[Argument]:
    """Where arguments go, whatever stands for them.

    Args:
        parameters: those of the function.
        placed: the arguments without a name.
        named: the others; what `**` unpacks has no name.
        starred: which of `placed` is the first that `*` unpacks: nobody knows how many these are.
        of_object: whether the first parameter takes the object whose method is called, and not the first of `placed`.
    """
    own, places = [], placed_parameters(parameters)
    if of_object:
        own, places = places[:1], places[1:]
    certain, unsure = placed[:starred], [] if starred is None else placed[starred:]
    pairs: list[tuple[ast.arg | None, Argument]] = list(
        zip(itertools.chain(places, itertools.repeat(parameters.vararg)), certain)  # noqa: B905
    )
    taken = {*own, *places[: len(certain)]}
    by_name = {one.arg: one for one in (*parameters.args, *parameters.kwonlyargs)}
    mappings = []
    for name, argument in named:
        taker = by_name.get(name or "", parameters.kwarg)
        if name is None:
            mappings.append(argument)
        else:
            pairs.append((None if taker in taken else taker, argument))
    given = [(taker, argument) for taker, argument in pairs if taker is not None]
    taken.update(taker for taker, _ in given)
    behind = [*(one for one in places[len(certain) :] if one not in taken), parameters.vararg]
    left = [*(one for one in by_name.values() if one not in taken), parameters.kwarg]
    perhaps = [(one, argument) for argument in unsure for one in behind if one is not None]
    perhaps += [(one, argument) for argument in mappings for one in left if one is not None]
    reached = {*taken, *defaults_of(parameters), *(one for one, _ in perhaps)}
    return Bound(
        given,
        perhaps,
        missing=[one for one in named_parameters(parameters) if one not in reached],
        spare=[argument for taker, argument in pairs if taker is None],
        of_object=own[0] if own else None,
    )


def bind_call(call: ast.Call, parameters: ast.arguments, *, of_object: bool = False) -> Bound[ast.expr]:
    """Where the arguments of a call go, as they are written."""
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]
    return bind(parameters, call.args, named, starred=first_unpacked(call), of_object=of_object)


def first_unpacked(call: ast.Call) -> int | None:
    """Which argument of a call is the first that `*` unpacks: those from there on may go to any parameter behind."""
    return next((place for place, one in enumerate(call.args) if isinstance(one, ast.Starred)), None)


def placed_parameters(parameters: ast.arguments) -> list[ast.arg]:
    """The parameters that take an argument without a name."""
    return [*parameters.posonlyargs, *parameters.args]


def named_parameters(parameters: ast.arguments) -> list[ast.arg]:
    """The parameters, but for `*args` and `**kwargs`."""
    return [*placed_parameters(parameters), *parameters.kwonlyargs]


def names_of_parameters(parameters: ast.arguments) -> set[str]:
    """The names that a function gives to its arguments, `*args` and `**kwargs` too."""
    return {node.arg for node in children(parameters) if isinstance(node, ast.arg)}


def defaults_of(parameters: ast.arguments) -> dict[ast.arg, ast.expr]:
    """The parameters that have a default, with that."""
    places = placed_parameters(parameters)
    found = dict(zip(places[len(places) - len(parameters.defaults) :], parameters.defaults, strict=True))
    by_name = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    return found | {one: default for one, default in by_name if default is not None}


def name_of_object(parameters: ast.arguments) -> str | None:
    """What a method calls its object, or a class method its class; None for what begins with another parameter."""
    first = [one.arg for one in placed_parameters(parameters)[:1]]
    return first[0] if first and first[0] in ("self", "cls") else None


def decorated_as(function: ast.AST, name: str) -> bool:
    """Whether a function is a "staticmethod" or "classmethod", by its decorators."""
    return any(isinstance(one, ast.Name) and one.id == name for one in getattr(function, "decorator_list", ()))
