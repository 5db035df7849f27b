"""What the manager does right and the script did wrong is named as a fix, once, and only where it is gone."""

import textwrap

import pytest

from oomfix.rewrite.apply import apply_to
from oomfix.rewrite.options import Options
from oomfix.rewrite.surroundings.local import findings_of
from oomfix.rules import all_rules
from oomfix.source import Source

CLIPS_SCALED = """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
UNSCALED_FP16 = """
import torch
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""


def source_of(text: str) -> Source:
    return Source.from_bytes("train.py", textwrap.dedent(text).encode())


@pytest.mark.parametrize(("text", "code", "line"), [(CLIPS_SCALED, "OOM303", 9), (UNSCALED_FP16, "OOM304", 6)])
def test_what_the_manager_mends_is_named_with_its_line_and_no_longer_found(text, code, line):
    source = source_of(text)
    applied = apply_to(source, all_rules(), Options("16gb"))
    assert [(fix.code, fix.line) for fix in applied.fixed] == [(code, line)]
    assert code not in {finding.code for finding in findings_of(source_of(applied.text), all_rules())}


def test_what_is_not_to_be_fixed_is_not_named():
    applied = apply_to(source_of(CLIPS_SCALED), all_rules(), Options("16gb", ignore=("OOM303",)))
    assert applied.fixed == ()


def test_a_clip_that_still_sees_scaled_gradients_is_not_called_mended():
    other = CLIPS_SCALED.replace("import torch", "").replace(
        "scaler.step(optimizer)", "scaler.step(optimizer, closure)"
    )
    source = source_of(CLIPS_SCALED + "def train(scaler):\n" + textwrap.indent(other, "    "))
    applied = apply_to(source, all_rules(), Options("16gb"))
    left = [f for f in findings_of(source_of(applied.text), all_rules()) if f.code == "OOM303"]
    assert len(left) == 2
    assert "OOM303" not in {fix.code for fix in applied.fixed}


def test_a_scaler_that_nothing_reads_any_more_goes_where_the_module_itself_trains():
    applied = apply_to(source_of(CLIPS_SCALED), all_rules(), Options("16gb"))
    assert "scaler" not in applied.text


def test_a_scaler_of_a_module_that_others_may_import_stays():
    head, _, loop = CLIPS_SCALED.partition("for x")
    text = head + "def train(loader):\n" + textwrap.indent("for x" + loop, "    ")
    applied = apply_to(source_of(text), all_rules(), Options("16gb"))
    assert "scaler = memory.scaler" in applied.text


def test_float16_that_a_decorator_keeps_is_not_called_mended():
    text = UNSCALED_FP16.replace('    with torch.autocast("cuda", dtype=torch.float16):\n        loss =', "    loss =")
    text = text.replace("criterion(model(x), y)", "loss_of(x, y)").replace(
        "for x, y", "@torch.autocast('cuda')\ndef loss_of(x, y):\n    return criterion(model(x), y)\nfor x, y"
    )
    applied = apply_to(source_of(text), all_rules(), Options("16gb"))
    assert "memory.backward" in applied.text or "memory.forward_backward" in applied.text
    assert "OOM304" not in {fix.code for fix in applied.fixed}
    assert "OOM304" in {finding.code for finding in findings_of(source_of(applied.text), all_rules())}


LEAKS = """
import torch
from torch import nn
model = nn.Linear(4, 2).cuda()
total, old = 0, torch.load("old.pt")
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    optimizer.step()
    total += loss
"""


def test_what_a_split_loop_no_longer_does_is_named_once():
    applied = apply_to(source_of(LEAKS), all_rules(), Options("16gb"))
    assert [loop.rewrite for loop in applied.loops] == ["micro-batched"]
    # which precision it trains in, the preset decides when it runs
    assert sorted((fix.code, fix.line) for fix in applied.fixed) == [("OOM101", 11), ("OOM103", 9)]
    by_hand = LEAKS.replace("    loss.backward", "    if loss == 9: break\n    loss.backward")
    in_place = apply_to(source_of(by_hand), all_rules(), Options("16gb"))
    assert [loop.rewrite for loop in in_place.loops] == ["in-place"]
    # lines are those of the file before, whatever stands above them now
    assert sorted((fix.code, fix.line) for fix in in_place.fixed) == [("OOM101", 12), ("OOM103", 10)]


def test_what_is_left_to_be_done_by_hand_is_named_with_its_line_and_the_reason():
    applied = apply_to(source_of(LEAKS), all_rules(), Options("16gb"))
    assert [(left.line, left.code) for left in applied.unfixed] == [(5, "OOM205")]
    reason = "what it loads may go elsewhere than into `load_state_dict`"
    assert applied.unfixed[0].message.endswith(f"(no automatic fix: {reason})")
    ignoring = apply_to(source_of(LEAKS), all_rules(), Options("16gb", ignore=("OOM205",)))
    assert ignoring.unfixed == ()


def test_what_stays_on_a_line_that_a_local_fix_writes_anew_is_left():
    text = LEAKS.replace('torch.load("old.pt")', 'torch.load("old.pt"), torch.cuda.amp.GradScaler()')
    text = text.replace("total, old", "total, old, scaler")
    applied = apply_to(source_of(text), all_rules(), Options("16gb", runtime=False))
    assert "torch.amp.GradScaler" in applied.text
    assert [(left.code, left.line) for left in applied.unfixed if left.line == 5] == [("OOM205", 5)]


def test_what_stays_on_a_line_that_the_manager_writes_anew_is_left_and_not_fixed():
    text = LEAKS.replace("    optimizer.step()", '    last = torch.load("last.pt"); optimizer.step()')
    applied = apply_to(source_of(text), all_rules(), Options("16gb"))
    assert 'torch.load("last.pt"); memory.step' in applied.text
    assert "OOM205" not in {fix.code for fix in applied.fixed}
    assert [left.line for left in applied.unfixed if left.code == "OOM205"] == [5, 10]


def test_what_goes_from_a_line_that_the_manager_writes_anew_is_fixed():
    text = LEAKS.replace("    optimizer.step()", "    torch.cuda.empty_cache(); optimizer.step()")
    applied = apply_to(source_of(text), all_rules(), Options("16gb"))
    assert "empty_cache" not in applied.text
    assert [fix.code for fix in applied.fixed].count("OOM501") == 1
    assert "OOM501" not in {left.code for left in applied.unfixed}
