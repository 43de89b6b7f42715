"""Tiny GPT-2 checkpoints, one for each way a checkpoint may look, with transformers' answers.

    make_variants.py [NAME...]

Each becomes tests/data/variants/NAME/: config.json, the weights, golden.json and golden.bin
(float32 logits of every prompt position, [T, vocab_size]). README.md says what is in them. Seeded:
a seed is taken only if the greedy continuation has no near tie, so that rounding cannot change it.
"""

import argparse
import copy
import json
import pathlib
import shutil
import struct
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/data/variants"
PROMPT, GREEDY = 24, 64
MIN_MARGIN = 2e-3   # between the two best logits at every greedy step
MIN_DISTINCT = 12   # different ids in the greedy continuation
MAX_ROUNDING = 2e-5  # between float32 and float64 arithmetic; a fifth of the tests' tolerance
MIN_EFFECT = 1e-3   # of what a variant is about, on the logits; ten times the tolerance

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SMALL = dict(vocab_size=101, n_positions=96, n_embd=20, n_layer=2, n_head=4)


# ---- weights ------------------------------------------------------------------------------------

def make_weights(config, rng, biases=True, untied=False):
    """Random float64 weights under Hugging Face's names without prefix, matrices [in, out]."""
    c, inner = config.n_embd, config.n_inner or 4 * config.n_embd

    def normal(*shape, scale):
        return torch.from_numpy(rng.standard_normal(shape) * scale)

    weights = {"wte.weight": normal(config.vocab_size, c, scale=0.4),
               "wpe.weight": normal(config.n_positions, c, scale=0.4)}

    def norm(name):
        weights[name + ".weight"] = 1 + normal(c, scale=0.2)
        if biases:
            weights[name + ".bias"] = normal(c, scale=0.1)

    def linear(name, n_in, n_out):
        weights[name + ".weight"] = normal(n_in, n_out, scale=0.25)
        if biases:
            weights[name + ".bias"] = normal(n_out, scale=0.1)

    for i in range(config.n_layer):
        norm(f"h.{i}.ln_1")
        linear(f"h.{i}.attn.c_attn", c, 3 * c)
        linear(f"h.{i}.attn.c_proj", c, c)
        norm(f"h.{i}.ln_2")
        linear(f"h.{i}.mlp.c_fc", c, inner)
        linear(f"h.{i}.mlp.c_proj", inner, c)
    norm("ln_f")
    if untied:
        weights["lm_head.weight"] = normal(config.vocab_size, c, scale=0.4)
    return weights


def is_linear(name):
    return name.endswith(".weight") and ".c_" in name


def build_reference(config, stored, dtype):
    """GPT2LMHeadModel of the weights as the file holds them."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    # Its upcasting takes nothing but float32; the same arithmetic in another order.
    config.reorder_and_upcast_attn &= dtype == torch.float32
    model = GPT2LMHeadModel(config).to(dtype).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        short = name.removeprefix("transformer.")
        if short in stored:
            # Through float32, as everything that computes in float32 sees them.
            tensor.copy_(stored[short].to(torch.float32))
        elif short == "lm_head.weight":
            tensor.copy_(stored["wte.weight"].to(torch.float32))
        elif short.endswith(".bias"):
            tensor.zero_()
        else:
            raise KeyError(name)
    model.load_state_dict(state)
    return model


# ---- what transformers answers ------------------------------------------------------------------

@torch.inference_mode()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def greedy_of(model, prompt, n_tokens):
    """GREEDY ids, the least margin, and how often a padding id was the largest."""
    ids, least, masked = list(prompt), float("inf"), 0
    for _ in range(GREEDY):
        row = logits_of(model, ids)[-1]
        masked += int(row.argmax() >= n_tokens)
        best, index = row[:n_tokens].topk(2)
        least = min(least, (best[0] - best[1]).item())
        ids.append(int(index[0]))
    return ids[len(prompt):], least, masked


def difference(a, b):
    """The largest, relative to the largest logit where that exceeds 10: as the tests compare."""
    scale = max(a.abs().max().item() / 10, 1.0)
    return (a.double() - b.double()).abs().max().item() / scale


# ---- files --------------------------------------------------------------------------------------

def write_by_hand(tensors, path):
    """A valid file whose data begins at an odd offset, with the header's keys in another order than
    the data and no metadata. The safetensors library always aligns."""
    names = sorted(tensors)
    header, data = {}, b""
    for name in names:
        raw = tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = next(k for k, v in DTYPES.items() if v == tensors[name].dtype)
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps({name: header[name] for name in reversed(names)}).encode()
    text += b" " * ((3 - len(text)) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_shards(tensors, directory, count):
    names, shards, where = list(tensors), [], {}
    for i in range(count):
        shards.append({name: tensors[name] for name in names[i::count]})
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file(shards[-1], directory / file, metadata={"format": "pt"})
        where |= {name: file for name in shards[-1]}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def byte_characters():
    """GPT-2's character for each byte."""
    plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


MERGES = ["h e", "Ġ t", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "Ġ s", "a t", "e n", "o r",
          "Ġ w", "in g", "o u", "n d", "Ġa nd", "Ġ o", "i s", "a n", "Ġ f", "e s", "l l"]


def write_tokenizer(directory):
    """256 bytes, a few merges and <|endoftext|>: returns the tokenizer."""
    tokens = [byte_characters()[b] for b in range(256)] + [m.replace(" ", "") for m in MERGES]
    vocab = {token: i for i, token in enumerate([*tokens, "<|endoftext|>"])}
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n",
                                          encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n",
                                          encoding="utf-8")
    tokenizer = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"),
                                               str(directory / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return tokenizer


# ---- a variant ----------------------------------------------------------------------------------

class Variant:
    """How one checkpoint looks. CONFIG goes over SMALL; DROP are keys left out of config.json;
    INSTEAD are settings under which the logits must differ clearly, else nothing is tested."""

    def __init__(self, config=None, *, prefix="transformer.", dtype="F32", linear=False,
                 biases=True, untied=False, tied_head=False, masks=None, shards=0, by_hand=False,
                 metadata=True, text=None, stops=False, drop=(), instead=None, loads=True):
        self.config = SMALL | (config or {})
        self.prefix, self.linear, self.biases = prefix, linear, biases
        self.dtype = dtype if callable(dtype) else lambda name: dtype
        self.untied, self.tied_head, self.masks = untied, tied_head, masks
        self.shards, self.by_hand, self.metadata = shards, by_hand, metadata
        self.text, self.stops, self.drop, self.instead = text, stops, drop, instead
        self.loads = loads  # whether transformers can load the files as they are

    def hf_config(self, **changes):
        return GPT2Config(**{"bos_token_id": None, "eos_token_id": None} | self.config | changes
                          | {"tie_word_embeddings": not self.untied})

    def config_json(self):
        config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
                  "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None,
                  "n_ctx": self.config["n_positions"], "scale_attn_weights": True,
                  "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
                  "tie_word_embeddings": not self.untied, "bos_token_id": None,
                  "eos_token_id": None} | self.config
        return {key: value for key, value in config.items() if key not in self.drop}

    def file_tensors(self, stored):
        """What goes into the files: names, layouts and companions of this variant."""
        tensors = {}
        for name, tensor in stored.items():
            full = name if name.startswith("lm_head.") else self.prefix + name
            if name.startswith("lm_head.") and self.prefix.startswith("_orig_mod."):
                full = "_orig_mod." + name
            tensors[full] = (tensor.T if self.linear and is_linear(name) else tensor).contiguous()
        if self.tied_head:
            head = ("_orig_mod." if self.prefix.startswith("_orig_mod.") else "") + "lm_head.weight"
            tensors[head] = stored["wte.weight"].clone()
        if self.masks is not None:
            dtype, size = self.masks
            triangle = torch.tril(torch.ones(size, size)).to(dtype)
            for i in range(self.config["n_layer"]):
                tensors[f"{self.prefix}h.{i}.attn.bias"] = triangle[None, None].clone()
                tensors[f"{self.prefix}h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return tensors


def attempt(name, variant, seed, directory):
    """Writes the variant if the seed is good; else says why it is not."""
    rng = np.random.default_rng(seed)
    config = variant.hf_config()
    weights = make_weights(config, rng, variant.biases, variant.untied)
    stored = {k: w.to(DTYPES[variant.dtype(k)]) for k, w in weights.items()}
    model = build_reference(config, stored, torch.float32)

    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    n_tokens = config.vocab_size
    if variant.text:
        tokenizer = write_tokenizer(directory)
        n_tokens = tokenizer.get_vocab_size()
        prompt = tokenizer.encode(variant.text).ids
    else:
        prompt = rng.integers(0, n_tokens, PROMPT).tolist()

    logits = logits_of(model, prompt)
    exact = logits_of(build_reference(config, stored, torch.float64), prompt)
    rounding = difference(exact, logits)
    if rounding > MAX_ROUNDING:
        return f"rounding {rounding:.1e}"
    greedy, margin, masked = greedy_of(model, prompt, n_tokens)
    if margin < MIN_MARGIN:
        return f"margin {margin:.1e}"
    if len(set(greedy)) < MIN_DISTINCT:
        return f"{len(set(greedy))} distinct ids"
    if n_tokens < config.vocab_size and masked == 0:
        return "no padding id ever wins"
    if variant.stops and config.eos_token_id not in greedy[4:60]:
        return "the end-of-text token does not come up"
    if variant.instead is not None:
        other = build_reference(variant.hf_config(**variant.instead), stored, torch.float32)
        effect = difference(logits, logits_of(other, prompt))
        if effect < MIN_EFFECT:
            return f"effect {effect:.1e}"

    golden = {"made_with": f"transformers {transformers.__version__}, float32, eager attention",
              "prompt_ids": prompt, "greedy": greedy, "min_margin": margin, "n_tokens": n_tokens}
    if variant.text:
        golden["prompt_text"] = variant.text
    if variant.stops:
        golden["stops_at"] = greedy.index(config.eos_token_id)
    (directory / "config.json").write_text(json.dumps(variant.config_json(), indent=1) + "\n")
    (directory / "golden.json").write_text(json.dumps(golden) + "\n")
    (directory / "golden.bin").write_bytes(logits.numpy().astype("<f4").tobytes())
    tensors = variant.file_tensors(stored)
    if variant.shards:
        write_shards(tensors, directory, variant.shards)
    elif variant.by_hand:
        write_by_hand(tensors, directory / "model.safetensors")
    else:
        save_file(tensors, directory / "model.safetensors",
                  metadata={"format": "pt"} if variant.metadata else None)

    if variant.loads:
        loaded = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
        if difference(logits, logits_of(loaded, prompt)) > 1e-6:
            raise SystemExit(f"{name}: transformers answers otherwise when it loads the files")
    print(f"{name}: seed {seed}, margin {margin:.4f}, rounding {rounding:.1e}, "
          f"{len(set(greedy))} distinct ids, largest logit {logits.abs().max():.1f}, "
          f"{sum(f.stat().st_size for f in directory.iterdir())} bytes")
    return None


def mixed(name):
    """A dtype for each kind of tensor, so that no two neighbours agree."""
    if name in ("wte.weight", "h.1.attn.c_attn.bias", "h.1.mlp.c_fc.weight"):
        return "BF16"
    if name.startswith("h.0.attn") or name == "h.1.ln_2.weight":
        return "F16"
    if name.startswith("h.0.ln") or name in ("h.1.mlp.c_proj.weight", "wpe.weight"):
        return "F64"
    return "F32"


COMPILED = "_orig_mod.transformer."
TEXT = "the king and the fox are singing"

VARIANTS = {
    # names
    "prefix-transformer": Variant(),
    "prefix-none": Variant(prefix=""),
    "prefix-compiled": Variant(prefix=COMPILED, loads=False),
    "prefix-orig-mod": Variant(prefix="_orig_mod.", loads=False),
    # mask buffers
    "masks-u8": Variant(prefix="", masks=(torch.uint8, 96)),
    "masks-bool": Variant(masks=(torch.bool, 96)),
    "masks-f32": Variant(masks=(torch.float32, 24)),
    "masks-f16": Variant(masks=(torch.float16, 20), dtype="F16"),
    # layouts; biases
    "linear-bias": Variant(linear=True, tied_head=True, loads=False),
    "linear-no-bias": Variant(linear=True, biases=False, tied_head=True, loads=False),
    "linear-no-bias-masks": Variant(linear=True, biases=False, tied_head=True, loads=False,
                                    masks=(torch.float32, 20)),
    "linear-square": Variant(dict(n_inner=20), linear=True, tied_head=True, loads=False),
    "linear-compiled-bf16": Variant(dict(n_embd=32), prefix=COMPILED, linear=True, biases=False,
                                    tied_head=True, dtype="BF16", loads=False),
    "linear-untied": Variant(linear=True, untied=True, loads=False),
    "conv1d-no-bias": Variant(biases=False, loads=False),
    # the head
    "head-untied": Variant(untied=True),
    "head-untied-no-prefix": Variant(untied=True, prefix="", dtype="BF16"),
    "head-tied-present": Variant(tied_head=True),
    # The config says tied, the file holds another head: transformers 5 then believes the file.
    "head-differs-though-tied": Variant(dict(tie_word_embeddings=True), untied=True),
    # dtypes
    "dtype-f64": Variant(dict(n_embd=16), dtype="F64"),
    "dtype-f16": Variant(dict(n_embd=28), dtype="F16"),
    "dtype-bf16": Variant(dict(n_embd=28), dtype="BF16"),
    "dtype-mixed": Variant(dtype=mixed),
    "dtype-f16-untied": Variant(untied=True, dtype="F16"),
    # containers
    "sharded": Variant(shards=3),
    "sharded-bf16-linear": Variant(shards=2, linear=True, untied=True, dtype="BF16", loads=False),
    "misaligned-f32": Variant(by_hand=True, loads=False),
    "misaligned-bf16": Variant(by_hand=True, dtype="BF16", loads=False),
    "misaligned-mixed": Variant(by_hand=True, dtype=mixed, loads=False),
    "metadata-absent": Variant(metadata=False),
    # configuration
    "config-minimal": Variant(drop=("activation_function", "layer_norm_epsilon", "n_inner", "n_ctx",
                                    "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
                                    "reorder_and_upcast_attn", "tie_word_embeddings",
                                    "bos_token_id", "eos_token_id")),
    "n-ctx-missing": Variant(drop=("n_ctx",)),
    "inner-odd": Variant(dict(n_inner=51)),
    "inner-square": Variant(dict(n_inner=20)),
    "epsilon": Variant(dict(layer_norm_epsilon=1e-2), instead=dict(layer_norm_epsilon=1e-5)),
    "scale-off": Variant(dict(scale_attn_weights=False), instead=dict(scale_attn_weights=True)),
    "scale-by-layer": Variant(dict(scale_attn_by_inverse_layer_idx=True, n_layer=3),
                              instead=dict(scale_attn_by_inverse_layer_idx=False)),
    "scale-off-by-layer": Variant(dict(scale_attn_weights=False, n_layer=3,
                                       scale_attn_by_inverse_layer_idx=True),
                                  instead=dict(scale_attn_by_inverse_layer_idx=False)),
    "reorder-upcast": Variant(dict(reorder_and_upcast_attn=True,
                                   scale_attn_by_inverse_layer_idx=True),
                              instead=dict(scale_attn_by_inverse_layer_idx=False)),
    # activations; gelu_new is everywhere else
    "activation-gelu": Variant(dict(activation_function="gelu"),
                               instead=dict(activation_function="gelu_new")),
    "activation-gelu-fast": Variant(dict(activation_function="gelu_fast"),
                                    instead=dict(activation_function="gelu")),
    "activation-gelu-pytorch-tanh": Variant(dict(activation_function="gelu_pytorch_tanh"),
                                            instead=dict(activation_function="gelu")),
    "activation-relu": Variant(dict(activation_function="relu"),
                               instead=dict(activation_function="gelu_new")),
    # heads
    "heads-of-11": Variant(dict(n_embd=33, n_head=3, n_inner=49)),
    "heads-of-1": Variant(dict(n_embd=24, n_head=24)),
    "heads-of-2": Variant(dict(n_embd=24, n_head=12)),
    "heads-of-64": Variant(dict(n_embd=64, n_head=1, n_layer=1), dtype="BF16"),
    "heads-of-48": Variant(dict(n_embd=96, n_head=2, n_layer=1, n_inner=64), dtype="F16"),
    "one-layer-one-head": Variant(dict(n_layer=1, n_head=1)),
    # ids
    "vocab-padded": Variant(dict(vocab_size=320, eos_token_id=279, bos_token_id=279), text=TEXT),
    "eos-zero": Variant(dict(eos_token_id=0, bos_token_id=0), stops=True),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="all variants when none is given")
    names = parser.parse_args().names or VARIANTS
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in names:
        first = zlib.crc32(name.encode())
        for seed in range(first, first + 400):
            reason = attempt(name, VARIANTS[name], seed, OUT / name)
            if reason is None:
                break
        else:
            raise SystemExit(f"{name}: no good seed; the last had: {reason}")


if __name__ == "__main__":
    main()
