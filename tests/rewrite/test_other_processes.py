"""What waits for other processes beside a loss: a metric may be averaged behind the call, a loss stays in place."""

import pytest

from tests.rewrite.small_loops import apply

METRIC = """\
    import torch.distributed as dist
    for x, y in loader:
        out = model(x)
        loss = F.cross_entropy(out, y)
        {before}
        hits = (out.argmax(1) == y).float().mean()
        if dist.is_initialized():
            {reduced}
            hits /= dist.get_world_size()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_metric_is_averaged_over_processes_behind_the_call():
    text, loops = apply(METRIC.format(before="pass", reduced="dist.all_reduce(hits, op=dist.ReduceOp.SUM)"))
    assert loops == [("micro-batched", None)]
    assert text.index("forward_backward(") < text.index("dist.all_reduce(hits")


@pytest.mark.parametrize(
    ("before", "reduced"),
    [
        ("pass", "dist.all_reduce(model.weight)"),
        ("pass", "dist.all_reduce(loss)"),
        ("for p in model.parameters(): dist.all_reduce(p)", "pass"),
    ],
)
def test_what_else_is_averaged_over_processes_keeps_the_loss_in_place(before, reduced):
    _, ((form, _),) = apply(METRIC.format(before=before, reduced=reduced))
    assert form == "in-place"


@pytest.mark.parametrize(
    "made",
    [
        "out = einops.reduce(model(x), 'b c -> b c', 'mean')",
        "out = functools.reduce(torch.add, [model(x), x])",
        "dist = torch.cdist(model(x), centers)\n            out = dist.gather(1, order)",
    ],
)
def test_a_reduction_within_the_process_is_lifted(made):
    text, loops = apply(f"""\
        for x, y in loader:
            {made}
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        """)
    assert loops == [("micro-batched", None)]
    assert f"        {made.splitlines()[0]}\n" in text


def test_a_function_that_gathers_from_other_processes_keeps_the_loss_in_place():
    _, loops = apply("""\
        import torch.distributed as dist


        def gathered(out):
            dist.all_gather_into_tensor(everywhere, out)
            return everywhere


        def gathered_once(out):
            return gathered(out)


        for x, y in loader:
            loss = F.cross_entropy(gathered_once(model(x)), y)
            loss.backward()
            optimizer.step()
        """)
    assert [form for form, _ in loops] == ["in-place"]
    assert "waits for other processes" in loops[0][1]


def test_an_average_over_processes_that_the_loss_depends_on_keeps_it_in_place():
    body = METRIC.format(before="pass", reduced="dist.all_reduce(hits)").replace("hits /=", "size =")
    _, loops = apply(body.replace("        loss.backward()", "        loss = loss * hits\n        loss.backward()"))
    assert loops == [("in-place", "line 14 waits for other processes on the way to the loss")]


@pytest.mark.parametrize(
    ("imported", "made"),
    [
        ("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP", "FSDP(model)"),
        ("import torch.distributed.fsdp as fsdp", "fsdp.FullyShardedDataParallel(model)"),
        ("from torch.distributed.fsdp import fully_shard", "fully_shard(model)"),
    ],
)
def test_what_the_runtime_refuses_to_split_is_left_alone(imported, made):
    _, loops = apply(f"""\
        {imported}
        model = {made}
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    told = "line 9 shards its network by FSDP1, which the runtime refuses: only `fully_shard` is supported"
    assert loops == [("micro-batched", None) if made.startswith("fully") else ("none", told)]
