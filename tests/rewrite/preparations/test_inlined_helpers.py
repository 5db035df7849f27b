"""A helper that runs the backward of a loss it is given is written out where it is called."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import TOP

CLIP_BY = "update(total, optimizer, {})"

HELPER = """
{decorator}
def update(loss, opt, clip=None, {more}):
    \"\"\"One step.\"\"\"
    opt.zero_grad()
    # through all of it
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    {line}
    opt.step()  # the end


for x, y in loader * 3:
    out = model(x)
    total = F.cross_entropy(out, y)
    {call}
    print(f"{{total.item():.9f}}")
"""


def script(call="update(total, optimizer)", line="pass", more="_=0", decorator="# updates"):
    return TOP + HELPER.format(call=call, line=line, more=more, decorator=decorator)


def assert_written_out(text):
    """The text after apply, which trains the same whole and in three parts, without the helper."""
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "def update" not in after.text
    assert parts_as_whole(text, after.text, after.text)
    return after


@pytest.mark.parametrize(
    ("call", "clips"),
    [
        ("update(total, optimizer)", None),
        ("update(total, optimizer, clip=0.1)", "y)\n    memory.unscale_(optimizer)\n"),
        ("update(opt=optimizer, loss=total, clip=limit)", "    if limit:\n        memory.unscale_(optimizer)\n"),
    ],
)
def test_the_helper_stands_in_the_place_of_its_call(call, clips):
    text = f"limit = 0.1\n{script(call)}"
    after = assert_written_out(text)
    assert after.loops[0].notes[-1] == "`update` is written out where it was called"
    assert after.loops[0].line == text.splitlines().index("for x, y in loader * 3:") + 1
    tail = after.text[after.text.index("    total = memory.forward_backward(forward, x, y)\n") :]
    assert "    # through all of it\n    total = memory.forward_backward" in after.text
    assert (clips in tail) if clips else ("clip_grad_norm_" not in tail)
    assert "    memory.step(optimizer)  # the end\n" in tail


def test_branches_for_mixed_precision_are_written_out_together():
    branches = """
import sys

scaler = torch.amp.GradScaler("cuda", enabled=False)


class Trainer:
    def __init__(self):
        self.amp, self.optimizer = "--amp" in sys.argv, optimizer

    def _update(self, loss):
        if self.amp:
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
        else:
            loss.backward()
            self.optimizer.step()

    def fit(self):
        for x, y in loader * 3:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", enabled=self.amp):
                total = F.cross_entropy(model(x), y)
            self._update(total)
            print(f"{total.item():.9f}")


Trainer().fit()
"""
    text = TOP + branches
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "_update" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))
    public = rewritten(text.replace("_update(", "update("))
    assert [loop.rewrite for loop in public.loops] == ["in-place"]


@pytest.mark.parametrize(
    "changes",
    [
        {"line": "loss = loss / 2"},
        {"line": "out = 3"},
        {"line": "x = clip"},
        {"call": "update(total * 1, optimizer)"},
        {"call": "seen = update(total, optimizer)"},
        {"call": "update(total, optimizer); print(1)"},
        {"call": "update(*[total, optimizer])"},
        {"call": "step = update\n    step(total, optimizer)"},
        {"line": "return loss.item()"},
        {"line": "global total"},
        {"more": "*rest"},
        {"decorator": "@torch.enable_grad()"},
        {"line": 'print("""a\n  b""")'},
        {"line": 'print(f"{loss=:.6f}")'},
        {"line": 'print(f"{_}")', "more": "_='a'"},
        {"line": "print(_.bit_length())", "more": "_=3"},
        {"line": "print(sorted(locals()))"},
        {"line": "print(_)", "more": "_=len(loader)"},
        {"line": "F = 3"},
        {
            "line": "loader[0:0], opt.defaults['lr'] = [], 3; print(clip)",
            "call": CLIP_BY.format("optimizer.defaults['lr']"),
        },
        {"line": "opt.defaults.update(lr=3); print(clip)", "call": CLIP_BY.format("optimizer.defaults['lr']")},
        {"call": "update(total, optimizer)\n    exec('update(F.cross_entropy(model(x), y), optimizer)')"},
        {"call": "update(\n        total,\n        memory_of\n        .optimizer,\n    )"},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_a_helper_that_may_mean_something_else_there_stays(changes):
    text = script(**changes).replace("loader * 3", "list(loader) * 3")
    if "memory_of" in text:
        text = text.replace("# updates", "import types\n\nmemory_of = types.SimpleNamespace(optimizer=optimizer)\n")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "def update" in after.text
    if "step = update" not in text and "return" not in text:
        assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_helper_that_reads_a_name_of_the_file_stays_where_a_function_has_one_of_its_own():
    text = script(line="print(limit)").replace(
        "for x, y in loader * 3:", "def fit():\n    limit = 2\n    for x, y in loader:"
    )
    head, loop = text.split("    for x, y in loader:\n")
    text = f"limit = 1\n{head}    for x, y in loader:\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    text += "\n\nif __name__ == '__main__':\n    fit()\n"
    assert [loop.rewrite for loop in rewritten(text).loops] == ["in-place"]
    assert [loop.rewrite for loop in rewritten(text.replace("limit = 2", "other = 2")).loops] == ["micro-batched"]


def test_a_function_that_other_files_may_import_stays():
    text = script().replace("for x, y in loader * 3:", "def fit():\n    for x, y in loader:")
    head, loop = text.split("    for x, y in loader:\n")
    text = f"{head}    for x, y in loader:\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    assert [loop.rewrite for loop in rewritten(text).loops] == ["in-place"]
    assert [loop.rewrite for loop in rewritten(text.replace("update(", "_update(")).loops] == ["micro-batched"]


CLASS = """
class Trainer:
    def __init__(self):
        self.seen = 0

    def _update(self, loss, seen):
        optimizer.zero_grad()
        loss.backward()
        {line}
        optimizer.step()

    def count(self):
        self.seen += 1

    def fit(self):
        for x, y in loader * 3:
            total = F.cross_entropy(model(x), y)
            self._update(total, self.seen)
            print(f"{{total.item():.9f}}")


