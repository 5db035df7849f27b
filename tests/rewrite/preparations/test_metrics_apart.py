"""Metrics that nothing differentiates leave the blocks around the forward."""

import ast

import pytest

from tests.rewrite.small_loops import apply, loop_of

METRICS = """\
seen = []
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        out = model(x)
        loss = F.cross_entropy(out, y)
        seen.append(loss.item())
    loss.backward()
    optimizer.step()
"""


def test_metrics_at_the_end_of_an_autocast_block_follow_the_call():
    text, forms = apply(METRICS)
    assert forms == [("micro-batched", None)]
    assert text.endswith("""
    def forward(x, y):
        with memory.autocast("cuda"):
            out = model(x)
            loss = F.cross_entropy(out, y)
        return loss

    loss = memory.forward_backward(forward, x, y)
    seen.append(loss.item())
    memory.step(optimizer)
""")


def test_metrics_that_a_part_of_a_batch_would_print_follow_the_call():
    assert loop_of(
        METRICS.replace("seen.append(loss.item())", "print(loss.item())").removeprefix("seen = []\n")
    ).endswith("    print(loss.item())\n    memory.step(optimizer)\n")


def test_an_autocast_block_stays_whole_where_the_loop_is_not_split_for_it():
    text, forms = apply(METRICS.replace("loss.backward()", "loss.backward(retain_graph=True)\n    loss.backward()"))
    assert forms[0][0] == "in-place"
    assert "        seen.append(loss.item())\n    memory" in text


@pytest.mark.parametrize("statement", ["other = seen.append(model(x))", "seen.append(model(x))", "loss += out.sum()"])
def test_what_the_loss_needs_or_runs_the_network_stays_in_its_autocast_block(statement):
    text, _ = apply(METRICS.replace("seen.append(loss.item())", statement))
    assert f"        {statement}\n" in text.replace("memory.forward(model, x)", "model(x)")


@pytest.mark.parametrize(
    "printing",
    [
        "if len(seen) % 10 == 0:\n            print(loss.item())\n        elif seen:\n            print(seen[-1])",
        "with torch.no_grad():\n            hits = (out.argmax(1) == y).sum()\n            print(hits.item())",
        "for row in out.tolist():\n            print(row)",
        "count(out, y)\n        print(1)",
    ],
    ids=["if", "no_grad", "for", "call"],
)
def test_blocks_that_a_part_of_a_batch_would_print_in_follow_the_call(printing):
    text, forms = apply(METRICS.replace("seen.append(loss.item())", printing))
    assert forms == [("micro-batched", None)]
    after = text[text.index("= memory.forward_backward(") :]
    assert printing.replace("\n    ", "\n").splitlines()[0] in after and text.count("print(") == after.count("print(")


@pytest.mark.parametrize(
    "added", ["loss += F.mse_loss(out, out * 2)", "for row in out:\n            loss += row.mean()"]
)
@pytest.mark.parametrize("backward", ["loss.backward()", "whole = loss / 2\n    whole.backward()"])
def test_a_loss_that_is_begun_ahead_of_its_autocast_block_is_added_up_inside_of_it(added, backward):
    script = METRICS.replace("    with torch", "    loss = 0\n    with torch").replace("loss.backward()", backward)
    text, _ = apply(
        script.replace("        loss = F.cross_entropy(out, y)\n        seen.append(loss.item())", f"        {added}")
    )
    (block,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.With))
    assert len(block.body) == 2


