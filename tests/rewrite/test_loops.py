"""Which form a loop gets, what the rewritten loop looks like, and why a loop is left alone."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run

TOP = """\
import torch
import torch.nn.functional as F
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))]
"""


def apply(body: str) -> tuple[str, list[tuple[str, str | None]]]:
    """The text behind the imports and the set-up after apply, and the forms of the loops with their reasons."""
    result = rewritten(TOP + textwrap.dedent(body))
    compile(result.text, "train.py", "exec")
    return result.text, [(loop.rewrite, loop.reason) for loop in result.loops]


def loop_of(body: str) -> str:
    """The loop after apply, for a body whose first line is that of the loop."""
    text, _ = apply(body)
    return text[text.index("\nfor ") + 1 :]


def test_the_slice_becomes_a_function_and_what_stood_between_follows_the_call():
    assert loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            print(out.shape)  # shapes
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            total = loss.item()
        """) == textwrap.dedent("""\
        for x, y in loader:

            def forward(x, y):
                out = model(x)
                loss = F.cross_entropy(out, y)
                return loss, out

            loss, out = memory.forward_backward(forward, x, y)
            print(out.shape)  # shapes
            memory.step(optimizer)
            total = loss.item()
        """).replace("for x, y in loader:\n\n", "for x, y in loader:\n")


def test_a_loss_that_nobody_reads_and_an_inline_forward_return_nothing():
    assert (
        "    def forward(x, y):\n        return F.cross_entropy(model(x), y)\n\n"
        "    memory.forward_backward(forward, x, y)\n    memory.step(optimizer)\n"
    ) in loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        """)


def test_a_dead_output_is_not_returned_and_one_of_the_next_iteration_is():
    text = loop_of("""\
        for x, y in loader:
            if "last" in globals():
                print(last)
            optimizer.zero_grad()
            dead = model(x)
            last = dead.mean()
            loss = F.cross_entropy(dead, y) + last
            loss.backward()
            optimizer.step()
        """)
    assert "return loss, last\n" in text


def test_what_a_function_of_a_flat_script_reads_is_an_output():
    text, _ = apply("""\
        def show():
            print(out)

        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        show()
        """)
    assert "return loss, out\n" in text


def test_sizes_of_the_batch_are_asked_again_inside():
    text = loop_of("""\
        for x, y in loader:
            n = x.size(0)
            optimizer.zero_grad()
            out = model(x).view(n, 2)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(n)
        """)
    assert "def forward(x, y):\n        n = x.size(0)\n        out = model(x).view(n, 2)\n" in text
    assert text.index("n = x.size(0)") < text.index("def forward")


def test_a_loss_started_before_the_forward_moves_with_it():
    text = loop_of("""\
        for x, y in loader:
            loss = 0
            optimizer.zero_grad()
            for part, target in zip(x.chunk(2), y.chunk(2)):
                loss = loss + F.cross_entropy(model(part), target)
            loss.backward()
            optimizer.step()
        """)
    assert "def forward(x, y):\n        loss = 0\n" in text


def test_a_loss_logged_before_it_is_rescaled_is_logged_unscaled():
    text = loop_of("""\
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            print(loss.item())
            if k > 1:
                loss = loss / k
            loss.backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        """)
    assert "return (loss / k if k > 1 else loss), loss\n" in text
    assert "if k > 1:" not in text


def test_a_mask_that_may_have_no_value_is_not_evaluated_early():
    text, forms = apply("""\
        for x, y in loader:
            if masked:
                mask = x > 0
            optimizer.zero_grad()
            out = model(x)
            if masked:
                out = out * mask.float().mean()
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    assert "forward_backward(forward, x, mask if masked else None, y)" in text


def test_names_that_the_file_uses_are_not_taken():
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        memory = runtime = forward = None
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    )
    assert "from oomfix import runtime as oomfix_runtime\n" in result.text
    assert 'gpu_memory = oomfix_runtime.preset("16gb")\n' in result.text
    assert "gpu_memory.forward_backward(forward_batch, x, y)" in result.text


