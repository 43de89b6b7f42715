"""The table of run.sh: bml's decode steps and prompts, their limits, and PyTorch's steps.

    table.py BML DIRECTORY    with the checkpoints, and torch.json if PyTorch was measured
"""

import json
import subprocess
import sys
from pathlib import Path

bml, directory = sys.argv[1], Path(sys.argv[2])
STEPS = 24


def bench(model, weights, batch, prompt, steps, *more):
    command = [bml, "bench", "--backend", "cuda", "-m", directory / model, "--weights", weights]
    command += ["--kv", "f32" if weights == "f32" else "bf16", "-b", batch, "-p", prompt]
    command += ["-n", steps, "-r", 5, "-q", "--json", *more]
    return json.loads(subprocess.check_output([str(part) for part in command]))


torch = {}
if (directory / "torch.json").exists():
    for line in (directory / "torch.json").read_text().splitlines():
        case = json.loads(line)
        torch[case["batch"], case["context"]] = case["median_us"]

print("| model | weights | batch | context | bml, us a step | limit, us | of it | PyTorch, us |")
print("|---|---|---|---|---|---|---|---|")
cases = [("gpt2", "bf16", b, c) for b, c in ((1, 64), (1, 1000), (8, 512), (64, 512), (256, 512))]
cases += [("gpt2", weights, 1, 64) for weights in ("f32", "f16", "q8", "q4")]
if (directory / "gpt2-xl").exists():
    cases += [("gpt2-xl", weights, 1, 64) for weights in ("bf16", "q8")]
for model, weights, batch, context in cases:
    decode = bench(model, weights, batch, context - STEPS // 2, STEPS)["decode"]
    step = 1e3 * decode["ms_per_step"]
    limit = step * decode["percent_of_bandwidth"] / 100
    peer = torch.get((batch, context)) if (model, weights) == ("gpt2", "bf16") else None
    shown = f"{peer:.0f} ({peer / step:.2f}x)" if peer else "-"
    print(
        f"| {model} | {weights} | {batch} | {context} | {step:.0f} | {limit:.0f} "
        f"| {decode['percent_of_bandwidth']:.0f}% | {shown} |",
        flush=True,
    )
for chunk in (512, 1024):
    prefill = bench("gpt2", "bf16", 1, 1023, 1, "--chunk", chunk)["prefill"]
    print(f"prompt of 1023 tokens, chunks of {chunk}: {prefill['time_to_first_token_ms']:.2f} ms")
