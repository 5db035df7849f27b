"""Gradients are unscaled before anything looks at them, or never scaled."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten
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


def test_what_is_stepped_on_a_backward_behind_the_loop_is_not_unscaled_in_it():
    result = rewritten(
        TOP
        + textwrap.dedent(f"""\
        weight = torch.tensor([0.0], requires_grad=True)
        of_weight = torch.optim.Adam([weight], lr=0.1)
        def train():
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                {CLIP}
                optimizer.step()
            of_weight.zero_grad()
            (weight.exp() * 0.1).sum().backward()
            of_weight.step()
        for epoch in range(2):
            train()
        """)
    )
    assert result.text.count("memory.unscale_(optimizer)") == result.text.count("unscale_") == 1


def test_optimizers_that_the_script_unscales_each_under_a_test_are_left_to_it():
    text = loop_of("""\
        scaler = torch.amp.GradScaler("cuda")
        head = nn.Linear(2, 2)
        other = torch.optim.SGD(head.parameters(), lr=0.1)
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(head(model(x)), y)
            optimizer.zero_grad()
            other.zero_grad()
            scaler.scale(loss).backward()
            if first is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), first)
            if second is not None:
                scaler.unscale_(other)
                nn.utils.clip_grad_norm_(head.parameters(), second)
            scaler.step(optimizer)
            scaler.step(other)
            scaler.update()
        """)
    lines = text.splitlines()
    assert [lines.index(line) for line in lines if "unscale_" in line] == [
        lines.index("    if first is not None:") + 1,
        lines.index("    if second is not None:") + 1,
    ]
