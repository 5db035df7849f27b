"""Techniques used alone name a wrong argument, its value and what was expected, before they do anything."""

import pytest
import torch
from torch import nn

from oomfix import runtime

NET = nn.Linear(6, 4)
ADAMW = torch.optim.AdamW(NET.parameters())


def stage_that_keeps(keep):
    with runtime.stage("head", keep=keep):
        pass


REFUSED = {
    "a model for an optimizer": (
        lambda: runtime.use_lean_step(NET),
        "optimizer: got Linear, expected a torch optimizer",
    ),
    "parameters for a model": (
        lambda: runtime.ProgressiveUnfreezing(list(NET.parameters()), {}),
        "model: got list, expected a torch.nn.Module",
    ),
    "names without epochs": (
        lambda: runtime.ProgressiveUnfreezing(NET, ["weight"]),
        "phases: got list, expected a mapping of epochs to lists of names",
    ),
    "an epoch as text": (
        lambda: runtime.ProgressiveUnfreezing(NET, {1: ["weight"]}).at("1"),
        "epoch: got '1', expected a whole number",
    ),
    "a size for a step": (
        lambda: runtime.find_batch_size(64),
        "run: got 64, expected a function that makes one training step with a batch of a given size",
    ),
    "a model that is not in a list": (
        lambda: runtime.find_batch_size(lambda size: None, restore=NET),
        "restore: got Linear, expected a list of models and optimizers",
    ),
    "what has no state": (
        lambda: runtime.find_batch_size(lambda size: None, restore=[NET, 3]),
        "restore: got 3 in it, expected models and optimizers, with state_dict and load_state_dict",
    ),
    "a size as text": (
        lambda: runtime.configure_allocator(max_split_size_mb="128"),
        "max_split_size_mb: got '128', expected more than 20",
    ),
    "a threshold as text": (
        lambda: runtime.configure_allocator(garbage_collection_threshold="0.8"),
        "garbage_collection_threshold: got '0.8', expected a share",
    ),
    "a share of the card as text": (
        lambda: runtime.memory_fraction("half"),
        "share: got 'half', expected a share above 0",
    ),
    "a share for the janitor as text": (
        lambda: runtime.CacheJanitor("third"),
        "unused_share: got 'third', expected a share between 0 and 1",
    ),
    "an optimizer that is not in a list": (
        lambda: stage_that_keeps(ADAMW),
        "keep: got AdamW, expected a list of optimizers",
    ),
    "the message of an error": (
        lambda: runtime.oom_report("CUDA out of memory."),
        "error: got 'CUDA out of memory.', expected the exception, or None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: pytest.fail("it was accepted"))
    call, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert said in str(error.value)