def test_phases_evaluate_where_they_do_not_train():
    text, forms = apply("""\
        for phase in ["train", "val"]:
            for x, y in loader:
                with torch.set_grad_enabled(phase == "train"):
                    loss = F.cross_entropy(model(x), y)
                    if phase == "train":
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                print(loss.item())
        """)
    assert forms == [("micro-batched", None)]
    assert "else:\n                loss = memory.evaluate(forward, x, y)\n" in text
    assert 'if phase == "train":\n                loss = memory.forward_backward(forward, x, y)' in text


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


AMP = """\
from torch.cuda.amp import GradScaler, autocast
scaler = GradScaler(enabled=args.amp)
for x, y in loader:
    optimizer.zero_grad()
    with autocast(enabled=args.amp):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
torch.save({"scaler": scaler.state_dict()}, "last.pt")
"""


def test_amp_is_folded_and_its_flag_and_checkpoint_lines_stay():
    text, forms = apply(AMP)
    assert forms == [("micro-batched", None)]
    assert 'with memory.autocast("cuda", enabled=args.amp):' in text
    assert "scaler = memory.scaler\n" in text
    assert '{"scaler": scaler.state_dict()}' in text
    assert text.count("memory.unscale_(optimizer)") == 1
    assert "scaler.update" not in text
    assert "torch.cuda.amp" not in text


def test_the_update_of_a_scale_that_tells_of_skipped_steps_stays():
    steps = "    scaler.step(optimizer)\n    scaler.update()\n"
    asked = f"    scale = scaler.get_scale()\n{steps}    skipped = scale > scaler.get_scale()\n"
    text, _ = apply(AMP.replace(steps, asked))
    assert asked.replace("scaler.step", "memory.step") in text


def in_a_function(comment: str = "", end: str = "return model") -> str:
    loop = textwrap.indent(AMP[AMP.index("for ") : AMP.index("torch.save")], "    ")
    head = f"from torch.cuda.amp import GradScaler, autocast\ndef train(args):\n    print(args){comment}\n"
    text, _ = apply(f"{head}    scaler = GradScaler(enabled=args.amp)\n{loop}    {end}\n")
    return text


def test_a_local_scaler_that_nothing_reads_any_more_is_taken_out():
    assert "def train(args):\n    print(args)\n    for x, y in loader:\n" in in_a_function()
    assert "    scaler = memory.scaler\n" in in_a_function(end="return scaler")
    assert "    # scales\n    scaler = memory.scaler\n" in in_a_function("\n    # scales")
    assert "    scaler = memory.scaler\n" in in_a_function(end="return locals()")


def test_an_unread_scaler_goes_where_a_function_begins_with_it_too():
    text, _ = apply("""\
        def train():
            scaler = torch.amp.GradScaler("cuda")

            for x, y in loader:
                with torch.autocast("cuda"):
                    loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


        train()
        """)
    assert "scaler" not in text
    assert "def train():\n    for x, y in loader:\n" in text


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        (
            "import torch\n\nfrom .data import loader",
            "import torch\nfrom oomfix import runtime\n\nfrom .data import loader",
        ),
        (
            "import torch\nfrom torch import nn\n\nfrom data import loader",
            "import torch\nfrom oomfix import runtime\nfrom torch import nn\n\nfrom data import loader",
        ),
        ("import torch\nimport data, os", "import torch\nimport data, os\nfrom oomfix import runtime"),
        (
            "from torch import nn\nfrom data import loader",
            "from torch import nn\nfrom data import loader\nfrom oomfix import runtime",
        ),
    ],
)
def test_the_runtime_is_imported_among_what_is_installed(imports, expected):
    body = "for x, y in loader:\n    loss = model(x, y)\n    loss.backward()\n    optimizer.step()\n"
    text = rewritten(f"import os\n\n{imports}\n{body}").text
    assert text.startswith(f'import os\n\n{expected}\n\nmemory = runtime.preset("16gb")\n\nfor x')


