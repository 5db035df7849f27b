"""A loss that takes rows by their number, or another way for other numbers of rows, keeps its batch whole."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP

LOOP = """
labelled = 4
loader = [(torch.randn(8, 4), torch.randint(0, 2, (8,))), (torch.randn(5, 4), torch.randint(0, 2, (5,)))] * 3
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    loss = F.cross_entropy(out, y)
    {also}
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
IN_TURN = """
X, Y = torch.randn(400, 4), torch.randint(0, 2, (400,))
batch_size = 40
for i in range(0, len(X), batch_size):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X[i : i + batch_size]), Y[i : i + batch_size])
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def assert_whole(text, where, note):
    """That the batches of a script run whole, for a reason that names the line in which `where` stands."""
    line = next(number for number, line in enumerate(text.splitlines(), 1) if where in line)
    after = rewritten(text, micro_batches=4)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert any(told.startswith(f"line {line} {note}: batches run whole") for told in after.loops[0].notes)
    assert not parts_as_whole(text, rewritten(text).text, after.text)


@pytest.mark.parametrize(
    "also",
    [
        "if len(x) > 6:\n        loss = loss * 2",
        "if x.size(0) != 8:\n        loss = loss * 2",
        "n = x.shape[0]\n    loss = loss * (2 if n == 8 else 1)",
    ],
)
def test_another_way_for_other_numbers_of_rows(also):
    where = also.splitlines()[-1 if also.startswith("n =") else 0]
    assert_whole(TOP + LOOP.format(also=also), where, "asks how many rows the batch has")


@pytest.mark.parametrize("rows", ["x[:labelled]", "x[-labelled:]"])
def test_a_number_of_rows_that_is_no_part_of_the_batch(rows):
    also = f"loss = loss + model({rows}).pow(2).mean()"
    assert_whole(TOP + LOOP.format(also=also), also, "takes rows of `x` by their number")


@pytest.mark.parametrize("rows", ["x[:4]", "x[2:, :]", "x[:-3]", "x[::2]"])
def test_a_fixed_number_of_rows_of_a_tensor(rows):
    also = f"loss = loss + model({rows}).pow(2).mean()"
    moved = LOOP.replace("    out = model(x)\n", "    x = x.to('cpu')\n    out = model(x)\n")
    assert_whole(TOP + moved.format(also=also), also, "takes rows of `x` by their number")


@pytest.mark.parametrize("rows", ["x[:4].detach()", "x[:4, :]"])
def test_a_range_that_shows_itself_that_it_is_one_of_a_tensor(rows):
    also = f"loss = loss + model({rows}).pow(2).mean()"
    assert_whole(TOP + LOOP.format(also=also), also, "takes rows of `x` by their number")


def test_a_list_of_views_has_no_rows():
    text = TOP + LOOP.format(also="loss = loss + sum(model(view).mean() for view in views[:2])")
    text = text.replace("    out = model(x)\n", "    views = [x.to('cpu'), x.flip(1), x]\n    out = model(x)\n")
    assert "batch_size=1" not in rewritten(text, micro_batches=2).text


def test_rows_that_a_network_gave():
    also = "loss = loss + out[:labelled].pow(2).mean()"
    assert_whole(TOP + LOOP.format(also=also), also, "takes rows of `out` by their number")


def test_a_data_set_whose_rows_are_taken_in_turn_is_no_batch():
    assert_whole(TOP + IN_TURN, "model(X[i", "takes rows of `X` by their number")


@pytest.mark.parametrize(
    "also",
    [
        "if len(x) > 0:\n        loss = loss * 2",
        "if x.size(0) == y.size(0):\n        loss = loss * 2",
        "if x.size(1) > 3:\n        loss = loss * 2",
        "if labelled > 3:\n        loss = loss * 2",
        "loss = loss + model(torch.cat([x[:, :2], x[:, 2:labelled]], 1)).pow(2).mean()",
        "loss = loss + sum(model(x[i : i + 1]).pow(2).sum() for i in range(len(x))) / len(x)",
    ],
)
def test_what_is_the_same_for_any_rows_is_split(also):
    after = rewritten(TOP + LOOP.format(also=also), micro_batches=2)
    assert after.loops[0].notes == ()
    assert "batch_size=1" not in after.text


def test_how_many_things_a_batch_brings_is_no_number_of_rows():
    text = TOP + LOOP.format(also="pass").replace("for x, y in loader:", "for batch in loader:").replace(
        "out = model(x)", "out = model(batch[0])\n    y = batch[1] if len(batch) == 2 else None"
    )
    after = rewritten(text, micro_batches=2)
    assert after.loops[0].notes == ()
    assert "batch_size=1" not in after.text
