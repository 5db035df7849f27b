"""Networks that are put into lists and dicts one by one, and what is asked of them there."""

from __future__ import annotations

import pytest

SCRIPT = """
    import torch

    class Head(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.layer = torch.nn.Linear(size, 3)

        def forward(self, x):
            return self.layer(x)

    class Ensemble:
        def __init__(self, sizes):
            self.main = Head(8)
            {made}

        def train(self, loader):
            for x, y in loader:
                criterion(self.main(x), y).backward()
                self.optimizer.step()

        def evaluate(self, loader):
            for x, y in loader:
                {asked}
"""

LISTS = [
    "self.parts = [None] * 3\n            for i in range(3): self.parts[i] = Head(8)",
    "self.parts = []\n            for size in sizes: self.parts.append(Head(size).cuda())",
    "self.parts = []\n            self.parts.append(Head(8))\n            self.parts.append(Head(9))",
    "parts = []\n            for size in sizes: parts.append(Head(size))\n            self.parts = parts",
]
DICTS = [
    "self.parts = {}\n            for size in sizes: self.parts[size] = Head(size).cuda()",
    "self.parts = dict()\n            for size in sizes: self.parts[size] = Head(size)",
    "self.parts = {}\n            self.parts['a'] = Head(8)\n            self.parts['b'] = Head(9)",
    "self.parts = {'a': Head(8), 'b': Head(9)}",
    "self.parts = {size: Head(size) for size in sizes}",
]


def evaluations(report, made, asked):
    """The lines on which an evaluation with gradients on was found, from that of what is asked on."""
    code = SCRIPT.format(made=made, asked=asked)
    first = code[: code.index(asked)].count("\n")
    return [line - first for name, line in report(code) if name == "OOM201"]


@pytest.mark.parametrize("made", LISTS)
@pytest.mark.parametrize(
    "asked",
    [
        "for part in self.parts: print(part(x).item())",
        "for i, part in enumerate(self.parts): print(part(x).item())",
        "print([part(x).item() for part in self.parts])",
        "print(self.parts[i](x).item())",
        "print(self.parts[0](x).item())",
    ],
)
def test_what_is_asked_of_networks_in_a_list_runs_them(report, made, asked):
    assert evaluations(report, made, asked) == [0]


@pytest.mark.parametrize("made", DICTS)
@pytest.mark.parametrize(
    "asked",
    [
        "for name, part in self.parts.items(): print(part(x).item())",
        "for part in self.parts.values(): print(part(x).item())",
        "for name in self.parts: print(self.parts[name](x).item())",
        "print(self.parts['a'](x).item())",
    ],
)
def test_what_is_asked_of_networks_in_a_dict_runs_them(report, made, asked):
    assert evaluations(report, made, asked) == [0]


@pytest.mark.parametrize("made", [*LISTS, *DICTS])
@pytest.mark.parametrize(
    "asked",
    [
        "for part in self.parts: part",
        "print(len(self.parts), list(self.parts), self.parts.keys())",
        "for name in self.parts: log(name, criterion(self.main_of(x), y).item())",
        "with torch.no_grad(): print([part(x) for part in self.parts], self.parts[0](x))",
    ],
)
def test_a_look_into_a_list_or_dict_of_networks_runs_none(report, made, asked):
    assert evaluations(report, made, asked) == []


@pytest.mark.parametrize(
    "made",
    [
        "self.parts = [torch.nn.L1Loss(), torch.nn.MSELoss()]",
        "self.parts = []\n            for size in sizes: self.parts.append(size)",
        "self.parts = []\n            self.parts.append(Head(8))\n            self.parts.append(print)",
        "self.parts = {}\n            self.parts['a'] = Head(9)\n            self.parts['b'] = print",
        "self.parts = {'a': Head(8), 'b': print}",
    ],
)
def test_what_is_in_a_list_with_something_else_is_not_known(report, made):
    assert evaluations(report, made, "print(self.parts[i](x).item())") == []


def test_keys_of_networks_are_no_networks(report):
    """A function out of sight that is given a network and a loss may train; one that is given a name does not."""
    made = "self.parts = {size: Head(size) for size in sizes}"
    asked = "for name in self.parts: loss = criterion(self.main(x), y); keep(name, loss)"
    assert evaluations(report, made, asked) == [0]


def test_networks_that_an_index_picks_are_switched_to_eval(report):
    code = """
        import torch

        def fit(values, optimizers, loader):
            for x, y in loader:
                values[i].train()
                criterion(values[i](x), y).backward()
                values[i].eval()
                rewards = values[i](x)
    """
    assert ("OOM201", 8) in report(code)
    assert ("OOM201", 8) not in report(code.replace("values[i].eval()", "pass"))
