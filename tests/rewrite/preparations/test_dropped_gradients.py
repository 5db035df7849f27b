"""A discriminator's loss that keeps the graph of the samples for the generator's, which drops what it left there."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

GAN = """\
import torch
from torch import nn

torch.manual_seed(0)
gen = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4))
disc = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
criterion = nn.BCEWithLogitsLoss()
opt_gen = torch.optim.Adam(gen.parameters(), lr=0.1)
opt_disc = torch.optim.SGD({disc}.parameters(), lr=0.1, momentum=0.9)
batches = [torch.randn(6, 4) for _ in range(3)]

for real in batches:
    fake = gen(torch.randn(len(real), 2))
    disc_real = disc(real)
    disc_fake = disc({seen})
    loss_d = criterion(disc_real, torch.ones_like(disc_real)) + criterion(disc_fake, torch.zeros_like(disc_fake))
    {ahead}
    opt_disc.zero_grad()
    loss_d.backward(retain_graph=True)
    opt_disc.step()
    {between}
    output = disc(fake)
    loss_g = criterion(output, torch.ones_like(output))
    {reset}
    loss_g.backward()
    opt_gen.step()
    print(loss_d.item(), loss_g.item())
"""


def gan(seen="fake", ahead="pass", between="pass", reset="gen.zero_grad()", disc="disc"):
    return GAN.format(seen=seen, ahead=ahead, between=between, reset=reset, disc=disc)


@pytest.mark.parametrize("reset", ["gen.zero_grad()", "opt_gen.zero_grad()"])
@pytest.mark.parametrize("between", ["pass", "torch.nn.utils.clip_grad_norm_(disc.parameters(), 1.0)"])
def test_gradients_that_are_dropped_need_not_be_computed(reset, between):
    text = gan(between=between, reset=reset)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.line, loop.rewrite, loop.reason) for loop in after.loops] == [(12, "micro-batched", None)]
    said = "the loss of line 19 sees samples without their graph: line 24 drops gradients of that"
    assert said in after.loops[0].notes
    assert "disc(fake.detach())" in after.text and "retain_graph" not in after.text
    assert parts_as_whole(text, after.text, after.text) == 6


def test_whole_batches_give_the_same_bits():
    text = gan()
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))


def test_samples_joined_with_others_lose_their_graph_too():
    text = gan(seen="torch.cat([real, fake])")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "torch.cat([real, fake.detach()])" in after.text


@pytest.mark.parametrize(
    ("made", "held", "judged"),
    [
        ("fake = gen(torch.randn(len(real), 2))", "pairs = torch.cat([real, fake])", "pairs"),
        ("fake = gen(torch.randn(len(real), 2))", "pairs = torch.cat((fake, fake.new_zeros(6, 4)), 0)", "pairs"),
        ("fake = gen(torch.randn(len(real), 2))", "pairs = fake", "pairs"),
        ("fake, more = pair(torch.randn(len(real), 2))", "pass", "fake"),
        ("fake, more = pair(torch.randn(len(real), 2))", "pairs = torch.cat([real, fake]); wide = pairs", "wide"),
    ],
)
def test_samples_lose_their_graph_under_other_names_too(made, held, judged):
    text = gan(seen=judged).replace(
        "fake = gen(torch.randn(len(real), 2))", f"{made}\n    {held}".replace("; ", "\n    ")
    )
    text = text.replace("output = disc(fake)", f"output = disc({judged})").replace(
        "loss_g = criterion(output, torch.ones_like(output))",
        "loss_g = criterion(output, torch.ones_like(output)) + (fake - real).abs().mean()",
    )
    text = text.replace(
        "criterion = nn",
        "class Pair(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.net = gen\n"
        "    def forward(self, x):\n        return self.net(x), x\npair = Pair()\ncriterion = nn",
    )
    if "pair(" in made:
        text = text.replace("gen.zero_grad()", "opt_gen.zero_grad()").replace("gen.parameters()", "pair.parameters()")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"], after.loops
    assert f"disc({judged}.detach())" in after.text and "retain_graph" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    split = rewritten(text, micro_batches=3, precision="fp32")
    assert parts_as_whole(text, split.text, split.text) == 6


@pytest.mark.parametrize(
    "held",
    [
        "pairs = torch.cat([real, fake * 2])",
        "pairs = torch.cat([real, fake])\n    pairs = pairs + 1",
        "pairs = other = torch.cat([real, fake])",
        "pairs = torch.cat([real, fake])\n    kept.append(pairs)",
    ],
)
def test_samples_that_go_on_in_another_way_keep_their_graph(held):
    text = gan(seen="pairs").replace("disc_real = disc(real)", f"{held}\n    disc_real = disc(real)")
    after = rewritten(text.replace("output = disc(fake)", "output = disc(pairs)"))
    assert "disc(pairs)" in after.text and "retain_graph=True" in after.text


KEEPING = """
kept = []

