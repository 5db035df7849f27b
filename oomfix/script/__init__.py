"""What a training script is: its loops, forwards and backwards, and which values carry an autograd graph.

`Script.read(source)` follows the file once, the way Python would run it: from the first line, into the functions it
calls with the arguments it calls them with, and then into every function of which nothing in the file runs all. What is
met on the way (a forward with gradients off, a loss that is kept) is written down as events; rules are questions about
them.

One class follows, in `interpreter/`, built in layers that each know one thing more; a file stands for each: `core`
(names, and where an event happens), `functions` (calls into the file), `networks` (modes and freezing), `forwards`,
`training` (backwards, steps), `contexts_by_hand`, `containers` (what is kept), `unseen` (calls out of sight), `methods`
(of networks), `externals` (what is imported), `calls` (what is called), `expressions`, `statements`, `entering`
(contexts), `flow` (branches and loops) and `follow` (the whole file). `facts/values` and `interpreter/state` are what
they pass on, `facts/trace` is what comes out. What rules ask of a trace is in `analyses/`, a file for each question;
`fixes/` has the edits that rules offer.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from oomfix.script.analyses.asked_for import where_asked_for
from oomfix.script.analyses.devices import Devices
from oomfix.script.analyses.evaluation import find_evaluation_forwards
from oomfix.script.analyses.gradients import (
    are_divided,
    differentiates_by_hand,
    dividing_functions,
    optimizes,
    zeroed_by_hand,
)
from oomfix.script.analyses.loaded_states import LoadedStates
from oomfix.script.analyses.loops import find_batch_loops, find_training_loops, is_over_batches
from oomfix.script.analyses.precision import Precision
from oomfix.script.analyses.retention import attention_maps, kept_graphs
from oomfix.script.analyses.training_loop import TrainingLoop
from oomfix.script.analyses.unit_tests import holds_unit_tests
from oomfix.script.analyses.windows import lost_tails
from oomfix.script.facts.hints import assigned_calls
from oomfix.script.facts.named_like import looks_like_forward, looks_like_loss, looks_like_optimizer, looks_like_penalty
from oomfix.script.facts.torch_facts import BACKWARD_HOOKS, INTEGER_RESULTS, LEAVING_THE_GRAPH, OTHER_LIBRARIES
from oomfix.script.facts.trace import Backward, Event, Forward, Keep, Loop, ModuleAttribute, Trace
from oomfix.script.fixes.removal import Removal
from oomfix.script.interpreter.follow import Follower
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import last_name, last_of, owner_of, receivers
from oomfix.script.syntax.nodes import Nodes, Scope, by_function, collect

if TYPE_CHECKING:
    from oomfix.script.analyses.graph_reuse import GraphReuse
    from oomfix.script.analyses.recurrent_states import CarriedState
    from oomfix.source import Source

__all__ = ["Event", "Forward", "Keep", "Place", "Script", "TrainingLoop"]

AnyEvent = TypeVar("AnyEvent", bound=Event)

_WITHOUT_GRAPH = LEAVING_THE_GRAPH | INTEGER_RESULTS


class Place(NamedTuple):
    """A span of the source: 1-based lines and columns in characters, end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(eq=False)
