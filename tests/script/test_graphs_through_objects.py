"""Graphs that reach a backward through attributes, entries and arguments given beforehand."""

from __future__ import annotations

import pytest

STEP = """
    import torch, functools
    import torch.nn.functional as F
    from collections import defaultdict
    from types import SimpleNamespace
    from project import Net, Other, Objective, Meter, TotalLoss, total_loss

    def compute(out):
        return F.cross_entropy(out["guess"], out["y"])

    def compare(out):
        return F.cross_entropy(out.guess, out.y)

    model, other = Net().cuda(), Other().cuda()
    objective, meter, criterion = Objective(), Meter(), TotalLoss(9)
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
    for batch in loader:
        x, y = batch["x"].cuda(), batch["y"].cuda()
        optimizer.zero_grad()
        {statements}
        loss.backward()
        optimizer.step()
"""


def forwards(report, *statements):
    """Whether the forward is found to run without autocast, and nothing else is found."""
    found = report(STEP.format(statements="\n        ".join(statements)))
    assert {code for code, _ in found} <= {"OOM202"}
    return bool(found)


@pytest.mark.parametrize(
    "statements",
    [
        # attributes of what is out of sight
        ["batch.guess = model(x)", "loss = compare(batch)"],
        ["batch.guess = model(x)", "loss = total_loss(batch)"],
        ["out = SimpleNamespace()", "out.guess = model(x)", "loss = compare(out)"],
        ["objective.guess = model(x)", "loss = objective.loss()"],
        ["criterion.guess = model(x)", "criterion.y = y", "loss = criterion.get_loss()"],
        # attributes that methods out of sight fill
        ["objective.add(model(x), y)", "loss = objective.total_loss"],
        ["objective.add(value=model(x))", "loss = F.mse_loss(objective.log_probs, y)"],
        ["objective.add(model(x))", "loss = (objective.logprob * y).mean()"],
        ["content_loss(model(x))", "loss = content_loss.loss"],
        ["content_loss(model(x))", "loss = 3 * content_loss.loss + penalty"],
        # entries
        ["batch.update(model(x))", "loss = compute(batch)"],
        ["out = {}", "out.setdefault('a', []).append(model(x))", "loss = F.cross_entropy(torch.cat(out['a']), y)"],
        ["out = defaultdict(dict)", "for k in 'ab': out[k]['c'] = model(x)", "loss = out['a']['c'].mean()"],
        # arguments given beforehand
        ["compare = functools.partial(F.mse_loss, model(x), y)", "loss = compare()"],
        ["compare = functools.partial(F.mse_loss, model(x))", "loss = compare(y)"],
    ],
)
def test_the_graph_of_an_output_is_followed(report, statements):
    assert forwards(report, *statements)


@pytest.mark.parametrize(
    "statements",
    [
        ["meter.guess = model(x).detach()", "loss = meter.loss()"],
        ["criterion.guess = model(x).detach()", "loss = criterion.get_loss()"],
        ["meter.update({'guess': model(x).detach()})", "loss = total_loss(meter)"],
        ["batch.guess = y", "loss = total_loss(batch)"],
        ["objective.add(model(x).detach())", "loss = (objective.log_probs * y).mean()"],
        ["objective.add(model(x))", "loss = (objective.targets * y).mean()"],
        ["content_loss(model(x).detach())", "loss = content_loss.loss"],
        ["content_loss(model(x))", "loss = content_loss.target"],
        ["compare = functools.partial(F.mse_loss, y, reduction='sum')", "loss = compare(x)"],
    ],
)
def test_what_has_no_graph_brings_none_along(report, statements):
    assert not forwards(report, *statements)


@pytest.mark.parametrize(
    "fill", ["outputs['mask'] = other(outputs['features'])", "outputs.update(other(outputs['features']))"]
)
def test_what_is_added_to_the_outputs_of_a_network_is_theirs(report, fill):
    code = f"""
        import torch
        from project import Net, Other

        model, other = Net().cuda(), Other().cuda()
        optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                outputs = model(x.cuda())
            {fill}
            loss = (outputs["mask"] - y.cuda()).abs().mean()
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 10)]


def test_what_a_meter_of_losses_takes_is_not_followed(report):
    code = """
        import torch

        for x, y in loader:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x.cuda()).mean()
            parts = {"loss": loss.item()}
            meter.update(parts)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []
