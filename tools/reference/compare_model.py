"""Compares the bml program with transformers on any model directory.

    compare_model.py --bml build/bml --model DIR [--prompt TEXT] [--tokens N]
                     [--text FILE [--stride N] [--limit BYTES]]

For whoever has a real checkpoint, such as gpt2 itself. Checks the logits of a prompt, a greedy
continuation and, given a text file, its perplexity. Exit status 0 when all agree.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from make_perplexity import conventions, window_nlls

PROMPT = "In a shocking finding, scientists discovered a herd of unicorns living in"


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr.decode(errors='replace')}")
    return done.stdout


def check(name, good, detail):
    print(f"{'ok  ' if good else 'FAIL'} {name}: {detail}", flush=True)
    return good


@torch.inference_mode()
def greedy_of(model, prompt, count, n_tokens):
    """Ids, and the margin between the two best logits at each step."""
    ids, margins = list(prompt), []
    for _ in range(count):
        row = model(torch.tensor([ids]), use_cache=False).logits[0, -1, :n_tokens]
        best, index = row.topk(2)
        margins.append((best[0] - best[1]).item())
        ids.append(int(index[0]))
    return ids[len(prompt):], margins


def compare_logits(args, model, prompt):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "logits.npy"
        run(args.bml, "logits", "-m", args.model, "-p", args.prompt, "--out", path)
        ours = np.load(path)
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    if ours.shape != theirs.shape:
        return check("logits", False, f"shape {ours.shape}, should be {theirs.shape}")
    off = np.abs(ours.astype(np.float64) - theirs).max()
    allowed = 1e-4 * max(np.abs(theirs).max() / 10, 1)
    return check("logits", off <= allowed, f"off by {off:.2e}, {allowed:.2e} allowed")


def compare_greedy(args, model, prompt, n_tokens):
    ours = json.loads(run(args.bml, "generate", "-m", args.model, "-p", args.prompt, "--greedy",
                          "--ignore-eos", "--json", "-q", "-n", args.tokens))
    if ours["prompt_ids"] != prompt:
        return check("prompt ids", False, f"{ours['prompt_ids']}, should be {prompt}")
    theirs, margins = greedy_of(model, prompt, args.tokens, n_tokens)
    if ours["ids"] == theirs:
        return check("greedy", True, f"{len(theirs)} ids, least margin {min(margins):.1e}")
    at = next((i for i, (a, b) in enumerate(zip(ours["ids"], theirs)) if a != b),
              min(len(ours["ids"]), len(theirs)))
    margin = f"{margins[at]:.1e}" if at < len(margins) else "none"
    return check("greedy", False, f"differs at step {at}, where the margin is {margin}")


def compare_perplexity(args, model, tokenizer):
    text = args.text.read_bytes()[:args.limit].decode("utf-8", errors="ignore")
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False,
                                        split_special_tokens=True))
    length = model.config.n_positions
    stride = args.stride or length
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "text"
        path.write_bytes(text.encode("utf-8"))
        ours = json.loads(run(args.bml, "score", "-m", args.model, path, "--stride", stride,
                              "--json"))
    if [token["id"] for token in ours["tokens"]] != ids.tolist():
        return check("text ids", False, "differ")
    starts = list(range(0, len(ids), stride))
    nlls = window_nlls(model, ids, starts, length)
    both = conventions(nlls, starts, len(ids), length, stride)
    name = "hugging_face"
    theirs = both[name]["perplexity"]
    off = ours["perplexity"] / theirs - 1
    return check("perplexity", abs(off) <= 1e-4, f"{ours['perplexity']:.6f}, {name} "
                 f"{theirs:.6f} ({off:+.1e}); {len(ids)} tokens, stride {stride}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bml", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--stride", type=int, default=0)
    parser.add_argument("--limit", type=int, default=200_000, help="bytes of the text to use")
    args = parser.parse_args()

    model = GPT2LMHeadModel.from_pretrained(args.model, dtype=torch.float32,
                                            attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, clean_up_tokenization_spaces=False)
    # Prompts and texts are plain: "<|endoftext|>" in them is not the token.
    prompt = tokenizer.encode(args.prompt, add_special_tokens=False, split_special_tokens=True)
    good = compare_logits(args, model, prompt)
    good &= compare_greedy(args, model, prompt, min(len(tokenizer), model.config.vocab_size))
    if args.text:
        good &= compare_perplexity(args, model, tokenizer)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
