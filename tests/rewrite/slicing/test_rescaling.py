"""What is kept of a loss that is divided in place is divided with it."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import TOP

BODY = """\
kept, total = [], 0.0
for x, y in loader * 3:
    loss = F.cross_entropy(model(x), y)
    {read}
    {divided}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(float(sum(kept)), float(total))
"""


def script(read, divided):
    return TOP + BODY.format(read=read, divided=divided)


@pytest.mark.parametrize("divided", ["loss *= 0.5", "loss /= 4"])
@pytest.mark.parametrize("read", ["kept.append(loss.detach())", "kept += [loss.data]", "total = loss.detach().view(1)"])
def test_what_shares_memory_with_the_loss_is_divided_in_place(read, divided):
    text = script(read, divided)
    after = rewritten(text)
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    ("read", "divided"),
    [
        ("kept.append(loss.item())", "loss *= 0.5"),
        ("kept.append(2 * loss.detach())", "loss *= 0.5"),
        ("total += loss.detach()", "loss /= 4"),
        ("print(f'{loss:.3f}', loss.item())", "loss /= 4"),
        ("kept.append(loss.detach())", "loss = loss / 4"),
    ],
)
def test_what_is_computed_of_it_is_not(read, divided):
    text = script(read, divided)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)
