"""The tables of run.sh: bml's decode steps and prompts, limits, and PyTorch's times.

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
    command += ["-b", batch, "-p", prompt, "-n", steps, "-r", 5 if steps else 15, "-q", "--json", *more]
    return json.loads(subprocess.check_output([str(part) for part in command]))


torch = {}
if (directory / "torch.json").exists():
    for line in (directory / "torch.json").read_text().splitlines():
        case = json.loads(line)
        torch[case["case"]] = case["median_us"]


def beside(us, case):
    peer = torch.get(case)
    return f"{peer:.0f} ({peer / us:.2f}x)" if peer else "-"


print("| model | weights | batch | context | bml, us a step | limit, us | of it | PyTorch, us |")
print("|---|---|---|---|---|---|---|---|")
cases = [("gpt2", "bf16", b, c) for b, c in ((1, 64), (1, 1000), (8, 512), (64, 512), (256, 512))]
cases += [("gpt2", weights, 1, 64) for weights in ("f32", "f16", "q8", "q4")]
cases += [("gpt2", weights, b, 512) for weights in ("f32", "q8", "q4") for b in (8, 64)]
for model in ("gpt2-medium", "gpt2-large", "gpt2-xl"):
    if (directory / model).exists():
        cases += [(model, weights, 1, 64) for weights in ("bf16", "q8")]
for model, weights, batch, context in cases:
    decode = bench(model, weights, batch, context - STEPS // 2, STEPS)["decode"]
    step = 1e3 * decode["ms_per_step"]
    limit = step * decode["percent_of_bandwidth"] / 100
    shown = beside(step, f"{batch}:{context}" if (model, weights) == ("gpt2", "bf16") else None)
    print(
        f"| {model} | {weights} | {batch} | {context} | {step:.0f} | {limit:.0f} "
        f"| {decode['percent_of_bandwidth']:.0f}% | {shown} |",
        flush=True,
    )

print("\n| gpt2, prompts | weights | chunk | bml, us | TFLOP/s | PyTorch compiled, us |")
print("|---|---|---|---|---|---|")
cases = [("bf16", 1, 512), ("bf16", 1, 1024), ("bf16", 8, 8192), ("bf16", 64, 65536)]
for weights, batch, chunk in cases + [("q8", 1, 1024), ("q8", 8, 8192), ("f32", 8, 8192)]:
    prefill = bench("gpt2", weights, batch, 1024, 0, "--chunk", chunk)["prefill"]
    us, case = 1e3 * prefill["time_to_first_token_ms"], f"{batch}x1024"
    shown = beside(us, case if weights == "bf16" else None)
    print(
        f"| {case} | {weights} | {chunk} | {us:.0f} | {1e-3 * prefill['gflop_s']:.0f} | {shown} |",
        flush=True,
    )

print("\n| gpt2 in bf16, one sequence of 900 tokens | us a token |")
print("|---|---|")
for how in (
    "--greedy",
    "--top-k 40",
    "--top-k 0",
    "--top-k 500",
    "--top-k 0 --top-p 0.95",
    "--top-k 40 --repetition-penalty 1.1",
):
    command = [bml, "generate", "--backend", "cuda", "-m", directory / "gpt2", "--weights", "bf16"]
    command += ["--ids", "1", "-n", "900", "--ignore-eos", "--json", "-q", "--seed", "3"]
    rates = [
        json.loads(subprocess.check_output([*map(str, command), *how.split()]))["stats"]
        for _ in range(3)
    ]
    rate = sorted(stats["decode_tok_s"] for stats in rates)[1]
    print(f"| `{how}` | {1e6 / rate:.0f} |", flush=True)
