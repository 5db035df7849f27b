"""report(): what every state of a run reads like, to the letter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))


class Small(nn.Linear):
    """Runs out of memory above `rows` samples."""

    rows = 8

    def forward(self, x):
        if len(x) > self.rows:
            raise OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


@pytest.fixture
def model():
    return Small(6, 4)


@pytest.fixture
def forward(model):
    def forward(x, y):
        return F.cross_entropy(model(x), y)

    return forward


def text(memory):
    return str(memory.report()).splitlines()


def test_a_run_that_has_not_begun():
    assert text(runtime.preset("16gb")) == ["preset 16gb: 0 optimizer steps"]


def test_batches_that_fit(model, forward):
    memory, optimizer = runtime.preset("24gb"), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        memory.forward_backward(forward, X, Y)
        memory.step(optimizer)
    memory.evaluate(forward, X, Y)
    assert text(memory) == [
        "preset 24gb: 3 optimizer steps",
        "  forward: whole batches, 3 training calls",
        "  forward: whole batches, 1 evaluation",
    ]


def test_a_fixed_number_of_micro_batches(model, forward):
    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(forward, X, Y)
    memory.step(torch.optim.SGD(model.parameters(), lr=0.1))
    memory.evaluate(forward, X, Y)
    assert text(memory) == [
        "preset 16gb: 1 optimizer step",
        "  forward: batches in 4 micro-batches, 1 training call",
        "  forward: whole batches, 1 evaluation",
        "  forward: micro-batches since training call 1, because micro_batches=4 was asked for; "
        "what it saves is not measured",
    ]


def test_a_batch_that_may_not_be_split(model):
    def coupled(x):
        return model(x).std(0, unbiased=False).mean()

    memory = runtime.preset("16gb", micro_batches=2)
    memory.forward_backward(coupled, X)
    assert text(memory)[1].startswith("  coupled: whole batches (samples depend on each other: ")
    assert list(memory.report().whole_because) == ["coupled"]


def test_a_batch_that_may_not_be_split_but_is(model):
    def coupled(x):
        return model(x).std(0, unbiased=False).mean()

    memory = runtime.preset("16gb", micro_batches=2, split="always")
    memory.forward_backward(coupled, X)
    assert text(memory)[1] == (
        "  coupled: batches in 2 micro-batches (samples depend on each other; split='always' was asked for), "
        "1 training call"
    )


def test_splitting_that_was_forbidden(forward):
    memory = runtime.preset("16gb", split="never")
    memory.forward_backward(forward, X, Y)
    assert text(memory)[1] == "  forward: whole batches (split='never' was asked for), 1 training call"


def test_a_hook_that_would_see_parts(model, forward):
    model.weight.register_hook(lambda gradient: gradient)
    memory = runtime.preset("16gb", micro_batches=2)
    memory.forward_backward(forward, X, Y)
    assert text(memory)[1] == (
        "  forward: whole batches (parameter 'weight' has a hook, which would see gradients of parts), 1 training call"
    )


def test_a_run_that_ran_out_of_memory(model, forward):
    model.rows = 2
    memory = runtime.preset("16gb")
    memory.forward_backward(forward, X, Y)
    assert text(memory) == [
        "preset 16gb: 0 optimizer steps",
        "  ran out of memory 2 times, and went on in smaller pieces",
        "  forward: micro-batches of up to 2 samples, 1 training call",
        "  forward: micro-batches since training call 1, because whole batches ran out of memory; "
        "what it saves is not measured",
    ]
    assert memory.report().largest == {"forward": 2}


def test_steps_that_fp16_left_out(model, forward):
    memory, optimizer = runtime.preset("16gb", precision="fp16"), torch.optim.SGD(model.parameters(), lr=0.1)
    for overflow in (True, True, False):
        memory.forward_backward(forward, X, Y)
        if overflow:
            model.weight.grad.fill_(float("inf"))
        memory.step(optimizer)
    assert text(memory)[0] == (
        "preset 16gb: 3 optimizer steps, 2 of them left out because fp16 gradients overflowed; loss scale 16384"
    )
    assert memory.report().skipped_steps == 2


def test_a_forward_that_autocast_made_fail():
    class Strict(nn.Linear):
        def forward(self, x):
            if torch.is_autocast_cpu_enabled():
                raise RuntimeError("no kernel for BFloat16")
            return super().forward(x)

    model = Strict(6, 4)

    def forward(x, y):
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb", precision="bf16")
    memory.forward_backward(forward, X, Y)
    assert text(memory)[1] == "  forward: whole batches, in fp32, 1 training call"


def test_windows(model, forward):
    memory, optimizer = runtime.preset("16gb"), torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in memory.accumulate([(X, Y)] * 5, 2):
        memory.forward_backward(forward, x, y)
        if memory.window_closed:
            memory.step(optimizer)
    assert text(memory) == [
        "preset 16gb: 3 optimizer steps",
        "  3 accumulation windows",
        "  forward: whole batches, 5 training calls",
    ]


def test_a_script_as_it_was_written(model, forward):
    memory = runtime.preset("off")
    memory.forward_backward(forward, X, Y)
    memory.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert text(memory) == ["preset off: 1 optimizer step"]