def test_a_backward_inside_of_autocast_moves_out_and_the_loop_is_split():
    text, forms = apply("""\
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
                # far from here
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """)
    assert forms == [("micro-batched", None)]
    assert "        return loss\n\n    # far from here\n    memory.forward_backward(forward, x, y)\n" in text


GAN = """\
critic = nn.Linear(2, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in loader:
    critic_optimizer.zero_grad()
    fake = model(x)
    critic(fake.detach()).mean().backward()
    critic_optimizer.step()
    optimizer.zero_grad()
    loss = -critic(fake).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("second", ["critic(fake)", "critic(again)"])
def test_backwards_through_one_forward_stay_in_place_and_keep_their_gradient_resets(second):
    loss = GAN.replace("critic(fake)", second).replace("    loss =", "    again = fake * 2\n    loss =")
    text, forms = apply(loss.replace("    optimizer.zero", "    model.zero"))
    assert forms == [("in-place", "it has 2 backwards (line 13, line 18); one goes through what another has computed")]
    assert "memory.backward(critic(fake.detach()).mean())\n" in text
    assert "critic_optimizer.zero_grad()\n" in text and "    model.zero_grad()\n" in text


def test_backwards_with_forwards_of_their_own_become_functions_each():
    text, forms = apply(GAN.replace("critic(fake)", "critic(model(x))"))
    assert forms == [("micro-batched", None)]
    assert text.endswith("""\
for x, y in loader:
    critic_optimizer.zero_grad()

    def forward(x):
        fake = model(x)
        return critic(fake.detach()).mean()

    memory.forward_backward(forward, x)
    memory.step(critic_optimizer)
    optimizer.zero_grad()

    def forward_2(x):
        loss = -critic(model(x)).mean()
        return loss

    memory.forward_backward(forward_2, x)
    memory.step(optimizer)
""")


def test_a_loss_that_takes_only_numbers_of_an_earlier_one_is_its_own():
    _, forms = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            first = F.cross_entropy(model(x), y)
            first.backward()
            print(first.item())
            if first > 0:
                second = F.cross_entropy(model(x + 1), y)
                second.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("self.last = model(x)\n    loss = self.last.sum()", "changes self, which was made outside"),
        ("loss = model(x).sum()\n    if loss > 3:\n        continue", "`continue` in line"),
        ("out = model(x)\n    model.eval()\n    loss = out.sum()", "switches layers or gradients"),
        ("out = model(x)\n    reset_grad()\n    loss = out.sum()", "may reset gradients"),
        ("out = model(x)\n    noise = torch.rand(1)\n    loss = out.sum() * torch.rand(1)", "draws random numbers"),
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
            "loss = model(x).sum()\n    accelerator.backward(loss)\n    optimizer.step()",
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


def test_gradients_that_another_function_reads_are_never_scaled():
    plot = "def plot(model):\n    print([p.grad.abs().mean() for p in model.parameters()])\n\n"
    loop = "for x, y in loader:\n    optimizer.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()\n"
    assert 'precision="no-fp16"' in rewritten(f"{TOP}{plot}{loop}    plot(model)\n").text
    zeroed = plot.replace("print([p.grad.abs().mean() for p in model.parameters()])", "model.weight.grad.zero_()")
    assert "no-fp16" not in rewritten(f"{TOP}{zeroed}{loop}").text


OWN_SCALER = """\
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda"):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(loss.item(), norm)
"""


def test_a_loss_scaler_that_cannot_be_handed_over_stays_and_the_batch_is_split():
    result = rewritten(TOP + OWN_SCALER)
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert result.loops[0].notes == (
        "its own precision and loss scaler stay: line 13 clips or reads gradients also where no step follows",
    )
    assert 'runtime.preset("16gb", precision="fp32")' in result.text
    assert result.text.endswith(
        """\

    def forward(x, y):
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x), y)
        return scaler.scale(loss), loss

    _, loss = memory.forward_backward(forward, x, y)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(loss.item(), norm)
