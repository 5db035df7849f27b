"""What stands between a forward and its backward, and cannot go ahead of the one or behind the other."""

import textwrap

import pytest

from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import apply

LOOP = """\
for x, y in loader * 3:
    loss = 2 * F.cross_entropy(model(x), y)
    {between}
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
SHARED = "changes gradients, and shares names with lines ahead of it"


@pytest.mark.parametrize(
    "reset",
    [
        "if loss < 9:\n        optimizer.zero_grad()",
        "low = loss < 9\n    if low:\n        optimizer.zero_grad()",
        "parts = list(model.parameters())\n    for part in parts:\n        part.grad = None",
    ],
)
def test_a_reset_by_what_the_forward_or_lines_behind_it_make_keeps_the_loss_in_place(reset):
    _, loops = apply(LOOP.format(between=reset))
    assert loops[0][0] == "in-place" and loops[0][1].endswith(SHARED)


def test_a_loop_that_does_more_than_reset_keeps_the_loss_in_place():
    _, loops = apply(LOOP.format(between="for o in [optimizer]:\n        o.zero_grad()\n    else:\n        decay()"))
    assert loops == [("in-place", "line 10, between forward and backward, may reset gradients or change the model")]


def test_a_reset_that_binds_what_the_loss_reads_keeps_it_in_place():
    loop = LOOP.replace("2 *", "p *").format(between="for p in model.parameters():\n        p.grad = None")
    _, loops = apply(f"p = 2\n{loop}    p = 3\n")
    assert loops == [("in-place", f"line 11 {SHARED}")]


def test_a_reset_goes_ahead_of_a_loss_that_binds_the_same_name_itself():
    penalty = "for p in model.parameters():\n        loss = loss + 0.01 * p.square().sum()\n    "
    text = assert_trains_the_same(LOOP.format(between=f"{penalty}for p in model.parameters():\n        p.grad = None"))
    assert text.index("return loss") < text.index("p.grad = None") < text.index("memory.forward_backward(")


def test_a_reset_in_the_branch_of_the_backward_that_asks_the_loss_keeps_it_in_place():
    loop = textwrap.indent(LOOP.format(between="if train:"), "    ").replace("  optimizer", "      optimizer")
    loop = loop.replace("loss.back", "    if loss < 9:\n                optimizer.zero_grad()\n            loss.back")
    _, loops = apply(f"def run(train):\n{loop}\nrun(True)\n")
    assert loops == [("in-place", f"line 12 {SHARED}")]


@pytest.mark.parametrize(
    "reader",
    [
        "print(model.weight.grad)\n    optimizer.zero_grad()",
        "optimizer.zero_grad()\n    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]",
        "if loss < 9:\n        print(model.weight.grad)\n    optimizer.zero_grad()",
    ],
)
def test_gradients_that_are_read_between_are_those_from_before_the_backward(reader):
    _, loops = apply(LOOP.format(between=reader))
    assert loops[0][0] == "in-place" and loops[0][1].endswith("asks for gradients between forward and backward")


def test_gradients_that_a_loss_is_made_of_are_those_of_the_batch_before():
    _, loops = apply(LOOP.format(between="loss = loss * (1 + model.weight.grad.norm()) if seen else loss"))
    assert loops == [("in-place", "line 10 reads gradients on the way to the loss, which would be those of parts")]


@pytest.mark.parametrize("asked", ["hook = out.register_hook(print)", "hook = model.weight.register_hook(print)"])
def test_a_gradient_that_is_asked_for_between_is_that_of_this_backward(asked):
    loop = LOOP.replace("loss = 2 * F.cross_entropy(model(x), y)", "out = model(x)\n    loss = F.cross_entropy(out, y)")
    _, loops = apply(loop.format(between=asked))
    assert loops == [("in-place", "line 11 asks for gradients between forward and backward")]


@pytest.mark.parametrize(
    "asked",
    [
        "skip = skip or hook.pre_update(model=model, optimizer=optimizer, loss=loss)",
        "skip = guard(optimizer)",
        "skip = [hook(loss, optimizer) for hook in hooks]",
        "if hook.before(optimizer):\n        skip = True",
    ],
)
def test_what_is_handed_an_optimizer_may_look_at_gradients_or_change_weights_before_the_backward(asked):
    _, loops = apply(LOOP.format(between=asked))
    assert loops == [("in-place", "line 10, between forward and backward, may reset gradients or change the model")]


def test_what_prepares_a_backward_comes_before_it():
    _, loops = apply(LOOP.format(between="skip = skip or hook.pre_backward(loss)"))
    assert loops == [("in-place", "line 10 runs `hook.pre_backward` between forward and backward")]


@pytest.mark.parametrize(
    "asked",
    ["lr = get_lr(optimizer)", "print('lr', lr_of(optimizer))", "bar.set_postfix(lr=round(current_lr(optimizer), 5))"],
)
def test_the_learning_rate_is_the_same_behind_the_backward(asked):
    _, loops = apply(LOOP.format(between=asked))
    assert loops == [("micro-batched", None)]


@pytest.mark.parametrize("skip", ["", "\n        continue"])
def test_the_rest_of_a_paragraph_whose_first_lines_go_up_keeps_the_blank_line_above_it(skip):
    """`zero_grad` and the backward go ahead of what looks at the loss, the clipping stays behind it."""
    text = assert_trains_the_same(f"""\
