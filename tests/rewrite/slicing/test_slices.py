"""Where a slice starts, what it is given and what it gives, in scripts whose first attempt at a slice does not do."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply, assert_trains_the_same


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


@pytest.mark.parametrize("ahead", ["loss = loss * 2", "seen.append(loss.item()); optimizer.zero_grad()"])
def test_a_branch_that_changes_the_loss_ahead_of_its_backward_holds_its_forward(ahead):
    text = assert_trains_the_same(PHASES.format(ahead=ahead.replace("; ", "\n" + " " * 16)))
    assert text.count("out = model(x)") == 2 and "loss.backward()" not in text


@pytest.mark.parametrize(
    "ahead",
    [
        "model.eval()",
        "x.mul_(2)",
        "torch.rand(1)",
    ],
)
def test_a_branch_that_does_more_ahead_of_its_backward_keeps_the_loss_in_place(ahead):
    _, loops = apply(PHASES.format(ahead=ahead.replace("; ", "\n" + " " * 16)))
    assert loops[0][0] == "in-place"


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


def test_a_number_of_the_first_row_is_read_of_the_whole_batch_as_before():
    text, forms = apply("""\
        from diffusion import noise_loss
        for batch in loader:
            x = batch["x"].to("cpu")
            target = batch["target"][0].item()
            optimizer.zero_grad()
            noise = torch.randn_like(x)
            loss = noise_loss(model, x, noise, target)
            loss.backward()
            optimizer.step()
            print(loss.item(), target)
        """)
    assert forms == [("micro-batched", None)]
    assert text.index("target = batch") < text.index("def forward(")


@pytest.mark.parametrize("start", ["torch.zeros_like(x[:, :2])", "x.new_zeros(len(x), 2)"])
def test_a_sum_over_several_runs_of_a_network_starts_in_the_slice(start):
    text = assert_trains_the_same(f"""\
        for x, y in loader:
            out = {start}
            for sample in range(3):
                out += model(x)
            out /= 3
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert text.index("def forward(") < text.index("    out = ")