""".removeprefix("\n")
    )


def test_a_loop_with_its_own_loss_scaler_that_cannot_be_split_is_left_alone():
    text = TOP + OWN_SCALER.replace("loss = F", "self.out = model(x)\n        loss = F")
    result = rewritten(text)
    assert result.text == text
    assert [loop.rewrite for loop in result.loops] == ["none"]
    assert (result.loops[0].reason or "").endswith(
        "where no step follows; and line 10 changes self, which was made outside of the slice"
    )


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


def test_a_step_keeps_gradients_that_the_script_never_resets():
    assert "memory.step(optimizer, zero_grad=False)" in loop_of("""\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)


def test_local_fixes_are_made_without_the_runtime():
    from oomfix.rewrite.apply import Options, apply_to
    from oomfix.rules import all_rules
    from oomfix.source import Source

    loop = "total = 0\nfor x, y in loader:\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n"
    text = f"{TOP}{loop}    total += loss\n"
    result = apply_to(Source.from_bytes("t.py", text.encode()), all_rules(), Options("16gb", runtime=False))
    assert result.text == f"{TOP}{loop}    total += loss.detach()\n"
    assert result.loops == ()


def test_names_that_are_only_deleted_leave_the_del():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(loss.item())
            del out, loss, x
            del out
        """)
    assert "        return loss\n" in text
    assert text.endswith("    print(loss.item())\n    del loss, x\n")


def test_a_name_deleted_behind_the_loop_is_still_there():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        del out
        """)
    assert "return loss, out\n" in text and "\ndel out\n" in text


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


def test_a_function_called_before_the_name_is_bound_again_sees_this_batch():
    text, _ = apply("""\
        def show():
            print(out)

        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            show()
            out = None
        """)
    assert "return loss, out\n" in text


def test_gradients_of_an_optimizer_from_elsewhere_are_still_reset_first():
    """A loop of another file may have left gradients behind; the first reset here drops them."""
    loop = "def train(model, loader, optimizer):\n    for x, y in loader:\n        optimizer.zero_grad()\n"
    loop += "        loss = model(x).sum()\n        loss.backward()\n        optimizer.step()\n"
    assert "        optimizer.zero_grad()\n" in rewritten(f"import torch\n\n{loop}").text
    made = "model = torch.nn.Linear(4, 2)\ntrain(model, [], torch.optim.SGD(model.parameters(), lr=0.1))\n"
    assert "zero_grad" not in rewritten(f"import torch\n\n{loop}\n\n{made}").text


def test_comments_at_the_end_of_a_block_stay_in_it():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            with torch.enable_grad():
                out = model(x)
                # out = model(x, y)

                # not yet
            # the loss
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        """)
    assert (
        "            out = model(x)\n            # out = model(x, y)\n\n            # not yet\n"
        "        # the loss\n        loss = F"
    ) in text


def test_what_goes_round_within_an_iteration_is_no_state_of_the_one_before():
    _, forms = apply("""\
        for x, y in loader:
            hidden = init()
            optimizer.zero_grad()
            loss = 0
            for step in range(3):
                out, hidden = model(x[step], hidden)
                loss += F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]


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


def test_backwards_that_both_branches_begin_with_run_ahead_of_them_so_that_the_batch_is_split():
    text, forms = apply(UNSEEN_AUTOCAST)
    assert forms == [("micro-batched", None)]
    assert text.endswith("""
    def forward(x, y):
        loss = model(x, y)
        return scaler.scale(loss) if scaler is not None else loss

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


def test_a_loop_with_semicolons_is_split_and_keeps_them():
    assert loop_of("""\
        for x, y in loader:
            optimizer.zero_grad();
            loss = F.cross_entropy(model(x), y);
            loss.backward();
            optimizer.step();
        """) == textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                loss = F.cross_entropy(model(x), y);
                return loss

            memory.forward_backward(forward, x, y);
            memory.step(optimizer);
        """)


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


def test_a_loss_scaler_that_another_object_uses_stays():
    text, _ = apply("""\
        def ours(scaler):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda"):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


        def theirs():
            scaler = torch.amp.GradScaler("cuda")
            surgeon.train(optimizer, scaler=scaler)


        ours(torch.amp.GradScaler("cuda"))
        """)
    assert 'scaler = torch.amp.GradScaler("cuda")\n    surgeon' in text
    assert text.endswith("ours(memory.scaler)\n")


