"""What stays in place or is left alone, and the reason that is told."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply, loop_of


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("self.last = model(x)\n    loss = self.last.sum()", "changes self, which was made outside"),
        ("loss = model(x).sum()\n    if loss < 3:\n        continue", "`continue` in line"),
        ("out = model(x)\n    model.eval()\n    loss = criterion(out, y)", "switches layers or gradients"),
        ("out = model(x)\n    reset_grad()\n    loss = out.sum()", "may reset gradients"),
        ("out = model(x)\n    noise = torch.rand(1)\n    loss = out.sum() * torch.rand(1)", "draws random numbers"),
        (
            "out = model(x)\n    with torch.no_grad():\n        blend(teacher, model, 0.9)\n        soft = teacher(x)\n"
            "    loss = (out - soft).pow(2).mean()",
            "calls `blend`, which may change what it is given",
        ),
        ("loss = model(x).sum() + len(locals())", "`locals()` in line"),
        ("loss = model(x).sum() * eval('weight')", "`eval()` in line"),
        ("out = model(x)\n    loss = super().criterion(out, y)", "`super()` in line"),
    ],
)
def test_what_cannot_be_moved_stays_in_place_with_the_reason(inside, reason):
    _, forms = apply(f"""\
for x, y in loader:
    optimizer.zero_grad()
    {inside}
    loss.backward()
    optimizer.step()
""")
    assert forms[0][0] == "in-place"
    assert reason in (forms[0][1] or "")


def test_a_helper_that_counts_is_not_run_in_parts():
    text = TOP + textwrap.dedent("""\
        class Losses:
            def __init__(self):
                self.calls = 0

            def of(self, out, y):
                self.calls += 1
                return F.cross_entropy(out, y)

        losses = Losses()
        for x, y in loader:
            optimizer.zero_grad()
            loss = losses.of(model(x), y)
            loss.backward()
            optimizer.step()
            print(losses.calls)
        """)
    split = run(rewritten(text, micro_batches=2).text)
    assert split.calls_in_parts == 0
    assert_same_bits(run(text), split)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("model(x).sum().backward()", "no optimizer step and no update of parameters is in sight"),
        (
            "loss = model(x).sum()\n    accelerator.backward(loss, retain_graph=True)\n    optimizer.step()",
            "Accelerate runs the backward",
        ),
    ],
)
def test_loops_that_others_control_are_left_alone_to_the_byte_with_the_reason(body, reason):
    text = f"{TOP}for x, y in loader:\n    optimizer.zero_grad()\n    {body}\n"
    result = rewritten(text)
    assert result.text == text
    assert [loop.rewrite for loop in result.loops] == ["none"]
    assert reason in (result.loops[0].reason or "")


def test_local_fixes_are_made_without_the_runtime():
    from oomfix.rewrite.apply import apply_to
    from oomfix.rewrite.options import Options
    from oomfix.rules import all_rules
    from oomfix.source import Source

    loop = "total = 0\nfor x, y in loader:\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n"
    text = f"{TOP}{loop}    total += loss\n"
    result = apply_to(Source.from_bytes("t.py", text.encode()), all_rules(), Options("16gb", runtime=False))
    assert result.text == f"{TOP}{loop}    total += loss.detach()\n"
    assert result.loops == ()


def test_an_engine_that_runs_backward_is_not_taken_for_a_loss():
    _, forms = apply("""\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if engine:
                model.backward(loss)
                model.step()
            else:
                loss.backward()
                optimizer.step()
        """)
    assert forms[0][0] == "none"


def test_an_optimizer_out_of_a_container_is_stepped():
    assert 'memory.step(parts["optimizer"])' in loop_of("""\
        for x, y in loader:
            parts["optimizer"].zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            parts["optimizer"].step()
        """)


def test_what_another_library_trains_is_left_alone():
    text, forms = apply("""\
        import tinygrad

        tiny = tinygrad.nn.optim.Adam(parameters)
        for x, y in loader:
            tiny.zero_grad()
            loss = network(x, y).mean()
            loss.backward()
            tiny.step()
        """)
    assert forms == [("none", "tinygrad trains it, not torch")]
    assert "memory" not in text


def test_a_loss_of_nothing_that_could_be_split_stays_in_place():
    _, forms = apply("""\
        for epoch in range(3):
            optimizer.zero_grad()
            loss = model(graph.features).sum()
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("in-place", "the loss is computed from nothing that could be split")]