{more}
Trainer().fit()
"""


@pytest.mark.parametrize(
    ("line", "more", "inlined"),
    [
        ("print(seen)", "", True),
        ("self.count(); print(seen)", "", False),
        ("pass", "class Other(Trainer):\n    def _update(self, loss, seen):\n        optimizer.step()\n", False),
        ("pass", "class Other(Trainer):\n    _update = print\n", False),
        ("pass", "print(callable(getattr(Trainer, '_update')))", False),
        ("pass", "class Other:\n    def fit(self):\n        self._update(1, 2)\n", False),
        ("pass", "class Other(Trainer):\n    def again(self, total):\n        self._update(total, 2)\n", True),
    ],
)
def test_a_method_is_written_out_only_where_no_other_can_be_meant(line, more, inlined):
    text = TOP + CLASS.format(line=line, more=more)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched" if inlined else "in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    "changed",
    [
        ("    def fit", "    step = _update\n\n    def fit"),
        ("class Trainer:", "class Base:\n    def _update(self, x):\n        x.backward()\n\n\nclass Trainer(Base):"),
    ],
)
def test_a_method_whose_name_something_else_has_stays(changed):
    text = TOP + CLASS.format(line="pass", more="").replace(*changed)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_method_that_is_all_of_its_class_stays():
    head, method = CLASS.format(line="pass", more="").split("    def _update")
    method, tail = method.split("    def count")
    base = f"class Base:\n    def _update{method}"
    text = TOP + base + head.replace("class Trainer:", "class Trainer(Base):") + f"    def count{tail}"
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize("kinds", [("if len(loader) > 9:", "else:"), ("if len(loader) < 9:", "else:")])
def test_a_helper_that_is_defined_by_branches_stays(kinds):
    branches = "".join(
        f"{kind}\n    def _update(loss):\n        optimizer.zero_grad()\n        loss.backward()\n"
        f"        print({number})\n        optimizer.step()\n"
        for number, kind in enumerate(kinds)
    )
    loop = "for x, y in loader:\n    total = F.cross_entropy(model(x), y)\n    _update(total)\n"
    text = TOP + branches + loop
    after = rewritten(text)
    assert [one.rewrite for one in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_parameter_with_the_name_of_the_helper_is_no_call_of_it():
    text = script().replace("for x, y in loader * 3:", "def fit(update):\n    for x, y in loader:")
    head, loop = text.split("    for x, y in loader:\n")
    text = f"{head}    for x, y in loader:\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    text += "\n\nif __name__ == '__main__':\n    fit(lambda loss, opt: (loss.backward(), opt.step()))\n"
    after = rewritten(text)
    assert "def update" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_helper_that_calls_another_stays_with_it():
    text = script(line="extra(_, opt)", more="_=None", call="again = F.cross_entropy(model(x + 1), y)\n    CALL")
    text = text.replace("CALL", "update(total, optimizer, None, again)")
    extra = "def extra(loss, opt):\n    opt.zero_grad()\n    loss.backward()\n\n\n# updates"
    text = text.replace("# updates", extra)
    after = rewritten(text)
    assert "def extra" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


STATE = """
import types

state = types.SimpleNamespace(n=0)
n = 0


def bump():
    global n
    state.n += 1
    n += 1


def tick():
    bump()


# updates"""


@pytest.mark.parametrize("given", ["n", "state.n"])
@pytest.mark.parametrize("line", ["tick()", "setattr(state, 'n', len(loader)); tick()"])
def test_what_functions_may_change_before_it_is_read_is_not_given_later(given, line):
    text = script(f"update(total, optimizer, _={given})", line=f"{line}; print(_)").replace("# updates", STATE)
    after = rewritten(text)
    assert "def update" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    still = script(f"update(total, optimizer, _={given})", line="print(_)").replace("# updates", STATE)
    assert [loop.rewrite for loop in rewritten(still).loops] == ["micro-batched"]


def test_what_an_object_is_given_to_may_change_it():
    objects = "import types\n\nstate = types.SimpleNamespace(n=[])\n\n\n# updates"
    line = "setattr(state, 'n', [2]); print(_)"
    text = script("update(total, optimizer, _=state.n)", line=line).replace("# updates", objects)
    after = rewritten(text)
    assert "def update" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    "changed",
    [
        ("    def count", "    @property\n    def rate(self):\n        return len(loader)\n\n    def count"),
        ("def __init__(self):\n", "def __init__(self):\n        self.__seen = 3\n        self.rate = 2\n"),
    ],
    ids=["a property", "a private name"],
)
def test_a_property_is_asked_once_and_a_private_name_belongs_to_its_class(changed):
    line = "loader[0:0] = loader[:1]; print(seen)" if "@" in changed[1] else "print(self.__seen)"
    other = "class Other(Trainer):\n    def fit(self):\n"
    text = TOP + CLASS.format(line=line, more="").replace(*changed).replace(
        "_update(total, self.seen)", "_update(total, self.rate)"
    )
    if "@" not in changed[1]:
        text = text.replace("    def fit(self):\n", f"\n\n{other}").replace("\nTrainer().fit()", "\nOther().fit()")
    text = text.replace("in loader * 3", "in list(loader) * 3")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))
