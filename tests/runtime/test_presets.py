"""Presets: budgets that real cards have, overrides that are checked, the environment's last word."""

import dataclasses
import subprocess
import sys

import pytest

from oomfix import presets

CARD_PRESETS = ["8gb", "12gb", "16gb", "24gb", "40gb", "48gb", "80gb"]


def test_the_table_is_the_one_in_the_design():
    assert list(presets.PRESETS) == [*CARD_PRESETS, "auto", "off"]


@pytest.mark.parametrize("name", CARD_PRESETS)
def test_the_budget_leaves_room_for_the_context_and_a_margin(name):
    preset = presets.get(name)
    assert preset.card is not None and preset.budget_gib is not None
    assert preset.card.capacity_gib < float(name.removesuffix("gb"))
    left = preset.card.capacity_gib - preset.budget_gib
    assert 0.05 * preset.card.capacity_gib + 600 / 1024 <= left <= 0.05 * preset.card.capacity_gib + 0.7


def test_a_16gb_preset_fits_the_t4_that_ran_out_at_14_74_gib():
    assert presets.get("16gb").budget_gib == 13.4
    assert presets.get("16gb").card == presets.Card("T4", 14.74, (7, 5))


def test_first_splits_are_4_2_1_at_8_16_24_gb():
    assert [presets.get(name).first_micro_batches for name in ("8gb", "16gb", "24gb")] == [4, 2, 1]


def test_only_the_smallest_card_checkpoints_from_the_start_and_empties_the_cache_by_count():
    assert {name: presets.get(name).checkpointing for name in CARD_PRESETS} == {
        name: "on" if name == "8gb" else "if-needed" for name in CARD_PRESETS
    }
    assert [presets.get(name).empty_cache_every for name in CARD_PRESETS] == [10] + [None] * 6


def test_off_is_the_script_as_it_was():
    off = presets.get("off")
    assert (off.micro_batches, off.split, off.precision, off.checkpointing) == (1, "never", "fp32", "off")
    assert off.budget_gib is off.clip_norm is off.empty_cache_every is None
    assert off.lean_step == "off"
    assert not off.expandable_segments and not off.pin_memory and off.memory_fraction == 1.0


def test_auto_reads_the_card():
    assert presets.get("auto").budget_gib is None
    assert presets.get("auto").card is None


def test_overrides_change_a_copy():
    changed = presets.get("16gb", micro_batches=4, clip_norm=1)
    assert (changed.micro_batches, changed.clip_norm) == (4, 1)
    assert presets.get("16gb").micro_batches == "auto"
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.micro_batches = 8


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("16GB", ValueError, "preset: got '16GB', expected one of '8gb', .*; did you mean '16gb'"),
        ("16 gb", ValueError, "did you mean '16gb'"),
        ("zzz", ValueError, "preset: got 'zzz', expected one of .*'off'$"),
        (16, TypeError, "preset: got 16, expected one of"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, error, message):
    with pytest.raises(error, match=message):
        presets.get(name)


@pytest.mark.parametrize(
    ("field", "value", "error", "expected"),
    [
        ("precison", "bf16", TypeError, "preset override: got 'precison', .*did you mean 'precision'"),
        ("name", "mine", TypeError, "preset override: got 'name'"),
        ("precision", "fp61", ValueError, "precision: got 'fp61', expected one of .*did you mean 'fp16'"),
        ("split", True, ValueError, "split: got True, expected one of 'verified', 'always', 'never'"),
        ("checkpointing", "yes", ValueError, "checkpointing: got 'yes', expected one of 'off'"),
        ("micro_batches", 0, ValueError, 'micro_batches: got 0, expected a whole number .* "auto"'),
        ("micro_batches", 2.0, TypeError, "micro_batches: got 2.0"),
        ("micro_batches", True, TypeError, "micro_batches: got True"),
        ("first_micro_batches", "auto", TypeError, "first_micro_batches: got 'auto'"),
        ("prefetch_factor", 0, ValueError, "prefetch_factor: got 0"),
        ("empty_cache_every", 0, ValueError, "empty_cache_every: got 0, expected .* or None"),
        ("budget_gib", -1.0, ValueError, "budget_gib: got -1.0, expected a finite number of GiB above 0"),
        ("budget_gib", "6", TypeError, "budget_gib: got '6'"),
        ("clip_norm", 0.0, ValueError, "clip_norm: got 0.0"),
        ("clip_norm", float("nan"), ValueError, "clip_norm: got nan"),
        ("memory_fraction", 1.5, ValueError, "memory_fraction: got 1.5, expected a share above 0, at most 1"),
        ("pin_memory", 1, TypeError, "pin_memory: got 1, expected True or False"),
        ("lean_step", True, ValueError, "lean_step: got True, expected one of 'off', 'if-needed', 'on'"),
        ("card", "t4", TypeError, "card: got 't4', expected a Card or None"),
    ],
)
def test_a_wrong_override_names_the_field_the_value_and_what_was_expected(field, value, error, expected):
    with pytest.raises(error, match=expected):
        presets.get("16gb", **{field: value})


def test_the_environment_changes_the_card_but_not_what_the_script_decided():
    card = presets.Card("V100", 15.77, (7, 0))
    written = presets.get("16gb", precision="fp32", clip_norm=1.0, budget_gib=14.0, card=card)
    run = presets.from_environment(written, {"OOMFIX_PRESET": "8gb"})
    assert run == presets.get("8gb", precision="fp32", clip_norm=1.0)


def test_off_in_the_environment_drops_every_override():
    written = presets.get("16gb", precision="bf16", micro_batches=4, clip_norm=1.0)
    assert presets.from_environment(written, {"OOMFIX_PRESET": "off"}) == presets.get("off")


@pytest.mark.parametrize("environ", [{}, {"OOMFIX_PRESET": ""}, {"OOMFIX_PRESET": " "}])
def test_an_empty_environment_changes_nothing(environ):
    written = presets.get("24gb", micro_batches=3)
    assert presets.from_environment(written, environ) is written


def test_a_preset_under_its_own_name_keeps_its_policies_on_another_card():
    mine = dataclasses.replace(presets.get("16gb", precision="fp32"), name="mine")
    run = presets.from_environment(mine, {"OOMFIX_PRESET": "80gb"})
    assert (run.name, run.budget_gib, run.precision) == ("80gb", presets.get("80gb").budget_gib, "fp32")


def test_a_wrong_name_in_the_environment_says_which_variable():
    with pytest.raises(ValueError, match=r"OOMFIX_PRESET: got '16g', .*did you mean '16gb'"):
        presets.from_environment(presets.get("auto"), {"OOMFIX_PRESET": "16g"})


def test_the_table_has_a_header_and_a_row_per_preset_all_text():
    header, *rows = presets.table()
    assert [row[0] for row in rows] == list(presets.PRESETS)
    assert {len(row) for row in rows} == {len(header)}
    assert all(isinstance(cell, str) for row in rows for cell in row)
    assert rows[2][:4] == ("16gb", "T4", "14.74 GiB", "13.4 GiB")


def test_importing_presets_imports_neither_torch_nor_libcst():
    code = "import sys, oomfix.presets; print([name for name in ('torch', 'libcst') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
