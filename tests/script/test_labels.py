"""Constants that name the cases of a script, against settings that somebody will change."""

from __future__ import annotations

import pytest

EPOCHS = """
    import torch

    {constants}

    def run_epoch(loader, model, optimizer, mode{default}):
        for x, y in loader:
            loss = criterion(model(x.cuda()), y)
            if {test}:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    {training}
    {validation}
"""
CASES = 'TRAIN = "train"; EVAL = "eval"'
BOTH = [("OOM201", 7), ("OOM202", 7)]


def epochs(
    constants: str = 'TRAIN, EVAL = ("train", "eval")',
    default: str = "",
    test: str = "mode == TRAIN",
    training: str = "run_epoch(loader, model, optimizer, TRAIN)",
    validation: str = "run_epoch(others, model, None, EVAL)",
) -> str:
    return EPOCHS.format(constants=constants, default=default, test=test, training=training, validation=validation)


@pytest.mark.parametrize(
    "parts",
    [
        {"constants": CASES},
        {"constants": 'TRAIN: str = "train"; EVAL: str = "eval"'},
        {"constants": CASES, "validation": "run_epoch(others, model, None, mode=EVAL)"},
        {"constants": CASES, "default": ", /"},
        {"constants": 'TRAIN = "train"; LOG = "log"; EVAL = "eval"', "test": "mode in (TRAIN, LOG)"},
        {"constants": 'TRAIN = "train"; LOG = "log"; EVAL = "eval"', "test": "mode == TRAIN or mode == LOG"},
        {"constants": CASES, "test": "mode != EVAL"},
        {
            "constants": CASES,
            "default": "=TRAIN",
            "training": "run_epoch(loader, model, optimizer)",
        },
        {
            "constants": CASES,
            "default": "=EVAL",
            "test": "mode != EVAL",
            "validation": "run_epoch(others, model, None)",
        },
    ],
    ids=str,
)
def test_a_pass_that_a_named_case_keeps_from_training_evaluates(report, parts):
    assert report(epochs(**parts)) == BOTH


@pytest.mark.parametrize(
    "parts",
    [
        # both calls train
        {"constants": 'TRAIN = "train"', "validation": "run_epoch(others, model, optimizer, TRAIN)"},
        # a setting: whoever runs the script decides
        {"constants": f"{CASES}; mode = TRAIN", "validation": "run_epoch(others, model, None, mode)"},
        {"constants": f'{CASES}; MODE = "eval"', "validation": "run_epoch(others, model, None, MODE)"},
        {
            "constants": f"{CASES}; MODE = EVAL",
            "test": "mode != EVAL",
            "validation": "run_epoch(others, model, None, MODE)",
        },
        {"constants": 'MODE = "eval"', "test": 'mode == "train"', "validation": "run_epoch(others, model, None, MODE)"},
    ],
    ids=str,
)
def test_a_case_that_nobody_has_named_is_not_told_apart(report, parts):
    assert report(epochs(**parts)) == [("OOM202", 7)]


def test_gradients_that_are_off_for_the_other_case_are_off(report):
    code = epochs(CASES, validation="with torch.no_grad(): run_epoch(others, model, None, EVAL)")
    assert report(code) == [("OOM202", 7)]
