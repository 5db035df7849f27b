"""Where a slice starts, what it is given and what it gives, in scripts whose first attempt at a slice does not do."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply


def assert_trains_the_same(body: str) -> str:
    """The text of a micro-batched script, which trains the same whole and in three parts."""
    text = TOP + textwrap.dedent(body)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    before = run(text)
    assert_same_bits(before, run(after.text, preset="off"))
    split = run(rewritten(text, micro_batches=3).text)
    assert split.calls_in_parts
    assert_close(before, split)
    return after.text


def test_a_teacher_without_gradients_runs_ahead_of_a_slice_that_cannot_hold_it():
    text = assert_trains_the_same("""\
        teacher = nn.Linear(4, 2)
        batches = iter(loader)
        for step in range(3):
            with torch.no_grad():
                try:
                    x, y = next(batches)
                except StopIteration:
                    batches = iter(loader)
                    x, y = next(batches)
                soft = teacher(x)
            model.train()
            out = model(x)
            loss = F.cross_entropy(out, y) + F.mse_loss(out, soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert text.index("soft = teacher(x)") < text.index("def forward(")


def test_a_network_with_gradients_is_never_left_ahead_of_the_slice():
    _, loops = apply("""\
        encoder = nn.Linear(4, 4)
        for x, y in loader:
            h = encoder(x)
            if y.sum() > 2:
                h = codes = h * 2
            loss = F.cross_entropy(model(h), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(codes)
        """)
    assert loops == [("in-place", "codes is read later, and only bound on some ways through the slice")]


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


@pytest.mark.parametrize("other", ["", "if y[0]:\n    y = y * 2"])
def test_data_of_the_module_is_an_input_of_a_function_that_trains_on_all_of_it(other):
    text = assert_trains_the_same(f"""\
x, y = loader[0]
{other}

def fit():
    for t in range(3):
        loss = F.cross_entropy(model(x), y.clamp(max=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())

fit()
""")
    assert "def forward(x, y):" in text


def test_losses_of_actions_taken_elsewhere_stay_where_they_are():
    """The graph is made while the episode runs; what is left to do is a sum over what was kept."""
    text, loops = apply("""\
        def act(x):
            kept.append(model(x).log_softmax(1)[:, 0])

        def finish():
            optimizer.zero_grad()
            total = 0
            returns = []
            for reward in rewards:
                total = reward + 0.9 * total
                returns.insert(0, total)
            loss = -(torch.stack(kept).mean(1) * torch.tensor(returns)).sum()
            loss.backward()
            optimizer.step()
            kept.clear()

        for episode in range(2):
            kept, rewards = [], []
            for x, y in loader:
                act(x)
                rewards.append(1.0)
            finish()
        """)
    assert loops == [("in-place", "no network is seen to run in the block of its backward")]
    assert "def forward" not in text


def test_the_choice_of_a_batch_by_another_library_stays_ahead_of_the_slice():
    text, loops = apply("""\
        from library import Agent

        class PPO(Agent):
            def learn(self, states, actions):
                while not self.batcher.end():
                    chosen = self.batcher.next_batch()[0]
                    chosen = self.network.tensor(chosen).long()
                    some_states = states[chosen]
                    some_actions = actions[chosen]
                    log_probs, entropy = self.network.predict(some_states, some_actions)
                    loss = -log_probs.mean() - entropy.mean()
                    self.opt.zero_grad()
                    loss.backward()
                    self.opt.step()
        """)
    assert loops == [("micro-batched", None)]
    assert "def forward(some_states, some_actions):" in text
    assert "memory.step(self.opt)" in text


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


def test_noise_of_a_target_is_drawn_for_the_whole_batch_as_before():
    text = assert_trains_the_same("""\
        target = nn.Linear(4, 2)

        def noisy(x):
            return x + torch.randn_like(x)

        for x, y in loader * 3:
            with torch.no_grad():
                wanted = target(noisy(x))
            loss = F.mse_loss(model(x), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert text.index("wanted = target(noisy(x))") < text.index("def forward(")


def test_an_evaluation_every_few_rounds_stays_ahead_of_the_slice():
    text = assert_trains_the_same("""\
        def train():
            for number in range(4):
                x, y = loader[0]
                if number % 2 == 0:
                    model.eval()
                    with torch.no_grad():
                        print(F.cross_entropy(model(x), y).item())
                    model.train()
                out = model(x)
                loss = F.cross_entropy(out, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        train()
        """)
    assert text.index("model.train()") < text.index("def forward(x, y)")


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


def test_the_batch_of_a_loop_around_that_of_a_policy_is_an_input():
    text = assert_trains_the_same("""\
        for x, y in loader:
            weight = torch.ones(())
            for _ in range(2):
                out = model(x)
                loss = (weight * out).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                weight = weight * 0.5
                print(loss.item())
        """)
    assert "def forward(x, weight):" in text


@pytest.mark.parametrize(
    "times",
    ["t = torch.randint(1, 9, (len(x), 1))", "idx = t = torch.rand(len(x), 1)", "t, _ = (lambda: (x[:, :1], 0))()"],
)
def test_times_drawn_for_the_samples_are_an_input_though_they_are_called_as_counters(times):
    text = assert_trains_the_same(f"""\
        for x, y in loader:
            {times}
            out = model(x * t)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "def forward(x, t, y):" in text


@pytest.mark.parametrize(
    ("header", "made", "inputs"),
    [
        ("for i in range(0, 12, 6):", "idx, y = order[i:i + 6], labels[i:i + 6]", "idx, y"),
        ("for i in range(0, 12, 6):", "y, idx = labels[i:i + 6], order[i:i + 6].long()", "idx, y"),
        ("for y, idx in [(labels[:6], order[:6]), (labels[6:], order[6:])]:", "", "idx, y"),
        ("for n, (idx, y) in enumerate([(order[:6], labels[:6]), (order[6:], labels[6:])]):", "", "idx, y"),
        (
            "for batch in [{'idx': order[:6], 'y': labels[:6]}, {'idx': order[6:], 'y': labels[6:]}]:",
            'idx, y = batch["idx"].long(), batch["y"]',
            "idx, y",
        ),
        ("for idx in order.split(6):", "y = labels[:6]", "idx, y"),
        ("for idx in torch.chunk(order, 2):", "y = labels[:6]", "idx, y"),
    ],
)
def test_rows_that_are_called_as_a_counter_are_an_input(header, made, inputs):
    text = assert_trains_the_same(f"""\
        table, order, labels = torch.randn(20, 4), torch.randperm(20)[:12], torch.tensor([0, 1, 1, 0, 1, 0] * 2)
        {header}
            {made}
            loss = F.cross_entropy(model(table[idx]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert f"def forward({inputs}):" in text


@pytest.mark.parametrize(
    ("header", "made"),
    [
        ("for (x, y), i in zip(loader, range(2)):", "pass"),
        ("for x, y in loader:", "i, *ends = 1, 2, 3"),
        ("for x, y in loader:", "*ends, i = 1, x[:3], 2"),
        ("settings = {'i': 2}\n        for x, y in loader:", 'i = settings["i"]'),
    ],
)
def test_a_count_that_comes_with_others_is_no_input(header, made):
    text, _ = apply(f"""\
        {header}
            {made}
            loss = F.cross_entropy(model(x) * i, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    assert "def forward(x, y):" in text


def test_a_count_beside_the_batch_is_no_input():
    text = assert_trains_the_same("""\
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / (i + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "def forward(x, y):" in text


def test_data_of_the_function_around_a_closure_is_an_input():
    text = assert_trains_the_same("""\
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def fit():
            for x, y in loader * 3:
                def closure():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                print(optimizer.step(closure).item())

        fit()
        """)
    assert "def forward(x, y):" in text


PHASES = """\
seen = []
for phase in ("train", "valid") * 2:
    for x, y in loader:
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            out = model(x)
            loss = F.cross_entropy(out, y)
            if phase == "train":
                {ahead}
                loss.backward()
                optimizer.step()
        print(phase, out.sum().item(), loss.item(), seen)
"""


def test_a_branch_that_notes_the_loss_ahead_of_its_backward_notes_it_behind():
    text = assert_trains_the_same(PHASES.format(ahead="seen.append(loss.item())"))
    call = text.index("loss, out = memory.forward_backward(forward, x, y)")
    assert call < text.index("seen.append(loss.item())") < text.index("memory.step(optimizer)")
    assert "loss.backward()" not in text


@pytest.mark.parametrize(
    "ahead",
    [
        "loss = loss * 2",
        "seen.append(loss.item()); optimizer.zero_grad()",
        "model.eval()",
        "x.mul_(2)",
        "torch.rand(1)",
    ],
)
def test_a_branch_that_does_more_ahead_of_its_backward_keeps_the_loss_in_place(ahead):
    _, loops = apply(PHASES.format(ahead=ahead.replace("; ", "\n" + " " * 16)))
    assert loops[0][0] == "in-place"


def test_what_a_network_is_given_is_an_input_wherever_it_was_bound():
    text = assert_trains_the_same("""\
        critic = nn.Linear(4, 1)
        optimizer.add_param_group({"params": critic.parameters()})

        def step(generator, x, y, scale):
            for _ in range(2):
                noise = x * 0.5
                loss = critic(generator(noise).repeat(1, 2)).mean() - critic(x).mean() * scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader:
            step(model, x, y, 0.5)
        """)
    assert "def forward(noise, x):" in text


def test_a_sequence_of_which_the_network_is_given_one_column_after_the_other_is_an_input():
    text = assert_trains_the_same("""\
        def update(sequence):
            state = torch.zeros(len(sequence), 2)
            for start in (0, 2):
                state = state.detach()
                loss = 0
                for t in range(start, start + 2):
                    state = state + model(sequence[:, t])
                    loss = loss + state.pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader * 2:
            update(x.unsqueeze(1).repeat(1, 4, 1))
    """)
    assert "forward(start, state, sequence)" in text


def test_what_a_loss_reckons_with_is_an_input_though_the_slice_binds_a_part_of_it_anew():
    text = assert_trains_the_same("""\
        def update(states, actions, old, gains):
            for _ in range(2):
                chosen = model(states).softmax(1).gather(1, actions.view(-1, 1))
                old = old.view(-1, 1)
                loss = (gains.view(-1, 1) * chosen / old).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader * 2:
            update(x, y, torch.rand(6) + 0.5, torch.rand(6))
        """)
    assert "def forward(states, actions, old, gains):" in text


def test_what_a_loss_reckons_with_is_an_input_where_the_iteration_binds_nothing():
    text = assert_trains_the_same("""\
        def update(states, actions, gains):
            for _ in range(2):
                chosen = model(states).gather(1, actions[:, None]).squeeze(1)
                loss = (chosen * gains).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader:
            update(x, y, torch.ones(len(x)))
        """)
    assert "def forward(states, actions, gains):" in text


TRAINER = """\
class Trainer:
    def run(self, loader):
        for x, y in loader:
            # forward
            out, self.loss = self.compute(x, y)  # both
            {between}
            model.zero_grad()
            self.loss.backward()
            optimizer.step()
            self.report()

    def compute(self, x, y):
        out = model(x)
        return out, F.cross_entropy(out, y)

    def report(self):
        print(f"{{self.loss.item():.6f}}")

Trainer().run(loader * 3)
"""


def test_a_loss_that_an_object_keeps_is_given_to_it_behind_the_call():
    text = assert_trains_the_same(TRAINER.format(between="pass"))
    lines = [line.strip() for line in text.splitlines()]
    call = lines.index("loss = memory.forward_backward(forward, x, y)")
    assert lines[call + 1] == "self.loss = loss"
    assert "out, loss = self.compute(x, y)  # both" in lines


@pytest.mark.parametrize("between", ["self.loss = self.loss * 2", "seen = loss"])
def test_a_loss_that_an_object_keeps_is_left_where_its_name_or_value_is_not_its_own(between):
    text, loops = apply("loss = 1\n" + TRAINER.format(between=between))
    assert loops[0][0] == "in-place"
    assert "memory.backward(self.loss)" in text


def test_a_start_that_the_slice_binds_anew_runs_ahead_of_it():
    text = assert_trains_the_same("""\
        encoder = nn.Linear(4, 4)
        for x, y in loader:
            h = encoder(x)
            loss = 0.0
            out = model(h)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert text.index("loss = 0.0") < text.index("def forward(")


def test_a_start_that_is_read_before_the_slice_binds_it_anew_keeps_its_place():
    _, loops = apply("""\
        encoder = nn.Linear(4, 4)
        total = 1.0
        for x, y in loader:
            h = encoder(x) * total
            total = 0.0
            out = model(h)
            total = F.cross_entropy(out, y)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        """)
    assert [form for form, _ in loops] == ["in-place"]


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


@pytest.mark.parametrize(
    "backward",
    ["(loss := F.cross_entropy(model(x), y)).backward()", "F.cross_entropy((loss := model(x)), y).backward()"],
)
def test_names_bound_in_what_is_differentiated_keep_it_in_place(backward):
    text, loops = apply(f"""\
        for x, y in loader:
            {backward}
            optimizer.step()
            optimizer.zero_grad()
            print(loss.sum().item())
        """)
    assert loops == [("in-place", "line 9 binds loss within what is differentiated")]
    before = run(TOP + f"for x, y in loader:\n    {backward}\n    optimizer.step()\n    optimizer.zero_grad()\n")
    assert_same_bits(before, run(text.replace("    print(loss.sum().item())\n", ""), preset="off"))


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
        ("pass", "torch.neg", "pass", "pass"),
        ("pass", "model", "for _ in y: out = out * 1", "pass"),
        ("pass", "model", "pass", "out = out.detach()"),
        ("pass", "model", "pass", "if y[0]: out = out.detach()"),
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


def test_what_moved_behind_the_call_is_parted_from_the_step_as_the_backward_was():
    text = assert_trains_the_same("""\
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            correct = (out.argmax(1) == y).sum()

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item(), correct.item())
        """)
    assert "    correct = (out.argmax(1) == y).sum()\n\n    memory.step(optimizer)\n" in text


@pytest.mark.parametrize(
    ("network", "told"),
    [
        ("model(batch.x.float())", "`batch` may be an object, which is cut where it is a mapping, a named tuple or a "),
        ("model(batch.to(device).x)", None),
        ("model(batch.data)", None),
        ('model(batch["x"])', None),
        ("model(x) + model(batch.x)", None),
    ],
)
def test_a_batch_that_may_be_an_object_of_a_kind_that_is_not_cut_is_named(network, told):
    body = f"for batch in batches:\n    x = batch.x\n    loss = F.cross_entropy({network}, batch.y)\n"
    body += "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    (loop,) = rewritten(TOP + body).loops
    assert loop.rewrite == "micro-batched"
    assert [note.startswith(told or "") for note in loop.notes] == [True] * bool(told)


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ("out.retain_grad()", "out.grad.abs().sum().item()"),
        ("out.register_hook(lambda gradient: kept.append(gradient.abs().sum().item()))", "kept[-1]"),
    ],
)
def test_a_gradient_that_is_kept_of_an_output_is_that_of_the_whole_batch(asked, read):
    text = f"""\
kept = []
for x, y in loader * 3:
    optimizer.zero_grad()
    out = model(x)
    {asked}
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    print({read})
"""
    after = rewritten(TOP + text, micro_batches=3)
    reason = "line 12 keeps a gradient on the way to the loss, which would be one of a part"
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("in-place", reason)]
    assert_same_bits(run(TOP + text), run(after.text))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("for p in other.parameters(): p.data = p.data * 2", "line 12 changes other"),
        ("[p.data.mul_(2) for p in other.parameters()]", "line 12 changes other"),
        (
            "for g in [*groups]:\n        for p in g['params']: p.data = p.data * 2",
            "line 12, between forward and backward",
        ),
        ("for row in targets: row['y'] = row['y'] * 2", "line 12 changes targets"),
        ("for i, row in enumerate(targets): row['y'].mul_(i + 2)", "line 12 changes targets"),
    ],
)
def test_what_changes_the_elements_of_what_the_loss_reads_keeps_its_place(between, reason):
    text = f"""\
other, targets = nn.Linear(4, 2), [{{"y": torch.ones(1)}}]
groups = [{{"params": list(other.parameters())}}]
for x, y in loader * 3:
    out = model(x)
    {between}
    loss = F.cross_entropy(out, y) * targets[0]["y"].sum() + F.cross_entropy(other(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    after = rewritten(TOP + text, micro_batches=3)
    assert [(loop.rewrite, loop.reason.startswith(reason)) for loop in after.loops] == [("in-place", True)]
    assert_same_bits(run(TOP + text), run(after.text))


def test_a_loop_that_shows_or_counts_elements_goes_behind_the_call():
    _, forms = apply("""\
        meters = []
        for x, y in loader:
            out = model(x)
            for meter in meters:
                meter.update(out.mean().item())
            for index in range(2):
                visualize(x[index], out[index])
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]


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


