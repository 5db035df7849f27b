"""Accumulation: is the loss divided, and is the tail stepped? In the many ways in which people write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Report = Callable[[str], list[tuple[str, int]]]

TRAINER = """
    import torch

    class Trainer:
        def __init__(self, model, optimizer, every, config):
            self.model, self.optimizer, self.every = model, optimizer, every
            self.config = config

        def run(self, loader, k, args):
            w = 1 / k
            n = args.k
            for i, (x, y) in enumerate(loader):
                loss = self.criterion(self.model(x), y)
                {division}
                {backward}
                if (i + 1) % self.every == 0 or (i + 1) == len(loader):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
"""


@pytest.fixture
def report(report: Report) -> Report:
    """What is reported of accumulation."""
    return lambda code: [found for found in report(code) if found[0].startswith("OOM3")]


@pytest.mark.parametrize(
    ("division", "backward"),
    [
        ("loss = loss / self.every", "loss.backward()"),
        ("loss /= self.every", "loss.backward()"),
        ("loss = loss / self.config.every", "loss.backward()"),
        ("loss = loss / n", "loss.backward()"),
        ("loss = loss * w", "loss.backward()"),
        ("loss = loss.mean() / k", "loss.backward()"),
        ("loss = torch.div(loss, k)", "loss.backward()"),
        ("loss.div_(k)", "loss.backward()"),
        ("if k > 1: loss = loss / k", "loss.backward()"),
        ("pass", "(loss / self.every).backward()"),
        ("pass", "loss.div(k).backward()"),
        ("pass", "loss.mul(1 / k).backward()"),
        ("pass", "(loss * (1 / k)).backward()"),
        ("pass", "scaler.scale(loss / self.every).backward()"),
        ("loss = unseen(loss)", "loss.div(k).backward()"),
    ],
)
def test_every_division_counts(report, division, backward):
    assert report(TRAINER.format(division=division, backward=backward)) == []


@pytest.mark.parametrize(
    ("division", "backward"),
    [
        ("pass", "loss.backward()"),
        ("loss = (loss + self.other(x)) / 2", "loss.backward()"),
        ("loss = loss + self.model.penalty() * k", "loss.backward()"),
        ("loss = loss + self.criterion(self.model(y), x) / k", "loss.backward()"),
        ("loss = loss * self.config.weight", "loss.backward()"),
    ],
)
def test_what_is_no_division_of_the_whole_loss_does_not(report, division, backward):
    assert ("OOM301", 14) in report(TRAINER.format(division=division, backward=backward))


def test_a_divisor_in_an_attribute_holds_no_graph(report):
    code = """
        class Trainer:
            def __init__(self, model, every: int):
                self.model, self.every = model, every

            def run(self, loader):
                total = 0.0
                for x, y in loader:
                    loss = criterion(self.model(x), y)
                    loss = loss / self.every
                    loss.backward()
                    total += loss.item() * self.every
    """
    assert report(code) == []


WINDOW = """
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / 4).backward()
        {before}
        {guard}
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("before", "guard", "tail_is_lost"),
    [
        ("pass", "if (i + 1) % 4 != 0: continue", True),
        ("pass", "if (i + 1) % 4 != 0 and (i + 1) != len(loader): continue", False),
        ("wait = (i + 1) % 4 != 0", "if wait: continue", True),
        ("wait = (i + 1) % 4 != 0 and (i + 1) != len(loader)", "if wait: continue", False),
    ],
)
def test_a_continue_guard_loses_the_tail_unless_it_lets_the_last_batch_through(report, before, guard, tail_is_lost):
    found = report(WINDOW.format(before=before, guard=guard))
    assert found == ([("OOM302", 4)] if tail_is_lost else [])


def test_a_counter_kept_by_hand_is_a_window(report):
    code = """
        seen = 0
        for x, y in loader:
            criterion(model(x), y).backward()
            seen += 1
            if seen == k:
                optimizer.step()
                optimizer.zero_grad()
                seen = 0
    """
    assert report(code) == [("OOM301", 3), ("OOM302", 5)]