def test_a_loss_that_a_function_returns_is_added_up_in_its_autocast_block():
    text, forms = apply("""\
        def loss_of(x, y):
            loss = 0
            with torch.autocast("cuda"):
                out = model(x)
                loss += F.mse_loss(out, out * 2)
            return loss


        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    assert "        loss += F" in text


@pytest.mark.parametrize("other", ["nullcontext()", "torch.autocast('cpu')", "profiler()"])
def test_metrics_leave_a_block_of_a_name_that_is_nothing_but_autocast(other):
    held = f"context = torch.autocast('cuda') if torch.cuda.is_available() else {other}\n"
    text, forms = apply(held + METRICS.replace('torch.autocast("cuda"):', "context:"))
    assert forms[0][0] == ("in-place" if other == "profiler()" else "micro-batched")
    assert ("    loss = memory.forward_backward(forward, x, y)\n    seen.append" in text) == (other != "profiler()")


@pytest.mark.parametrize("added", ["terms.append((out @ out.T).mean())", "terms[0] += (out @ out.T).mean()"])
def test_a_term_that_is_put_into_a_list_of_the_loss_is_computed_under_autocast(added):
    script = METRICS.replace("    with torch", "    terms = [0]\n    with torch")
    script = script.replace("seen.append", f"{added}\n        seen.append")
    text, forms = apply(script.replace("loss.backward", "(loss + sum(terms)).backward"))
    assert forms == [("micro-batched", None)]
    assert f"            {added}\n        return loss + sum(terms)" in text
    assert text.index("memory.forward_backward(") < text.index("seen.append(")


def test_what_the_name_of_a_loss_is_bound_to_behind_its_backward_is_no_part_of_the_loss():
    script = METRICS.replace("seen = []", "meter = Meter()").replace("seen.append", "meter.update")
    text, forms = apply(f"from meters import Meter\n{script}    loss = meter.average\n")
    assert forms == [("micro-batched", None)]
    assert text.index("memory.forward_backward(") < text.index("meter.update(")


SWITCHED = """\
def run(loader, is_train):
    losses = []
    for x, y in loader:
        with torch.set_grad_enabled(is_train):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
        if is_train:
            model.zero_grad()
            loss.backward()
            optimizer.step()
    return losses
"""


def test_metrics_leave_a_block_whose_gradients_a_flag_switches():
    text, forms = apply(SWITCHED)
    assert forms == [("micro-batched", None)]
    assert text.endswith("""
        else:
            loss = memory.evaluate(forward, x, y)
        losses.append(loss.item())
    return losses
""")


def test_what_looks_at_the_network_stays_in_the_block():
    text, forms = apply(SWITCHED.replace("losses.append(loss.item())", "losses.append(model.weight.norm())"))
    assert forms[0][0] == "in-place"
    assert "            losses.append(model.weight.norm())\n" in text


def test_metrics_leave_blocks_in_blocks_in_their_order():
    text, forms = apply("""\
        seen = []
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autograd.profiler.record_function("forward"):
                with torch.autocast("cuda"):
                    loss = F.cross_entropy(model(x), y)
                    seen.append(loss.item())
                seen.append(len(x))
            seen.append(0)
            loss.backward()
            optimizer.step()
        """)
    assert forms == [("micro-batched", None)]
    after = text[text.index("memory.forward_backward(") :].splitlines()[1:4]
    assert [line.strip() for line in after] == ["seen.append(loss.item())", "seen.append(len(x))", "seen.append(0)"]


def test_metrics_stay_in_a_block_that_is_not_known():
    _, forms = apply(SWITCHED.replace("torch.set_grad_enabled(is_train)", "locked(is_train)"))
    assert forms[0][0] == "in-place"


def test_what_follows_the_backward_in_a_measured_block_is_measured_still():
    text, forms = apply("""\
        seen = []
        for x, y in loader:
            with torch.autograd.profiler.record_function("iteration"):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
        """)
    assert forms == [("micro-batched", None)]
    assert text.endswith("        memory.step(optimizer)\n        seen.append(loss.item())\n")


def test_metrics_leave_a_block_around_a_function_that_runs_the_network():
    function = "def run(network, x):\n    return network(x)\n\n\n"
    text, forms = apply(function + METRICS.replace("out = model(x)", "out = run(model, x)"))
    assert forms == [("micro-batched", None)]
    assert "    seen.append(loss.item())\n    memory.step(optimizer)\n" in text
    _, forms = apply(function + METRICS.replace("seen.append(loss.item())", "seen.append(run(model, x))"))
    assert forms[0][0] == "in-place"
