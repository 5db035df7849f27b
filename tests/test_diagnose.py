"""Out-of-memory messages as torch 1.8 to 2.13 word them, alone and in logs: sizes to the byte, kinds, cures."""

import json
import time

import pytest
from click.testing import CliRunner

from oomfix.diagnose import diagnose
from oomfix.diagnose_command import diagnose as command

MIB, GIB = 2**20, 2**30

TORCH_1_8 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity; 5.89 GiB already "
    "allocated; 13.44 MiB free; 6.16 GiB reserved in total by PyTorch)"
)
TORCH_1_13 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 14.76 GiB total capacity; "
    "12.25 GiB already allocated; 1.03 GiB free; 12.50 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation."
)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 23.65 "
    "GiB of which 1.50 GiB is free. Process 4321 has 22.14 GiB memory in use. Of the allocated memory 21.00 GiB is "
    "allocated by PyTorch, and 700.00 MiB is reserved by PyTorch but unallocated."
)
TORCH_2_13 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.14 GiB "
    "of which 1.50 GiB is free. Process 99 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "47.50 GiB memory in use. 60.00 GiB allowed; Of the allocated memory 46.00 GiB is allocated by PyTorch, and 1.00 "
    "GiB is reserved by PyTorch but unallocated."
)
TORCH_1_2 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity; 5.89 GiB already "
    "allocated; 13.44 MiB free; 276.48 MiB cached)"
)
TORCH_1_9_WITH_A_FRACTION = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity; 3.00 GiB already "
    "allocated; 11.20 GiB free; 4.00 GiB allowed; 3.10 GiB reserved in total by PyTorch)"
)
TORCH_2_6_WITH_GRAPHS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.14 GiB "
    "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.50 GiB memory in use. Of the "
    "allocated memory 71.00 GiB is allocated by PyTorch, with 6.00 GiB allocated in private pools (e.g., CUDA Graphs), "
    "and 1.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ROCM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 15.98 GiB of "
    "which 500.00 MiB is free. Of the allocated memory 14.00 GiB is allocated by PyTorch, and 200.00 MiB is reserved "
    "by PyTorch but unallocated."
)
# as the write-ups quote theirs
FEW_SHOT = """torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.35 GiB.\x20
GPU 0 has a total capacity of 15.89 GiB of which 375.12 MiB is free.
Process has 15.52 GiB memory in use."""
CAMOUFLAGE = """Stage 2 (full fine-tuning), epoch 31
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 600.00 MiB.
GPU 0 has a total capacity of 14.74 GiB of which 378.12 MiB is free.
Process has 14.37 GiB memory in use. Of the allocated memory 12.77 GiB
is allocated by PyTorch, and 1.45 GiB is reserved by PyTorch but unallocated.
"""


def only(text):
    found = diagnose(text)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("message", "requested", "capacity", "allocated", "unallocated"),
    [
        (TORCH_1_9_WITH_A_FRACTION, 2 * GIB, 4 * GIB, 3 * GIB, 0.1 * GIB),
        (TORCH_2_6_WITH_GRAPHS, 2 * GIB, 79.14 * GIB, 71 * GIB, 1 * GIB),
        (ROCM, 1 * GIB, 15.98 * GIB, 14 * GIB, 200 * MIB),
        (TORCH_1_8, 20 * MIB, 7.79 * GIB, 5.89 * GIB, 0.27 * GIB),
        (TORCH_1_13, 1.5 * GIB, 14.76 * GIB, 12.25 * GIB, 0.25 * GIB),
        (TORCH_2_1, 2 * GIB, 23.65 * GIB, 21 * GIB, 700 * MIB),
        (TORCH_2_13, 2 * GIB, 60 * GIB, 46 * GIB, 1 * GIB),
    ],
)
def test_every_format_gives_its_sizes(message, requested, capacity, allocated, unallocated):
    crash = only(message).crash
    assert crash.requested == int(requested)
    assert (crash.capacity, crash.allocated) == (int(capacity), int(allocated))
    assert crash.unallocated == pytest.approx(unallocated, abs=2)