class Script:
    """A training script, read.

    `target_torch` is the version the script is meant for, as (major, minor); None when nothing says it.
    """

    source: Source
    target_torch: tuple[int, int] | None = None

    @classmethod
    def read(cls, source: Source, target_torch: tuple[int, int] | None = None) -> Script:
        """The script of a source. Nothing is followed until a question asks for it.

        A question raises RecursionError where the source is nested absurdly.
        """
        return cls(source, target_torch)

    @cached_property
    def trace(self) -> Trace:
        """Everything that happens in the script."""
        return Follower(self.source.tree, self._nodes).follow()

    @cached_property
    def imports(self) -> Imports:
        """What the names of the file refer to."""
        return Imports(self.source.tree, Nodes(node for node, _ in self._nodes))

    @cached_property
    def _nodes(self) -> list[tuple[ast.AST, Scope]]:
        return collect(self.source.tree)

    # Places

    def place(self, node: ast.expr | ast.stmt) -> Place:
        """Where a node stands."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Place(
            node.lineno,
            self._column(node.lineno, node.col_offset),
            node.end_lineno,
            self._column(node.end_lineno, node.end_col_offset),
        )

    def header(self, statement: ast.If) -> Place:
        """The test of an `if`, with its keyword."""
        test = self.place(statement.test)
        return Place(
            statement.lineno, self._column(statement.lineno, statement.col_offset), test.end_line, test.end_column
        )

    def _column(self, line: int, utf8_column: int) -> int:
        return self.source.offset(line, utf8_column) - self.source.line_starts[line - 1] + 1

    # The words that rules are written in

    @cached_property
    def loops(self) -> list[TrainingLoop]:
        """Every training loop, by line."""
        return [] if self._only_looks_at_gradients else find_training_loops(self.trace)

    @property
    def _only_looks_at_gradients(self) -> bool:
        """Whether its backwards are for hooks that read gradients (Grad-CAM), and nothing is optimized."""
        hooked = any(any(self.calls_of_method(name)) for name in BACKWARD_HOOKS)
        return hooked and not self.trace.steps and not any(map(optimizes, self.imports.nodes))

    @cached_property
    def _training_runs(self) -> set[int]:
        return {run for loop in self.loops for run in loop.runs} | set(self.trace.framework_loops.values())

    @cached_property
    def evaluation_forwards(self) -> list[Forward]:
        """Every forward of an evaluation pass, with gradients on or off, on each way that leads to it."""
        return find_evaluation_forwards(self.trace, self._training_runs, self._trained_methods)

    @cached_property
    def _trained_methods(self) -> set[Hashable]:
        """The methods of networks of other files that a loss goes back through, by itself or with a step to show it."""
        if not self._runs_methods:
            return set()
        from oomfix.script.analyses.trained_methods import methods_backpropagated_alone

        return methods_backpropagated_alone(self.trace) | self._methods_of_stepped

    @cached_property
    def _methods_of_stepped(self) -> set[Hashable]:
        if not self._runs_methods:
            return set()
        # few scripts come to this question, and every module is a third of a millisecond of each run
        from oomfix.script.analyses.trained_methods import methods_of_stepped

        return methods_of_stepped(self.trace, self.imports.nodes.of(ast.Assign))

    @cached_property
    def _methods_that_train(self) -> set[Hashable]:
        """The methods of networks of other files that run the network, as the training in sight shows."""
        if not self._runs_methods:
            return set()
        from oomfix.script.analyses.trained_methods import methods_of_trained

        calls, assignments = self.imports.nodes.of(ast.Call), self.imports.nodes.of(ast.Assign)
        return self._methods_of_stepped | methods_of_trained(self.trace, calls, assignments)

    @property
    def _runs_methods(self) -> bool:
        return not all(forward.direct for forward in self.trace.forwards.values())

    def is_array_at_once(self, forward: Forward) -> bool:
        """`net(x).cpu().numpy()`, which torch refuses where a graph was recorded: there is none."""
        return forward.node in self._arrays_at_once

    @cached_property
    def _arrays_at_once(self) -> set[ast.expr]:
        """What `numpy` is asked of, and all that it was made of by methods, where none of them takes a graph off."""
        found: set[ast.expr] = set()
        for node in self.imports.nodes.of(ast.Attribute):
            if node.attr == "numpy":
                chain = list(receivers(node.value))
                asked = {part.func if isinstance(part, ast.Call) else part for part in chain}
                if not any(isinstance(part, ast.Attribute) and part.attr in _WITHOUT_GRAPH for part in asked):
                    found.update(chain)
        return found

    def where_asked_for(self, forwards: list[Forward]) -> list[Forward]:
        """Forwards in methods of networks that training runs as well, each at the call that an evaluation makes."""
        return where_asked_for(forwards, self.trace)

    def lost_tails(self, loop: TrainingLoop) -> list[ast.If]:
        """The decisions on which the last incomplete accumulation window of an epoch is never stepped."""
        return lost_tails(loop, self._by_function[loop.node])

    def steps_tail_by_itself(self, loop: TrainingLoop) -> bool:
        """Whether a framework steps the last window of a loop: Accelerate does where it is told what to accumulate."""
        if loop.framework != "accelerate":
            return loop.accumulates_by_itself
        made = [call for call in self.imports.nodes.of(ast.Call) if last_name(call) == "Accelerator"]
        told = any(word.arg is None or "accumulation" in word.arg for call in made for word in call.keywords)
        return not made or told or any(self.calls_of_method("accumulate"))

    @cached_property
    def _by_function(self) -> dict[ast.AST, list[ast.AST]]:
        return by_function(self._nodes)

    def loses_tail(self, loop: TrainingLoop) -> bool:
        """Whether the last incomplete accumulation window of an epoch is never stepped."""
        return bool(self.lost_tails(loop))

    def divides_gradients(self, loop: TrainingLoop) -> bool:
        """Whether the gradients of a loop are divided by hand before its step."""
        return are_divided(loop, self._dividing_functions, self._nodes)

    def reads_window_size(self, loop: TrainingLoop, backward: Backward | None = None) -> bool:
        """Whether an iteration (that comes to a backward) asks how large its window is beyond whether it is full."""
        from oomfix.script.analyses.window_sizes import reads_its_size

        return reads_its_size(loop, self._nodes, backward)

    @cached_property
    def _dividing_functions(self) -> set[Scope]:
        return dividing_functions(self._nodes)

    def kept_graphs(self) -> Iterator[Keep]:
        """Everything that is kept with its graph beyond an iteration and never backpropagated."""
        runs = self._training_runs
        for keep in kept_graphs(self.trace, runs, self.evaluation_forwards):
            # a unit test that adds up what it compares with is no training
            if not self.is_test_module or not runs.isdisjoint(keep.site.runs):
                yield keep

    def attention_maps_kept(self) -> list[ModuleAttribute]:
        """Attention maps that a module's forward leaves on the module with their graph."""
        return attention_maps(self.trace)

    def carried_states(self) -> Iterator[CarriedState]:
        """Recurrent states that are carried into the next iteration with their graph."""
        from oomfix.script.analyses.recurrent_states import carried_states

        return carried_states(self.trace, self.evaluation_forwards)

    def is_needed_later(self, backward: Backward) -> bool:
        """Whether a later backward (or an unseen one) may go through the graph of this one again."""
        return self._reuse.is_needed_later(backward)

    @cached_property
    def _reuse(self) -> GraphReuse:
        from oomfix.script.analyses.graph_reuse import GraphReuse

        return GraphReuse(self.trace, self._nodes)

    @cached_property
    def devices(self) -> Devices:
        """Where it may train."""
        return Devices(self.source, self.imports.nodes)

    @cached_property
    def may_run_on_cuda(self) -> bool:
        """Whether it may train on a GPU: it says so, or says nothing, and trains networks that other files make."""
        if self.devices.may_be_cuda or not self.devices.are_left_open:
            return self.devices.may_be_cuda
        # few scripts say nothing of it, and every module is a third of a millisecond of each run
        from oomfix.script.analyses.handed_over import trains_what_it_is_handed

        return trains_what_it_is_handed(self.trace, self.imports)

    @cached_property
    def precision(self) -> Precision:
        """Who decides the precision of its forwards and backwards."""
        return Precision(self.source, self.trace, self.imports)

    @property
    def backwards(self) -> list[Backward]:
        """Every backward, in program order."""
        return self.trace.backwards

    @cached_property
    def is_test_module(self) -> bool:
        """Whether the file holds unit tests, which pytest also finds where nobody imports it."""
        imported = {name.split(".")[0] for names in self.imports.names.values() for name in names}
        return bool(imported & {"pytest", "unittest"}) or holds_unit_tests(self.source.tree)

    @cached_property
    def is_of_another_library(self) -> bool:
        """Whether the file is written for a library that looks like torch, or for layers by hand, not for torch."""
        roots = {name.split(".")[0] for names in self.imports.names.values() for name in names}
        if "torch" in roots:
            return False
        return bool(roots & OTHER_LIBRARIES) or differentiates_by_hand(self.imports.nodes, "numpy" in roots)

    def distinct(self, events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
        """The first event at each node: what happens on several ways is one occurrence."""
        seen: set[ast.expr] = set()
        for event in events:
            if event.node not in seen:
                seen.add(event.node)
                yield event

    def calls_to(self, name: str) -> list[Event]:
        """Every call of a function that is followed by name (see `Core.note_call`)."""
        return self.trace.calls.get(name, [])

    def calls_of_method(self, name: str) -> Iterator[ast.Call]:
        """Every call of a method of this name, whatever the object."""
        yield from self._method_calls.get(name, ())

    @cached_property
    def _method_calls(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for node in self.imports.nodes.of(ast.Call):
            if isinstance(node.func, ast.Attribute):
                found.setdefault(node.func.attr, []).append(node)
        return found

    def reads_attribute(self, name: str) -> bool:
        """Whether an attribute of this name is read anywhere in the file, so that a loss may be made of it."""
        attributes = self.imports.nodes.of(ast.Attribute)
        return any(node.attr == name and isinstance(node.ctx, ast.Load) for node in attributes)

    def is_optimizer_class(self, function: ast.expr) -> bool:
        """Whether an expression is the class of an optimizer."""
        qualified = self.imports.qualified(function)
        return any(".optim" in name or name.endswith(("AdamW", "Adafactor")) for name in qualified) and not any(
            "lr_scheduler" in name for name in qualified
        )

    def takes_set_to_none(self, call: ast.Call) -> bool:
        """Whether a `zero_grad` is torch's: that of a network, or of an optimizer made of one of its classes in sight.

        A class of its own, here or in another file, may have one that takes no argument.
        """
        path = owner_of(call)
        if self._defines_zero_grad or path is None or not looks_like_optimizer(last_of(path)):
            return not self._defines_zero_grad
        makers = self.makers_of(path)
        return bool(makers) and all(map(self._is_optimizer_class_of_torch, makers))

    def _is_optimizer_class_of_torch(self, name: str) -> bool:
        root, _, rest = name.partition(".")
        return any(f"{start}.{rest}".startswith("torch.optim.") for start in self.imports.names.get(root, ()))

    @cached_property
    def _defines_zero_grad(self) -> bool:
        return any(node.name == "zero_grad" for node in self.imports.nodes.of(ast.FunctionDef))

    def gradients_zeroed_by_hand(self) -> Iterator[ast.Call]:
        """`p.grad.zero_()` on each of several parameters, in a loop."""
        return zeroed_by_hand(self.imports.nodes)

    def only_loads_state(self, call: ast.Call) -> bool:
        """Whether what a call gives goes into `load_state_dict`, which copies it to where the parameters are."""
        return self._loaded_states.take(call)

    @cached_property
    def _loaded_states(self) -> LoadedStates:
        return LoadedStates(self.imports.nodes, self._by_function, self.source.tree)

    def makers_of(self, path: str) -> set[str]:
        """What is called, as it is written, for the objects that are assigned to a name or attribute."""
        return self._makers.get(path, set())

    @cached_property
    def _makers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for node in self.imports.nodes.of(ast.Assign):
            for maker, path in assigned_calls(node):
                found.setdefault(path, set()).add(maker)
        return found

    def is_forward_of_network(self, forward: Forward) -> bool:
        """Whether a call runs the network itself: the module, or a method that is named or trained like its forward.

        `model.orthogonal_loss()`, which is given nothing, is one of its weights.
        """
        method = last_of(forward.path)
        named = looks_like_forward(method) and bool(forward.given or not looks_like_loss(method))
        named = named and not looks_like_penalty(method)
        return forward.direct or named or (bool(forward.given) and forward.method in self._methods_that_train)

    def is_in_batch_loop(self, event: Event) -> bool:
        """Whether an event is in a loop over batches: one that trains, the innermost around a forward, or named so."""
        loop = event.site.loop
        return loop is not None and (loop in self._batch_loops or is_over_batches(loop))

    @cached_property
    def _batch_loops(self) -> set[Loop]:
        return find_batch_loops(self.trace, self.loops)

    def trains_in(self, node: ast.AST) -> bool:
        """Whether a backward runs in a loop or function, or in what it calls in this file."""
        return node in self._training_nodes

    @cached_property
    def _training_nodes(self) -> set[ast.AST]:
        nodes: set[ast.AST] = set()
        for event in self.trace.backwards:
            nodes.update(event.site.loops)
            nodes.update(function.node for function in event.site.functions)
        return nodes

    @cached_property
    def nodes_trained_through(self) -> set[ast.AST]:
        """The loops and functions in which, or in what they call, a forward is backpropagated."""
        nodes: set[ast.AST] = set()
        for forward in self.trace.forwards.values():
            if forward.origin in self.trace.backpropagated:
                nodes.update(forward.site.loops)
                nodes.update(function.node for function in forward.site.functions)
        return nodes

    @cached_property
    def blocks_with_gradients(self) -> list[ast.With]:
        """The blocks that say themselves whether gradients are on: `with torch.set_grad_enabled(True):`."""
        return [
            block
            for block in self.imports.nodes.of(ast.With)
            for item in block.items
            if isinstance(item.context_expr, ast.Call)
            and last_name(item.context_expr) in ("enable_grad", "set_grad_enabled")
        ]

    def removal_of(self, call: ast.expr) -> tuple[Edit, ...]:
        """The edit that takes a call out which is a statement of its own; empty for any other."""
        return self._removal.of(call)

    @cached_property
    def _removal(self) -> Removal:
        return Removal(self.source, self.imports.nodes)
