"""The shapes that logs have in the wild: several ranks, notebooks, boxes, clusters, other cards, engines that serve."""

import pytest

from oomfix.diagnose import diagnose

GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.50 GiB is"
    " free. Including non-PyTorch memory, this process has 22.14 GiB memory in use. Of the allocated memory 21.00"
    " GiB is allocated by PyTorch, and 700.00 MiB is reserved by PyTorch but unallocated."
)
RAISED = f"torch.OutOfMemoryError: {MESSAGE}"
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 8.50 GiB, other allocations: 200.00 MiB, max "
    "allowed: 9.00 GiB). Tried to allocate 1.25 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to "
    "disable upper limit."
)
ROCM_THOUGH_FREE = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92"
    " GiB of which 7.12 GiB is free. Of the allocated memory 8.08 GiB is allocated by PyTorch, and 321.96 MiB is "
    "reserved by PyTorch but unallocated."
)
LIMITED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 23.65 "
    "GiB of which 20.00 GiB is free. 1.05 GiB allowed; Of the allocated memory 1.03 GiB is allocated by PyTorch, "
    "and 1.00 MiB is reserved by PyTorch but unallocated."
)
NEIGHBOUR_IN_TORCH_1 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.63 GiB (GPU 0; 44.56 GiB total capacity; 27.91 GiB already "
    "allocated; 565.31 MiB free; 27.93 GiB reserved in total by PyTorch)"
)
UNKNOWN_NEIGHBOUR = MESSAGE.replace(
    "Including non-PyTorch memory, this process has 22.14 GiB", "Process 17 has 17179869184.00 GiB"
)
BUS = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    "RuntimeError: DataLoader worker (pid 2991) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit."
)
SLURM = "Killed\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.\n"
VLLM = (
    'Traceback (most recent call last):\n  File "/site-packages/vllm/worker.py", line 335, in execute\n    x = y\n'
    + RAISED
)
NO_CACHE = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."


def only(text):
    found = diagnose(text)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("log", "kind", "evidence"),
    [
        (MPS, "too large", "tensors held 8.50 GiB of 9.00 GiB"),
        (ROCM_THOUGH_FREE, "refused though free", "7.12 GiB were free when 432.00 MiB were refused"),
        (LIMITED, "limit", "torch may use 1.05 GiB, while 20.00 GiB"),
        (NEIGHBOUR_IN_TORCH_1, "another process", "14.58 GiB of the card are neither free nor torch's"),
        (f"torch.OutOfMemoryError: {UNKNOWN_NEIGHBOUR}", "too large", "1.50 GiB of 23.65 GiB were free"),
        (BUS, "shared memory", "/dev/shm"),
        (SLURM, "host memory", "the system killed"),
        ("/spool/job: line 28:  8156 Killed    python3 main.py\n", "host memory", "8156 Killed"),
        ("  exitcode  : -9 (pid: 1)\n  traceback : Signal 9 (SIGKILL) received by PID 1\n", "host memory", "-9"),
        ("OSError: [WinError 1455] The paging file is too small for this", "host memory", "Windows"),
        ("numpy.core._exceptions.MemoryError: Unable to allocate 5.96 GiB for an array with shape (2,)", "host memory",
         "5.96 GiB were asked for in the memory of the host"),
        ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 8388608 bytes.",
         "host memory", "8.00 MiB"),
        (VLLM, "serving", "an engine that serves models"),
        (NO_CACHE, "serving", "an engine that serves models"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "unknown",
         "a library of CUDA found no room"),
        ("torch.cuda.CudaError: CUDA_ERROR_OUT_OF_MEMORY", "unknown", "no sizes"),
        ("{'loss': 0.5, 'grad_norm': 1.0, 'epoch': 3.02}\n" + RAISED, "leak", "until epoch 3"),
        ("Epoch 0:  37%|#| 1500/4000 [10:03<12:00, 3.1it/s]\n" + RAISED, "too large", "1500 iterations had gone well"),
    ],
)  # fmt: skip
def test_the_kind_and_what_speaks_for_it(log, kind, evidence):
    found = only(log)
    assert found.kind == kind
    assert evidence in " ".join(found.evidence)


@pytest.mark.parametrize(
    ("log", "senseless"),
    [
        (MPS, "--preset"),
        (ROCM_THOUGH_FREE, "oomfix"),
        (LIMITED, "oomfix"),
        (NEIGHBOUR_IN_TORCH_1, "oomfix"),
        (BUS, "oomfix"),
        (SLURM, "oomfix"),
        (VLLM, "oomfix"),
        (NO_CACHE, "oomfix"),
    ],
)
def test_no_command_is_named_that_cannot_help(log, senseless):
    assert only(log).cures and not any(senseless in cure for cure in only(log).cures)


