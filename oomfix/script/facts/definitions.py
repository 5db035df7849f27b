"""The functions and classes of a file."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from oomfix.script.facts.as_arrays import gives_arrays, mentions_arrays
from oomfix.script.facts.named_like import runs_network
from oomfix.script.facts.values import Kind, Value
from oomfix.script.syntax.names import last_of, path_of, unpacked
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.parameters import decorated_as, named_parameters
from oomfix.script.syntax.patterns import Pattern

if TYPE_CHECKING:
    from oomfix.script.interpreter.state import Frame

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# `act`, `select_action`, `get_greedy_action`, `sampleActions`, `action_epsilon_greedy`
_ACTING = (
    r"(?:select|choose|take|pick|get|sample|compute|decide|greedy|best|optimal)_?(?:\w+_)?actions?|"
    r"actions?_(?:e|eps|epsilon|greedy|softmax|boltzmann)(?:_greedy)?|act"
)
_EVALUATION_NAME = Pattern(
    r"(^|_)(eval|evaluate|evaluation|evaluator|val|valid|validate|validation|test|testing|tester|infer|inference|predict|prediction|"
    r"predictions|dev|score|demo|generate|sample|visuali[sz]e|embed|(greedy|beam)_(decode|search))(_|$|\d)|"
    rf"(^|_)({_ACTING})(_|$|\d)|"
    r"^(eval|valid|test|infer|predict|(plot|show|display)_|save_(?!.*(model|checkpoint|ckpt|state|weight)))",
    re.IGNORECASE,
)
# what is predicted or sampled has a loss in training, where `val_loss` and `estimate_loss` say that they evaluate;
# `critic_val` is a value;
# a policy is asked for the probabilities of actions again by a loss, and a sample of experience is kept for one
_FOR_TRAINING = Pattern(
    r"(^|_)(predict\w*|generate|sample|score|embed|actions?)_(\w+_)?loss(_|$|\d)|(^|_)eval(uate)?_(log_?probs?_)?actions?$|"
    r"(^|_)(critic|state|action|q)_val(_|$)|(^|_)(append|add|store|push|insert|remember)_samples?$|(^|_)(sample|generate)_(\w+_)?(traj\w*|paths?|rollouts?|episodes?)$",
    re.IGNORECASE,
)
_ACTING_NAME = Pattern(rf"(^|_)({_ACTING})(_|$|\d)", re.IGNORECASE)
_MODULE_BASE = Pattern(
    r"(^|\.)(Module|PreTrainedModel|\w*Model|\w*Net|\w*Module|\w*For[A-Z]\w*(LM|Classification|Generation|Answering|Training|Detection|Segmentation))$"
)
_MAKING = Pattern(r"^_*(set|build|make|create|init|setup|define)(_|$)")
"""Methods that a constructor out of sight calls, by their names."""
_OF_MODULES = ("parameters", "named_parameters", "modules", "named_modules", "register_buffer", "register_parameter")
_TRANSFORMERS_TRAINER = Pattern(r"^(transformers|trl|sentence_transformers)\.(.*\.)?\w*Trainer$")
_MOST_NAMED_LIKE = 4
_LIGHTNING_BASE = Pattern(r"(^|\.)(LightningModule|LightningDataModule)$")


@dataclass(eq=False)
class Function:
    """A function, method or lambda, with the frame it was defined in."""

    node: FunctionNode
    name: str
    closure: Frame
    owner: Class | None = None
    effects: list[Value] = field(default_factory=list)
    """Contexts that its decorators put around its body."""
    calls: int = 0

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Its node and everything below it, level by level: it is asked about many times."""
        return list(walk(self.node))

    @cached_property
    def mentions_arrays(self) -> bool:
        """Whether anything in it may be an array."""
        return mentions_arrays(self.nodes)

    @cached_property
    def gives_arrays(self) -> bool:
        """Whether all that it returns are arrays, through which nothing goes back."""
        return self.mentions_arrays and gives_arrays(self.nodes)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names of what it is given, and of what a default that is a function is given."""
        return frozenset(node.arg for node in walk(self.node.args) if isinstance(node, ast.arg))

    @cached_property
    def evaluates(self) -> bool:
        """Whether its name says that it evaluates, tests or predicts."""
        trains = "train" in self.name.lower() or _FOR_TRAINING.search(self.name)
        return bool(_EVALUATION_NAME.search(self.name)) and not trains

    @cached_property
    def acts(self) -> bool:
        """Whether it asks a policy for an action: with the action, its log probability may be wanted for a loss."""
        return bool(_ACTING_NAME.search(self.name))

    @property
    def is_hook(self) -> bool:
        """Whether a framework calls it, in contexts that nobody sees: `val_step` of a class built on an import."""
        elsewhere = self.owner is not None and (self.owner.is_built_on_imports or self.owner.is_built_on_unnamed)
        return elsewhere and self.evaluates and self.name.endswith("_step")

    @property
    def is_handed_out(self) -> bool:
        """Whether the function in which it is defined returns it."""
        outer = self.closure.function
        return outer is not None and any(
            isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id == self.name
            for node in outer.nodes
        )

    @property
    def is_left_open(self) -> bool:
        """Whether a method says nothing, as for classes of other files to fill: `raise NotImplementedError`."""
        if self.owner is None or isinstance(self.node, ast.Lambda):
            return False
        return all(
            isinstance(statement, ast.Pass)
            or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            or (isinstance(statement, ast.Raise) and _says_not_implemented(statement.exc))
            for statement in self.node.body
        )

    @property
    def is_property(self) -> bool:
        """Whether a method is asked for like an attribute."""
        decorators = getattr(self.node, "decorator_list", ())
        return any(last_of(path_of(decorator)) in ("property", "cached_property") for decorator in decorators)

    @property
    def sets_property(self) -> bool:
        """Whether it is `@model.setter` or `@model.deleter`, which have the name of what is asked for."""
        decorators = getattr(self.node, "decorator_list", ())
        return any(last_of(path_of(decorator)) in ("setter", "deleter") for decorator in decorators)

    @property
    def shown_attribute(self) -> ast.Attribute | None:
        """`self._model`, where all that a method does is to return that."""
        body = self.node.body
        only = body[0] if isinstance(body, list) and len(body) == 1 else None
        value = only.value if isinstance(only, ast.Return) else None
        own = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"
        return value if isinstance(value, ast.Attribute) and own else None

    @property
    def is_whole_pass(self) -> bool:
        """Whether it says that it evaluates, and goes over the batches itself."""
        return self.evaluates and any(isinstance(node, ast.For | ast.AsyncFor) for node in self.nodes)

    @property
    def is_static(self) -> bool:
        """Whether a method takes no `self`."""
        return self.takes_class or decorated_as(self.node, "staticmethod")

    @property
    def takes_class(self) -> bool:
        """Whether a method takes its class in the place of an object."""
        return self.owner is not None and decorated_as(self.node, "classmethod")


@dataclass(eq=False)
class Class:
    """A class of the file."""

    node: ast.ClassDef
    name: str
    bases: list[Value]
    base_names: list[str]
    methods: dict[str, Function] = field(default_factory=dict)

    def find(self, method: str) -> Function | None:
        """A method, looked up through the base classes that are in the file."""
        if method in self.methods:
            return self.methods[method]
        return self.find_inherited(method)

    def find_inherited(self, method: str) -> Function | None:
        """A method, looked up in the base classes that are in the file."""
        for base in self.bases:
            if base.kind is Kind.CLASS and (found := base.ref.find(method)) is not None:
                return found  # type: ignore[no-any-return]
        return None

    def methods_named_like(self, name: ast.expr) -> list[str]:
        """The methods that `f"step_{phase}"` or `"step_" + phase` may name; none where these are many."""
        before = written_before(name)
        known = {method for cls in (*self.ancestors, self) for method in cls.methods}
        found = sorted(method for method in known if before and method.startswith(before))
        return found if len(found) <= _MOST_NAMED_LIKE else []

    @property
    def ancestors(self) -> Iterator[Class]:
        """The classes of the file that it is built on, the furthest first."""
        for base in reversed(self.bases):
            if base.kind is Kind.CLASS:
                yield from base.ref.ancestors
                yield base.ref

    @cached_property
    def is_module(self) -> bool:
        """Whether it is a torch module, by its bases; one of another file is told by what stands here."""
        if any(base.ref.is_module for base in self.bases if base.kind is Kind.CLASS):
            return True
        # a base that is in the file has told already what it is, whatever it is called
        elsewhere = [
            name for base, name in zip(self.bases, self.base_names, strict=True) if base.kind is not Kind.CLASS
        ]
        named = any(map(_MODULE_BASE.search, elsewhere)) and not self._trains_networks
        return named or ((self.is_built_on_imports or self.is_built_on_unnamed) and self._makes_layers)

    @property
    def _trains_networks(self) -> bool:
        """Whether it trains the networks that it holds: `class Pix2Pix(BaseModel)`, where that is of another file.

        Nothing calls it as a network, and its `forward` is given nothing, if it has one.
        """
        if not (self.is_built_on_imports and self.training_methods) or self._makes_layers:
            return False
        forward = self.find("forward")
        if forward is None:
            asked = {name for method in self.methods.values() for name in called_on_self(method.nodes)}
            return not any(name == "forward" or (runs_network(name) and self.find(name) is None) for name in asked)
        given = forward.node.args
        return len(named_parameters(given)) == 1

    @property
    def _makes_layers(self) -> bool:
        """Whether it has a `forward` and makes layers, `self.head = nn.Linear(8, 2)`, or asks `self.parameters()`."""
        forward = self.methods.get("forward")
        if forward is None:
            return False
        given = len(named_parameters(forward.node.args)) > 1
        if given and any(self._asks_itself_for(name) for name in _OF_MODULES):
            return True
        making = [
            method
            for name, method in self.methods.items()
            if name == "__init__" or (given and _MAKING.match(name) and name not in self.training_methods)
        ]
        return any(
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and (path_of(node.targets[0]) or "").startswith("self.")
            and (path_of(node.value.func) or "").startswith(("nn.", "torch.nn."))
            and not last_of(path_of(node.value.func)).endswith("Loss")
            for method in making
            for node in method.nodes
        )

    def _asks_itself_for(self, name: str) -> bool:
        """Whether a method is called on `self` that no class of the file has."""
        return self.find(name) is None and any(
            isinstance(node, ast.Call) and path_of(node.func) == f"self.{name}"
            for method in self.methods.values()
            for node in method.nodes
        )

    @cached_property
    def fields(self) -> list[str]:
        """What the constructor of a dataclass or named tuple takes, in order; empty for other classes."""
        decorators = (node.func if isinstance(node, ast.Call) else node for node in self.node.decorator_list)
        if not any(last_of(path_of(decorator)) == "dataclass" for decorator in decorators) and not self.is_named_tuple:
            return []
        inherited = [name for base in self.bases if base.kind is Kind.CLASS for name in base.ref.fields]
        own = [node.target for node in self.node.body if isinstance(node, ast.AnnAssign)]
        return [*inherited, *(target.id for target in own if isinstance(target, ast.Name))]

    @cached_property
    def is_named_tuple(self) -> bool:
        """Whether it is declared as a tuple whose items have names: `class Result(NamedTuple)`."""
        return "typing.NamedTuple" in self.base_names

    @cached_property
    def has_own_parameters(self) -> bool:
        """Whether it makes parameters outside of layers (`nn.Parameter(torch.ones(8))`)."""
        calls = (node.func for method in self.methods.values() for node in method.nodes if isinstance(node, ast.Call))
        return any(last_of(path_of(called)) == "Parameter" for called in calls)

    @cached_property
    def set_attributes(self) -> frozenset[str]:
        """What its methods assign to `self`, and those of the classes of the file that it is built on."""
        targets = (
            path_of(target)
            for cls in (self, *self.ancestors)
            for method in cls.methods.values()
            for node in method.nodes
            if isinstance(node, ast.Assign)
            for listed in node.targets
            for target in unpacked(listed)
        )
        return frozenset(path.removeprefix("self.") for path in targets if path is not None)

    @cached_property
    def training_methods(self) -> frozenset[str]:
        """Its methods in which a backward runs, or that call one of these."""
        return self._methods_that_call("backward")

    @cached_property
    def running_methods(self) -> frozenset[str]:
        """Its methods, other than `forward`, that run the whole network, or that call one of these."""
        return self._methods_that_call("forward") - {"forward"}

    def _methods_that_call(self, name: str) -> frozenset[str]:
        """Its methods in which a method of a name is called, on whatever `called_on_self` yields, however deep."""
        called = {method: set(called_on_self(function.nodes)) for method, function in self.methods.items()}
        calling = {method for method, names in called.items() if name in names}
        while more := {method for method, names in called.items() if names & calling} - calling:
            calling |= more
        return frozenset(calling)

    @property
    def is_built_on_imports(self) -> bool:
        """Whether some of its code is in another file, and not in torch."""
        imported = [base.ref for base in self.bases if base.kind is Kind.EXTERNAL and "." in base.ref]
        return any(not name.startswith("torch.") for name in imported)

    @property
    def is_built_on_unnamed(self) -> bool:
        """Whether a base is named nowhere else in the file: `from base import *`."""
        return any(
            base.kind is Kind.UNKNOWN and name.isidentifier() and not hasattr(builtins, name)
            for base, name in zip(self.bases, self.base_names, strict=True)
        )

    @cached_property
    def is_lightning(self) -> bool:
        """Whether Lightning runs its training and evaluation."""
        return any(base.ref.is_lightning for base in self.bases if base.kind is Kind.CLASS) or any(
            _LIGHTNING_BASE.search(name) for name in self.base_names
        )

    @cached_property
    def is_fabric(self) -> bool:
        """Whether it is Fabric itself, or what was called so before, with a training loop of its own."""
        return any(last_of(name) in ("Fabric", "LightningLite") for name in self.base_names)

    @property
    def step_of_a_framework(self) -> str | None:
        """The method that a framework calls for each batch, to backpropagate what it returns."""
        if self.is_lightning:
            return "training_step"
        trainer = any(_TRANSFORMERS_TRAINER.search(name) for name in self.base_names)
        return "compute_loss" if trainer else None


def written_before(text: ast.expr) -> str:
    """What a text begins with that is put together: `step_` of `f"step_{phase}"`."""
    match text:
        case ast.JoinedStr([ast.Constant(str(start)), *_]) | ast.BinOp(ast.Constant(str(start)), ast.Add() | ast.Mod()):
            return start.partition("%")[0]
    return ""


def called_on_self(nodes: list[ast.AST]) -> Iterator[str]:
    """The methods that are called on `self`, "forward" for `self(x)`, and "backward" where anything's backward is."""
    for child in nodes:
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "self":
            yield "forward"
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            own = isinstance(child.func.value, ast.Name) and child.func.value.id == "self"
            if own or child.func.attr == "backward":
                yield child.func.attr
            elif child.func.attr == "forward_backward":
                yield "backward"


@dataclass(eq=False)
class Instance:
    """An object made from a class of the file; its attributes live in `State.attributes` under `number`."""

    cls: Class
    number: int


class Inherited(NamedTuple):
    """What `super()` gives in a class: an object, with the methods that the class has from those it is built on."""

    cls: Class
    receiver: Value


def _says_not_implemented(raised: ast.expr | None) -> bool:
    """`NotImplementedError`, called or not; `NotImplemented`, which some programs raise for it."""
    named = raised.func if isinstance(raised, ast.Call) else raised
    return named is not None and last_of(path_of(named)) in ("NotImplementedError", "NotImplemented")