def test_a_network_is_handed_to_a_function_of_another_file_where_its_own_methods_are_called_elsewhere():
    _, forms = apply("""\
        from variational import elbo
        optimizer = torch.optim.Adam(params=model.parameters())
        for epoch in range(9):
            h = torch.randn(6, 4)
            bound, kl = elbo(model, h)
            loss = -bound
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(kl.item(), model(h).sum().item())
        """)
    assert forms == [("micro-batched", None)]


def test_sizes_and_modules_are_no_part_of_a_batch_that_the_network_draws_itself():
    text, loops = apply("""\
        WIDTH = 4
        def train():
            for x, y in loader:
                n = x.size(0)
                optimizer.zero_grad()
                loss = model(torch.randn(n, WIDTH)).mean()
                loss.backward()
                optimizer.step()
        """)
    assert loops == [("in-place", "the loss is computed from nothing that could be split")]
    assert "    loss = model(torch.randn(n, WIDTH)).mean()\n        memory.backward(loss)\n" in text
    of_module = apply("""\
        for x, y in loader:
            n = x.size(0)
            loss = model(torch.randn(n, 4)).mean()
            loss.backward()
            optimizer.step()
        """)
    assert of_module[1] == loops


def test_a_second_loss_of_noise_that_it_draws_itself_takes_no_part_of_a_batch():
    text = assert_trains_the_same("""\
        WIDTH = 4
        for x, y in loader * 2:
            n = x.size(0)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            fooled = -model(torch.randn(n, WIDTH)).mean()
            fooled.backward()
            optimizer.step()
            print(loss.item(), fooled.item())
        """)
    assert "    fooled = memory.forward_backward(forward_2)\n" in text