def test_apex_does_the_precision_and_not_the_accumulation(report):
    code = """
        from apex import amp
        model, optimizer = amp.initialize(model.cuda(), optimizer, opt_level="O1")
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    """
    assert report(code) == [("OOM301", 6), ("OOM302", 7)]


def test_accelerate_does_both(report):
    code = """
        from accelerate import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=4)
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    """
    assert report(code) == []


def test_a_scaler_object_that_takes_loss_and_optimizer_is_the_backward(read, report):
    code = """
        import torch
        def train_one_epoch(model, loader, optimizer, loss_scaler, accum):
            model.train(True)
            for i, x in enumerate(loader):
                with torch.autocast("cuda"):
                    loss = model(x)
                loss /= accum
                loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(i + 1) % accum == 0)
    """
    assert report(code) == []
    assert read(code).loops[0].to_json()["backwards"] == [8]


CLIP = """
    import torch
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        {before}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("pass", [("OOM303", 8)]),
        ("scaler.unscale_(optimizer)", []),
        ("if args.clip: scaler.unscale_(optimizer)", [("OOM303", 8)]),
        ("self.scaler.unscale_(self.optimizer)", []),
        ("unscale(scaler)", [("OOM303", 8)]),
    ],
)
def test_clipping_needs_unscaled_gradients(report, before, found):
    assert report(CLIP.format(before=before)) == found


def test_clipping_in_a_helper_after_its_unscale_is_clean(report):
    code = """
        import torch
        def clip(scaler, optimizer, model):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        for x, y in loader:
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            clip(scaler, optimizer, model)
            scaler.step(optimizer)
    """
    assert report(code) == []


COUNTED = """
    class Trainer:
        def run(self, model, loader, optimizer, k, epochs):
            {before_epochs}
            for epoch in range(epochs):
                {before_batches}
                for x, y in loader:
                    (criterion(model(x), y) / k).backward()
                    seen += 1
                    {decision}
                        optimizer.step()
                        optimizer.zero_grad()
                        {after_step}
                {after_batches}
