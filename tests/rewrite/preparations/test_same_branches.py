"""Branches that are the same once precision is handed over become one."""

import pytest

from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.preparations.same_branches import merge_branches
from oomfix.script import Script
from oomfix.source import Source
from tests.rewrite.small_loops import apply

BRANCHES = """\
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    if args.amp:
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x), y)
    else:
        loss = F.cross_entropy(model(x), y)
    if args.amp:
        # scaled
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(loss.item())
"""


def test_branches_that_are_the_same_without_their_own_scaler_become_one_and_the_batch_is_split():
    text, forms = apply(BRANCHES)
    assert forms == [("micro-batched", None)]
    assert text.endswith(
        """\
            else:
                loss = F.cross_entropy(model(x), y)
            return loss

        # scaled
        loss = memory.forward_backward(forward, x, y)
        memory.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        memory.step(optimizer)
        print(loss.item())
""".replace("\n    ", "\n").removeprefix("    ")
    )


ASKED_OF_THE_SCALER = """\
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=args.amp):
        loss = F.cross_entropy(model(x), y)
    if scaler.is_enabled():
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = size_of(loss)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        norm = size_of(loss)
        optimizer.step()
    print(loss.item(), norm)
"""


def test_branches_that_differ_only_in_what_unscales_become_the_one_that_does():
    text, forms = apply(ASKED_OF_THE_SCALER)
    assert forms == [("micro-batched", None)]
    assert text.endswith(
        """\
    loss = memory.forward_backward(forward, x, y)
    memory.unscale_(optimizer)
    norm = size_of(loss)
    memory.step(optimizer)
    print(loss.item(), norm)
"""
    )


@pytest.mark.parametrize(
    ("test", "merged"),
    [("args.amp", True), ("scaler is not None", True), ("last", False), ("args.amp and last", False)],
)
def test_what_unscales_the_last_batch_of_a_window_alone_stays_under_its_test(test, merged):
    text = f"""\
for x, y in loader:
    if {test}:
        memory.backward(loss)
        memory.unscale_(optimizer)
    else:
        memory.backward(loss)
    memory.step(optimizer)
"""
    reading = Reading(Script.read(Source.from_bytes("train.py", text.encode()), None))
    assert bool(merge_branches(reading, "memory").edits) is merged


def test_a_function_that_reads_gradients_in_the_branch_without_scaling_sees_no_scale():
    reader = "def size_of(loss):\n    return sum(float(one.grad.norm()) for one in model.parameters())\n\n\n"
    text, forms = apply(reader + ASKED_OF_THE_SCALER)
    assert forms == [("micro-batched", None)]
    assert 'runtime.preset("16gb", precision="fp32")' in text
    assert "return (scaler.scale(loss) if scaler.is_enabled() else loss), loss" in text


def test_a_branch_that_only_unscales_besides_its_backward_becomes_both():
    text, forms = apply("""\
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", enabled=args.amp):
                loss = F.cross_entropy(model(x), y)
            if args.amp:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            else:
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if args.amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    assert "if args.amp" not in text


def test_branches_that_differ_or_are_chosen_by_a_call_stay():
    _, forms = apply(
        BRANCHES.replace("model.parameters(), 1.0)\n    optim", "model.parameters(), 2.0)\n    optim", 1).replace(
            "    else:\n        loss.b", "    else:\n        print()\n        loss.b"
        )
    )
    assert forms[0][0] == "in-place"
    text, forms = apply(BRANCHES.replace("if args.amp:\n        #", "if flip():\n        #"))
    assert forms[0][0] == "in-place"
    assert "if flip():" in text


UNSEEN_AUTOCAST = """\
scaler = torch.cuda.amp.GradScaler() if args.fp16 else None
for x, y in loader:
    loss = model(x, y)
    optimizer.zero_grad()
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
"""


IN_CHAIN = """\
scaler = torch.amp.GradScaler("cuda") if args.amp else None
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", enabled=args.amp):
        loss = F.cross_entropy(model(x), y) / 4
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if {amp} and i % 4 == 3:  # closes
        # with a scale
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    elif {closes}:
        # or without
        optimizer.step()
        {behind}
    print(loss.item())
"""


@pytest.mark.parametrize("amp", ["scaler is not None", "not scaler is None", "args.amp"])
def test_a_step_under_the_same_test_with_and_without_scaling_is_one(amp):
    text, _ = apply(IN_CHAIN.format(amp=amp, closes="i % 4 == 3", behind="optimizer.zero_grad()"))
    assert text.endswith("""\
    loss = memory.forward_backward(forward, x, y)
    if i % 4 == 3:  # closes
        # with a scale
        memory.step(optimizer)
    print(loss.item())
""")


@pytest.mark.parametrize(
    ("amp", "closes", "behind"),
    [
        ("scaler is not None", "i % 4 == 1", "optimizer.zero_grad()"),
        ("scaler is not None", "i % 4 == 3", "print(i)"),
        ("verbose", "i % 4 == 3", "optimizer.zero_grad()"),
        ("scaler is not None", "i % 4 == 3", "optimizer.zero_grad()\n    else:\n        print(i)"),
    ],
)
def test_steps_of_a_chain_that_differ_stay(amp, closes, behind):
    text, _ = apply(IN_CHAIN.format(amp=amp, closes=closes, behind=behind))
    assert f"    if {amp} and i % 4 == 3:  # closes\n" in text and f"    elif {closes}:\n" in text


def test_backwards_that_both_branches_begin_with_run_ahead_of_them_so_that_the_batch_is_split():
    text, forms = apply(UNSEEN_AUTOCAST)
    assert forms == [("micro-batched", None)]
    assert text.endswith("""
    def forward(x, y):
        loss = model(x, y)
        return scaler.scale(loss) if scaler is not None else loss

    optimizer.zero_grad()
    memory.forward_backward(forward, x, y)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""")


def test_a_branch_that_does_something_ahead_of_its_backward_keeps_it():
    text, _ = apply(UNSEEN_AUTOCAST.replace("        loss.backward()", "        print(loss)\n        loss.backward()"))
    assert "        print(loss)\n        loss.backward()\n" in text
