"""What the function of a loss takes and gives where a name is bound on some ways only, in rounds or under tests."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten, run
from tests.rewrite.small_loops import TOP, apply, assert_trains_the_same, loop_of


def test_a_name_that_is_bound_within_an_expression_and_read_later_keeps_the_loss_in_place():
    _, loops = apply("""\
        for x, y in loader:
            loss = F.cross_entropy(out := model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(out)
        """)
    assert loops == [("in-place", "out is read later, and bound within an expression")]


def test_the_last_output_of_a_loop_over_time_is_returned():
    text = assert_trains_the_same("""\
        cell = nn.RNNCell(1, 4)
        optimizer.add_param_group({"params": cell.parameters()})
        for x, y in loader:
            optimizer.zero_grad()
            h = torch.zeros(len(x), 4)
            loss = 0
            for t in range(x.size(1)):
                h = cell(x[:, t : t + 1], h)
                out = model(h)
                loss += F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(loss.item(), out.sum().item())
        """)
    assert "return loss, out" in text


RECURRENT = """\
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNNCell(1, 4), nn.Linear(4, 2)

        def init_hidden(self, rows):
            return torch.zeros(rows, 4)

        def forward(self, x, h):
            h = self.cell(x, h)
            return self.head(h), h


    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader * 3:
        optimizer.zero_grad()
        {hidden}
        for t in range(x.size(1)):
            out, h = net(x[:, t : t + 1], h)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        print(loss.item(), out.sum().item())
        {behind}
    """


@pytest.mark.parametrize("hidden", ["h = torch.zeros(len(x), 4)", "h = net.init_hidden(len(x))"])
def test_the_loss_of_the_last_output_of_a_loop_over_time_is_lifted(hidden):
    text = assert_trains_the_same(RECURRENT.format(hidden=hidden, behind=""))
    assert "    def forward(x, y):\n" in text and "return loss, out" in text


@pytest.mark.parametrize("hidden", ["h = torch.zeros(len(x), 4)", "h = net.init_hidden(len(x))"])
def test_an_output_of_a_loop_over_time_that_something_else_binds_too_keeps_the_loss_in_place(hidden):
    _, loops = apply(RECURRENT.format(hidden=hidden, behind="out = net.head.weight.sum() * torch.ones(6, 2)"))
    assert loops == [("in-place", "out may have no value yet where the slice reads it")]


def test_an_output_that_a_round_of_the_loop_may_not_bind_keeps_the_loss_in_place():
    _, loops = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = 0
            for t in range(3):
                if t > y.sum():
                    continue
                out = model(x)
                loss += F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(out)
        """)
    assert loops == [("in-place", "out is read later, and only bound on some ways through the slice")]


OF_SOME_ROUNDS = """\
    {before}
    for x, y in loader:
        optimizer.zero_grad()
        for number in range(2):
            if number == 0:
                loss = F.cross_entropy(model(x), y)
            if number > 0:
                loss += F.cross_entropy(model(x), 1 - y)
        loss.backward()
        optimizer.step()
        print(loss.item())
        {behind}
    """


def test_a_loss_that_some_rounds_make_and_others_add_to_is_lifted():
    text = assert_trains_the_same(OF_SOME_ROUNDS.format(before="", behind=""))
    assert "def forward(x, y):" in text


def test_a_loss_of_before_its_rounds_is_given_to_them():
    text = assert_trains_the_same(OF_SOME_ROUNDS.format(before="loss = None", behind=""))
    assert "def forward(loss, x, y):" in text or "def forward(x, y, loss):" in text


def test_a_loss_that_the_end_of_an_iteration_binds_too_stays_in_place():
    _, loops = apply(OF_SOME_ROUNDS.format(before="", behind="loss = model.weight.sum()"))
    assert [form for form, _ in loops] == ["in-place"]


