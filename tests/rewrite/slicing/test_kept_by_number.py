"""What is kept for each batch and taken out by its number is a part of the batch."""

import pytest

from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import apply

DISTILLED = """\
kept = [torch.randn(len(y), 2).numpy() for x, y in loader * 3]
for i, (x, y) in enumerate(loader * 3):
    out = model(x)
    # what the teacher gave
    {taken}
    loss = F.cross_entropy(out, y) + F.mse_loss(out, soft)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize(
    "taken",
    [
        "soft = torch.from_numpy(kept[i])",
        "soft = torch.tensor(kept[i])\n    if torch.cuda.is_available():\n        soft = soft.cuda()\n"
        "    soft = soft.detach()",
    ],
)
def test_what_a_teacher_gave_for_each_batch_is_taken_out_ahead_of_the_slice(taken):
    text = assert_trains_the_same(DISTILLED.format(taken=taken))
    assert f"enumerate(loader * 3):\n    # what the teacher gave\n    {taken}\n\n    def forward(x, y, soft):\n" in text


def test_what_is_called_like_a_counter_is_a_part_of_the_batch_too():
    text = assert_trains_the_same(DISTILLED.format(taken="t = torch.from_numpy(kept[i])").replace("soft", "t"))
    assert "    def forward(x, y, t):\n" in text


@pytest.mark.parametrize(
    "taken",
    [
        "soft = torch.from_numpy(kept[i]) * out.detach().abs()",
        "soft = torch.from_numpy(kept[i]) + torch.randn(len(y), 2)",
        "soft = torch.from_numpy(kept[i])\n    soft += out.detach()",
        "soft = torch.from_numpy(kept[len(kept) - 1 - i])",
    ],
)
def test_what_depends_on_the_network_or_does_more_than_move_stays_where_it_is(taken):
    text, _ = apply(DISTILLED.format(taken=taken))
    assert "enumerate(loader * 3):\n    def forward(x, y):\n        out = model(x)\n        # what" in text


def test_what_reads_that_of_the_batch_before_keeps_the_loss_in_place():
    loop = DISTILLED.format(taken="print(soft)\n    soft = torch.from_numpy(kept[i])")
    _, loops = apply(loop.replace("for i", "soft = 0\nfor i"))
    assert loops == [("in-place", "line 14 has to stay where it is, between lines that compute the loss")]


@pytest.mark.parametrize("hook", ["lambda m, x, out: kept.append(out)", "note"])
def test_what_a_hook_keeps_while_the_network_runs_is_taken_out_behind_it(hook):
    loop = DISTILLED[DISTILLED.index("for i") :].format(taken="soft = kept[i].detach()")
    text, _ = apply(f"""\
kept = []
def note(m, x, out):
    kept.append(out)

model.register_forward_hook({hook})
{loop}""")
    assert text.index("out = model(x)") < text.index("soft = kept[i].detach()")
