"""A backward in a block that only measures it, with the loss computed outside."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import apply

MEASURED = """\
def train(loader):
    total = 0.0
    for x, y in loader:
        with {context}("forward"):
            loss = F.cross_entropy(model(x), y)
        {between}
        with {context}("backward"):
            {ahead}
            loss.backward()
            {behind}
        optimizer.step()
        total += loss.item()
    return total
"""


def measured(context="record_function", between="pass", ahead="pass", behind="pass"):
    return apply(MEASURED.format(context=context, between=between, ahead=ahead, behind=behind))


@pytest.mark.parametrize(
    "context",
    ["record_function", "torch.autograd.profiler.record_function", "timer", "self.timers", "torch.cuda.nvtx.range"],
)
def test_a_loss_whose_backward_is_measured_is_a_function_ahead_of_the_block(context):
    text, forms = measured(context, ahead="optimizer.zero_grad()")
    assert forms == [("micro-batched", None)]
    assert (
        f"""
    for x, y in loader:
        def forward(x, y):
            with {context}("forward"):
                loss = F.cross_entropy(model(x), y)
            return loss

"""
        in text
    )
    assert (
        f"""
        with {context}("backward"):
            optimizer.zero_grad()
            loss = memory.forward_backward(forward, x, y)
            pass
"""
        in text
    )


@pytest.mark.parametrize("context", ["model.no_sync", "locked", "torch.no_grad"])
def test_a_block_that_does_more_than_measure_keeps_the_loss_in_place(context):
    _, ((form, _),) = measured(context)
    assert form != "micro-batched"


def test_what_reads_the_loss_within_the_block_follows_the_call():
    text, forms = measured(ahead="print(loss.item())")
    assert forms == [("micro-batched", None)]
    assert text.index("memory.forward_backward(") < text.index("print(loss.item())")


def test_what_stood_between_follows_the_block_unless_the_block_steps():
    text, forms = measured(between="print(loss.item())")
    assert forms == [("micro-batched", None)]
    assert text.index('"backward"') < text.index("print(loss.item())")
    looks = measured(between="print(model.weight.norm())", behind="optimizer.step()")
    assert looks[1][0] == ("in-place", "line 13 looks at the network, which line 14 trains behind it")


SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(5):
    x, y = torch.randn(7, 4), torch.randint(0, 2, (7,))
    with record_function("forward"):
        out = model(x)
        loss = F.cross_entropy(out, y)
    print(f"{out.argmax(1).sum()}")
    with record_function("backward"):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.9f}")
"""


def test_a_measured_script_trains_the_same():
    after = rewritten(SCRIPT, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(SCRIPT), run(after.text, preset="off"))
    assert_close(run(SCRIPT), run(after.text))


OWN = """\
class measure:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        {entered}

    def __exit__(self, *exception):
        {left}


"""


@pytest.mark.parametrize(
    ("entered", "left", "form"),
    [
        ("self.start = torch.tensor(0)", "print(self.name)", "micro-batched"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)", "in-place"),
    ],
)
def test_a_block_that_the_file_defines_is_what_it_does(entered, left, form):
    body = MEASURED.format(context="measure", between="pass", ahead="pass", behind="pass")
    _, ((found, _),) = apply(OWN.format(entered=entered, left=left) + body)
    assert found == form


def test_metrics_leave_a_block_that_only_measures():
    text, forms = apply("""\
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            with timer("forward"):
                loss = F.cross_entropy(model(x), y)
                losses.append(loss.item())
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    assert "    loss = memory.forward_backward(forward, x, y)\n    losses.append(loss.item())\n" in text
