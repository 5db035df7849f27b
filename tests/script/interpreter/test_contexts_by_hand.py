"""Contexts that a call enters, and that another one leaves."""

from __future__ import annotations

import pytest

VALIDATE = """
    import torch

    def validate(model, loader):
        model.eval()
        guard = {made}
        guard.__enter__()
        for x in loader:
            print(model(x))
        guard.__exit__(None, None, None)
        for x in loader:
            print(model(x))
"""
TRAIN = """
    import torch

    model.cuda()
    guard = torch.autocast("cuda", torch.bfloat16)
    for x, y in loader:
        guard.__enter__()
        loss = criterion(model(x), y)
        {left}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("made", ["torch.no_grad()", "torch.inference_mode()"])
def test_gradients_are_off_between_entering_and_leaving_by_hand(report, made):
    assert report(VALIDATE.format(made=made)) == [("OOM201", 11)]


def test_what_another_context_leaves_is_not_what_was_entered(report):
    entered = VALIDATE.replace("guard.__enter__", "{made}.__enter__").format(made="torch.no_grad()")
    assert report(entered.replace("guard.__exit__", "profiler().__exit__")) == []


def test_what_is_entered_by_hand_may_be_another_context(report):
    assert report(VALIDATE.format(made="torch.enable_grad()")) == [("OOM201", 8), ("OOM201", 11)]
    assert report(VALIDATE.format(made="open('log')")) == [("OOM201", 8), ("OOM201", 11)]


def test_autocast_entered_by_hand_covers_the_forward(report):
    assert report(TRAIN.format(left="guard.__exit__(None, None, None)")) == []


def test_a_backward_before_autocast_is_left_is_inside_of_it(report):
    assert report(TRAIN.format(left="pass")) == [("OOM305", 9)]


def test_a_flag_that_decides_whether_gradients_are_off_leaves_it_open(report):
    code = """
        import torch

        def validate(model, loader, guard, quiet):
            model.eval()
            if quiet:
                off = torch.no_grad()
                off.__enter__()
            for x in loader:
                print(model(x))
            if quiet:
                off.__exit__(None, None, None)
    """
    assert report(code) == []


def test_a_context_of_the_file_that_enters_another_by_hand_is_that_one(report):
    code = """
        import torch

        class Quiet:
            def __init__(self):
                self.off = torch.no_grad()

            def __enter__(self):
                self.off.__enter__()

            def __exit__(self, *raised):
                self.off.__exit__(*raised)

        def validate(model, loader):
            model.eval()
            with Quiet():
                for x in loader:
                    print(model(x))
    """
    assert report(code) == []


@pytest.mark.parametrize(
    ("imported", "switch", "found"),
    [
        ("import torch.autograd.grad_mode as gm", "gm.no_grad()", []),
        ("import torch.autograd.grad_mode as gm", "gm.set_grad_enabled(False)", []),
        ("from torch.autograd.grad_mode import inference_mode", "inference_mode()", []),
        ("from torch.autograd.grad_mode import inference_mode", "inference_mode(False)", [("OOM201", 8)]),
        ("from torch.autograd import grad_mode", "grad_mode.enable_grad()", [("OOM201", 8)]),
    ],
)
def test_the_module_that_defines_the_switches_of_gradients_offers_them_too(report, imported, switch, found):
    code = f"""
    import torch
    {imported}

    def validate(model, loader):
        model.eval()
        with {switch}:
            for x in loader:
                print(model(x))
    """
    assert report(code) == found


DECORATED = """
    import torch

    def without_gradients():
        def decorate(fn):
            {returned}
        return decorate

    @without_gradients()
    def validate(model, loader):
        model.eval()
        for x in loader:
            print(model(x))
"""


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("return torch.no_grad()(fn)", []),
        ("return (torch.inference_mode if hasattr(torch, 'inference_mode') else torch.no_grad)()(fn)", []),
        ("return torch.enable_grad()(fn)", [("OOM201", 12)]),
        ("return torch.jit.ignore(fn)", [("OOM201", 12)]),
    ],
)
def test_a_decorator_may_hand_the_function_to_one_of_torch(report, returned, found):
    assert report(DECORATED.format(returned=returned)) == found


@pytest.mark.parametrize("made", ["torch.no_grad", "torch.inference_mode"])
def test_a_context_that_is_named_and_not_called_is_taken_for_it(report, made):
    code = f"""
        import torch

        def validate(model, loader):
            model.eval()
            with {made}:
                for x in loader:
                    print(model(x))
    """
    assert report(code) == []