def traceback(function):
    frame = f'  File "/w/train.py", line 90, in {function}\n    out = model(x)'
    return f"Traceback (most recent call last):\n{frame}\n{RAISED}"


@pytest.mark.parametrize("mark", ["[rank{}]: ", "[default{}]:", "(Worker pid=123{}) "])
def test_ranks_that_write_into_one_log_are_read_apart(mark):
    """Line by line in turn: one of them was training, the other one in its evaluation."""
    first, second = traceback("train_step").split("\n"), traceback("validate").split("\n")
    turns = (enumerate(lines) for lines in zip(first, second, strict=True))
    log = "".join(f"{mark.format(rank)}{line}\n" for turn in turns for rank, line in turn)
    found = diagnose(log)
    assert [(one.kind, one.crash.frames[-1][2]) for one in found] == [
        ("too large", "train_step"), ("evaluation", "validate"),
    ]  # fmt: skip
    assert {one.crash.requested for one in found} == {2 * GIB}


NOTEBOOK_8 = """OutOfMemoryError                          Traceback (most recent call last)
Cell \x1b[0;32mIn[7], line 12\x1b[0m
\x1b[0;32m---> 12\x1b[0m     optimizer.step()

File \x1b[0;32m/site-packages/torch/optim/adamw.py:171\x1b[0m, in \x1b[0;36mAdamW.step\x1b[0;34m(self, closure)\x1b[0m
\x1b[1;32m    170\x1b[0m     adamw(

\x1b[0;31mOutOfMemoryError\x1b[0m: """
NOTEBOOK_7 = """RuntimeError                              Traceback (most recent call last)
<ipython-input-9-abc> in <module>
      3
----> 4 evaluate(model)

<ipython-input-5-def> in evaluate(model)
     10     for x in loader:
---> 11         out = model(x)

RuntimeError: """
RICH = """╭───────────── Traceback (most recent call last) ─────────────╮
│ /w/train.py:105 in validate                                 │
│ > 105 │   out = model(x)                                    │
╰─────────────────────────────────────────────────────────────╯
OutOfMemoryError: """


@pytest.mark.parametrize(
    ("above", "kind", "frame"),
    [
        (NOTEBOOK_8, "first optimizer step", ("/site-packages/torch/optim/adamw.py", 171, "AdamW.step")),
        (NOTEBOOK_7, "evaluation", ("<ipython-input-5-def>", 11, "evaluate")),
        (RICH, "evaluation", ("/w/train.py", 105, "validate")),
    ],
)
def test_tracebacks_of_notebooks_and_in_boxes_tell_where_it_happened(above, kind, frame):
    found = only(above + MESSAGE)
    assert found.kind == kind and found.crash.frames[-1][:3] == frame


def test_words_that_only_look_like_it_are_no_error():
    assert diagnose("room 5, bloom filter\nEpoch 3 loss 0.1\nskilled workers\nfinished\n") == []


@pytest.mark.parametrize(
    ("files", "script"),
    [
        (("finetune.py", "/x/site-packages/torch/nn/module.py"), "finetune.py"),
        (("<string>", "/usr/lib/python3.10/runpy.py", "/w/my runs/fit.py", "/w/model.py"), "'/w/my runs/fit.py'"),
        (("/tmp/ipykernel_7/81.py", "/x/dist-packages/torch/_tensor.py"), "train.py"),
    ],
)
def test_commands_name_the_script_of_the_traceback(files, script):
    lines = [f'  File "{file}", line 9, in main' for file in files]
    found = only("\n".join(["Traceback (most recent call last):", *lines, RAISED]))
    assert found.cures[0] == f"`oomfix apply --preset 24gb {script}`"


@pytest.mark.parametrize(
    ("file", "function", "setting"),
    [
        ("transformers/trainer.py", "training_step", "gradient_checkpointing=True"),
        ("transformers/trainer.py", "evaluation_loop", "eval_accumulation_steps"),
        ("lightning/pytorch/trainer/trainer.py", "fit", "accumulate_grad_batches"),
        ("pytorch_lightning/trainer/trainer.py", "fit", "accumulate_grad_batches"),
    ],
)
def test_a_framework_is_told_by_its_own_settings(file, function, setting):
    """`apply` finds no loop to rewrite there."""
    frame = f'  File "/x/site-packages/{file}", line 9, in {function}'
    found = only(f"Traceback (most recent call last):\n{frame}\n{RAISED}")
    assert setting in found.cures[0] and not any("apply" in cure for cure in found.cures)