@pytest.mark.parametrize(
    ("message", "others"), [(TORCH_1_8, 0), (TORCH_1_13, 0), (TORCH_2_1, 470), (TORCH_2_13, 30 * 1024)]
)
def test_only_other_processes_count_as_others(message, others):
    """In torch 2.1 the process named is this one: its context is no other process."""
    assert only(message).crash.others <= (others + 1) * MIB
    assert (only(message).kind == "another process") == (others > 1024)


def test_reserved_and_unused_memory_beyond_the_request_is_fragmentation():
    assert only(TORCH_1_8).kind == "fragmentation"
    assert "expandable_segments" in only(TORCH_1_8).cures[0]
    # 0.25 GiB unused, 1.5 GiB asked for
    assert only(TORCH_1_13).kind == "too large"


def test_the_advice_names_the_preset_of_the_card():
    assert any("--preset 16gb" in cure for cure in only(TORCH_1_13).cures)
    assert any("--preset 16gb" in cure for cure in only(FEW_SHOT).cures)


def test_a_card_of_unknown_size_is_left_to_the_preset_that_reads_it():
    (found,) = diagnose("CUDA out of memory. Tried to allocate 600.00 MiB.")
    assert found.cures[0] == "`oomfix apply --preset auto train.py`"


def test_an_error_that_is_only_told_of_has_the_line_where_it_is_told():
    (found,) = diagnose("epoch 2\ntraining crashed, out of memory\nat night\n")
    assert (found.crash.line, found.kind) == (2, "leak")


def test_the_write_up_that_died_at_its_second_stage_is_told_so_and_that_memory_was_fragmented():
    found = only(CAMOUFLAGE)
    assert found.kind == "stage switch" and "Stage 2" in found.evidence[0]
    assert any("1.45 GiB" in sentence for sentence in found.evidence)
    assert only(CAMOUFLAGE.replace("Stage 2", "Stage 1")).kind == "fragmentation"


def test_a_run_that_dies_after_epochs_leaks():
    log = "Epoch 1: loss 0.3\nEpoch 37: loss 0.1\n" + TORCH_1_13
    found = only(log)
    assert found.kind == "leak" and "epoch 37" in found.evidence[0] and found.crash.line == 3
    assert only("Epoch 1: loss 0.3\n" + TORCH_1_13).kind == "too large"


def test_growing_memory_in_the_log_is_a_leak():
    log = "step 1: 3.50 GB allocated\nstep 2: 4.50 GB allocated\nstep 3: 5.50 GB allocated\n" + TORCH_1_13
    assert only(log).kind == "leak"
    steady = log.replace("4.50", "3.50").replace("5.50", "3.51")
    assert only(steady).kind == "too large"


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (
            'File "/lib/torch/optim/adamw.py", line 184, in _init_group\n    state["exp_avg"] = torch.zeros_like(',
            "first optimizer step",
        ),
        ('File "train.py", line 9, in <module>\n    checkpoint = torch.load("best.pt")', "checkpoint loading"),
        ('File "train.py", line 70, in validate\n    out = model(images)', "evaluation"),
        ('File "train.py", line 70, in train\n    out = model(images)', "too large"),
    ],
)
def test_the_traceback_tells_where_it_happened(frame, kind):
    log = f"Traceback (most recent call last):\n  {frame}\n{TORCH_1_13}"
    assert only(log).kind == kind


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (["/torch/optim/adamw.py:step:loss = closure()", "/app/model.py:training_step:loss = self(x)"], "too large"),
        (["/torch/optim/adamw.py:step:loss = closure()", "/app/model.py:validate:self(x)"], "evaluation"),
        (
            ["/lightning/precision.py:optimizer_step:return optimizer.step(closure=closure, **kwargs)",
             "/torch/optim/adamw.py:_init_group:torch.zeros_like("],
            "first optimizer step",
        ),
        (["train.py:train_and_evaluate:out = model(x)"], "too large"),
        (["train.py:train_and_evaluate:evaluate(model)", "train.py:evaluate:out = model(x)"], "evaluation"),
        (["train.py:run_latest:out = model(x)"], "too large"),
        (["train.py:evaluate_step:loss.backward()"], "too large"),
    ],
)  # fmt: skip
def test_a_frame_that_only_passes_through_tells_nothing(frames, kind):
    lines = []
    for frame in frames:
        file, function, code = frame.split(":", 2)
        lines += [f'  File "{file}", line 9, in {function}', f"    {code}"]
    assert only("\n".join(["Traceback (most recent call last):", *lines, TORCH_1_13])).kind == kind


