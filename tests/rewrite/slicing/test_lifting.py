"""What the function of a lifted loss holds, takes and returns, and what stays around its call."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply, loop_of


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


@pytest.mark.parametrize(
    ("top", "target", "read"),
    [
        ("for _ in range(3):", "x, y", "print(_, out.sum())"),
        ("for epoch in range(3):", "x, _", "print(out.sum(), _)"),
        ("from gettext import gettext as _\nfor epoch in range(3):", "x, y", "print(_('sum'), out.sum())"),
        ("import builtins\nbuiltins._ = str.upper\nfor epoch in range(3):", "x, y", "print(_('sum'), out.sum())"),
        ("def show(out):\n    print(_('sum'), out.sum())\n\n_ = str.upper\nfor n in range(3):", "x, y", "show(out)"),
    ],
)
def test_an_underscore_that_is_read_is_not_bound_to_a_loss_that_is_not(top, target, read):
    loop = f"{top}\n    for {target} in loader:\n        optimizer.zero_grad()\n        out = model(x)\n"
    body = f"{loop}        (out ** 2).mean().backward()\n        optimizer.step()\n        {read}\n"
    assert "        loss, out = memory.forward_backward(forward, x)\n" in apply(body)[0]
    named = body.replace("(out ** 2).mean().backward()", "err = (out ** 2).mean()\n        err.backward()")
    assert "        err, out = memory.forward_backward(forward, x)\n" in apply(named)[0]


def test_an_underscore_of_the_module_stays_that_of_its_functions():
    text, forms = apply("""\
        _ = str.upper


        def train():
            print(_("start"))
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                F.cross_entropy(out, y).backward()
                optimizer.step()
                print(out.sum())


        train()
        """)
    assert forms == [("micro-batched", None)]
    assert "        loss, out = memory.forward_backward(forward, x, y)\n" in text


def test_an_underscore_that_is_bound_again_before_it_is_read_is_free():
    loop = "for _ in range(3):\n    optimizer.zero_grad()\n    out = model(x)\n    out.mean().backward()\n"
    rest = "    optimizer.step()\n    _, best = out.max(1)\n    print(_, best, [_ + 1 for _ in best])\n"
    text, forms = apply(f"x, y = loader[0]\n{loop}{rest}")
    assert forms == [("micro-batched", None)]
    assert "    _, out = memory.forward_backward(forward" in text


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


def test_what_is_only_evaluated_draws_its_random_numbers_where_nothing_reads_the_loss_too():
    text = TOP + textwrap.dedent("""\
        drop = nn.Dropout(0.5)
        for phase in ["train", "val", "train"]:
            for x, y in loader:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    loss = F.cross_entropy(model(drop(x)), y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
        """)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_reset_of_gradients_behind_the_loss_stays_above_what_was_the_backward():
    assert loop_of("""\
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)

            # start afresh
            model.zero_grad()  # all of it

            loss.backward()
            optimizer.step()
            print(model.weight.grad.norm())
        """).startswith(
        textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                out = model(x)
                loss = F.cross_entropy(out, y)
                return loss

            # start afresh
            model.zero_grad()  # all of it

            memory.forward_backward(forward, x, y)
            memory.step(optimizer, zero_grad=False)
        """)
    )


@pytest.mark.parametrize(
    ("written", "moved"),
    [
        (
            "    (F.mse_loss(out, y) +\n     out.abs().mean()).backward()",
            "        return (F.mse_loss(out, y) +\n                out.abs().mean())",
        ),
        (
            "    torch.add(F.mse_loss(out, y),\n              out.abs().mean()).backward()",
            "        return torch.add(F.mse_loss(out, y),\n                         out.abs().mean())",
        ),
        (
            "    (\n        F.mse_loss(out, y)\n        + out.abs().mean()\n    ).backward()",
            "        return (F.mse_loss(out, y)\n                + out.abs().mean())",
        ),
        (
            "    torch.add(\n        F.mse_loss(out, y),\n        out.abs().mean(),\n    ).backward()",
            "        return torch.add(\n            F.mse_loss(out, y),\n            out.abs().mean(),\n        )",
        ),
    ],
    ids=["brackets", "call", "own lines", "hanging"],
)
def test_further_lines_of_a_loss_stay_below_what_they_belong_to(written, moved):
    text = loop_of(
        f"for x, y in loader:\n    optimizer.zero_grad()\n    out = model(x)\n{written}\n    optimizer.step()\n"
    )
    assert f"{moved}\n" in text


def test_the_lines_of_a_string_in_a_loss_stay_as_they_are():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y, '''first
          second''').backward()
            optimizer.step()
        """)
    assert "'''first\n  second'''" in text
