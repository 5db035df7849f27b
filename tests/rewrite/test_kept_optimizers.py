"""Optimizers that a list or a dict holds step through the manager, by whatever name a loop gives them."""

import pytest

from tests.rewrite.small_loops import apply

LISTED = "[torch.optim.SGD(part.parameters(), 0.1) for part in parts]"
NAMED = "{str(n): torch.optim.SGD(part.parameters(), 0.1) for n, part in enumerate(parts)}"
WRITTEN = '{"one": torch.optim.SGD(model.parameters(), 0.1), "two": torch.optim.SGD(model.parameters(), 0.2)}'


@pytest.mark.parametrize(
    ("made", "header"),
    [
        (f"held = {LISTED}", "for o in held:"),
        (f"held = {LISTED}", "for part, o in zip(parts, held):"),
        (f"held = {NAMED}", "for o in held.values():"),
        (f"held = {NAMED}", "for _, o in held.items():"),
        (f"held = {WRITTEN}", "for o in held.values():"),
        ("opts = []\nopts.append(optimizer)", "for o in opts:"),
        ("opts = {}\nopts['one'] = optimizer", "for o in opts.values():"),
    ],
)
def test_optimizers_out_of_a_list_or_dict_step_through_the_manager(made, header):
    loop = f"for x, y in loader:\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    {header}\n"
    text, forms = apply(f"parts = [model]\n{made}\n{loop}        o.step()\n        o.zero_grad()\n")
    assert forms == [("micro-batched", None)]
    assert text.endswith(f"    {header}\n        memory.step(o)\n")


def test_schedulers_out_of_a_list_are_no_optimizers():
    header = "for s in opt_schedulers:\n        s.step()\n"
    loop = f"for x, y in loader:\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    {header}"
    assert apply(loop)[1] == [("none", "no optimizer step and no update of parameters is in sight")]


@pytest.mark.parametrize("key", ["scheduler", "lr_sched"])
def test_a_scheduler_that_is_kept_beside_its_optimizer_is_none(key):
    body = f"""\
        optim = {{"all": {{"opt": optimizer, "{key}": schedule_of(optimizer)}}}}
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for opt in optim.values():
                opt["opt"].step()
                opt["{key}"].step()
                opt["opt"].zero_grad()
        """
    text, forms = apply(body)
    assert forms == [("micro-batched", None)]
    assert f"""memory.step(opt["opt"])\n        opt["{key}"].step()\n""" in text
