"""Scripts whose backward, step or loop belongs to a framework."""

from __future__ import annotations

import pytest

from oomfix.rules import all_rules


def findings_of(script):
    """The code, line and severity of everything but the notes on bare `zero_grad()`."""
    found = [finding for rule in all_rules() for finding in rule.check(script) if finding.code != "OOM203"]
    return sorted((finding.code, finding.line, finding.severity.value) for finding in found)


@pytest.mark.parametrize(
    ("made", "loss", "backward", "severity"),
    [
        ("engine, opt, loader, _ = deepspeed.initialize(model=net)", "engine(batch)", "engine.backward(loss)", "warning"),
        ("engine = deepspeed.initialize(model=net)[0]", "engine(batch)", "engine.backward(loss)", "warning"),
        ("accelerator = Accelerator()", "compute(batch)", "accelerator.backward(loss)", "warning"),
        ("fabric = Fabric()", "compute(batch)", "fabric.backward(loss)", "warning"),
        ("step = unseen()", "compute(batch)", "(loss + compute(batch)).backward()", "warning"),
        ("net = net.cuda()", "net(batch).mean()", "torch.autograd.backward(loss)", "warning"),
        ("net = net.cuda()", "net(batch).mean()", "torch.autograd.backward(loss, retain_graph=True)", "error"),
        ("net = net.cuda()", "net(batch).mean()", "net(batch).mean().backward()", "error"),
    ],
)
def test_a_backward_through_what_is_out_of_sight_frees_it_too(read, made, loss, backward, severity):
    code = f"""
        import deepspeed, torch
        from accelerate import Accelerator
        from lightning import Fabric
        from project import compute, net, unseen
        {made}
        total = 0
        for batch in loader:
            loss = {loss}
            {backward}
            total += loss
    """
    found = [finding for finding in findings_of(read(code)) if finding[0] == "OOM101"]
    assert found == [("OOM101", 10, severity)]


def test_two_losses_made_out_of_sight_may_share_a_graph(report):
    code = """
        for batch in loader:
            first = compute(batch)
            first.backward(retain_graph=True)
            second = compute_other(batch)
            second.backward()
            optimizer.step()
    """
    assert report(code) == []