for x, y in loader * 3:
    loss = F.cross_entropy(model(x), y)

    if torch.isnan(loss):
        print("nan"){skip}

    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
""")
    assert f'print("nan"){skip}\n\n    memory.unscale_(optimizer)\n    nn.utils' in text


@pytest.mark.parametrize(
    ("told", "form"),
    [
        ("loss_hist.send(loss.item())", "micro-batched"),
        ("self.meters.send(loss.item())", "micro-batched"),
        ("plan.send(loss.item())", "in-place"),
        ("loss_hist.send(optimizer)", "in-place"),
    ],
)
def test_an_object_that_is_a_record_by_its_name_resets_nothing(told, form):
    _, loops = apply(LOOP.format(between=told))
    assert loops[0][0] == form


FLAGGED = """\
def run(loader, is_train):
    seen = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        seen.append({value})
        if is_train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return seen
"""
LOOKED_AT = "def norm():\n    return model.weight.norm().item()\n\n\n"


@pytest.mark.parametrize(
    "value", ["model.weight.norm().item()", "norm()", "[p.norm().item() for p in model.parameters()]"]
)
def test_what_looks_at_the_network_does_not_go_behind_a_branch_that_steps(value):
    assert apply(LOOKED_AT + FLAGGED.format(value=value))[1] == [
        ("in-place", "line 16 looks at the network, which line 17 trains behind it")
    ]


def test_what_looks_at_the_loss_goes_behind_a_branch_that_steps():
    assert apply(LOOKED_AT + FLAGGED.format(value="loss.item()"))[1] == [("micro-batched", None)]


def test_gradients_that_are_clipped_ahead_of_their_backward_are_those_from_before():
    """It does nothing where gradients were dropped, and is kept where they add up."""
    clipping = "nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    text = assert_trains_the_same(LOOP.format(between=clipping))
    assert text.index("for x, y in") < text.index(clipping) < text.index("memory.forward_backward(")


def test_a_norm_that_is_taken_ahead_of_the_backward_keeps_the_loss_in_place():
    _, loops = apply(LOOP.format(between="norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)"))
    assert loops[0][0] == "in-place"


@pytest.mark.parametrize("call", ["board.flush()", "np.testing.assert_equal(loss.shape, ())"])
def test_what_flushes_or_asserts_goes_behind_the_call(call):
    text, loops = apply(LOOP.format(between=call))
    assert loops == [("micro-batched", None)]
    assert text.index("memory.forward_backward(") < text.index(call) < text.index("memory.step(")


def test_numbers_that_a_function_draws_between_are_drawn_in_their_order():
    _, loops = apply("""\
        def noise(count):
            return torch.rand(count)

        for x, y in loader:
            out = model(x)
            label = noise(len(x))
            loss = F.cross_entropy(out + model(F.dropout(x)), y)
            loss.backward()
            optimizer.step()
            print(loss.item(), label)
        """)
    assert loops == [("in-place", "line 13 draws random numbers between forward and backward")]


def test_the_next_batch_may_be_drawn_ahead_of_the_backward_where_nothing_else_draws_behind_it():
    text = assert_trains_the_same("""\
        def draw():
            rows = torch.randint(6, (6,))
            return loader[0][0][rows], loader[0][1][rows]

        x, y = draw()
        for step in range(4):
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss = loss / 2
            x, y = draw()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert text.index("memory.forward_backward(forward, x, y)") < text.rindex("x, y = draw()")