METRICS = """\
seen = []
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        out = model(x)
        loss = F.cross_entropy(out, y)
        seen.append(loss.item())
    loss.backward()
    optimizer.step()
"""


def test_metrics_at_the_end_of_an_autocast_block_follow_the_call():
    text, forms = apply(METRICS)
    assert forms == [("micro-batched", None)]
    assert text.endswith("""
    def forward(x, y):
        with memory.autocast("cuda"):
            out = model(x)
            loss = F.cross_entropy(out, y)
        return loss

    loss = memory.forward_backward(forward, x, y)
    seen.append(loss.item())
    memory.step(optimizer)
""")


def test_metrics_that_a_part_of_a_batch_would_print_follow_the_call():
    assert loop_of(
        METRICS.replace("seen.append(loss.item())", "print(loss.item())").removeprefix("seen = []\n")
    ).endswith("    print(loss.item())\n    memory.step(optimizer)\n")


def test_an_autocast_block_stays_whole_where_the_loop_is_not_split_for_it():
    text, forms = apply(METRICS.replace("loss.backward()", "loss.backward(retain_graph=True)\n    loss.backward()"))
    assert forms[0][0] == "in-place"
    assert "        seen.append(loss.item())\n    memory" in text


@pytest.mark.parametrize("statement", ["other = seen.append(model(x))", "seen.append(model(x))", "loss += out.sum()"])
def test_what_the_loss_needs_or_runs_the_network_stays_in_its_autocast_block(statement):
    text, _ = apply(METRICS.replace("seen.append(loss.item())", statement))
    assert f"        {statement}\n" in text.replace("memory.forward(model, x)", "model(x)")