def test_a_little_idle_memory_hides_no_leak():
    message = TORCH_1_8.replace("6.16 GiB reserved", "6.04 GiB reserved")
    assert only(message).kind == "fragmentation"
    found = only("Epoch 1: loss 0.3\nEpoch 37: loss 0.1\n" + message)
    assert found.kind == "leak" and any("no tensor uses" in sentence for sentence in found.evidence)
    assert only("Epoch 37: loss 0.1\n" + TORCH_1_8.replace("6.16 GiB reserved", "7.10 GiB reserved")).kind == (
        "fragmentation"
    )


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuda runtime error (2) : out of memory at /opt/conda/THCStorage.cu:58",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: NCCL error: unhandled cuda error, Failed to CUDA calloc 6291456 bytes",
        "The run ended in an OOM.",
    ],
)
def test_errors_without_sizes_are_still_errors(message):
    assert only(message).kind == "unknown"


def test_an_error_that_repeats_is_reported_once_and_another_one_too():
    assert len(diagnose("\n".join([TORCH_1_8, TORCH_1_8, TORCH_1_13]))) == 2


def test_a_log_without_such_an_error_is_clean():
    assert diagnose("epoch 1: loss 0.1, memory 3.5 GB allocated\n") == []


def test_the_command_reads_standard_input_and_says_by_its_exit_code_what_it_found():
    found = CliRunner().invoke(command, ["--script", "fit.py"], input=TORCH_1_13)
    assert found.exit_code == 1 and "`oomfix apply --preset 16gb fit.py`" in found.output
    assert CliRunner().invoke(command, [], input="all well").exit_code == 0
    as_json = CliRunner().invoke(command, ["--format", "json"], input=TORCH_1_13)
    assert json.loads(as_json.output)["diagnoses"][0]["kind"] == "too large"


def test_memory_of_the_host_is_told_apart():
    message = (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 18874368000 bytes. Error code 12 (Cannot allocate memory)"
    )
    found = only(message)
    assert found.kind == "host memory" and found.crash.requested == 18874368000
    assert "17.58 GiB" in found.evidence[0] and "workers" in found.cures[0]


@pytest.mark.parametrize(
    "said",
    [
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.",
        "[123.4] Out of memory: Killed process 4711 (python) total-vm:98765kB, anon-rss:9876kB",
        "Reason: OOMKilled",
    ],
)
def test_a_process_that_the_system_kills_has_filled_the_host(said):
    found = only(f"epoch 3 loss 0.5\n{said}\n")
    assert found.kind == "host memory" and found.crash.line == 2
    assert "the system killed" in found.evidence[0] and "workers" in found.cures[0]


