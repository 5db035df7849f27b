"""What scripts do between host and card: files, devices, values that come back. Peaks follow from the sizes."""

import sys

import pytest
import torch

from oomfix.profile import boundary
from oomfix.profile.refusals import CannotSimulate
from oomfix.profile.run import run as simulate
from tests.torch_versions import needs_torch

MIB = 2**20
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
"""
# 1 MiB of weights
LINEAR = HEAD + "model = nn.Linear(512, 512, bias=False).to(device)\n"


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Run a script's source in simulation, in a folder of its own."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def run(source, **options):
        script = tmp_path / "train.py"
        script.write_text(source)
        return simulate(str(script), [], **options)

    return run


@pytest.mark.parametrize(
    "where",
    [
        "map_location='cuda'",
        "map_location=torch.device('cuda:0')",
        "map_location={'cpu': 'cuda:0'}",
        "map_location=lambda storage, location: storage.cuda(0)",
    ],
)
def test_a_checkpoint_loaded_onto_the_card_takes_its_size_there_once(simulated, tmp_path, where):
    weight = torch.zeros(512, 512)
    torch.save({"weight": weight, "tied": weight, "epoch": 3}, tmp_path / "model.pt")
    found = simulated(LINEAR + f"kept = torch.load('model.pt', {where})\nassert kept['epoch'] == 3\n")
    assert found["error"] is None
    assert found["peak_allocated_bytes"] == 2 * MIB


def test_a_checkpoint_for_the_host_takes_nothing_of_the_card(simulated, tmp_path):
    torch.save({"weight": torch.ones(512, 512)}, tmp_path / "model.pt")
    found = simulated(
        LINEAR + "kept = torch.load('model.pt', map_location='cpu')\nassert kept['weight'].sum() == 2**18\n"
    )
    assert found["error"] is None and found["peak_allocated_bytes"] == MIB


def test_what_the_script_saved_it_can_load_again_and_no_file_is_written(simulated, tmp_path):
    source = (
        "torch.save({'model': model.state_dict(), 'epoch': 7, 'host': torch.arange(3)}, 'best.pt')\n"
        "best = torch.load('best.pt')\n"
        "assert best['epoch'] == 7 and best['host'].tolist() == [0, 1, 2] and best['model']['weight'].is_cuda\n"
        "model.load_state_dict(best['model'])\n"
    )
    found = simulated(LINEAR + source)
    assert found["error"] is None and found["peak_allocated_bytes"] == 2 * MIB
    assert not (tmp_path / "best.pt").exists()


def test_a_model_turned_to_half_on_the_card_needs_one_layer_more_than_the_model(simulated):
    """On a card each weight is replaced as it is converted: 4 MiB of fp32, and one layer of 0.5 MiB beside them."""
    layers = "model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).to(device).half()\n"
    found = simulated(HEAD + layers)
    assert found["peak_allocated_bytes"] == 4 * MIB + MIB // 2
    assert found["breakdown"]["weights"] >= 4 * MIB


def test_a_large_model_converted_on_the_host_touches_no_memory_there(simulated):
    source = (
        "import resource\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(8)]).bfloat16()\n"
        "model = model.to(torch.float16).cuda()\n"
        "grew_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert grew_kib < 200 * 1024, grew_kib\n"
    )
    found = simulated(HEAD + source)
    assert found["error"] is None and found["peak_allocated_bytes"] == 8 * 128 * MIB


@pytest.mark.parametrize(
    "mixed",
    [
        "model(torch.ones(4, 512))\n",
        "F.cross_entropy(model(torch.ones(4, 512, device=device)), torch.zeros(4, dtype=torch.long))\n",
        "F.mse_loss(model(torch.ones(4, 512, device=device)), torch.ones(4, 512))\n",
        "nn.Linear(512, 2)(model(torch.ones(4, 512, device=device)))\n",
    ],
)
def test_tensors_of_host_and_card_in_one_operation_fail_as_on_a_card(simulated, mixed):
    found = simulated(LINEAR + mixed)
    assert "Expected all tensors to be on the same device" in found["error"]
    assert found["fits"] == {}


@pytest.mark.parametrize(
    "mixed",
    [
        "x = torch.ones(4, 512, device=device) * torch.tensor(2.0)\n",
        "x = torch.ones(4, 512, device=device)[torch.tensor([0, 2])]\n",
        "x = torch.ones(4, 512, device=device)\nx[torch.tensor([0])] = 1\n",
        "x = F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 4, device=device)] * 3, is_causal=True)\n",
        "host = torch.zeros(4, 512)\nhost.copy_(torch.ones(4, 512, device=device))\n",
    ],
)
def test_what_a_card_accepts_from_the_host_is_accepted(simulated, mixed):
    assert simulated(LINEAR + mixed)["error"] is None


def test_small_tensors_bring_their_values_along_and_back(simulated):
    """Lengths that travel to the card and back must still be lengths, or packing fails."""
    source = (
        "from torch.nn.utils.rnn import pack_padded_sequence\n"
        "lengths = torch.tensor([3, 1, 2]).to(device)\n"
        "assert lengths.cpu().tolist() == lengths.tolist() == [3, 1, 2]\n"
        "assert torch.tensor(5).cuda().item() == 5\n"
        "packed = pack_padded_sequence(torch.ones(3, 3, 8, device=device), lengths.cpu(), True, enforce_sorted=False)\n"
        "assert packed.data.shape == (6, 8)\n"
        "lengths.add_(1)\n"
        "assert lengths.cpu().tolist() == [0, 0, 0], 'written on the card: not known'\n"
    )
    found = simulated(HEAD + source)
    assert found["error"] is None
    assert any(line.startswith("data copied from the card are zeros") for line in found["assumptions"])


def test_what_torch_reads_for_itself_is_no_assumption_of_the_script(simulated):
    source = (
        "model(torch.ones(4, 512, device=device)).mean().backward()\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    )
    assert simulated(LINEAR + source)["assumptions"] == []


def test_evaluation_in_inference_mode_moves_its_batches(simulated):
    source = "with torch.inference_mode():\n    x = torch.stack([torch.ones(512)] * 4)\n    model(x.to(device)).cpu()\n"
    assert simulated(LINEAR + source)["error"] is None


def test_finite_losses_stay_finite(simulated):
    source = (
        "loss = model(torch.ones(4, 512, device=device)).mean()\n"
        "assert torch.isfinite(loss) and loss.isfinite().all() and not torch.isnan(loss)\n"
    )
    assert simulated(LINEAR + source)["error"] is None


def test_a_bare_number_is_a_card(simulated):
    source = (
        "assert torch.device(0) == torch.device('cuda:0') and isinstance(torch.device(0), torch.device)\n"
        "assert type(torch.device('cpu')) == torch.device\n"
        "x = torch.ones(4, device=torch.device(0)).to(torch.device(0))\n"
    )
    assert simulated(HEAD + source)["error"] is None


def test_what_scripts_ask_of_the_card_is_answered(simulated):
    source = (
        "start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\n"
        "1 / start.elapsed_time(end)\n"
        "held = torch.cuda.memory_allocated(device=device)\n"
        "assert held == torch.cuda.memory_stats(device)['active_bytes.all.current'] == 2**20\n"
        "torch.cuda.memory_stats()['segment.all.peak'], torch.cuda.memory_snapshot()\n"
        "torch.cuda.memory._record_memory_history(max_entries=9)\n"
        "assert isinstance(model.weight.data, torch.cuda.FloatTensor) and not isinstance(1, torch.cuda.FloatTensor)\n"
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):\n"
        "    model(torch.ones(4, 512, device=device))\n"
    )
    assert simulated(LINEAR + source)["error"] is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("torch.cuda.CUDAGraph()\n", "it uses CUDAGraph of torch.cuda"),
        ("raise RuntimeError('Found no NVIDIA driver on your system.')\n", "it asks the driver of the card"),
        pytest.param(
            "x = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged).to(device)\n",
            "it uses nested tensors",
            marks=needs_torch("2.6", "nested tensors that can be moved to a card"),
        ),
    ],
)
def test_what_only_a_real_card_has_is_refused(simulated, source, reason):
    with pytest.raises(CannotSimulate, match=reason):
        simulated(HEAD + source)


def test_factories_take_a_bare_number_as_the_card(simulated):
    """As `device=rank` in scripts for several processes."""
    source = HEAD + "tensors = [torch.zeros(256, 1024, device=0), torch.randn(256, 1024, device=0)]\n"
    source += "tensors += [torch.randint(9, (256, 512), device=0), torch.arange(131072, device=0)]\n"
    assert simulated(source)["peak_allocated_bytes"] == 4 * MIB


def test_a_script_that_waits_for_a_number_of_the_card_is_refused(simulated, monkeypatch):
    monkeypatch.setattr(boundary, "_MOST_QUESTIONS", 1000)
    source = HEAD + "error = torch.ones(1, device=device)\nwhile error.item() > 0.001:\n    error = error * 0.5\n"
    with pytest.raises(CannotSimulate, match=r"train.py:\d+ has read the card 1000 times: it seems to wait"):
        simulated(source)


def test_scripted_functions_run_as_they_are_written(simulated):
    """A compiled one would call factories that know no simulated card; the sum and the product take 1 MiB each."""
    script = """
@torch.jit.script
def swish(x):
    return x * torch.zeros(512, device=x.device).add(x)

traced = torch.jit.trace(model, torch.zeros(1, 512, device=device))
y = swish(traced(torch.zeros(512, 512, device=device)))
"""
    found = simulated(LINEAR + script)
    assert found["error"] is None
    assert any("torch.jit was left out" in sentence for sentence in found["assumptions"])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_of_a_loader_do_costs_no_tracing(simulated, workers):
    """Workers have no card; in the script's own process a data set may use it, and the trace has to look."""
    script = """
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        assert (_get_current_dispatch_mode() is None) == (WORKERS > 0)
        return torch.zeros(512)

for x in DataLoader(Rows(), batch_size=2, num_workers=WORKERS):
    model(x.to(device)).sum().backward()
"""
    found = simulated(LINEAR + script.replace("WORKERS", str(workers)))
    assert found["error"] is None
    assert found["breakdown"]["weights"] == MIB
