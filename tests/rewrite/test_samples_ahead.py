"""A look at what the network does, ahead of its loss: `if step % 100 == 0: model.eval(); print(...); model.train()`."""

import pytest

from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import apply

LOOP = """\
    step = 0
    for x, y in loader * 2:
        step += 1
        x = x * 2
        if step % 3 == 0:
            model.eval()
            sample = model({sample})
            model.train()
            print(sample.sum().item())
        loss = F.cross_entropy(model(x), y){more}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
    """


@pytest.mark.parametrize("sample", ["torch.ones(1, 4)", "x[:1]"])
def test_what_nothing_goes_back_through_stays_ahead_of_the_loss(sample):
    text = assert_trains_the_same(LOOP.format(sample=sample, more=""))
    assert text.index("model.train()") < text.index("def forward(x, y):")


def test_a_sample_that_the_loss_goes_back_through_stays_in_place():
    _, loops = apply(LOOP.format(sample="x[:1]", more=" + (sample.sum() if step % 3 == 0 else 0)"))
    assert [form for form, _ in loops] == ["in-place"]