def test_a_mean_over_cards_that_is_divided_and_scaled_by_the_script_is_returned_so():
    text, forms = apply("""\
        for i, (x, y) in enumerate(loader):
            losses = []
            with unseen():
                loss = model(x, y)
            losses.append(loss.mean().item())
            loss = loss.mean() / 4
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert "return scaler.scale(loss.mean() / 4), loss\n" in text
    assert "_, loss = memory.forward_backward(forward, x, y)\n    losses.append(loss.mean().item())\n" in text


def test_every_name_is_an_output_where_the_script_reads_names_that_it_does_not_write_down():
    text, forms = apply("""\
        def train():
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                loss = F.cross_entropy(out, y)
                loss.backward()
                optimizer.step()
            return locals()["out"]
        """)
    assert forms == [("micro-batched", None)]
    assert "return loss, out\n" in text


def test_a_function_of_the_file_called_eval_is_no_builtin():
    text, forms = apply("""\
        def eval(model):
            pass

        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        eval(model)
        """)
    assert forms == [("micro-batched", None)]
    assert "return loss\n" in text


def test_resets_of_the_model_and_switches_stay_ahead_of_the_slice():
    text, forms = apply("""\
        for x, y in loader:
            model = model.train()
            optimizer.zero_grad()
            model.init_hidden()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    assert "    model = model.train()\n    model.init_hidden()\n\n    def forward(x, y):\n" in text


def test_tensors_that_are_converted_are_part_of_the_batch_and_numbers_are_not():
    text = loop_of("""\
        for x, y in loader:
            x = x.float()
            weight = float(y.sum())
            optimizer.zero_grad()
            loss = weight * F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    assert "memory.forward_backward(forward, x, y)" in text


def test_a_batch_made_around_the_loop_is_an_input_though_its_making_may_fail():
    text, forms = apply("""\
        def train():
            while True:
                try:
                    x, y = batch()
                except StopIteration:
                    break
                for step in range(3):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert "memory.forward_backward(forward, x, y)" in text


def test_a_size_asked_ahead_of_the_loop_is_asked_again_inside():
    text, _ = apply("""\
        def step(x):
            n = x.size(0)
            for repeat in range(3):
                optimizer.zero_grad()
                loss = critic(model(x), torch.rand(n, 2))
                loss.backward()
                optimizer.step()

        for x, y in loader:
            step(x)
        """)
    assert "        def forward(x):\n            n = x.size(0)\n            loss = critic" in text


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


def test_what_speaks_of_a_removed_reset_goes_with_it_and_other_comments_stay():
    text = loop_of("""\
        for x, y in loader:
            # one step
            loss = F.cross_entropy(model(x), y)
            loss.backward()

            # compute the step
            optimizer.step()

            # zero the gradients
            optimizer.zero_grad()

            print(loss.item())
        """)
    assert text.endswith("""\
    loss = memory.forward_backward(forward, x, y)

    # compute the step
    memory.step(optimizer)

    print(loss.item())
""")


def test_loops_that_share_their_backward_have_one_form():
    _, forms = apply("""\
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        for x, y in loader:
            step(x, y)
        for i in range(3):
            step(*loader[i])
        """)
    assert forms == [("micro-batched", None)] * 2


def test_gradients_switched_by_a_context_are_switched_in_the_slice():
    text, forms = apply("""\
        def step(x, y, train):
            with torch.set_grad_enabled(train):
                loss = F.cross_entropy(model(x), y)
            if train:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss.item()

        for x, y in loader:
            step(x, y, True)
        """)
    assert forms == [("micro-batched", None)]
    assert "    def forward(x, y):\n        with torch.set_grad_enabled(train):\n" in text
    assert "loss = memory.evaluate(forward, x, y)" in text


def test_the_backward_of_an_optimizer_stays_beside_that_of_the_loss_unscaled():
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if args.fp16:
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        """)
    )
    assert [loop.rewrite for loop in result.loops] == ["in-place"]
    assert result.loops[0].notes[0].endswith("`optimizer.backward` in line 12 scales the loss by itself")
    assert "    if args.fp16:\n        optimizer.backward(loss)\n" in result.text
    assert "    else:\n        memory.backward(loss)\n" in result.text


def test_an_optimizer_that_runs_backward_is_no_loss():
    text = "for x, y in loader:\n    loss = model(x).sum()\n    optimizer.backward(loss)\n    optimizer.step()\n"
    result = rewritten(TOP + text)
    assert [loop.rewrite for loop in result.loops] == ["none"]
    assert result.text == TOP + text


@pytest.mark.parametrize("root", ["score = self.D(x)\n    score = score.mean()", "for score in model(x):\n        1"])
def test_a_tensor_that_starts_from_a_gradient_is_no_engine(root):
    _, forms = apply(f"for x, y in loader:\n    {root}\n    score.backward(one)\n    optimizer.step()\n")
    assert forms[0][0] == "in-place"


def test_a_name_that_is_bound_anew_ahead_of_its_del_need_not_be_returned():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        for x, y in loader:
            out = len(x)
            del out
        """)
    assert "        return loss\n" in text


def test_a_comment_behind_the_backward_stands_behind_its_call():
    assert "memory.forward_backward(forward, x, y)  # gradients\n" in loop_of("""\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()              # gradients
            optimizer.step()             # update
        """)


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


def test_statements_joined_on_a_line_get_lines_of_their_own_where_the_loss_is_lifted():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad(); out = model(x)
            loss = F.cross_entropy(out, y); print(loss.item())
            loss.backward(); optimizer.step()  # train
        """)
    assert text == textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                out = model(x)
                loss = F.cross_entropy(out, y)
                return loss

            loss = memory.forward_backward(forward, x, y)
            print(loss.item())
            memory.step(optimizer)  # train
        """)


@pytest.mark.parametrize("comment", ["", "  # next"])
def test_neighbours_on_one_line_that_both_go_leave_nothing(comment):
    text, loops = apply(f"""\
        scaler = torch.amp.GradScaler()
        for x, y in loader:
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad(){comment}
        """)
    assert loops[0][0] == "micro-batched"
    assert f"    memory.step(optimizer){comment}\n" in text