@pytest.mark.parametrize("root", ["loss", "loss + F.dropout(model.bias).sum()"])
def test_what_is_drawn_behind_the_next_batch_keeps_the_loss_in_place(root):
    loss = "loss = F.cross_entropy(model(x), y)"
    between = f"{loss}\n    label = torch.rand(1)" + ("\n    loss = noisy(loss)" if root == "loss" else "")
    _, loops = apply(f"for x, y in loader:\n    {between}\n    ({root}).backward()\n    optimizer.step()\n")
    assert loops == [("in-place", "line 10 draws random numbers between forward and backward")]


def test_files_may_be_made_and_closed_between_forward_and_backward():
    assert_trains_the_same("""\
        import os
        for x, y in loader:
            out = model(x)
            if len(x) > 5:
                if not os.path.exists(os.sep):
                    os.mkdir(os.sep)
                file = open(os.devnull)
                file.close()
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)


RESETS = """\
def reset_all({given}):
    "Of all optimizers."
    optimizer.zero_grad()
    {more}


{again}
for x, y in loader * 3:
    loss = F.cross_entropy(model(x), y)
    reset_all({given})
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("more", ["model.zero_grad()", "for p in model.parameters():\n        p.grad = None"])
def test_a_function_that_resets_gradients_and_does_nothing_else_is_called_ahead_of_the_call(more):
    text = assert_trains_the_same(RESETS.format(given="", more=more, again=""))
    assert "        return loss\n\n    reset_all()\n    loss = memory.forward_backward(forward, x, y)\n" in text


@pytest.mark.parametrize(
    ("given", "more", "again"),
    [("", "model.eval()", ""), ("", "model.zero_grad()", "reset_all = print"), ("x", "x.mul_(2)", "")],
    ids=["does more", "another function", "changes its argument"],
)
def test_a_function_that_may_do_more_than_reset_keeps_the_loss_in_place(given, more, again):
    _, loops = apply(RESETS.format(given=given, more=more, again=again))
    assert [form for form, _ in loops] == ["in-place"]


def test_a_sum_whose_gradient_is_asked_for_switches_nothing_that_was_there_before():
    """The penalty of a critic, of points between real and made samples."""
    text = assert_trains_the_same("""\
        for x, y in loader * 3:
            loss = F.cross_entropy(model(x), y)
            mixed = (0.5 * x + 0.5 * x.flip(1)).requires_grad_(True)
            slope = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)[0]
            loss = loss + slope.pow(2).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "        mixed = (0.5 * x + 0.5 * x.flip(1)).requires_grad_(True)\n" in text


def test_a_function_that_is_given_the_number_of_a_loss_changes_nothing_of_it():
    more = "log_value('first', loss.item())\n    loss = loss + model(-x).pow(2).mean()"
    function = "log = {}\n\n\ndef log_value(name, value):\n    log.setdefault(name, []).append(value)\n\n\n"
    text = assert_trains_the_same(function + LOOP.format(between=more))
    assert text.index("return loss") < text.index("log_value('first', ")


def test_a_function_that_reads_gradients_between_two_backwards_keeps_the_losses_in_place():
    norm = "sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)"
    text = f"""\
def log_norm():
    print({norm})

for x, y in loader * 3:
    first = F.cross_entropy(model(x), y)
    second = model(x).square().mean()
    optimizer.zero_grad()
    first.backward()
    log_norm()
    second.backward()
    log_norm()
    optimizer.step()
"""
    _, loops = apply(text)
    assert [form for form, _ in loops] == ["in-place"]


METRIC = """\
from update import SegmentationMetric
metric = SegmentationMetric(2).to("cuda")
for x, y in loader:
    outputs = model(x)
    loss = F.cross_entropy(outputs, y)
    metric.addBatch(outputs, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_metric_that_is_moved_to_a_device_is_told_of_the_whole_batch():
    text, loops = apply(METRIC)
    assert loops == [("micro-batched", None)]
    assert text.index("memory.forward_backward(") < text.index("metric.addBatch(")


def test_another_network_that_runs_between_forward_and_backward_keeps_the_loss_in_place():
    _, loops = apply(METRIC.replace("metric.addBatch(outputs, y)", "net(outputs)").replace("metric", "net"))
    assert [form for form, _ in loops] == ["in-place"]