def test_long_lists_of_inputs_are_broken_as_lines_of_the_file_are():
    names = ", ".join(f"a_rather_long_name_{number}" for number in range(8))
    text, loops = apply(f"""\
        for batch in loader:
            {names} = batch
            optimizer.zero_grad()
            loss = model({names}).mean()
            loss.backward()
            optimizer.step()
        """)
    assert loops == [("micro-batched", None)]
    written = text[text.index("memory.forward_backward(") :].splitlines()
    assert len(written) > 3
    assert max(map(len, written)) <= 120


def test_long_lists_of_outputs_are_broken_as_lines_of_the_file_are():
    names = [f"a_rather_long_name_{number}" for number in range(4)]
    made = "".join(f"    {name} = model(x) + {number}\n" for number, name in enumerate(names))
    text = assert_trains_the_same(
        f"for x, y in loader:\n    optimizer.zero_grad()\n{made}"
        f"    loss = F.cross_entropy({names[0]} + {names[1]}\n        + {names[2]} + {names[3]}, y)\n"
        "    loss.backward()\n    optimizer.step()\n" + "".join(f"    print({name}.sum().item())\n" for name in names)
    )
    assert (
        """
    (
        _, a_rather_long_name_0, a_rather_long_name_1, a_rather_long_name_2,
        a_rather_long_name_3
    ) = memory.forward_backward(forward, x, y)
"""
        in text
    )


def test_a_name_that_some_batches_bind_anew_is_an_input_and_an_output():
    text = assert_trains_the_same("""\
        flips = False
        for x, y in loader * 3:
            optimizer.zero_grad()
            out = model(x)
            if flips:
                y = 1 - y
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(loss.item(), y.sum().item())
        """)
    assert "def forward(x, y):" in text
    assert "return loss, y" in text


def test_what_only_some_ways_bind_is_an_input_where_the_slice_reads_it_in_any_case():
    text = assert_trains_the_same("""\
        moved = True
        for batch in loader:
            if moved:
                x, y = batch[0] * 2, batch[1]
            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "def forward(x, y):" in text


MIXED = """\
mixes = {mixes}

def mixed(x, y):
    order = torch.randperm(len(x))
    return 0.5 * (x + x[order]), y, y[order]

def train():
    for x, y in loader * 3:
        if mixes:
            x, y_a, y_b = mixed(x, y)
        out = model(x)
        if mixes:
            loss = F.cross_entropy(out, y_a) + F.cross_entropy(out, y_b)
        else:
            loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())

train()
"""


@pytest.mark.parametrize("mixes", [True, False])
def test_what_is_bound_and_read_under_one_test_is_given_under_it(mixes):
    text = assert_trains_the_same(MIXED.format(mixes=mixes))
    assert "def forward(x, y_a, y_b, y):" in text
    assert "forward, x, y_a if mixes else None, y_b if mixes else None, y\n" in text


CHOSEN = MIXED.replace(
    MIXED[MIXED.index("        if mixes:\n            loss") : MIXED.index("        optimizer")],
    """\
        loss = F.cross_entropy(out, y_a) + F.cross_entropy(out, y_b) if mixes else F.cross_entropy(out, y)