def test_a_sum_that_goes_on_from_outside_of_the_slice_stays_in_place():
    """Parts of a batch would each add to the same tensor."""
    _, forms = apply("""\
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            for row in model(x):
                total += row.sum()
            total.backward()
            optimizer.step()
        """)
    assert forms[0] == ("in-place", "line 12 adds to total, which was made outside of the slice")


def test_an_optimizer_that_runs_backward_is_no_loss():
    text = "for x, y in loader:\n    loss = model(x).sum()\n    optimizer.backward(loss)\n    optimizer.step()\n"
    result = rewritten(TOP + text)
    assert [loop.rewrite for loop in result.loops] == ["none"]
    assert result.text == TOP + text


@pytest.mark.parametrize("root", ["score = self.D(x)\n    score = score.mean()", "for score in model(x):\n        1"])
def test_a_tensor_that_starts_from_a_gradient_is_no_engine(root):
    _, forms = apply(f"for x, y in loader:\n    {root}\n    score.backward(one)\n    optimizer.step()\n")
    assert forms[0][0] == "in-place"


@pytest.mark.parametrize(("reset", "form"), [("schedule.optimizer", "micro-batched"), ("optimizer", "none")])
def test_a_schedule_that_holds_the_optimizer_steps_it_out_of_sight(reset, form):
    text, loops = apply(f"""\
        from library import Schedule
        schedule = Schedule(optimizer)
        for x, y in loader:
            {reset}.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            schedule.step()
        """)
    assert loops[0][0] == form
    assert f"    {reset}.zero_grad()\n" in text
    assert "    schedule.step()\n" in text


def test_a_schedule_named_after_its_optimizer_steps_as_before():
    text, _ = apply("""\
        def adjust():
            optim_scheduler.step()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            adjust()
        """)
    assert "    optim_scheduler.step()\n" in text


@pytest.mark.parametrize("made", ["(base * 2).tanh()", "base * 2"])
def test_a_graph_made_ahead_of_the_loop_of_a_parameter_is_kept_for_every_round(made):
    text = TOP + textwrap.dedent(f"""\
        base = torch.randn(6, 4, requires_grad=True)
        table = {made}
        for x, y in loader * 3:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(table + x), y)
            loss.backward(retain_graph=True)
            optimizer.step()
            print(loss.item())
        """)
    result = rewritten(text)
    assert [loop.rewrite for loop in result.loops] == ["in-place"]
    assert_same_bits(run(text), run(result.text, preset="off"))


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ("retain_graph=True", ""),
        ("retain_graph=flag", ", retain_graph=flag"),
        ("create_graph=True", ", create_graph=True"),
    ],
)
def test_a_graph_that_no_other_backward_needs_is_not_kept_in_place_either(last, kept):
    text = rewritten(f"""
import torch
from networks import Net, criterion

net, critic = Net().cuda(), Net().cuda()
first, second = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
for x, y in loader:
    seen.fake = net(x)
    judged = criterion(critic(seen.fake), y)
    second.zero_grad()
    judged.backward(retain_graph=True)
    second.step()
    made = criterion(critic(seen.fake), x)
    first.zero_grad()
    made.backward({last})
    first.step()
""").text
    assert "    memory.backward(judged, retain_graph=True)\n" in text
    assert f"    memory.backward(made{kept})\n" in text