class Box:
    def put(self, x):
        self.got = x
        return x.mean()

    def note(self, x):
        kept.append(x)
        return x.mean()

box = Box()
criterion = nn"""


@pytest.mark.parametrize(
    ("keep", "judged"),
    [
        ("kept.append(fake)", "kept[-1]"),
        ("box.put(fake)", "box.got"),
        ("mean = box.put(fake)", "box.got"),
        ("mean = box.note(x=fake)", "kept[-1]"),
    ],
)
def test_samples_that_something_keeps_for_the_other_loss_keep_their_graph(keep, judged):
    text = gan().replace("output = disc(fake)", f"output = disc({judged})")
    text = text.replace("    disc_real = disc(real)", f"    {keep}\n    disc_real = disc(real)")
    text = text.replace("\ncriterion = nn", KEEPING)
    after = rewritten(text)
    assert ".detach()" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


ENCODED = {
    "opt_disc = torch": "enc = nn.Linear(4, 2)\nopt_enc = torch.optim.SGD(enc.parameters(), lr=0.1)\nopt_disc = torch",
    "fake = gen(torch.randn(len(real), 2))": "code = enc(real)\n    fake = gen(code)",
    "opt_gen.step()": "opt_gen.step()\n    opt_enc.step()",
}


@pytest.mark.parametrize(
    ("seen", "cut"),
    [
        ("fake", "disc(fake.detach())"),
        ("torch.cat([real, fake * code.mean()])", None),
        ("torch.cat([fake, torch.cat([code, code], 1)])", None),
    ],
)
def test_a_network_whose_samples_lose_their_graph_keeps_what_it_is_given(seen, cut):
    text = gan(seen=seen, reset="gen.zero_grad(); opt_enc.zero_grad()")
    for line, more in ENCODED.items():
        text = text.replace(line, more)
    after = rewritten(text)
    assert "gen(code)" in after.text
    assert "detach" not in after.text if cut is None else cut in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    split = rewritten(text, micro_batches=3, precision="fp32")
    assert parts_as_whole(text, split.text, split.text) == (0 if cut is None else 6)


@pytest.mark.parametrize(
    "changed",
    [
        {"reset": "pass"},
        {"reset": "disc.zero_grad()"},
        {"reset": "opt_gen.zero_grad(set_to_none=False)"},
        {"reset": "pass", "ahead": "gen.zero_grad()"},
        {"between": "print(gen[0].weight.grad)"},
        {"between": "torch.nn.utils.clip_grad_norm_(gen.parameters(), 1.0)"},
        {"between": "log_gradients(gen)"},
        {"between": "opt_gen.step()"},
        {"ahead": "loss_d = loss_d + fake.pow(2).mean()"},
        {"ahead": "loss_d = loss_d + torch.autograd.grad(disc_fake.sum(), fake, create_graph=True)[0].mean()"},
        {"ahead": "loss_d = loss_d + slope(disc_fake, fake)"},
        {"ahead": "fake.retain_grad()"},
        {"disc": "nn.ModuleList([disc, gen])"},
    ],
)
def test_gradients_that_something_may_take_are_computed(changed):
    after = rewritten(gan(**changed))
    assert ".detach()" not in after.text and [loop.rewrite for loop in after.loops] != ["micro-batched"]


def test_a_loss_that_goes_on_through_the_other_network_keeps_its_graph():
    text = gan().replace("    output = disc(fake)\n", "    output = disc_fake\n")
    after = rewritten(text)
    assert ".detach()" not in after.text and [loop.rewrite for loop in after.loops] == ["in-place"]