def test_joined_statements_stay_where_the_loss_cannot_be_lifted_for_another_reason():
    text, loops = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            first = F.cross_entropy(out, y)
            first.backward(); print(first.item())
            second = F.mse_loss(model(x), out.detach())
            second.backward(); optimizer.step()
        """)
    assert loops[0][0] == "in-place"
    assert "memory.backward(first); print(first.item())" in text


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


def test_a_comment_that_the_longer_call_has_no_room_for_stands_above_it():
    comment = "# goes through the network, and leaves a gradient in each of its parameters for the step"
    text, _ = apply(f"""\
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  {comment}
            optimizer.step()
        """)
    assert f"    {comment}\n    memory.forward_backward(forward, images, labels)\n" in text


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


@pytest.mark.parametrize(
    "body",
    [
        """\
        for number in range(6):
            try:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if number % 2:
                    raise FloatingPointError("diverged")
                loss.backward()
                optimizer.step()
            except FloatingPointError as error:
                print(error)
                continue
        """,
        """\
        def step(number):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            assert number % 2, "diverged"
            loss.backward()
            optimizer.step()

        for number in range(6):
            try:
                step(number)
            except (AssertionError, RuntimeError):
                pass
        """,
    ],
)
def test_gradients_of_a_batch_that_an_exception_skips_are_reset_ahead_of_the_next(body):
    text = TOP + "x, y = loader[0]\n" + textwrap.dedent(body)
    result = rewritten(text)
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(result.text, preset="off"))


@pytest.mark.parametrize("handler", ["except ValueError:\n    raise", "except KeyboardInterrupt:\n    pass"])
def test_exceptions_that_end_the_training_do_not_keep_a_reset(handler):
    body = "optimizer.zero_grad()\nloss = F.cross_entropy(model(x), y)\nloss.backward()\noptimizer.step()\n"
    loop = f"try:\n{textwrap.indent(body, '    ')}{handler}\n"
    assert "zero_grad" not in loop_of("for x, y in loader:\n" + textwrap.indent(loop, "    "))


def test_a_batch_that_is_skipped_between_forward_and_backward_leaves_no_gradients():
    text = TOP + textwrap.dedent("""\
        x, y = loader[0]
        for number in range(6):
            try:
                loss = F.cross_entropy(model(x), y)
                if number % 2:
                    raise ValueError("diverged")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            except ValueError as error:
                print(error)
        """)
    result = rewritten(text)
    reason = "line 13 may skip the batch between forward and backward"
    assert [(loop.rewrite, loop.reason) for loop in result.loops] == [("in-place", reason)]
    assert_same_bits(run(text), run(result.text, preset="off"))


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


def test_arguments_of_autocast_stay_on_their_lines():
    text, _ = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(
                device_type="cuda",
                dtype=torch.bfloat16,  # no scaler
            ):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    kept = ["with memory.autocast(", '    device_type="cuda",', "    dtype=torch.bfloat16,  # no scaler", "):"]
    assert "".join(f"        {line}\n" for line in kept) in text


def test_a_comment_above_a_reset_that_goes_stays_with_what_follows():
    body = """\
        for x, y in loader:
            # loss
            optimizer.zero_grad()

            {}loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=flag)
            optimizer.step()
        """
    assert "    # loss\n    loss = F.cross" in loop_of(body.format(""))
    assert "    # loss\n\n    # of classes\n    loss = F.cross" in loop_of(body.format("# of classes\n            "))


def test_a_module_that_does_without_torch_does_so_after_apply():
    """The runtime imports torch: its import stands where torch's own may fail."""
    optional = textwrap.dedent("""\
        import math

        try:
            import torch
            from torch import nn
        except ImportError:  # pragma: no cover
            torch = None
        import os


        def train(model, loader):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
        """)
    result = rewritten(optional)
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert result.text.startswith(
        "import math\n\ntry:\n    import torch\n    from torch import nn\n    from oomfix import runtime\n\n"
        '    memory = runtime.preset("16gb")\nexcept ImportError:  # pragma: no cover\n    torch = None\nimport os\n'
    )
    assert rewritten(result.text).text == result.text
