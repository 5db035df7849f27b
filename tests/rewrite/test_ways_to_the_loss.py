"""Losses with several ways to them: chains of `elif`, guards that end the run, networks that other functions run."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten, run
from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import TOP, apply

BRANCHES = """\
    def run(mode):
        total = correct = 0
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            total += loss.item()
            if mode == "train":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            elif mode == "test":
                correct += (out.argmax(1) == y).sum().item()
        return total, correct / 7


    for mode in ("train", "test", "validate", "train"):
        print(*run(mode))
    """


def test_every_other_branch_of_a_chain_evaluates_the_loss():
    text = assert_trains_the_same(BRANCHES)
    assert text.count("loss, out = memory.evaluate(forward, x, y)\n") == 2
    assert text.count("loss, out = memory.forward_backward(forward, x, y)\n") == 1


def test_a_chain_with_an_else_gets_no_other():
    text = assert_trains_the_same(
        BRANCHES.replace(
            "        return", "            else:\n                correct -= out.max().item()\n        return"
        )
    )
    assert text.count("memory.evaluate(forward, x, y)\n") == 2
    assert text.count("else:\n") == 1


def test_a_chain_that_asks_the_loss_stays():
    _, loops = apply(BRANCHES.replace('elif mode == "test":', "elif loss > 1:"))
    assert loops == [("in-place", "the test in line 18 depends on the loss")]


GUARDED = """\
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if torch.isnan(loss):
            print("diverged")
            raise SystemExit(2)
        for p in model.parameters():
            loss += 0.01 * p.pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
    """


def test_a_guard_between_the_steps_to_a_loss_goes_into_the_function():
    text = assert_trains_the_same(GUARDED)
    assert text.index("def forward(") < text.index("if torch.isnan(loss):") < text.index("return loss\n")


def test_a_guard_still_ends_the_run():
    broken = TOP + textwrap.dedent(GUARDED.replace("model(x), y)", 'model(x), y) * float("nan")'))
    with pytest.raises(SystemExit, match="2"):
        run(rewritten(broken, micro_batches=3).text)


@pytest.mark.parametrize("test", ["loss > 9", "torch.isnan(loss) or loss > 9"])
def test_a_guard_that_weighs_the_loss_sees_that_of_the_whole_batch(test):
    _, loops = apply(GUARDED.replace("torch.isnan(loss)", test))
    assert loops == [("in-place", "line 10 has to stay where it is, between lines that compute the loss")]


ALTERNATIVES = """\
    for number, (x, y) in enumerate(loader):
        out = model(x)
        out = (out, out) if number % 2 else out
        if not isinstance(out, tuple):
            loss = F.cross_entropy(out, y)
            hits = (out.argmax(1) == y).float()
        elif len(out) == 2:
            loss = F.cross_entropy(out[1], y)
            hits = (out[1].argmax(1) == y).float()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), hits.sum().item())
    """


def test_what_is_bound_wherever_the_loss_is_bound_is_returned_with_it():
    assert "loss, hits = memory.forward_backward(forward, x, y)\n" in assert_trains_the_same(ALTERNATIVES)


def test_what_only_one_way_to_the_loss_binds_is_not():
    _, loops = apply(ALTERNATIVES.replace("hits = (out[1]", "others = (out[1]"))
    assert loops == [("in-place", "hits is read later, and only bound on some ways through the slice")]


def test_a_network_that_a_function_of_another_file_runs_is_run_where_it_is_handed_over():
    # `render` stands for an import: the file says nothing of what it does with the network
    text = assert_trains_the_same("""\
        render = eval("lambda x, network: {'out': network(x)}")
        encoder = nn.Linear(4, 4)
        for x, y in loader:
            model.train()
            rendered = render(x, model)
            for name, value in rendered.items():
                print(name, value.sum().item())
            loss = F.cross_entropy(rendered["out"], y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                print(loss.item(), encoder(x).sum().item())
        """)
    assert text.index("def forward(") < text.index("rendered = render(x, model)") < text.index("for name, value")