"""


@pytest.mark.parametrize(
    ("before_epochs", "before_batches", "decision", "after_step", "after_batches", "tail_is_lost"),
    [
        ("pass", "seen = 0", "if seen == k:", "seen = 0", "pass", True),
        ("pass", "seen = 0", "if seen >= k:", "seen = 0", "pass", True),
        ("pass", "seen, total = 0, 0.0", "if seen % k == 0:", "pass", "pass", True),
        ("seen = 0", "pass", "if seen == k:", "seen = 0", "pass", False),
        ("seen = 0", "pass", "if seen % k == 0:", "pass", "pass", False),
        ("seen = 0", "self.seen = 0", "if seen % k == 0:", "pass", "pass", False),
        ("seen = 0", "optimizer.zero_grad()", "if seen % k == 0:", "pass", "pass", True),
        ("seen = 0", "if fresh: optimizer.zero_grad()", "if seen % k == 0:", "pass", "pass", False),
        ("seen = 0; optimizer.zero_grad()", "pass", "if seen % k == 0:", "pass", "pass", False),
        ("seen = 0", "optimizer.zero_grad()", "if seen % k == 0:", "pass", "optimizer.step()", False),
        ("pass", "seen = 0", "if seen == k:", "seen = 0", "if seen: optimizer.step()", False),
        ("pass", "seen = 0", "if seen == k or seen == len(loader):", "seen = 0", "pass", False),
    ],
)
def test_a_counter_of_the_epoch_loses_the_tail_and_one_of_the_run_does_not(
    report, before_epochs, before_batches, decision, after_step, after_batches, tail_is_lost
):
    found = report(
        COUNTED.format(
            before_epochs=before_epochs,
            before_batches=before_batches,
            decision=decision,
            after_step=after_step,
            after_batches=after_batches,
        )
    )
    assert [line for code, line in found if code == "OOM302"] == ([9] if tail_is_lost else [])


def test_a_counter_made_in_the_function_that_runs_the_epoch_is_of_the_epoch(report):
    code = """
        def train_epoch(model, loader, optimizer, k):
            seen = 0
            for x, y in loader:
                (criterion(model(x), y) / k).backward()
                seen += 1
                if seen == k:
                    optimizer.step()
                    optimizer.zero_grad()
                    seen = 0
    """
    assert report(code) == [("OOM302", 6)]


def test_a_counter_of_the_run_does_not_help_where_each_epoch_resets_gradients(report):
    code = """
        class Trainer:
            def train_epoch(self):
                self.optimizer.zero_grad()
                for x, y in self.loader:
                    self.seen += 1
                    (criterion(self.model(x), y) / self.k).backward()
                    if self.seen % self.k == 0:
                        self.optimizer.step()
                        self.optimizer.zero_grad()
    """
    assert report(code) == [("OOM302", 7)]
    assert report(code.replace("self.optimizer.zero_grad()\n                for", "for")) == []


def test_a_counter_that_is_handed_in_or_kept_elsewhere_is_not_judged(report):
    code = """
        def train_epoch(model, loader, optimizer, k, seen):
            for x, y in loader:
                (criterion(model(x), y) / k).backward()
                seen += 1
                if seen % k == 0:
                    optimizer.step()
            return seen

        def train_epoch_with_global(model, loader, optimizer, k):
            global step
            for x, y in loader:
                (criterion(model(x), y) / k).backward()
                step += 1
                if step % k == 0:
                    optimizer.step()

        def train_epoch_with_attribute(self, loader, k):
            for x, y in loader:
                (criterion(self.model(x), y) / k).backward()
                self.steps += 1
                if self.steps % k == 0:
                    self.optimizer.step()
    """
    assert report(code) == []


WHOLE_WINDOWS = """
    import itertools

    def train(model, loader, optimizer, k):
        whole = len(loader) // k * k
        {check}
        for i, (x, y) in enumerate({batches}):
            {guard}
            (criterion(model(x), y) / k).backward()
            if (i + 1) % k == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("batches", "guard", "tail_is_lost"),
    [
        ("loader", "assert len(loader) % k == 0", False),
        ("loader", "pass", True),
        ("loader", "if i >= whole: break", False),
        ("loader", "if i >= len(loader) // k * k: break", False),
        ("loader", "if i == len(loader) - len(loader) % k: break", False),
        ("loader", "if i >= whole: continue", False),
        ("itertools.islice(loader, whole)", "pass", False),
        ("itertools.islice(loader, len(loader) // k * k)", "pass", False),
        ("loader", "if i // k >= steps: continue", False),
        ("loader", "step = i // k\n            if step >= steps: continue", False),
        ("loader", "if i >= max_steps: break", True),
        ("loader", "if i >= len(loader) // 2: break", True),
    ],
)
def test_an_epoch_that_ends_with_a_whole_window_has_no_tail(report, batches, guard, tail_is_lost):
    check, guard = (guard, "pass") if guard.startswith("assert") else ("pass", guard)
    found = report(WHOLE_WINDOWS.format(batches=batches, guard=guard, check=check))
    assert found == ([("OOM302", 9)] if tail_is_lost else [])


def test_what_one_function_knows_of_its_batches_another_does_not(report):
    code = """
        def first(model, loader, optimizer, k):
            assert len(loader) % k == 0
            for i, (x, y) in enumerate(loader):
                (criterion(model(x), y) / k).backward()
                if (i + 1) % k == 0:
                    optimizer.step()

        def second(model, loader, optimizer, k):
            for i, (x, y) in enumerate(loader):
                (criterion(model(x), y) / k).backward()
                if (i + 1) % k == 0:
                    optimizer.step()
    """
    assert report(code) == [("OOM302", 11)]


def test_a_window_by_divmod_is_named_by_its_size(read):
    code = """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / k).backward()
            if divmod(i + 1, k)[1] == 0:
                optimizer.step()
                optimizer.zero_grad()
    """
    (loop,) = read(code).loops
    assert loop.window.size == "k"


