"""Loops put together at random train the same after `apply`, and a second `apply` changes nothing."""

from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

TOP = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
inputs, targets = torch.randn(44, 5), torch.randint(0, 3, (44,))
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
criterion = nn.CrossEntropyLoss()
scaler = GradScaler()
use_amp = bool(len(inputs))
total, correct, seen, window = 0.0, 0, 0, 4
"""
HEADERS = {
    "plain": ("for x, y in loader:", []),
    "enumerate": ("for i, (x, y) in enumerate(loader):", []),
    "batch": ("for batch in loader:", ["x, y = batch", "x, y = x.to('cpu'), y.to('cpu')"]),
    "range": ("for i in range(0, len(inputs), 8):", ["x, y = inputs[i : i + 8], targets[i : i + 8]"]),
    "while": ("it = iter(loader)\nwhile seen < 80:", ["x, y = next(it, (inputs[:6], targets[:6]))"]),
}
LOSSES = {
    "criterion": ["out = model(x)", "loss = criterion(out, y)"],
    "two terms": ["out = model(x)", "penalty = out.pow(2).mean()", "loss = F.cross_entropy(out, y) + 0.1 * penalty"],
    "summed": ["out = model(x)", "loss = 0", "for row in out.T:", "    loss = loss + row.pow(2).mean()"],
    "branch": ["out = model(x)", "if seen >= 0:", "    loss = criterion(out, y)", "else:", "    loss = out.sum()"],
    "sized": ["n = x.size(0)", "out = model(x).view(n, 3)", "loss = F.cross_entropy(out, y, reduction='sum') / 8"],
}
BETWEEN = ["print(f'{loss.item():.10f}')", "correct += (out.argmax(1) == y).sum().item()", "total += loss.item()"]
AFTER = [*BETWEEN, "total += loss", "lr = optimizer.param_groups[0]['lr']", "print(f'{out.sum().item():.9f}')"]


def indented(lines: list[str], by: int) -> str:
    return "".join(f"{' ' * by}{line}\n" for line in lines)


# what a window should divide each loss by, for scripts that do not: batches, or their share of its samples
BATCHES = "loss / min(window, len(loader) - i // window * window)"
SAMPLES = "loss * (x.size(0) / min(8 * window, 44 - i // window * window * 8))"


class Generated(NamedTuple):
    """A script; the same without the bugs of its window, that divides by batches; and by samples."""

    text: str
    by_batches: str
    by_samples: str


@st.composite
def scripts(draw) -> Generated:
    place, epochs = draw(st.sampled_from(["flat", "function", "helper", "method"])), draw(st.integers(1, 2))
    folded = place != "helper" and draw(st.booleans())
    header, fetch = HEADERS["enumerate" if folded else draw(st.sampled_from(sorted(HEADERS)))]
    amp, clip, windowed = draw(st.booleans()), draw(st.booleans()), folded or draw(st.booleans())
    kind = draw(st.sampled_from(sorted(LOSSES)))
    loss = LOSSES[kind]
    between = draw(st.lists(st.sampled_from(BETWEEN), max_size=2, unique=True))
    if amp and draw(st.booleans()):
        loss, between = [*loss, *between], []
    if amp:
        loss = ["with autocast():", *(f"    {line}" for line in loss)]
    after = draw(st.lists(st.sampled_from(AFTER), max_size=3, unique=True))
    # a loss that may be a sum is folded only where it is divided
    divided = draw(
        st.sampled_from(
            ["not at all", "before", "after"] if folded and kind not in ("sized", "branch") else ["before", "after"]
        )
    )
    rescale = ["loss = loss / window"] if windowed and divided == "before" else []
    scaled = "loss / window" if windowed and divided == "after" else "loss"
    step = ["scaler.step(optimizer)", "scaler.update()"] if amp else ["optimizer.step()"]
    if clip:
        step = (["scaler.unscale_(optimizer)"] if amp else []) + [
            "nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
            *step,
        ]
    zero = "optimizer.zero_grad()"
    ahead: list[str] = []
    if windowed:
        test = "(i + 1) % window == 0" if folded else "(seen // 8) % window == 0"
        step = [f"if {test}:", *(f"    {line}" for line in [*step, zero])]
    else:
        late = draw(st.booleans())
        ahead = [] if late else [zero]
        step = [*step, zero] if late else step
    branched = amp and not windowed and draw(st.booleans())
    # without a window, where the gradients of the batches ahead of a skipped one would have to stay
    ways = ["not at all"] if windowed else ["not at all", "skipped", *([] if branched else ["trained"])]
    guarded = draw(st.sampled_from(ways))
    guard = ["if not torch.isfinite(loss):", f"    {LEAVING[place]}"] if guarded == "skipped" else []
    if draw(st.booleans()):
        step = [*step, "scheduler.step()"]

    def script(whole: str | None) -> str:
        """The script, with `whole` as its loss where its window is to be right."""
        keep = ["whole = loss"] if whole else []
        root = whole.replace("loss", "whole") if whole else scaled
        backward = [f"scaler.scale({root}).backward()" if amp else f"({root}).backward()"]
        train = [*backward, *step]
        if branched:
            plain = [
                f"({root}).backward()",
                *(line.replace("scaler.step(optimizer)", "optimizer.step()") for line in step),
            ]
            plain = [line for line in plain if "scaler" not in line]
            train = ["if use_amp:", *(f"    {line}" for line in train), "else:", *(f"    {line}" for line in plain)]
        if guarded == "trained":
            train = ["if torch.isfinite(loss):", *(f"    {line}" for line in train)]
        lines = [*ahead, "seen += x.size(0)", *loss, *guard, *keep, *between, *rescale, *train, *after]
        if whole:
            lines = [line.replace("% window == 0:", "% window == 0 or i + 1 == len(loader):") for line in lines]
        return TOP + (BAD_ROW if guarded != "not at all" else "") + PLACES[place](header, fetch, lines, epochs) + END

    if not folded or kind == "sized":
        # the window of a sum over samples stays as it is
        return Generated(script(None), script(None), script(None))
    return Generated(script(None), script(BATCHES), script(SAMPLES))


def flat(header: str, fetch: list[str], iteration: list[str], epochs: int) -> str:
    lines = [*header.splitlines(), *(f"    {line}" for line in [*fetch, *iteration])]
    return f"for epoch in range({epochs}):\n" + indented(lines, 4)


def in_function(header: str, fetch: list[str], iteration: list[str], epochs: int) -> str:
    lines = [*header.splitlines(), *(f"    {line}" for line in [*fetch, *iteration])]
    return "def train():\n    global total, correct, seen\n" + indented(lines, 4) + "\n\n" + "train()\n" * epochs


def in_helper(header: str, fetch: list[str], iteration: list[str], epochs: int) -> str:
    helper = "def train_step(model, x, y):\n    global total, correct, seen\n" + indented(iteration, 4) + "\n\n"
    lines = [*header.splitlines(), *(f"    {line}" for line in [*fetch, "train_step(model, x, y)"])]
    return helper + f"for epoch in range({epochs}):\n" + indented(lines, 4)


def in_method(header: str, fetch: list[str], iteration: list[str], epochs: int) -> str:
    names = {"model(": "self.model(", "optimizer": "self.optimizer", "scaler": "self.scaler", "model.p": "self.model.p"}
    lines = [*header.splitlines(), *(f"    {line}" for line in [*fetch, *iteration])]
    for old, new in names.items():
        lines = [line.replace(old, new) for line in lines]
    parts = "self.model, self.optimizer, self.scaler = model, optimizer, scaler"
    text = f"class Trainer:\n    def __init__(self):\n        {parts}\n\n    def train(self):\n"
    return text + "        global total, correct, seen\n" + indented(lines, 8) + "\n\n" + "Trainer().train()\n" * epochs


PLACES = {"flat": flat, "function": in_function, "helper": in_helper, "method": in_method}
LEAVING = {"flat": "continue", "function": "continue", "helper": "return", "method": "continue"}
BAD_ROW = "inputs[17, 2] = float('nan')\n"
END = "print(f'{float(total):.10f} {float(correct):.1f}')\n"


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scripts())
def test_generated_loops_train_the_same(generated):
    """Those whose window loses its tail or its division train as they would without that."""
    after = rewritten(generated.text)
    assert rewritten(after.text).text == after.text
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"], after.loops
    assert ("memory.accumulate" in after.text) == (generated.text != generated.by_batches)
    assert_same_bits(run(generated.by_batches), run(after.text, preset="off"))
    split = run(rewritten(generated.text, micro_batches=3).text)
    # a check that meets the bad row cannot tell whether the batch may be split
    assert split.calls_in_parts or BAD_ROW in generated.text
    assert_close(run(generated.by_samples), split, relative=1e-9)
