"""Accumulation: is the loss divided, and is the tail stepped? In the many ways in which people write it."""

from __future__ import annotations

import pytest

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
    assert report(code) == [("OOM301", 3)]


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
