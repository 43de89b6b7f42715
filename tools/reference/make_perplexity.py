"""Perplexity of the built-in model on a text, under each convention in use.

    make_perplexity.py [--model DIR] [--text FILE.txt.xz] [--out FILE.json]

Writes tests/data/storyteller_perplexity.json. The arithmetic is float32 on the weights of the file,
eager attention; log-probabilities are taken and summed in float64. See README.md for what the
conventions are.
"""

import argparse
import json
import lzma
import pathlib
import time

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2LMHeadModel

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = 8192  # tokens of the quick golden: the first of the text
BATCH = 4


def load_tokenizer(directory, special):
    """GPT2TokenizerFast by its parts; SPECIAL says whether <|endoftext|> in text is a token."""
    tokenizer = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"),
                                               str(directory / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return tokenizer


@torch.inference_mode()
def window_nlls(model, ids, starts, length):
    """For each window [start, start + length): nll of tokens start + 1 .. start + length, each from
    the position before it in that window (the last is the first token after the window), float64
    [windows, length]. Where the text ends earlier the rest is NaN."""
    result = torch.full((len(starts), length), float("nan"), dtype=torch.float64)
    full = [i for i, s in enumerate(starts) if s + length <= len(ids)]
    groups = [full[i:i + BATCH] for i in range(0, len(full), BATCH)]
    groups += [[i] for i in range(len(starts)) if starts[i] + length > len(ids)]
    for group in groups:
        batch = torch.stack([ids[starts[i]:starts[i] + length] for i in group])
        logits = model(batch, use_cache=False).logits
        for row, i in enumerate(group):
            targets = ids[starts[i] + 1:starts[i] + 1 + batch.shape[1]]
            scores = logits[row, :len(targets)].double()
            chosen = scores.gather(1, targets[:, None])[:, 0]
            result[i, :len(targets)] = torch.logsumexp(scores, 1) - chosen
    return result


def summary(nlls):
    """nlls: float64 of the tokens scored."""
    total = nlls.sum().item()
    return {"scored": len(nlls), "nll": total,
            "perplexity": torch.exp(torch.tensor(total / len(nlls), dtype=torch.float64)).item()}


def conventions(nlls, starts, n, length, stride):
    """The numbers for a text of N tokens, from what its windows (or a longer text's) give."""
    hugging_face, continued, weighted, weight, end = [], [], 0.0, 0, 0
    for i, start in enumerate(starts):
        last = min(start + length, n)
        # Hugging Face: the window's new tokens, each from the position before it in the window; a
        # window's first token has none.
        own = nlls[i, max(end, start + 1) - start - 1:last - start - 1]
        hugging_face.append(own)
        # Its recipe then weighs each window's mean by one less than its labels, although only
        # the first window lost one.
        if len(own):
            weighted += own.mean().item() * (last - end - 1)
            weight += last - end - 1
        # Continued: also the first token after the window, from the window's last position.
        continued.append(nlls[i, end - start:min(last, n - 1) - start])
        end = last
        if end == n:
            break
    recipe = torch.exp(torch.tensor(weighted / weight, dtype=torch.float64)).item()
    return {"stride": stride,
            "hugging_face": summary(torch.cat(hugging_face)) | {"recipe_perplexity": recipe},
            "continued": summary(torch.cat(continued))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/storyteller")
    parser.add_argument("--text", type=pathlib.Path,
                        default=ROOT.parent / "shared/corpus/valid.txt.xz")
    parser.add_argument("--out", type=pathlib.Path,
                        default=ROOT / "tests/data/storyteller_perplexity.json")
    parser.add_argument("--strides", type=int, nargs="*", default=[1024, 512])
    args = parser.parse_args()

    text = lzma.open(args.text).read().decode("utf-8")
    model = GPT2LMHeadModel.from_pretrained(args.model, dtype=torch.float32,
                                            attn_implementation="eager").eval()
    length = model.config.n_positions
    result = {"text_bytes": len(text.encode("utf-8")), "window": length, "prefix": PREFIX}
    for name, special in (("plain", False), ("special", True)):
        ids = torch.tensor(load_tokenizer(args.model, special).encode(
            text, add_special_tokens=False).ids)
        result[name] = {"tokens": len(ids), "full": [], "first": []}
        for stride in args.strides:
            began = time.time()
            starts = list(range(0, len(ids), stride))
            nlls = window_nlls(model, ids, starts, length)
            result[name]["full"].append(conventions(nlls, starts, len(ids), length, stride))
            result[name]["first"].append(conventions(nlls, starts, PREFIX, length, stride))
            print(name, f"{time.time() - began:.0f} s", json.dumps(result[name]["full"][-1]),
                  flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
