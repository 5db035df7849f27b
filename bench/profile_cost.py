"""What an estimate costs: seconds beyond `import torch`, and memory of the host, each in a process of its own.

python bench/profile_cost.py             # prints the table
python bench/profile_cost.py --write     # and writes bench/results/profile-cost.md
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "profile-cost.md"

ESTIMATE = """
import json, resource, time
start = time.process_time()
import torch
imported = time.process_time() - start
import transformers
from transformers import {config}, {model}
start = time.process_time()
from oomfix.profile import estimate
configuration = {config}({arguments})
found = estimate(
    lambda: {model}(configuration),
    lambda: {{name: torch.zeros({rows}, {length}, dtype=torch.long) for name in ("input_ids", "labels")}},
    lambda model, batch: model(**batch).loss, precision="bf16", gpu="a100-80gb",
)
print(json.dumps([imported, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
                  found.peak_allocated_bytes / 2**30]))
"""

LLAMA_7B = "vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32"

SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig({arguments}))
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for _ in range(2):
    ids = torch.zeros(1, 512, dtype=torch.long).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def measure(code: str) -> list[float]:
    """What the last line of a program's output lists."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def script_with_real_weights() -> list[float]:
    """The same model, built on the host by an unmodified script and moved: [CPU seconds, MiB of host memory, GiB]."""
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder, "train.py"), Path(folder, "found.json")
        script.write_text(SCRIPT.format(arguments=LLAMA_7B))
        code = f"""
import json, resource, time
from oomfix.profile import run
start = time.process_time()
assert run.main(["--gpu", "a100-80gb", "--output", {str(output)!r}, {str(script)!r}]) == 0
found = json.load(open({str(output)!r}))
print(json.dumps([time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
                  found["peak_allocated_bytes"] / 2**30]))
"""
        return measure(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    text = [
        "| run | CPU seconds beyond importing torch and transformers | host memory MiB | peak GiB |",
        "|---|---:|---:|---:|",
    ]
    cases = {
        "GPT-2 124 M, estimate, b8 x 1024": ("GPT2Config", "GPT2LMHeadModel", "", 8, 1024),
        "Llama 6.7 B, estimate, b1 x 512": ("LlamaConfig", "LlamaForCausalLM", LLAMA_7B, 1, 512),
    }
    imported = 0.0
    for name, (config, model, arguments, rows, length) in cases.items():
        code = ESTIMATE.format(config=config, model=model, arguments=arguments, rows=rows, length=length)
        imported, seconds, memory, peak = measure(code)
        text.append(f"| {name} | {seconds:.1f} | {memory:.0f} | {peak:.2f} |")
    seconds, memory, peak = script_with_real_weights()
    text.append(
        f"| Llama 6.7 B, script that builds it on the host, b1 x 512 | {seconds:.1f} | {memory:.0f} | {peak:.2f} |"
    )
    print("\n".join(text))
    if options.write:
        head = [
            "# What an estimate costs",
            "",
            f"`python bench/profile_cost.py --write`, {datetime.date.today()}, torch {torch.__version__}, one thread; "
            f"importing torch alone takes {imported:.1f} CPU seconds here.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *text, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
