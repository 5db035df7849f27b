"""Gradients are unscaled before anything looks at them, or never scaled."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply, loop_of


def test_clipping_of_scaled_gradients_is_preceded_by_unscaling():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """)
    unscale, clip = text.index("memory.unscale_(optimizer)\n"), text.index("norm = nn.utils")
    assert text.index("forward_backward") < unscale < clip < text.index("memory.step(optimizer)")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("loss = model(x).sum()\n    loss.backward()\n    optimizer.step(closure)", "takes a closure or a loss"),
        ("model(x).sum().backward()\n    optimizer.first_step()\n    optimizer.step()", "steps twice per batch (SAM)"),
        (
            "x.requires_grad_()\n    model(x).sum().backward()\n    optimizer.step()\n    print(x.grad)",
            "reads `x.grad`",
        ),
        (
            "model(x).sum().backward()\n    print(model.weight.grad.norm())\n    optimizer.step()",
            "reads `model.weight.g",
        ),
        ("model(x).sum().backward()\n    optimizer.step_and_update_lr()", "the step is out of sight"),
        (
            "solver, _ = model.configure()\n    solver.zero_grad()\n    model(x).sum().backward()\n    solver.step()",
            "`solver` is not seen to be an optimizer",
        ),
        ("model(x).sum().backward()\n    norm = optimizer.step()", "what the step in line 11 returns is used"),
        ("model(x).sum().backward()\n    model.weight.data -= 0.1 * model.weight.grad", "the step is out of sight"),
    ],
)
def test_gradients_that_the_script_looks_at_are_never_scaled(body, reason):
    """In fp16 a loss is scaled by 65536, which only the manager's own step can take out again."""
    result = rewritten(f"{TOP}for x, y in loader:\n    optimizer.zero_grad()\n    {body}\n")
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    (note,) = result.loops[0].notes
    assert note.startswith("losses are not scaled, so no fp16: ") and reason in note
    assert 'runtime.preset("16gb", precision="no-fp16")' in result.text
    assert "unscale_" not in result.text


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
UNSCALE = "memory.unscale_(optimizer)"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f"if clip: {CLIP}", f"if clip:\n        {UNSCALE}\n        {CLIP}"),
        (f"if clip: {CLIP}; print(1)", f"if clip:\n        {UNSCALE}\n        {CLIP}; print(1)"),
        (f"if not clip: pass\n    else: {CLIP}", f"if not clip: pass\n    else:\n        {UNSCALE}\n        {CLIP}"),
        (f"z = 1; {CLIP}", f"z = 1; {UNSCALE}; {CLIP}"),
        (f"{CLIP}; z = 1", f"{UNSCALE}\n    {CLIP}; z = 1"),
        (f"for _ in '1': {CLIP}", f"{UNSCALE}\n    for _ in '1': {CLIP}"),
    ],
)
def test_clipping_that_shares_its_line_is_preceded_by_unscaling_too(written, expected):
    wide = f"# {'as wide as this file is ':-<100}\nclip = True\n"
    loop = "for x, y in loader:\n    optimizer.zero_grad()\n    model(x).sum().backward()\n"
    text, forms = apply(f"{wide}{loop}    {written}\n    optimizer.step()\n")
    assert forms == [("micro-batched", None)]
    assert f"    {expected}\n    memory.step(optimizer)\n" in text


def test_clipping_on_one_line_with_backward_and_step_is_preceded_by_unscaling():
    """A loop that stays in place keeps its lines as they are joined."""
    text, forms = apply(f"""\
        seen = []
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            seen.append(out)
            loss = F.cross_entropy(seen[-1], y)
            loss.backward(); {CLIP}; optimizer.step()
        """)
    assert [form for form, _ in forms] == ["in-place"]
    assert f"memory.backward(loss); {UNSCALE}; {CLIP[:24]}" in text


def test_gradients_that_another_function_reads_are_never_scaled():
    plot = "def plot(model):\n    print([p.grad.abs().mean() for p in model.parameters()])\n\n"
    loop = "for x, y in loader:\n    optimizer.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()\n"
    assert 'precision="no-fp16"' in rewritten(f"{TOP}{plot}{loop}    plot(model)\n").text
    zeroed = plot.replace("print([p.grad.abs().mean() for p in model.parameters()])", "model.weight.grad.zero_()")
    assert "no-fp16" not in rewritten(f"{TOP}{zeroed}{loop}").text


LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    {between}
    optimizer.step()
"""


@pytest.mark.parametrize("added", ["+= 0.01 * model.weight.detach()", "-= noise"])
def test_what_is_added_to_a_gradient_is_added_once_it_is_unscaled(added):
    """In fp16 it would be 65536 times too small beside the gradient."""
    text, forms = apply(f"noise = torch.rand(2, 4)\n{LOOP.format(between=f'model.weight.grad {added}')}")
    assert forms == [("micro-batched", None)]
    assert f"    memory.unscale_(optimizer)\n    model.weight.grad {added}\n    memory.step(optimizer)" in text


def test_a_function_that_adds_to_gradients_keeps_losses_unscaled():
    decay = "def decay(network):\n    for p in network.parameters():\n        p.grad += 0.01 * p.data\n\n"
    result = rewritten(f"{TOP}{decay}{LOOP.format(between='decay(model)')}")
    (note,) = result.loops[0].notes
    assert note == "losses are not scaled, so no fp16: line 10 adds to `p.grad`, a gradient that may be scaled"


def test_a_gradient_that_is_multiplied_keeps_its_scale():
    text, _ = apply(LOOP.format(between="model.weight.grad *= 0.5"))
    assert "unscale_" not in text and "no-fp16" not in text


GIVEN = """\
other = nn.Linear(4, 2)
optimizer_2 = torch.optim.SGD(other.parameters(), lr=0.1)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gradients = torch.autograd.grad(F.cross_entropy(other(x), y), other.parameters())
    for parameter, gradient in zip(other.parameters(), gradients):
        parameter.grad = {gradient}
    optimizer_2.step()
"""


@pytest.mark.parametrize("gradient", ["gradient", "-gradient.clone()"])
def test_where_a_script_gives_parameters_gradients_of_its_own_no_loss_is_scaled(gradient):
    """`memory.step` would divide them by a scale that they were never multiplied by."""
    result = rewritten(f"{TOP}{GIVEN.format(gradient=gradient)}")
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    (note,) = result.loops[0].notes
    assert note == "losses are not scaled, so no fp16: line 17 gives `parameter.grad` a value that is not scaled"
    assert 'runtime.preset("16gb", precision="no-fp16")' in result.text


@pytest.mark.parametrize("gradient", ["None", "torch.zeros_like(parameter)"])
def test_a_gradient_of_nothing_has_every_scale(gradient):
    assert "no-fp16" not in rewritten(f"{TOP}{GIVEN.format(gradient=gradient)}").text


def test_a_step_behind_the_loop_on_a_backward_of_its_own_keeps_losses_unscaled():
    last = "loss = F.cross_entropy(model(x), y)\nloss.backward()\noptimizer.step()\n"
    result = rewritten(f"{TOP}{LOOP.format(between='pass')}optimizer.zero_grad()\n{last}")
    (note,) = result.loops[0].notes
    assert note == "losses are not scaled, so no fp16: line 16 steps on the backward of line 15, which is in no loop"
    tail = "if len(loader) % 2:\n    optimizer.step()\n"
    assert "no-fp16" not in rewritten(f"{TOP}{LOOP.format(between='pass')}{tail}").text


def test_clipping_where_no_step_follows_is_kept_in_a_loop_without_loss_scaling():
    """The loss scale can be taken out of gradients once per step: clipping each part of a window needs none at all."""
    text, forms = apply("""\
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert 'precision="no-fp16"' in text


