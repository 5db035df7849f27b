"""All local fixes of a file together: each once, none that a comment silences, none left to be found."""

import pytest

from oomfix.rewrite.apply import apply_to
from oomfix.rewrite.options import Options
from oomfix.rewrite.surroundings.local import findings_of
from oomfix.rules import all_rules
from oomfix.source import Source

EVALUATION = """\
import torch

def validate(model, loader):
    model.eval()
    total = 0.0
    for x, t in loader:
        a = model(x)
        b = model(t)
        total += (a * b).mean().item()
    return total
"""


def fixed(text: str, only: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    source = Source.from_bytes("train.py", text.encode())
    result = apply_to(source, all_rules(), Options("16gb", runtime=False, only=only))
    return result.text, [fix.code for fix in result.fixed]


def test_findings_with_the_same_fix_are_mended_by_one_edit_and_counted_each():
    text, codes = fixed(EVALUATION)
    assert codes == ["OOM201", "OOM201"]
    assert text == EVALUATION.replace("def validate", "@torch.no_grad()\ndef validate")


def test_nothing_that_was_fixed_is_found_again():
    text, _ = fixed(EVALUATION)
    assert [finding.code for finding in findings_of(Source.from_bytes("t.py", text.encode()), all_rules())] == []


def test_a_silenced_finding_is_not_fixed():
    text = """\
import torch
total = 0
for x, y in loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    total += loss  # oomfix: ignore[OOM101]
"""
    assert fixed(text) == (text, [])
    assert fixed(text.replace("  # oomfix: ignore[OOM101]", ""))[1] == ["OOM101"]


def test_notes_are_left_unless_they_are_asked_for():
    text = """\
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
    assert fixed(text) == (text, [])
    assert fixed(text, only=("OOM203",))[0] == text.replace("zero_grad()", "zero_grad(set_to_none=True)")


ABSTRACT = """\
import torch

class Agent:
    def run(self, steps):
        samples = self.collect()
        for _ in range(steps):
            self.update(next(samples))

    def collect(self):
        state = self.env.reset()
        while True:
            with torch.no_grad():
                action = self.policy.forward(state)
            state, reward, done, info = self.env.step(action)
            yield {"state": state, "q": self.value.forward(state)}

    def imitate(self, samples):
        for sample in samples:
            self.backward(sample)

    def update(self, sample):
        raise NotImplementedError
"""


@pytest.mark.parametrize(
    "body",
    ["raise NotImplementedError", "raise NotImplementedError('train')", "pass", "...", '"""Train on a sample."""'],
)
def test_gradients_stay_on_around_a_method_that_classes_of_other_files_fill_with_their_training(body: str):
    script = ABSTRACT.replace("raise NotImplementedError", body)
    assert fixed(script) == (script, [])


@pytest.mark.parametrize("call", ["learn()", "learn(sample=next(samples))"])
@pytest.mark.parametrize("body", ["    def learn(self, sample=None):\n        raise NotImplementedError\n", ""])
def test_such_a_method_trains_whatever_it_is_given_and_whether_the_class_names_it_or_not(call: str, body: str):
    script = ABSTRACT[: ABSTRACT.index("    def update")].replace("update(next(samples))", call) + body
    assert fixed(script) == (script, [])


def test_a_method_of_the_file_that_trains_nothing_may_run_without_gradients():
    text, codes = fixed(ABSTRACT.replace("raise NotImplementedError", "print(sample)"))
    assert codes == ["OOM201"]
    assert "@torch.no_grad()\n    def run" in text


RECURRENT = """\
import torch

def evaluate(songs):
    hidden = torch.zeros(4, 3)
    for song in songs:
        hidden = network(song + hidden)
    return hidden

def validate():
    return [criterion(evaluate(songs), genres).item() for songs, genres in validation]

for genres, songs in batches:
    optimizer.zero_grad()
    loss = criterion(evaluate(songs), genres)
    loss.backward()
    optimizer.step()
"""


def test_a_loop_that_training_runs_as_well_keeps_its_gradients_whatever_its_function_is_called():
    assert fixed(RECURRENT) == (RECURRENT, [])


EMPTYING = """\
import torch
for x, y in loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step(){between}
    torch.cuda.empty_cache(){behind}
print("done")
"""
WITHOUT = EMPTYING.replace("\n    torch.cuda.empty_cache()", "")


@pytest.mark.parametrize("comment", ["# release memory", "## Clear the CUDA cache", "#清理显存", "# empty cache"])
@pytest.mark.parametrize("behind", ["", "\n    total += 1", "\n\n    total += 1"])
def test_what_speaks_of_a_cache_that_is_not_emptied_any_more_goes_too(comment: str, behind: str):
    text, codes = fixed(EMPTYING.format(between=f"\n    {comment}", behind=behind))
    assert codes == ["OOM501"]
    assert text == WITHOUT.format(between="", behind=behind)


@pytest.mark.parametrize(
    ("comment", "behind"),
    [
        ("# end of the step", ""),
        ("# free memory", "\n    gc.collect()"),
        ("# free memory", "\n    del loss"),
        ("# a comment of two lines\n    # on memory", ""),
    ],
)
def test_what_speaks_of_more_than_a_cache_stays(comment: str, behind: str):
    text, _ = fixed(EMPTYING.format(between=f"\n    {comment}", behind=behind))
    assert text == WITHOUT.format(between=f"\n    {comment}", behind=behind)


def test_one_of_the_blank_lines_around_a_cache_that_is_not_emptied_goes():
    text, _ = fixed(EMPTYING.format(between="\n    ", behind="\n\n    total += 1"))
    assert text == WITHOUT.format(between="", behind="\n\n    total += 1")


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ("del y; torch.cuda.empty_cache()", "del y"),
        ("torch.cuda.empty_cache(); del y", "del y"),
        ("gc.collect(); torch.cuda.empty_cache(); del y  # free memory", "gc.collect(); del y  # free memory"),
        ("del y; torch.cuda.empty_cache();", "del y;"),
        ("with lock: gc.collect(); torch.cuda.empty_cache()", "with lock: gc.collect()"),
    ],
)
def test_a_cache_emptied_on_a_line_with_other_statements_is_not_any_more(written: str, left: str):
    """The line stays as it is otherwise, with the comment above it."""
    script = EMPTYING.format(between="\n    # free memory", behind="").replace("torch.cuda.empty_cache()", written)
    text, codes = fixed(script)
    assert codes == ["OOM501"]
    assert text == script.replace(written, left)


@pytest.mark.parametrize(("above", "unit"), [("    ", "\t"), ("\t", "  "), ("    ", "  "), ("  ", "    ")])
def test_an_evaluation_is_indented_as_its_own_blocks_are_written(above: str, unit: str):
    """Notebooks put cells of several hands into one file."""
    head = f"import torch\n\ndef show(x):\n{above}print(x)\n\nmodel.eval()\n"
    loop = f"for x in loader:\n{unit}if len(x) > 1:\n{unit * 2}show(model(x))\n"
    body = "".join(f"{unit}{line}" for line in loop.splitlines(keepends=True))
    assert fixed(head + loop)[0] == f"{head}with torch.no_grad():\n{body}"


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("torch.load(\n    path)", 'torch.load(\n    path, map_location="cpu")'),
        ("torch.load(\n    path\n)", 'torch.load(\n    path,\n    map_location="cpu"\n)'),
        ("torch.load(\n    path,\n)", 'torch.load(\n    path,\n    map_location="cpu",\n)'),
        ("torch.load(path,\n    mmap=True)", 'torch.load(path,\n    mmap=True,\n    map_location="cpu")'),
    ],
)
def test_an_added_argument_gets_a_line_of_its_own_where_the_others_have_one(call: str, after: str):
    assert (
        fixed(f"import torch\nmodel.load_state_dict({call})\n")[0] == f"import torch\nmodel.load_state_dict({after})\n"
    )


@pytest.mark.parametrize("quote", ["'", '"'])
def test_what_a_fix_adds_has_the_quotes_of_the_file(quote):
    text, codes = fixed(
        "import torch\n"
        "from torch.cuda.amp import GradScaler, autocast\n"
        "model.load_state_dict(torch.load('a.pt'))\n"
        "scaler = GradScaler()\n"
        "with autocast():\n"
        "    print('a')\n".replace("'", quote),
    )
    assert set(codes) == {"OOM205", "OOM401"}
    assert f"torch.load({quote}a.pt{quote}, map_location={quote}cpu{quote})" in text
    assert f"GradScaler({quote}cuda{quote})" in text
    assert f"autocast({quote}cuda{quote})" in text


def test_apostrophes_in_words_are_no_quotes_of_the_file():
    says = "# it's the model's own, and don't ask whose the others' are\n"
    text, _ = fixed(f'import torch\n{says}name = f"{{tag}}\'s"\nmodel.load_state_dict(torch.load(f"{{name}}.pt"))\n')
    assert 'map_location="cpu"' in text


@pytest.mark.parametrize("switched", ["torch.set_grad_enabled(True)", "torch._C._set_grad_enabled(True)"])
def test_an_edit_that_would_leave_its_finding_is_not_made_and_the_finding_is_named(switched):
    text = EVALUATION.replace("    model.eval()\n", f"    {switched}\n    model.eval()\n")
    result = apply_to(Source.from_bytes("train.py", text.encode()), all_rules(), Options("16gb", runtime=False))
    found = findings_of(Source.from_bytes("train.py", text.encode()), all_rules())
    after = findings_of(Source.from_bytes("train.py", result.text.encode()), all_rules())
    assert result.text.count("@torch.no_grad()") <= 1
    assert len(found) == len(result.fixed) + len(result.unfixed) and len(after) == len(result.unfixed)


def test_a_finding_that_takes_several_edits_is_counted_once():
    """Each of the functions that call the one that runs the network is decorated."""
    text = """\
import torch
from model import *
class Agent:
    def act(self, state):
        if self.on_card:
            return self.actor(state).detach().cpu().numpy()
    def target(self, state):
        if self.on_card:
            self.critic.train()
            self.actor.eval()
        return self.actor(state)
    def add(self, sample):
        targets = self.target(following)
    def update(self, batch, weights):
        targets = self.target(following)
"""
    result = apply_to(Source.from_bytes("train.py", text.encode()), all_rules(), Options("16gb", runtime=False))
    found = findings_of(Source.from_bytes("train.py", text.encode()), all_rules())
    after = findings_of(Source.from_bytes("train.py", result.text.encode()), all_rules())
    assert (len(found), len(after), len(result.fixed)) == (2, 0, 2)


def test_an_evaluation_in_a_block_that_switches_gradients_on_is_left_for_hands_to_change():
    text = EVALUATION.replace("    for x, t in", "    with torch.enable_grad():\n      for x, t in")
    text = text.replace("        a =", "          a =").replace("        b =", "          b =")
    text = text.replace("        total +=", "          total +=")
    result = apply_to(Source.from_bytes("train.py", text.encode()), all_rules(), Options("16gb", runtime=False))
    assert result.text == text
    assert [(one.code, one.message.endswith("may need gradients)")) for one in result.unfixed] == [("OOM201", True)] * 2


def test_of_two_lines_in_the_same_words_the_one_that_was_fixed_is_not_told_as_left():
    text = """\
import torch

net.eval()
for noise in noises:
    shown = net(noise).detach().numpy()
    plot(shown)
shown = net(noise).detach().numpy()
plot(shown)
"""
    source = Source.from_bytes("show.py", text.encode())
    result = apply_to(source, all_rules(), Options("16gb"))
    assert [(one.code, one.line) for one in result.fixed] == [("OOM201", 5)]
    assert [(one.code, one.line) for one in result.unfixed] == [("OOM201", 7)]
