"""Lines that print or log where a loss is computed are told: they run once for each part of a batch."""

import pytest

from tests.rewrite import small_loops
from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP

PRINTING = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = 0
    for i, row in enumerate(x):
        out = model(row)
        loss = loss + F.cross_entropy(out, y[i])
        if i == 0:
            {printing}
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("call", ["print(out.argmax())", "pprint(out)"])
def test_what_prints_where_the_loss_is_computed_is_told(call):
    (loop,) = rewritten(TOP + PRINTING.format(printing=call)).loops
    assert loop.rewrite == "micro-batched"
    assert loop.notes == (
        "line 15 prints where the loss is computed: once for each micro-batch, and for each check whether the batch "
        "may be split",
    )


@pytest.mark.parametrize("call", ["out = out + 0", "print(out)\n            raise SystemExit", "print(1); sys.exit()"])
def test_what_prints_behind_the_loss_or_at_the_end_of_the_run_is_not(call):
    (loop,) = rewritten(TOP + PRINTING.format(printing=call)).loops
    assert (loop.rewrite, loop.notes) == ("micro-batched", ())


def test_all_lines_that_print_are_those_of_the_file_as_it_was():
    twice = PRINTING.format(printing="print(out)\n            print(out.argmax())")
    (loop,) = rewritten(f"{TOP}{twice}").loops
    assert loop.notes[0].startswith("line 15, line 16 print where the loss is computed: ")


LOGGING = """\
def compute(out, y, writer, step):
    loss = F.cross_entropy(out, y)
    {said}
    return loss


def train(loader, writer):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = compute(model(x), y, writer, step)
        loss.backward()
        optimizer.step()
        writer.add_scalar("lr", 0.1, step)


train(loader, None)
"""


@pytest.mark.parametrize(
    ("said", "verb"),
    [
        ('writer.add_scalar("loss", loss, step)', "logs"),
        ('logging.info("loss %f", loss)', "logs"),
        ('logger.warning("loss %f", loss)', "logs"),
        ('self.logger.error("loss %f", loss)', "logs"),
        ("wandb.log({'loss': loss})", "logs"),
        ("print(loss)", "prints"),
    ],
)
def test_what_a_function_logs_where_the_loss_is_computed_is_told(said, verb):
    (loop,) = rewritten(TOP + LOGGING.format(said=said)).loops
    assert loop.rewrite == "micro-batched"
    (note,) = loop.notes
    assert note.startswith(f"line 10 {verb} where the loss is computed: once for each micro-batch, ")


@pytest.mark.parametrize("said", ["loss = torch.log(loss)", "loss = loss.log()", "if loss > 9:\n        raise OSError"])
def test_what_a_function_computes_where_the_loss_is_computed_is_no_log(said):
    (loop,) = rewritten(TOP + LOGGING.format(said=said)).loops
    assert (loop.rewrite, loop.notes) == ("micro-batched", ())


def test_a_slice_that_prints_and_logs_is_told_once():
    said = 'print(out)\n            writer.add_scalar("out", out.sum(), i)'
    (loop,) = rewritten(TOP + PRINTING.format(printing=said)).loops
    assert loop.notes[0].startswith("line 15, line 16 print or log where the loss is computed: ")


def test_a_progress_bar_in_a_branch_is_told_of_the_whole_batch():
    text, loops = small_loops.apply("""\
        from tqdm import tqdm

        bar = tqdm(loader)
        for x, y in bar:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            if len(x) > 2:
                extra = out.pow(2).mean()
                loss = loss + extra
                bar.set_postfix(extra=extra.item())
            loss.backward()
            optimizer.step()
        """)
    assert loops == [("micro-batched", None)]
    assert text.index("return loss") < text.index("bar.set_postfix(")


def test_of_two_loops_one_prints_behind_its_call_and_the_other_is_split():
    text, loops = small_loops.apply("""\
        log = []
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            if len(x) > 2:
                loss = loss + out.pow(2).mean()
                print("more")
            loss.backward()
            optimizer.step()
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            if len(x) > 2:
                loss = loss + out.pow(2).mean()
                log.append(1)
            loss.backward()
            optimizer.step()
        """)
    assert loops == [("micro-batched", None), ("micro-batched", None)]
    calls = text.split("forward_backward(")
    assert "print" in calls[1] and "log.append" in calls[2] and "print" not in calls[0]
