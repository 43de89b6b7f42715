#!/usr/bin/env python3
"""Times bml and its peers on the same weights, in turn; see README.md."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

import report
from worker import PEERS, peer_class

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ("llama-cpp-python", "ctranslate2", "torch", "onnxruntime")
HOPELESS = 5  # times slower than ours in each of the first two rounds: not measured again
SAME = 5e-3  # most difference of logits in float32; llama.cpp has a float16 cache
PAUSE = 0.2  # seconds between two programs: some threads spin for a while after their work


class Worker:
    """A peer in its own process, which stays loaded between measurements."""

    def __init__(self, name, weight_format, model, cache, threads):
        command = [sys.executable, HERE / "worker.py", name, weight_format, model, cache]
        settings = getattr(peer_class(name), "ENVIRONMENT", {}).get(weight_format, {})
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **settings}
        self.log = open(cache / f"{name}-{weight_format}.log", "w")
        self.process = subprocess.Popen(
            [*map(str, command), str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def ask(self, **request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"failed; see {self.log.name}")
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


def say(text):
    print(text, file=sys.stderr, flush=True)


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--bml", default=ROOT / "build/bml", type=Path, help="the program to compare")
    p.add_argument("--preset", default="gpt2", help="shape of the random model (bml synth)")
    p.add_argument("--cache", default=ROOT / ".cache/peers", type=Path, help="for models")
    p.add_argument("--threads", default=2, type=int)
    p.add_argument("--formats", default="f32,bf16,f16,q8,q4")
    p.add_argument("--peers", default=",".join(PEERS))
    p.add_argument("--batches", default="1,8")
    p.add_argument("--phases", default="decode,prefill")
    p.add_argument("--rounds", default=5, type=int, help="measurements of each, taken in turn")
    p.add_argument("--repetitions", default=2, type=int, help="in a measurement; the best counts")
    p.add_argument("--prompt", default=512, type=int, help="tokens of a prefill")
    p.add_argument("--context", default=112, type=int, help="tokens before the first step")
    p.add_argument("--steps", default=32, type=int, help="steps of a decode")
    p.add_argument("--kv", default="f32", help="bml's cache: f32, f16 or bf16")
    p.add_argument("--json", default=ROOT / ".cache/peers/results.json", type=Path)
    p.add_argument("--svg", default=ROOT / "docs/peers.svg", type=Path)
    args = p.parse_args()
    for name in ("formats", "peers", "batches", "phases"):
        setattr(args, name, getattr(args, name).split(","))
    args.batches = [int(b) for b in args.batches]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        p.error(f"no peer {', '.join(sorted(unknown))}; there are: {', '.join(PEERS)}")
    if not args.bml.exists():
        p.error(f"{args.bml} does not exist: build it (make), or name it with --bml")
    return args


def lengths(args, phase):
    if phase == "prefill":
        return {"length": args.prompt}
    return {"context": args.context, "steps": args.steps}


def measure_ours(args, model, weight_format, batch, phase):
    decoding = phase == "decode"
    prompt, steps = (args.context, args.steps) if decoding else (args.prompt, 0)
    command = f"bench -q --json --weights {weight_format} --kv {args.kv} --threads {args.threads}"
    command += f" -b {batch} -p {prompt} -n {steps} -r {args.repetitions}"
    out = subprocess.run(
        [args.bml, *command.split(), "-m", model], check=True, capture_output=True, text=True
    )
    result = json.loads(out.stdout)
    rates, limits = result[phase], result["limits"]
    ms = 1e3 * batch * (1 if decoding else prompt) / rates["tok_s_max"]
    work = rates["bytes_per_step"] if decoding else rates["flops"]
    limit = limits["read_gb_s"] if decoding else limits["gflop_s"]
    return {"ms": ms, "of_limit": 1e-6 * work / ms / limit, **limits}


def start_workers(args, peers, weight_format, model):
    """Also compares the logits: the relative RMS difference from ours in float32."""
    ids = np.random.default_rng(2).integers(0, 1000, 16).tolist()
    npy = args.cache / "logits.npy"
    text = ",".join(map(str, ids))
    command = [args.bml, "logits", "-q", "--last", "-m", model, "--ids", text, "-o", npy]
    subprocess.run(command, check=True)
    ours = np.load(npy)[0]
    workers, differences = {}, {}
    for name, peer in peers.items():
        if weight_format not in peer.FORMATS:
            continue
        worker = Worker(name, weight_format, model, args.cache, args.threads)
        try:
            theirs = np.array(worker.ask(ids=ids))
        except RuntimeError as error:
            say(f"{weight_format}: {name} {error}")
            worker.close()
            continue
        difference = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))
        say(f"{weight_format}: {name}: logits differ from float32 by {100 * difference:.2g}%")
        if weight_format == "f32" and not difference < SAME:
            raise SystemExit(f"{name} does not compute the same model")
        workers[name], differences[name] = worker, difference
    return workers, differences


def measure_cell(args, model, workers, weight_format, batch, phase):
    ours, theirs = [], {name: [] for name in workers}
    for r in range(args.rounds):
        time.sleep(PAUSE)
        ours.append(measure_ours(args, model, weight_format, batch, phase))
        for name, times in theirs.items():
            slow = all(t > HOPELESS * o["ms"] for t, o in zip(times, ours))
            if len(times) < r or (r > 1 and slow):
                continue
            time.sleep(PAUSE)
            request = {"phase": phase, "batch": batch, "repetitions": args.repetitions}
            try:
                times.append(min(workers[name].ask(**request, **lengths(args, phase))))
            except RuntimeError as error:
                say(f"{weight_format}: {name} {error}")
        latest = "  ".join(f"{n} {t[-1]:.2f}" for n, t in theirs.items() if t)
        what = f"{weight_format} x{batch} {phase} {r + 1}/{args.rounds}"
        say(f"{what}: bml {ours[-1]['ms']:.2f}  {latest}")
    return {"format": weight_format, "batch": batch, "phase": phase, "ours": ours, "peers": theirs}


def available_peers(names):
    peers = {}
    for name in names:
        try:
            peers[name] = peer_class(name)
        except ImportError as error:
            say(f"skipped: {name} is not installed ({error})")
    return peers


def version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


def main():
    args = parse_arguments()
    started = time.time()
    model = args.cache / args.preset
    cache = args.cache = args.cache / f"{args.preset}-converted"
    cache.mkdir(parents=True, exist_ok=True)
    if not (model / "model.safetensors").exists():
        subprocess.run([args.bml, "synth", "-q", "--preset", args.preset, model], check=True)
    peers = available_peers(args.peers)
    results, agreement = [], {}
    for weight_format in args.formats:
        workers, agreement[weight_format] = start_workers(args, peers, weight_format, model)
        try:
            for batch in args.batches:
                for phase in args.phases:
                    cell = measure_cell(args, model, workers, weight_format, batch, phase)
                    results.append(cell)
        finally:
            for worker in workers.values():
                worker.close()
    run = {
        "date": time.strftime("%Y-%m-%d"),
        "minutes": math.ceil((time.time() - started) / 60),
        "processor": processor(),
        "threads": args.threads,
        "model": args.preset,
        "prompt": args.prompt,
        "context": args.context + args.steps // 2,
        "rounds": args.rounds,
        "versions": {p: version(p) for p in PACKAGES if version(p)},
        "peer_formats": {name: peer.FORMATS for name, peer in peers.items()},
        "logit_differences": agreement,
        "results": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(run, indent=1) + "\n")
    print(report.table(run))
    args.svg.write_text(report.svg(run))
    say(f"written: {args.json}, {args.svg}")


if __name__ == "__main__":
    main()