def test_gradients_divided_in_one_function_are_not_divided_in_another(report):
    code = """
        def divided(model, loader, optimizer, k):
            for i, (x, y) in enumerate(loader):
                criterion(model(x), y).backward()
                if (i + 1) % k == 0 or i + 1 == len(loader):
                    average(model, k)
                    optimizer.step()

        def average(model, k):
            for parameter in model.parameters():
                parameter.grad /= k

        def undivided(model, loader, optimizer, k):
            for i, (x, y) in enumerate(loader):
                criterion(model(x), y).backward()
                if (i + 1) % k == 0 or i + 1 == len(loader):
                    optimizer.step()
    """
    assert report(code) == [("OOM301", 14)]


BRANCHES = """
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", enabled=amp):
            loss = criterion(model(x), y)
        if amp:
            {scaled}
        else:
            loss{division}.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_a_scaler_object_in_one_branch_leaves_the_other_to_be_judged(report):
    scaled = "scaler(loss, optimizer, model.parameters(), i % 4 == 0)"
    code = BRANCHES.format(scaled=scaled, division="")
    assert report(code) == [("OOM301", 7), ("OOM302", 8)]


def test_each_branch_that_loses_the_tail_is_reported(report):
    code = """
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cuda", enabled=amp):
                loss = criterion(model(x), y) / 4
            if amp:
                scaler.scale(loss).backward()
                if (i + 1) % 4 == 0:
                    scaler.step(optimizer)
                    scaler.update()
            else:
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
    """
    assert report(code) == [("OOM302", 6), ("OOM302", 11)]


ALTERNATIVES = """
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / k).backward()
            if {test}:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "tail_is_lost"),
    [
        ("(i + 1) % k == 0 or i + 1 == len(loader)", False),
        ("(i + 1) % k == 0 or (last and i + 1 == len(loader))", False),
        ("(i + 1) % k == 0 or (len(loader) <= k and i + 1 == len(loader))", True),
        ("(i + 1) % k == 0 or (i + 1 == len(loader) and k >= len(loader))", True),
        ("(i + 1) % k == 0 or i % k == 7", True),
    ],
)
def test_an_end_of_epochs_that_hold_no_whole_window_is_not_the_end_of_the_others(report, test, tail_is_lost):
    assert report(ALTERNATIVES.format(test=test)) == ([("OOM302", 4)] if tail_is_lost else [])


@pytest.mark.parametrize("flag", ["args.accum_steps > 1", "args.accum_steps != 1", "args.accum_steps > 0"])
def test_whether_anything_is_accumulated_is_not_what_a_step_waits_for(report, flag):
    found = report(f"""
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            if {flag}:
                (loss / args.accum_steps).backward()
                if (i + 1) % args.accum_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """)
    assert found == [("OOM302", 5)]


def test_a_window_of_batches_is_lost_where_the_step_is_in_a_loop_over_parts_of_each(report):
    assert report("""
        for i, (texts, images) in tqdm(enumerate(loader)):
            for text, image in zip(texts, images):
                (criterion(model(text, image)) / k).backward()
                if i % k == k - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    """) == [("OOM302", 4)]


def test_a_step_by_the_epoch_loses_no_window_of_batches(report):
    assert not report("""
        for epoch in range(epochs):
            for x, y in loader:
                (criterion(model(x), y) / k).backward()
                if epoch % k == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """)


def test_a_test_kept_in_a_name_is_one_where_it_is_one_of_several(report):
    assert report("""
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / k
            scaler.scale(loss).backward() if scaler is not None else loss.backward()
            due = (i + 1) % k == 0
            if scaler is not None and due:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            elif due:
                optimizer.step()
                optimizer.zero_grad()
    """) == [("OOM302", 5), ("OOM302", 9)]


def test_apex_scales_the_loss_that_it_is_given_wherever_it_is_imported(report):
    assert (
        report("""
        class Trainer:
            def __init__(self, args, model, optimizer):
                self.args, self.model, self.optimizer = args, model, optimizer
                if args.fp16:
                    from apex import amp

            def run(self, loader):
                for i, (x, y) in enumerate(loader):
                    loss = criterion(self.model(x), y) / self.args.every
                    with amp.scale_loss(loss, self.optimizer) as scaled:
                        scaled.backward()
                    if (i + 1) % self.args.every == 0 or i + 1 == len(loader):
                        self.optimizer.step()
                        self.optimizer.zero_grad()
    """)
        == []
    )