def test_gradients_clipped_in_a_window_that_steps_behind_its_loop_are_not_scaled():
    text, forms = apply("""\
        for epoch in range(3):
            for i in range(4):
                x, y = next(batches)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert 'precision="no-fp16"' in text


def test_the_shape_of_a_gradient_tells_nothing_of_its_scale():
    body = """\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            print([p.grad.{} for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        """
    assert "unscale_" not in loop_of(body.format("shape"))
    assert "memory.unscale_(optimizer)\n    print" in loop_of(body.format("sum()"))


def test_a_script_that_clips_where_nothing_is_scaled_is_not_clipped_again():
    loop = "for x, y in loader:\n    model(x).sum().backward()\n    norm = optimizer.step()\n"
    clip = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    norm"
    assert 'precision="no-fp16", clip_norm=0.5)' in rewritten(TOP + loop, clip_norm=0.5).text
    assert "clip_norm=" not in rewritten(TOP + loop.replace("    norm", clip), clip_norm=0.5).text


READERS = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
{between}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("between", "lines"),
    [
        # both branches clip: one call ahead of the test for them
        (
            "    loss.backward()\n    if flag:\n        nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
            "    else:\n        nn.utils.clip_grad_norm_(model.parameters(), 2)",
            ["    memory.unscale_(optimizer)", "    if flag:"],
        ),
        # one round in ten only looks, and all clip
        (
            "    loss.backward()\n    if flag:\n        print(nn.utils.clip_grad_norm_(model.parameters(), 9))\n"
            "    nn.utils.clip_grad_norm_(model.parameters(), 2)",
            ["    memory.unscale_(optimizer)", "    if flag:"],
        ),
        # a test that a window closes: gradients are still gathered where it has not
        (
            "    loss.backward()\n    if flag:\n        nn.utils.clip_grad_norm_(model.parameters(), 2)",
            ["        memory.unscale_(optimizer)", "        nn.utils.clip_grad_norm_(model.parameters(), 2)"],
        ),
    ],
    ids=["both branches", "one branch and all", "one branch"],
)
def test_gradients_are_unscaled_on_every_way_that_looks_at_them(between, lines):
    text, _ = apply("flag = False\n" + READERS.format(between=between))
    found = text.splitlines()
    assert [line for line in found if "unscale_" in line] == lines[:1]
    assert found[found.index(lines[0]) + 1] == lines[1]


def test_gradients_are_unscaled_in_each_branch_that_runs_its_own_backward():
    between = (
        "    if flag:\n        (loss * 2).backward()\n        nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
        "    else:\n        loss.backward()\n        nn.utils.clip_grad_norm_(model.parameters(), 2)"
    )
    text, _ = apply("flag = False\n" + READERS.format(between=between))
    assert text.count("        memory.unscale_(optimizer)\n        nn.utils.clip_grad_norm_(") == 2


def test_gradients_of_a_step_in_a_loop_are_unscaled_inside_of_the_loop():
    """Ahead of the loop, which the loop of the caller sees as well, its names mean nothing."""
    text, _ = apply("""\
        nets = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        def others(x, y):
            for i in range(2):
                optimizers[i].zero_grad()
                x = x + 1
                loss = F.cross_entropy(nets[i](x), y)
                loss.backward(retain_graph=flag)
                nn.utils.clip_grad_norm_(nets[i].parameters(), 1)
                optimizers[i].step()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            others(x, y)
        """)
    lines = text.splitlines()
    assert [line for line in lines if "unscale_" in line] == ["        memory.unscale_(optimizers[i])"]


@pytest.mark.parametrize(
    "clip", ["gradient_clipping(model.parameters(), 1.0)", "clip_gnorm(model)", "norm = grad_norm(model)"]
)
def test_gradients_are_unscaled_for_clips_of_another_file(clip):
    text, _ = apply(f"""\
        from library import gradient_clipping, clip_gnorm, grad_norm
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            {clip}
            optimizer.step()
            optimizer.zero_grad()
        """)
    assert f"    memory.unscale_(optimizer)\n    {clip}\n" in text


def test_what_is_said_of_a_clip_stays_with_it():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            # no gradient grows
            # beyond one
            for p in model.parameters():
                nn.utils.clip_grad_value_(p, 1.0)
            optimizer.step()
        """)
    assert "    memory.unscale_(optimizer)\n    # no gradient grows\n    # beyond one\n    for p in" in text


def test_gradients_clipped_ahead_of_the_steps_of_two_optimizers_are_unscaled_for_both():
    text, _ = apply("""\
        critic = nn.Linear(4, 2)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for x, y in loader:
            loss, other = F.cross_entropy(model(x), y), F.cross_entropy(critic(x), y)
            optimizer.zero_grad()
            second.zero_grad()
            loss.backward()
            other.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            nn.utils.clip_grad_norm_(critic.parameters(), 1)
            optimizer.step()
            second.step()
        """)
    both = "    memory.unscale_(optimizer)\n    memory.unscale_(second)\n    nn.utils.clip_grad_norm_(model"
    assert both in text and text.count("unscale_") == 2


def test_gradients_clipped_ahead_of_each_step_are_unscaled_where_they_are_clipped():
    text, _ = apply("""\
        critic = nn.Linear(4, 2)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for x, y in loader:
            optimizer.zero_grad()
            second.zero_grad()
            loss = F.cross_entropy(model(x), y) + F.cross_entropy(critic(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            nn.utils.clip_grad_norm_(critic.parameters(), 1)
            second.step()
        """)
    assert "    memory.unscale_(second)\n    nn.utils.clip_grad_norm_(critic" in text and text.count("unscale_") == 2


def test_gradients_handed_to_the_parameters_of_another_model_are_not_scaled():
    """The optimizer does not hold what the backward has scaled, and cannot unscale it."""
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        local = nn.Linear(4, 2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(local(x), y)
            loss.backward()
            for param, local_param in zip(model.parameters(), local.parameters()):
                param{} = local_param.grad
            optimizer.step()
        """).format("._grad")
    )
    assert 'precision="no-fp16"' in result.text
    assert "unscale_" not in result.text


FLAGGED = """\
amp = False
scaler = torch.amp.GradScaler("cuda", enabled=amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=amp):
        loss = F.cross_entropy(model(x), y)
"""


def test_a_flag_that_decides_no_precision_any_more_goes_from_around_the_unscaling_too():
    text, _ = apply(
        FLAGGED
        + textwrap.dedent("""\
        #
            if amp:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            if amp:
                scaler.unscale_(optimizer)  # for the clip
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            if amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        """)
    )
    assert "    memory.unscale_(optimizer)  # for the clip\n    nn.utils.clip" in text
    assert "if amp" not in text and text.count("unscale_") == 1


def test_gradients_clipped_in_both_branches_of_a_flag_are_unscaled_in_both():
    text, _ = apply(
        FLAGGED
        + textwrap.dedent("""\
        #
            if amp:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1)
                optimizer.step()
        """)
    )
    assert "if amp" not in text and text.count("    memory.unscale_(optimizer)\n    nn.utils.clip") == 1


HELPER = """\
class Staff:
    def __init__(self, model):
        self.model = model

    def compute(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

staff = Staff(model)
for x, y in loader:
    staff.compute(x, y)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_that_a_function_clips_which_has_no_step_are_not_scaled():
    text, forms = apply(HELPER)
    assert forms == [("micro-batched", None)]
    assert 'precision="no-fp16"' in text


def test_a_function_without_a_step_that_unscales_by_itself_keeps_doing_so():
    script = HELPER.replace("loss.backward()", "scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)")
    script = script.replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()")
    script = script.replace("    loss = F", "    with torch.autocast('cuda'):\n            loss = F")
    text, forms = apply(f"scaler = torch.amp.GradScaler('cuda')\n{script}")
    assert forms == [("micro-batched", None)]
    assert "memory.unscale_(optimizer)\n        nn.utils.clip" in text and "no-fp16" not in text


HANDED = """\
from hooks import hook, stats

for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    {between}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("stats.add(model)", "line 14 hands `model` to `stats.add`, which may look at gradients"),
        (
            "skip = hook.post_backward(loss, optimizer=optimizer)",
            "hands `optimizer` to `hook.post_backward`, which may",
        ),
        ("for one in hook:\n        one.check(model=model)", "line 15 hands `model` to `one.check`, which may look"),
        ("stats.add(model.named_parameters())", "hands `model` to `stats.add`, which may look at gradients"),
    ],
)
def test_what_is_out_of_sight_and_handed_a_network_before_its_step_sees_no_scaled_gradients(between, reason):
    result = rewritten(f"{TOP}{HANDED.format(between=between)}")
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    (note,) = result.loops[0].notes
    assert note.startswith("losses are not scaled, so no fp16: line ") and reason in note


@pytest.mark.parametrize(
    "between",
    [
        "adjust_learning_rate(optimizer, 3)",
        "torch.save(model, 'model.pt')",
        "save_checkpoint(model, optimizer)",
        "print(type(model), len(list(model.parameters())))",
        "accuracy = evaluate(model, loader)",
        "show(model)",
    ],
)
def test_what_reads_no_gradients_may_be_handed_a_network_before_its_step(between):
    show = "def show(model):\n    print(model)\n\n"
    result = rewritten(f"{TOP}{show}{HANDED.format(between=between)}")
    assert "no-fp16" not in result.text and "unscale_" not in result.text


def test_what_is_handed_a_network_ahead_of_its_backward_or_behind_its_step_sees_no_scale():
    loop = HANDED.format(between="pass").replace("    loss = F", "    stats.add(model)\n    loss = F")
    assert "no-fp16" not in rewritten(f"{TOP}{loop}    stats.add(model)\n").text


SEVERAL = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)]
for step in range(4):
    {header}x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    {margin}loss = F.cross_entropy(model(x), y)
    {margin}loss.backward()
    {clip}
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    print(f"{{loss.item():.9f}}")
"""
PARTS = {"header": "for part in range(3):\n        ", "margin": "    "}


@pytest.mark.parametrize("around", [{"header": "", "margin": ""}, PARTS], ids=["one batch", "an inner loop"])
@pytest.mark.parametrize(
    ("clip", "unscaled"),
    [
        (
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "    for optimizer in optimizers:\n        memory.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(",
        ),
        (
            "x = y; torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "    x = y; [memory.unscale_(optimizer) for optimizer in optimizers]; torch.nn.utils.clip_grad_norm_(",
        ),
    ],
    ids=["a line of its own", "a shared line"],
)
def test_each_optimizer_that_a_loop_steps_is_unscaled_ahead_of_a_clip_of_all(around, clip, unscaled):
    text = SEVERAL.format(clip=clip, **around)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert unscaled in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


def test_an_optimizer_that_is_named_behind_a_clip_takes_no_scaled_gradients():
    text, forms = apply("""\
        optimizers = {"all": optimizer}
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            mine = optimizers["all"]
            mine.step()
            mine.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert 'preset("16gb", precision="no-fp16")' in text and "unscale_" not in text


PLAIN = {"header": "", "margin": ""}
STEPS = "    for optimizer in optimizers:\n        optimizer.step()\n"


@pytest.mark.parametrize(
    ("clip", "steps"),
    [
        ("{clip}; named = dict(enumerate(optimizers))", "for _, optimizer in named.items():\n        optimizer.step()"),
        ("{clip}; print(step)", "for step, optimizer in enumerate(optimizers):\n        optimizer.step()"),
        ("every = iter(optimizers); {clip}", "for optimizer in every:\n        optimizer.step()"),
        ("every = (o for o in optimizers); {clip}", "for optimizer in every:\n        optimizer.step()"),
        (
            "{clip}",
            "for group in [optimizers]:\n        for optimizer in group:\n            optimizer.step()",
        ),
    ],
    ids=["bound behind", "name of another", "iterator", "generator", "in another loop"],
)
def test_a_loop_that_cannot_run_ahead_of_the_clip_as_well_takes_no_scaled_gradients(clip, steps):
    clip = clip.format(clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)").replace("; ", "\n    ")
    text = SEVERAL.format(clip=clip, **PLAIN).replace(STEPS, f"    {steps}\n")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert 'precision="no-fp16"' in after.text and "unscale_" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_optimizers_that_a_loop_names_without_brackets_are_unscaled_on_a_shared_line():
    clip = "x = y; nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    text = SEVERAL.format(clip=clip, **PLAIN).replace("for step", "first, second = optimizers\nfor step")
    text = text.replace(STEPS, STEPS.replace("optimizers", "first, second"))
    after = rewritten(text)
    assert "x = y; [memory.unscale_(optimizer) for optimizer in (first, second)]; nn" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


BOUND_BEHIND_A_CLIP = """\
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            {bound}
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("bound", "unscaled"),
    [
        ("self.norm = norm", True),
        ("self.optimizer.seen = norm", True),
        ("self.optimizer = self.optimizer_of(norm)", False),
    ],
)
def test_an_attribute_beside_the_optimizer_may_be_bound_behind_a_clip(bound, unscaled):
    text, _ = apply(BOUND_BEHIND_A_CLIP.format(bound=bound))
    assert ("memory.unscale_(self.optimizer)" in text) is unscaled
    assert ('precision="no-fp16"' in text) is not unscaled
