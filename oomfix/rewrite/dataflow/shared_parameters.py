"""Which networks an optimizer steps or a clip looks at, and whether two of them may share parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from oomfix.rewrite.dataflow.bindings import bindings
from oomfix.rewrite.dataflow.changes import overlap
from oomfix.rewrite.dataflow.given_parameters import GivenParameters
from oomfix.script import Script
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of, children, walk
from oomfix.script.syntax.patterns import Pattern

_OF_NETWORKS = frozenset("parameters named_parameters modules named_modules children named_children".split())
_ADDING = frozenset({"append", "extend", "add_param_group"})
_SETTINGS = Pattern(
    r"(^|_)(args|arguments|cfg|config|conf|opt|opts|option|options|flags|hparams|params|settings|device|dtype|vocab|"
    r"tokenizer|size|shape|dim|seed)$",
    re.IGNORECASE,
)
_GIVES_NUMBERS = frozenset("len int float max min sum range device".split())


class SharedParameters:
    """Says whether optimizers of a file may step the same parameters, under any names that the file gives networks.

    Args:
        script: the script.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        parameters = GivenParameters(script)
        self._bound = {name: list(values) for name, values in parameters.given.items() if name not in parameters.unseen}
        self._unseen = parameters.unseen
        self._classes = {node.name: node for node in script.imports.nodes.of(ast.ClassDef)}
        for node in script.imports.nodes:
            for target, value in (*bindings(node), *_added(node)):
                if (path := path_of(target)) is not None:
                    self._bound.setdefault(path, []).append(value)

    def may_be_shared(self, optimizer: str, other: str) -> bool:
        """Whether two optimizers, given by path, may step the same parameters; one from elsewhere may step any."""
        own, others = self._stepped(optimizer), self._stepped(other)
        return optimizer == other or not own or not others or self._have_common(own, others)

    def is_made_for(self, optimizer: str, network: str) -> bool:
        """Whether an optimizer is seen to step all of a network, by its path."""
        return network in self._stepped(optimizer)

    def is_made_for_all(self, optimizer: str, network: str) -> bool:
        """Whether an optimizer is seen to step one network and nothing else: `Adam(net.parameters())`.

        Names that functions have for them are theirs wherever they are given no others.
        """
        made = [value for value in self._bound.get(optimizer, ()) if path_of(value) != optimizer]
        others = {path_of(value) for value in self._bound.get(network, ())} - {None, network}
        return (
            bool(made)
            and not others
            and self._unseen.isdisjoint((optimizer, network))
            and all(
                isinstance(value, ast.Call)
                and self._script.is_optimizer_class(value.func)
                and [ast.unparse(given) for given in value.args[:1]] == [f"{network}.parameters()"]
                for value in made
            )
        )

    def may_have_parts_in_common(self, network: str, other: str) -> bool:
        """Whether one of two networks may be a part of the other, or have one in common with it."""
        for path in (network, other):
            made = self._bound.get(path, [])
            if path in self._unseen or not made or not all(isinstance(value, ast.Call) for value in made):
                return True
        return self._have_common(*(set(self._with_parts(path, set())) for path in (network, other)))

    def may_be_given(self, optimizer: str, call: ast.Call) -> bool:
        """Whether a call, such as a clip, may be given parameters that an optimizer steps."""
        given = {path for argument in arguments_of(call) for path in self._networks_in(argument, set())}
        own = self._stepped(optimizer)
        return not own or optimizer in given or self._have_common(own, given)

    def may_be_read(self, optimizer: str, paths: set[str]) -> bool:
        """Whether what an optimizer steps may be read by one of these paths, or by what they are made of."""
        own = self._stepped(optimizer)
        return not own or overlap(self._parts_of(own), self._parts_of(paths))

    def _parts_of(self, paths: set[str]) -> set[str]:
        """Paths, what they are made of, and what is put into them; `a` for `a[0]`."""
        parts = {part.split("[")[0] for path in paths for part in self._with_parts(path, set())}
        return parts | self._put_into(paths)

    def _have_common(self, networks: set[str], others: set[str]) -> bool:
        """Whether networks are, have put into them or share a third one: `critic.body = body`, `b[0] = a[0]`."""
        inner, inner_of_others = self._put_into(networks), self._put_into(others)
        if overlap(networks | inner, others) or overlap(networks, others | inner_of_others):
            return True
        third = (set(filter(self._may_be_network, paths)) for paths in (inner, inner_of_others))
        return overlap(*third)

    def _put_into(self, paths: set[str]) -> set[str]:
        """What is put into what the paths are: `critic.body` and `body` for `critic.body = body`."""
        starts = tuple(f"{path}{sign}" for path in paths for sign in ".[")
        inner = [path for path in self._bound if path.startswith(starts)]
        return {part.split("[")[0] for path in inner for part in self._with_parts(path, set())}

    def _stepped(self, optimizer: str) -> set[str]:
        """The networks that an optimizer is made for; empty where that is not seen."""
        own = self._made_for(optimizer, set())
        owner, _, name = optimizer.rpartition(".")
        itself = owner != "self" and self._steps_itself(owner, name, set())
        return own or (set(self._with_parts(owner, set())) if itself else set())

    def _steps_itself(self, owner: str, name: str, seen: set[str]) -> bool:
        """Whether all that a path may be makes itself an optimizer: `self.optimizer = Adam(self.parameters())`."""
        seen.add(owner)
        named = [(value, path_of(value)) for value in self._bound.get(owner, ()) if path_of(value) not in seen]
        return (
            bool(named)
            and owner not in self._unseen
            and all(
                self._steps_itself(path, name, seen) if path is not None else self._makes_own(value, name)
                for value, path in named
            )
        )

    def _makes_own(self, value: ast.expr, name: str) -> bool:
        """Whether a call makes an object of the file whose attribute is an optimizer of all that it is made of."""
        owner = self._classes.get(last_name(value)) if isinstance(value, ast.Call) else None
        made = (
            [one for node in walk(owner) for target, one in bindings(node) if path_of(target) == f"self.{name}"]
            if owner
            else []
        )
        return bool(made) and all(
            isinstance(one, ast.Call)
            and self._script.is_optimizer_class(one.func)
            and [ast.unparse(given) for given in one.args[:1]] == ["self.parameters()"]
            for one in made
        )

    def _made_for(self, optimizer: str, seen: set[str]) -> set[str]:
        """The networks that an optimizer is made for under this name, or under that which a parameter is given."""
        seen.add(optimizer)
        found: set[str] = set()
        for value in self._bound.get(optimizer, ()):
            path = path_of(value)
            if path is not None and path not in seen | self._unseen:
                found |= self._made_for(path, seen)
            for call in _calls_that_give(value):
                given = arguments_of(call)
                if self._script.is_optimizer_class(call.func):
                    named = [one.value for one in call.keywords if one.arg == "params"]
                    given = [*call.args[:1], *named]
                found |= {path for one in given for path in self._networks_in(one, {optimizer})}
        return found - {optimizer}

    def _networks_in(self, node: ast.AST, seen: set[str]) -> Iterator[str]:
        """The paths that an expression takes parameters from, each with what that was made of."""
        if isinstance(node, ast.Dict):
            # of a group of parameters, its rate and the like say nothing
            pairs = zip(node.keys, node.values, strict=True)
            group = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "params"]
            for value in group or node.values:
                yield from self._networks_in(value, seen)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_NETWORKS:
            yield from self._networks_in(node.func.value, seen)
        elif isinstance(node, ast.Call):
            for argument in arguments_of(node):
                yield from self._networks_in(argument, seen)
        elif isinstance(node, ast.expr) and (path := path_of(node)) is not None:
            yield from self._with_parts(path, seen)
        elif not isinstance(node, ast.Lambda):
            for child in children(node):
                yield from self._networks_in(child, seen)

    def _with_parts(self, path: str, seen: set[str]) -> Iterator[str]:
        """A path, and what it is made of: `encoder` for the `critic` of `critic = Critic(encoder)`."""
        if path in seen:
            return
        seen.add(path)
        yield path
        for value in self._bound.get(path, ()):
            makes = isinstance(value, ast.Call) and last_name(value) not in _OF_NETWORKS
            for other in self._networks_in(value, seen):
                if not makes or self._may_be_network(other):
                    yield other

    def _may_be_network(self, path: str) -> bool:
        """Whether something that a network was made with may be a network itself: no setting, and made by a call."""
        if any(map(_SETTINGS.search, path.split("."))):
            return False
        made = (call for value in self._bound.get(path, ()) for call in _calls_that_give(value))
        return any(last_name(call) not in _GIVES_NUMBERS for call in made)


def _added(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is added to a list: `params += list(net.parameters())`, `params.extend(net.parameters())`."""
    if isinstance(node, ast.AugAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        for argument in node.args:
            yield node.func.value, argument


def _calls_that_give(value: ast.expr) -> Iterator[ast.Call]:
    """The calls whose result an expression may be: `A(x) if big else B(x)` is that of either."""
    if isinstance(value, ast.IfExp):
        yield from _calls_that_give(value.body)
        yield from _calls_that_give(value.orelse)
    elif isinstance(value, ast.Call):
        yield value