@pytest.mark.parametrize(("division", "found"), [("value / k", []), ("value * weight", [("OOM301", 6)])])
def test_entries_divided_one_by_one_are_divided(report, division, found):
    assert (
        report(f"""
        for i, (x, y) in enumerate(loader):
            losses = criterion(model(x), y)
            for key, value in losses.items():
                losses[key] = {division}
            loss = losses["total"]
            loss.backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    """)
        == found
    )


@pytest.mark.parametrize(
    ("size", "found"),
    [("gas", True), ("args.gas", True), ("ACC_STEPS", True), ("grad_acc", True), ("n_gases", False), ("acc", False)],
)
def test_a_range_is_a_window_by_the_name_of_its_size(report, size, found):
    code = """
        import torch

        def train(model, get_batch, optimizer, args):
            while True:
                for part in range(SIZE):
                    x, y = get_batch()
                    with torch.autocast("cuda", dtype=torch.bfloat16):
                        _, loss = model(x, y)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert report(code.replace("SIZE", size)) == ([("OOM301", 9)] if found else [])


PIECES = """
    import torch
    from torch import nn

    def run(model, loader, optimizer, n, m):
        criterion = nn.CrossEntropyLoss({reduction})
        for x, y in loader:
            optimizer.zero_grad()
            {cut}
            {header}
                {part}
                loss = criterion(model(a), b){normalised}
                loss.backward()
            optimizer.step()
"""
CUTS = [
    ("pass", "for a, b in zip(x.chunk(n), y.chunk(n)):", "pass"),
    ("pass", "for a, b in zip(torch.split(x, m), torch.split(y, m)):", "pass"),
    ("pass", "for i, (a, b) in enumerate(zip(x.tensor_split(n, 0), y.tensor_split(n, dim=0))):", "pass"),
    ("parts = list(zip(x.chunk(n), y.chunk(n)))", "for a, b in parts:", "pass"),
    ("xs, ys = x.chunk(n), y.chunk(n)", "for i in range(n):", "a, b = xs[i], ys[i]"),
    ("pass", "for i in range(0, len(x), m):", "a, b = x[i : i + m], y[i : i + m]"),
    ("pass", "for i in range(n):", "start = i * m; a, b = x[start : start + m], y[start : start + m]"),
    ("pass", "for i in range(n):", "a, b = x[i::n], y[i::n]"),
]


def in_pieces(cut, header, part, *, reduction="", normalised=""):
    return PIECES.format(cut=cut, header=header, part=part, reduction=reduction, normalised=normalised)


@pytest.mark.parametrize(("cut", "header", "part"), CUTS)
def test_the_pieces_of_a_batch_add_up(report, cut, header, part):
    assert report(in_pieces(cut, header, part)) == [("OOM301", 12)]


@pytest.mark.parametrize(("cut", "header", "part"), CUTS)
@pytest.mark.parametrize("normalised", [" / n", " * len(a) / len(x)", " * (len(a) / len(x))"])
def test_pieces_of_which_each_has_its_share_do_not(report, cut, header, part, normalised):
    assert report(in_pieces(cut, header, part, normalised=normalised)) == []


@pytest.mark.parametrize("reduction", ["reduction='sum'", "size_average=False"])
def test_sums_over_the_samples_add_up_to_the_sum_over_the_batch(report, reduction):
    assert report(in_pieces(*CUTS[0], reduction=reduction)) == []


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("for a, b in zip(x.chunk(n, 1), y.chunk(n, 1)):", "pass"),
        ("for i in range(0, x.size(1), m):", "a, b = x[:, i : i + m], y[:, i : i + m]"),
        ("for i in range(len(x)):", "a, b = x[i], y[i]"),
        ("for word in x.split(' '):", "a, b = word, y"),
        ("for a, b in zip(x.chunk(n), y.chunk(n)):", "optimizer.zero_grad()"),
    ],
)
def test_time_samples_and_what_is_reset_are_no_such_pieces(report, header, part):
    assert report(in_pieces("pass", header, part)) == []


def test_pieces_of_a_sequence_that_hand_on_a_state_are_no_such_pieces(report):
    code = """
        def run(model, loader, optimizer, m):
            for x, y in loader:
                optimizer.zero_grad()
                state = None
                for i in range(0, len(x), m):
                    out, state = model(x[i : i + m], state)
                    state = state.detach()
                    criterion(out, y[i : i + m]).backward()
                optimizer.step()
    """
    assert report(code) == []


def test_parts_of_one_output_are_no_pieces_of_a_batch(report):
    code = """
        def run(model, loader, optimizer, n):
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                for a, b in zip(out.chunk(n), y.chunk(n)):
                    criterion(a, b).backward(retain_graph=True)
                optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize(("stepped", "line"), [("    optimizer.step()", 5), ("optimizer.step()", 2)])