@pytest.mark.parametrize(("star", "given"), [("*inputs", "x, x + 1"), ("**inputs", "a=x, b=x + 1")])
def test_parameters_that_gather_arguments_are_parts_of_the_batch(star, given):
    text = assert_trains_the_same(f"""\
        class Pair(nn.Linear):
            def forward(self, a, b):
                return super().forward(a) + super().forward(b)

        model = Pair(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def step(target, {star}):
            optimizer.zero_grad()
            loss = F.cross_entropy(model({star}), target)
            loss.backward()
            optimizer.step()
            print(loss.item())

        for x, y in loader * 3:
            step(y, {given})
        """)
    assert "memory.forward_backward(forward, inputs, target)" in text


@pytest.mark.parametrize(
    "head",
    [
        "for n, c in loader * 3:",
        "for n, c in loader * 3:\n    n, c = n.to('cpu'), c.to('cpu')",
        "for batch in loader * 3:\n    n, c = batch[0].to('cpu'), batch[1].to('cpu')",
        "for batch in loader * 3:\n    n = batch[0].to('cpu')\n    c = batch[1]",
    ],
)
def test_data_that_is_called_like_a_counter_and_asked_like_a_tensor_is_an_input(head):
    text = assert_trains_the_same(
        f"{head}\n    out = model(n.view(-1, 4))\n    loss = F.cross_entropy(out, c) + n.mean() * 0\n"
        "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n    print(loss.item())\n"
    )
    assert "    def forward(n, c):\n" in text


def test_a_counter_is_no_input():
    text = assert_trains_the_same("""\
        for i, (x, y) in enumerate(loader * 3):
            loss = F.cross_entropy(model(x), y) * min(1.0, i / 2 + 0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(i, loss.item())
        """)
    assert "    def forward(x, y):\n" in text


def test_labels_that_are_read_by_columns_are_an_input_though_they_are_called_as_a_counter():
    text = assert_trains_the_same("""\
        def train(x, t):
            optimizer.zero_grad()
            loss = 0
            for c in range(2):
                loss += F.mse_loss(model(x)[:, c], t[:, c])
            loss.backward()
            optimizer.step()
            return loss.item()

        for x, y in loader:
            print(train(x, torch.stack((y, 1 - y), 1).float()))
        """)
    assert "def forward(x, t):" in text


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
    assert loops == [("in-place", "first is read later, and only bound on some ways through the slice")]


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