def test_a_request_beyond_all_machines_is_a_wrong_size_in_the_script():
    frame = 'Traceback (most recent call last):\n  File "train.py", line 9, in pair\n    x = a * b\n'
    found = only(frame + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.")
    assert found.kind == "too large" and found.crash.requested is None
    assert "pair (train.py, line 9)" in found.cures[0]


LEAKING = """import torch

def train(model, loader, optimizer):
    total = 0
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss
    return total

def validate(model, loader):
    model.eval()
    correct = 0
    for x, y in loader:
        out = model(x.cuda())
        correct += (out.argmax(1) == y.cuda()).sum().item()
    return correct
"""


@pytest.fixture
def joined(tmp_path):
    """The findings that `diagnose --script` shows with an error, as its JSON holds them."""

    def of(log, source=LEAKING):
        script = tmp_path / "fit.py"
        script.write_text(source)
        result = CliRunner().invoke(command, ["--format", "json", "--script", str(script)], input=log)
        assert result.exit_code == 1, result.output
        return json.loads(result.stdout)["diagnoses"][0]["findings"]

    return of


def test_the_audit_of_the_script_explains_a_leak(joined, tmp_path):
    findings = joined("Epoch 1: loss 0.3\nEpoch 37: loss 0.1\n" + TORCH_1_13)
    assert [finding["code"] for finding in findings] == ["OOM101", "OOM201"]
    assert findings[0]["place"] == f"{tmp_path / 'fit.py'}:10:9"


def test_findings_on_the_lines_of_the_traceback_come_first(joined):
    """A leak is explained by OOM101 sooner than by OOM201, but not if it died there, in whatever folder that was."""
    frame = '  File "/home/me/fit.py", line 17, in main\n    out = model(x.cuda())\n'
    findings = joined("Epoch 37: loss 0.1\nTraceback (most recent call last):\n" + frame + TORCH_1_13)
    assert [(found["code"], found["on_the_way"]) for found in findings] == [("OOM201", True), ("OOM101", False)]


def test_another_process_is_no_fault_of_the_script(joined):
    assert joined(TORCH_2_13) == []


def test_the_text_begins_with_the_line_and_the_kind():
    text = CliRunner().invoke(command, [], input="all well\n" + TORCH_1_13).output
    assert text.startswith("line 2: out of memory: too large\n  ")


def test_a_script_that_is_not_here_is_only_named_and_this_is_said():
    result = CliRunner().invoke(command, ["--script", "nowhere/fit.py"], input=TORCH_1_13)
    assert "nowhere/fit.py: no such file; it was not audited\n" in result.stderr
    assert "nowhere/fit.py" in result.output and "OOM" not in result.output


def test_findings_stand_between_the_evidence_and_the_cures(tmp_path):
    script = tmp_path / "fit.py"
    script.write_text(LEAKING)
    log = "Epoch 37: loss 0.1\n" + TORCH_1_13
    text = CliRunner().invoke(command, ["--script", str(script)], input=log).output
    assert text.index("epoch 37") < text.index("fit.py:10:9  OOM101") < text.index("fix: ")


@pytest.mark.parametrize(("found", "told"), [(6, "and 1 more finding in"), (7, "and 2 more findings in")])
def test_findings_beyond_the_fifth_are_counted(found, told, tmp_path):
    script = tmp_path / "fit.py"
    script.write_text("import torch\n" + 'state = torch.load("state.pt")\n' * found)
    frame = '  File "/home/me/fit.py", line 2, in load\n    state = torch.load("state.pt")\n'
    log = "Traceback (most recent call last):\n" + frame + TORCH_1_13
    text = CliRunner().invoke(command, ["--script", str(script)], input=log).output
    assert text.count("OOM205") == 5 and f"  {told} the script\n" in text


def test_colours_and_windows_line_ends_make_no_difference():
    coloured = TORCH_2_13.replace("2.00", "\x1b[1;36m2.00\x1b[0m").replace("CUDA out", "\x1b[91mCUDA out")
    assert only(coloured.replace(". ", ".\r\n")).crash == only(TORCH_2_13.replace(". ", ".\n")).crash


def test_a_progress_bar_is_one_line_of_the_log():
    bar = "".join(f"\rStage 2: {done}%|#| {done}/99" for done in range(99)) + "\n"
    result = CliRunner().invoke(command, ["--format", "json"], input=(bar + TORCH_1_13).encode())
    (found,) = json.loads(result.output)["diagnoses"]
    assert found["crash"]["line"] == 2
    assert found["evidence"][0] == 'the last stage named in the log is "Stage 2: 98%|#| 98/99"'


@pytest.mark.parametrize("setting", ["Namespace(epoch=90, lr=0.1)", "{'epoch': 90}", "python train.py --epoch 90"])
def test_a_number_of_epochs_that_was_asked_for_is_none_that_was_reached(setting):
    assert only(f"{setting}\n{TORCH_1_13}").kind == "too large"


def test_an_error_that_a_loop_runs_into_again_and_again_is_reported_once():
    """Sizes differ from try to try; the traceback does not."""
    frame = 'Traceback (most recent call last):\n  File "train.py", line 70, in train\n    out = model(images)\n'
    log = "".join(frame + TORCH_1_13.replace("12.25", f"12.{tries}") + "\n" for tries in range(10, 60))
    assert len(diagnose(log)) == 1


def test_a_log_costs_what_its_length_costs():
    """Long runs of digits, hundreds of errors and thousands of lines are each read once, not once per error."""
    many = "".join("loss 0.1\n" * 100 + TORCH_1_13.replace("12.25", f"{i}.25") + "\n" for i in range(400))
    digits = "epoch " + "1" * 2**18 + "\n" + TORCH_1_13
    begun = time.process_time()
    assert len(diagnose(many)) == 20
    assert only(digits).kind == "too large"
    assert time.process_time() - begun < 5
