"""apex's mixed precision, taken out of a script so that its loops can be handed to the runtime's.

`amp.scale_loss` and `amp.initialize` were taken over by torch in 1.6 (torch.amp), and apex no longer has them.
"""

from __future__ import annotations

import ast

from oomfix.rewrite.facts.out_of_sight import OutOfSight
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.layout import Lines
from oomfix.rewrite.text.removal import without
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of, walk

NOTE = "apex is replaced by the runtime's own mixed precision"


def apex_edits(reading: Reading) -> list[Edit]:
    """The edits that leave a script without `apex.amp`: losses are differentiated as they are.

    Nothing where any use of it is not understood: saved states, options of one loss, losses scaled but not at once
    differentiated, half precision by hand, networks that another file gives to it, or scales the losses of.
    """
    text = reading.source.text
    if "scale_loss" not in text or "initialize" not in text or "fp16_utils" in text or "FP16_Optimizer" in text:
        return []
    return _Migration(reading).edits()


class _Unknown(Exception):
    """A use of apex that is not understood."""


class _Migration:
    def __init__(self, reading: Reading) -> None:
        self._source, self._blocks, self._layout = reading.source, reading.blocks, reading.layout
        self._reading, self._nodes = reading, reading.script.imports.nodes

    def edits(self) -> list[Edit]:
        imports = [node for node in self._nodes if isinstance(node, ast.ImportFrom) and node.module == "apex"]
        names = {alias.asname or alias.name for node in imports for alias in node.names if alias.name == "amp"}
        if len(names) != 1 or any(len(node.names) != 1 for node in imports):
            return []
        edits: dict[int, Edit] = {}
        try:
            for node in self._nodes:
                if isinstance(node, ast.Name) and node.id in names:
                    self._replace_use(node, edits)
            for statement in imports:
                self._take_out(statement, edits)
        except _Unknown:
            return []
        kept = list(edits.values())
        return [edit for edit in kept if not any(_within(edit, other) for other in kept)]

    def _replace_use(self, name: ast.Name, edits: dict[int, Edit]) -> None:
        """Note the edit for one use; those inside of a block that is moved are made with it."""
        attribute = next(self._blocks.ancestors(name))
        call = next(self._blocks.ancestors(attribute))
        if not isinstance(attribute, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not attribute:
            raise _Unknown
        around = next(self._blocks.ancestors(call))
        if attribute.attr == "scale_loss" and isinstance(around, ast.withitem):
            block = next(self._blocks.ancestors(around))
            assert isinstance(block, ast.With)
            edits[id(block)] = self._ended(block, call)
        elif attribute.attr == "initialize" and isinstance(around, ast.Assign):
            self._take_out(around, edits, self._initialized(around, call))
        elif attribute.attr == "master_params" and len(call.args) == 1 and not call.keywords:
            edits[id(call)] = Edit(*bounds(self._source, call), self._parameters(call))
        else:
            raise _Unknown

    def _ended(self, block: ast.With, call: ast.Call) -> Edit:
        """`with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()` as `loss.backward()`."""
        scaled, first = block.items[0].optional_vars, block.body[0]
        own, inner = self._layout.own_lines(block), self._layout.own_lines(first)
        if len(block.items) != 1 or call.keywords or len(call.args) != 2 or own is None or inner is None:
            raise _Unknown
        if not isinstance(scaled, ast.Name) or self._source.segment(first) != f"{scaled.id}.backward()":
            raise _Unknown
        if sum(isinstance(node, ast.Name) and node.id == scaled.id for node in walk(block)) != 2:
            raise _Unknown
        used = [n for n in self._nodes if isinstance(n, ast.Name) and n.id == scaled.id and isinstance(n.ctx, ast.Load)]
        inside = {id(node) for other in self._nodes if _scales(other) for node in walk(other)}
        if any(id(node) not in inside for node in used) or inner.first == block.lineno:
            raise _Unknown
        loss = self._source.segment(call.args[0])
        loss = loss if path_of(call.args[0]) is not None else f"({loss})"
        margin = self._layout.margin(block)
        behind = self._source.text[bounds(self._source, first)[1] : self._layout.span(inner)[1]]
        lines = self._layout.moved(Lines(inner.first, own.last), self._layout.margin(first), margin)
        lines[: inner.last - inner.first + 1] = [f"{margin}{loss}.backward(){behind}"]
        moved = self._layout.newline.join(lines)
        for node in walk(block):
            if isinstance(node, ast.Call) and last_name(node) == "master_params":
                moved = moved.replace(self._source.segment(node), self._parameters(node))
        start, end = self._layout.span(own)
        return Edit(start, end, moved)

    def _initialized(self, statement: ast.Assign, call: ast.Call) -> str:
        """What is left of `model, optimizer = amp.initialize(model.cuda(), optimizer, ...)`; "" where nothing is."""
        target = statement.targets[0]
        if len(statement.targets) != 1 or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            raise _Unknown
        given = call.args[:2]
        if len(given) != 2 or any(isinstance(one, ast.List | ast.Tuple) for one in (*given, *target.elts)):
            raise _Unknown
        if self._are_given_away(*target.elts):
            raise _Unknown
        segment = self._source.segment
        changed = [
            (segment(one), segment(other))
            for one, other in zip(target.elts, given, strict=True)
            if ast.unparse(one) != ast.unparse(other)
        ]
        return f"{', '.join(one for one, _ in changed)} = {', '.join(other for _, other in changed)}" if changed else ""

    def _are_given_away(self, network: ast.expr, optimizer: ast.expr) -> bool:
        """Whether a function of another file gets both, so that it may scale losses by what apex noted on them."""
        paths = path_of(network), path_of(optimizer)
        if None in paths:
            return True
        calls = OutOfSight(self._reading, {str(paths[0])}).calls()
        others = (call for call in calls if last_name(call) != "initialize")
        return any(path_of(one) == paths[1] for call in others for one in arguments_of(call))

    def _parameters(self, call: ast.Call) -> str:
        """The parameters that are clipped: as the script says where it does not use apex, else the optimizer's."""
        clipped = self._clipped()
        if len(clipped) == 1:
            return clipped.pop()
        return f'[p for group in {self._source.segment(call.args[0])}.param_groups for p in group["params"]]'

    def _clipped(self) -> set[str]:
        clips = (n for n in self._nodes if isinstance(n, ast.Call) and last_name(n).startswith("clip_grad") and n.args)
        given = (clip.args[0] for clip in clips)
        return {
            self._source.segment(one) for one in given if isinstance(one, ast.Call) and last_name(one) == "parameters"
        }

    def _take_out(self, statement: ast.stmt, edits: dict[int, Edit], instead: str = "") -> None:
        """Take out a statement, and what only stands around it: the test for its flag, the `try` of its import."""
        if instead:
            edits[id(statement)] = Edit(*bounds(self._source, statement), instead)
            return
        gone: ast.stmt = statement
        parent = next(self._blocks.ancestors(gone))
        if isinstance(parent, ast.Try):
            if not self._is_setup(parent):
                if isinstance(statement, ast.ImportFrom):
                    return  # what it is for besides, a flag or a message, stays
                raise _Unknown
            gone, parent = parent, next(self._blocks.ancestors(parent))
        if isinstance(parent, ast.If) and not parent.orelse and all(map(self._is_setup, parent.body)):
            gone, parent = parent, next(self._blocks.ancestors(parent))
        edits[id(gone)] = without(self._layout, gone, self._blocks.block_of(gone))

    def _is_setup(self, statement: ast.stmt) -> bool:
        """Whether nothing but the import and the call of `amp.initialize` is in a statement."""
        if isinstance(statement, ast.Try):
            return _only_raises(statement) and all(map(self._is_setup, statement.body))
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            call = statement.value
            named = last_name(call) == "initialize" and path_of(call.func) != "initialize"
            return named and not self._initialized(statement, call)
        return isinstance(statement, ast.ImportFrom) and statement.module == "apex"


def _scales(node: ast.AST) -> bool:
    calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    return any(isinstance(call, ast.Call) and last_name(call) == "scale_loss" for call in calls)


def _only_raises(statement: ast.Try) -> bool:
    handlers = [other for handler in statement.handlers for other in handler.body]
    more = statement.orelse or statement.finalbody
    return bool(handlers) and all(isinstance(other, ast.Raise) for other in handlers) and not more


def _within(edit: Edit, other: Edit) -> bool:
    return edit is not other and other.start <= edit.start and edit.end <= other.end