def test_the_loop_over_pieces_is_a_training_loop_where_each_piece_is_stepped(read, stepped, line):
    code = f"""
        def run(model, loader, optimizer, n):
            for x, y in loader:
                pieces = zip(x.chunk(n), y.chunk(n))
                optimizer.zero_grad()
                for a, b in pieces:
                    criterion(model(a), b).backward()
                {stepped}
    """
    assert [loop.line for loop in read(code).loops] == [line]


@pytest.mark.parametrize(
    ("around", "fetched", "found"),
    [
        ("if True", "next(stream)", []),
        ("for epoch in range(9)", "next(stream)", [("OOM302", 6)]),
        ("if True", "data[step]", [("OOM302", 6)]),
    ],
)
def test_a_run_of_so_many_steps_has_no_epochs_that_end(report, around, fetched, found):
    code = f"""
        def run(model, stream, optimizer, data, k):
            {around}:
                for step in tqdm(range(100000)):
                    x, y = {fetched}
                    (criterion(model(x), y) / k).backward()
                    if (step + 1) % k == 0:
                        optimizer.step()
    """
    assert report(code) == found


@pytest.mark.parametrize(("bar", "found"), [("tqdm(range(100000))", []), ("tqdm(data)", [("OOM302", 6)])])
def test_a_bar_over_so_many_steps_has_no_epochs_that_end(report, bar, found):
    code = f"""
        def run(model, stream, optimizer, data, k):
            bar = {bar}
            for step in bar:
                x, y = next(stream)
                (criterion(model(x), y) / k).backward()
                if (step + 1) % k == 0:
                    optimizer.step()
    """
    assert report(code) == found


SHRUNK = """class Shrunk(torch.nn.Module):
        def forward(self, losses):
            return sum(losses) / args.steps"""