""",
)


@pytest.mark.parametrize("mixes", [True, False])
def test_what_is_read_in_a_choice_by_the_test_it_is_bound_under_is_given_under_it(mixes):
    text = assert_trains_the_same(CHOSEN.format(mixes=mixes))
    assert "forward, x, y_a if mixes else None, y_b if mixes else None, y)\n" in text


@pytest.mark.parametrize(("old", "new"), [("out, y)\n", "out, y_a)\n"), ("y_b) if mixes", "y_b) if len(x)")])
def test_what_is_read_on_the_other_side_of_a_choice_or_by_another_is_no_input(old, new):
    _, definition = apply(CHOSEN.format(mixes=True).replace(old, new))[0].split("def forward(")
    assert "y_a" not in definition.split(")")[0]


def test_a_test_under_which_something_is_given_is_written_as_the_file_writes_it():
    code = MIXED.format(mixes='"all"').replace("if mixes:", 'if mixes == "all":')
    assert 'y_a if mixes == "all" else None' in apply(code)[0]
    below = code.replace('if mixes == "all":', 'if (mixes ==\n                "all"):')
    assert "y_a if mixes == 'all' else None" in apply(below)[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if mixes:\n            x,", "if mixes and len(x):\n            x,"),
        ("if mixes:\n            loss", "if mixes or out is None:\n            loss"),
        ("out = model(x)\n", "mixes = bool(y_a.sum())\n        out = model(x)\n"),
        ("if mixes:", "if torch.rand(()) < mixes:"),
        ("else:\n            loss = F.cross_entropy(out, y)", "else:\n            loss = F.cross_entropy(out, y_a)"),
    ],
)
def test_what_is_read_under_another_test_than_it_is_bound_under_is_no_input(before, after):
    _, definition = apply(MIXED.format(mixes=True))[0].split("def forward(")
    assert definition.startswith("x, y_a, y_b, y)")
    changed = MIXED.format(mixes=True)
    assert before in changed
    _, definition = apply(changed.replace(before, after))[0].split("def forward(")
    assert "y_a" not in definition.split(")")[0]


def test_a_loss_that_every_case_of_a_match_makes_is_read_later():
    text = assert_trains_the_same("""\
        for kind, (x, y) in zip(["sum", "mean", "sum"], loader * 3):
            match kind:
                case "sum":
                    loss = F.cross_entropy(model(x), y, reduction="sum")
                case "mean":
                    loss = F.cross_entropy(model(x), y)
                case _:
                    raise ValueError(kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "loss = memory.forward_backward(forward, kind, x, y)" in text


WAYS = """\
kind = "turned"
for x, y in loader * 3:
    {ahead}
    if kind == "plain":
        out = model(x)
    elif kind == "turned":
        z = -x
        out = {network}(z)
    {behind}
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), out.sum().item())
    {last}
"""


def test_what_the_network_gives_on_each_way_of_a_branch_is_bound_where_the_loss_reads_it():
    text = assert_trains_the_same(WAYS.format(ahead="pass", network="model", behind="pass", last="pass"))
    assert "def forward(x, y):" in text
    assert "return loss, out" in text


@pytest.mark.parametrize(
    ("ahead", "network", "behind", "last"),
    [
        ("if y[0]: out = x[:, :2] * 1", "model", "pass", "pass"),
        ("pass", "torch.neg", "pass", 'kind = "turned"'),
        ("pass", "model", "for _ in y: out = out * 1", "pass"),
        ("pass", "model", "pass", "kind, out = kind, out.detach()"),
        ("pass", "model", "pass", "if y[0]: kind, out = kind, out.detach()"),
    ],
)
def test_what_may_go_on_past_all_ways_of_a_branch_keeps_the_loss_in_place(ahead, network, behind, last):
    (loop,) = rewritten(TOP + WAYS.format(ahead=ahead, network=network, behind=behind, last=last)).loops
    assert loop.rewrite == "in-place"


def test_inputs_stand_in_the_order_in_which_they_are_read():
    text = assert_trains_the_same("""\
        y = torch.zeros(6, 2)
        for x, _ in loader:
            optimizer.zero_grad()
            out, y = model(x), y.detach() * 0.5 + x[:, :2]
            loss = (out - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "def forward(x, y):" in text


AFTERWARDS = """\
{before}
for epoch in range(2):
    for x, y in loader:
        if epoch == 0:
            loss = F.cross_entropy(model(x), y)
        elif len(x) > 4:
            half = len(x) // 2
            loss = F.cross_entropy(model(x[half:]), y[half:])
        else:
            half = len(x) // 3
            loss = F.cross_entropy(model(x[:half]), y[:half])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    {after}
"""


@pytest.mark.parametrize(
    ("before", "after", "form"),
    [("eval('model').train()", "pass", "micro-batched"), ("pass", "print(eval('half'))", "in-place")],
)
def test_what_reads_any_name_ahead_of_all_loops_reads_nothing_of_the_slice(before, after, form):
    assert [one for one, _ in apply(AFTERWARDS.format(before=before, after=after))[1]] == [form]


LOSSES = """\
        def train(x, y, kind):
            optimizer.zero_grad()
            out = model(x)
            if kind == "squares":
                first = out.square().mean()
            elif kind == "sizes":
                first = out.abs().mean()
            print(first.item())
            loss = first + F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            return loss.item()

        for x, y in loader:
            print(train(x, y, "squares"))
            print(train(x, y, "sizes"))
"""


def test_a_term_without_which_a_function_fails_is_an_output():
    assert "return loss, first" in assert_trains_the_same(LOSSES)
    body = LOSSES.replace('"sizes"))', '"other"))')
    for text in (TOP + textwrap.dedent(body), apply(body)[0]):
        with pytest.raises(UnboundLocalError, match="first"):
            run(text)


def test_a_term_that_a_loop_may_have_from_the_round_before_is_none():
    """On the way past both tests it is the number of the round before, which nothing misses."""
    _, loops = apply("""\
        for number, (x, y) in enumerate(loader * 3):
            optimizer.zero_grad()
            out = model(x)
            if number == 0:
                first = out.detach().square().mean()
            loss = first + F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(first.item())
        """)
    assert loops == [("in-place", "first may have no value yet where the slice reads it")]


def test_a_size_that_is_asked_between_lines_of_a_slice_is_asked_of_each_part():
    text = assert_trains_the_same("""\
        def train(x, y):
            optimizer.zero_grad()
            factor = None
            rows = len(x)
            out = model(x)
            if factor is None:
                factor = torch.ones(rows, 1)
            loss = F.cross_entropy(out * factor, y)
            loss.backward()
            optimizer.step()
            return loss.item() / rows

        for x, y in loader * 3:
            print(train(x, y))
        """)
    assert text.count("rows = len(x)") == 2


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


def test_a_size_that_only_the_loss_reads_is_asked_inside_alone():
    body = """\
for x, y in loader:
    x = x.float()
    n = x.size(0)
    optimizer.zero_grad()
    out = model(x).view(n, 2)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
"""
    text = loop_of(body)
    assert text.startswith(
        "for x, y in loader:\n    x = x.float()\n\n"
        "    def forward(x, y):\n        n = x.size(0)\n        out = model(x).view(n, 2)\n"
    )
    assert text.count("n = x.size(0)") == 1
    for stays in (body.replace("    n =", "    # rows\n    n ="), body + "    print(locals())\n", body + "print(n)\n"):
        assert loop_of(stays).count("n = x.size(0)") == 2


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


EXTRA = """\
    def penalised(out):
        return out.pow(2).mean(), 0.5

    for number, (x, y) in enumerate(loader * 4):
        {ahead}
        out = model(x)
        {between}
        extra = torch.tensor(0.0)
        if number % 2:
            extra, share = penalised(out)
        loss = F.cross_entropy(out, y) + extra
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), share)
    """


def test_what_the_slice_may_leave_as_it_was_is_given_to_it_and_comes_back():
    text = assert_trains_the_same(EXTRA.format(ahead="share = number / 8", between="pass"))
    assert "def forward(x, y, share):" in text and "loss, share = memory.forward_backward(forward, x, y, share)" in text


@pytest.mark.parametrize("start", ["0.25", "None", "'no'"])
def test_what_starts_as_a_constant_within_the_slice_starts_there(start):
    text = assert_trains_the_same(EXTRA.format(ahead="pass", between=f"share = {start}"))
    assert f"        out = model(x)\n        share = {start}\n        extra" in text and "def forward(x, y):" in text