DIVIDED_OUT_OF_SIGHT = """
    import torch
    from functools import partial, reduce
    from elsewhere import average, criterion, scaled

    {made}
    model = Net().cuda()
    for i, (x, y) in enumerate(loader):
        losses = model(x, y)
        {divided}
        loss.backward()
        if (i + 1) % args.steps == 0:
            {full}
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "written",
    [
        {"divided": "loss = sum([one / args.steps for one in losses])"},
        {"divided": "loss, other = map(lambda one: one / args.steps, losses)"},
        {"divided": "loss = torch.stack([one / args.steps for one in losses]).sum()"},
        {"divided": "loss = reduce(add, [one / args.steps for one in losses])"},
        {"divided": "parts.append(losses[0] / args.steps); loss = sum(parts)"},
        {"divided": "loss = scaled(losses, args.steps)"},
        {"divided": "loss = sum(losses); loss *= weight.item() / args.steps"},
        {"divided": "loss = sum(losses); loss.register_hook(lambda grad: grad / args.steps)"},
        {"divided": "loss = some_loss(losses)", "made": "some_loss = partial(criterion, scale=1 / args.steps)"},
        {"divided": "loss = Shrunk()(losses)", "made": SHRUNK},
        {"made": "for p in net.parameters():\n        p.register_hook(lambda grad: grad / args.steps)"},
        {"made": "optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / args.steps)"},
        {"made": "for group in optimizer.param_groups:\n        group['lr'] /= args.steps"},
        {"made": "for some_loss in (Scaled(1 / args.steps),):\n        pass", "divided": "loss = some_loss(losses)"},
        {"full": "average(model, args.steps)"},
        {"full": "[setattr(p, 'grad', p.grad / args.steps) for p in model.parameters()]"},
        {"full": "torch._foreach_div_([p.grad for p in model.parameters()], args.steps)"},
    ],
    ids=lambda written: next(iter(written.values())),
)
def test_a_loss_that_may_be_divided_where_it_cannot_be_followed_is_not_reported(report, written):
    code = DIVIDED_OUT_OF_SIGHT.format(**{"made": "", "divided": "loss = sum(losses)", "full": "pass", **written})
    assert "OOM301" not in [found for found, _ in report(code)]


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"full": "print(total / args.steps)"},
        {"full": "total /= args.steps"},
        {"divided": "loss = sum(losses); lap = i // args.steps"},
        {"made": "rounds = epochs / args.steps"},
        {"made": "warmup = 1000 / args.steps"},
        {"divided": "loss = sum(losses); running += loss.item() / args.steps"},
        {"made": "optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * args.steps)"},
        {"divided": "loss = sum([one * 2 for one in losses])"},
    ],
)
def test_a_size_that_is_asked_and_logged_divides_nothing(report, written):
    code = DIVIDED_OUT_OF_SIGHT.format(**{"made": "", "divided": "loss = sum(losses)", "full": "pass", **written})
    assert "OOM301" in [found for found, _ in report(code)]


@pytest.mark.parametrize(("size", "found"), [("1", []), ("4", [("OOM301", 4), ("OOM302", 5)])])
def test_a_window_that_the_round_sets_to_one_iteration_is_none(report, size, found):
    code = f"""
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            every = {size}
            loss.backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    """
    assert [one for one in report(code) if one[0] != "OOM202"] == found


ACCELERATED = """
    from accelerate import Accelerator
    accelerator = Accelerator({given})
    for epoch in range(9):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            {before}
            accelerator.backward(criterion(model(x), y) / 4)
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("given", "before", "found"),
    [
        ("cpu=True", "pass", [("OOM302", 8)]),
        ("", "pass", [("OOM302", 8)]),
        ("gradient_accumulation_steps=4", "pass", []),
        ("gradient_accumulation_plugin=plugin", "pass", []),
        ("**settings", "pass", []),
        ("", "with accelerator.accumulate(model): y = model(x)", []),
    ],
)
def test_accelerate_steps_the_tail_of_what_it_is_told_to_accumulate(report, given, before, found):
    assert report(ACCELERATED.format(given=given, before=before)) == found


@pytest.mark.parametrize(("behind", "found"), [("seen = 0", [("OOM302", 6)]), ("log(seen)", []), ("seen = left", [])])
def test_a_counter_that_starts_again_behind_the_batches_loses_the_tail(report, behind, found):
    code = f"""
        seen = 0
        for epoch in range(9):
            for x, y in loader:
                (criterion(model(x), y) / 4).backward()
                seen += 1
                if seen == 4:
                    optimizer.step()
                    optimizer.zero_grad()
                    seen = 0
            {behind}
    """
    assert report(code) == found


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("sum(losses) / len(losses)", [("OOM301", 8)]),
        ("sum(losses) / len(losses) / steps", []),
        ("sum(losses) / len(windows)", []),  # may be as many as there are backwards
        ("sum(losses) / steps", []),
    ],
)
def test_the_mean_over_the_terms_of_one_loss_divides_by_no_window(report, loss, found):
    code = f"""
        import torch

        def fit(model, loader, optimizer, steps, windows):
            for _ in range(100):
                for _ in range(steps):
                    losses = model(next(loader))
                    loss = {loss}
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert [one for one in report(code) if one[0] != "OOM202"] == found
