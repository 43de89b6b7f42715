"""CTranslate2. It has no call for one step over cached keys: decoding is timed from the first token
that a generation reports to the last, and the time to the first token is the prefill."""

import time

import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerDecoderModelSpec

from checkpoint import LINEARS


def set_linear(spec, weight, bias=None):
    spec.weight = np.ascontiguousarray(weight)
    if bias is not None:
        spec.bias = bias


def convert(checkpoint, directory):
    """What ctranslate2.converters.TransformersConverter does for GPT-2, without a tokenizer."""
    spec = TransformerDecoderModelSpec.from_config(
        checkpoint.n_layer, checkpoint.n_head, activation=Activation.GELUTanh
    )
    decoder = spec.decoder

    def set_norm(norm, name):
        norm.gamma = checkpoint[name + ".weight"]
        norm.beta = checkpoint[name + ".bias"]

    decoder.scale_embeddings = False
    decoder.embeddings.weight = checkpoint["wte.weight"]
    decoder.position_encodings.encodings = checkpoint["wpe.weight"]
    set_linear(decoder.projection, checkpoint["wte.weight"])
    set_norm(decoder.layer_norm, "ln_f")
    for i, layer in enumerate(decoder.layer):
        set_norm(layer.self_attention.layer_norm, f"h.{i}.ln_1")
        set_norm(layer.ffn.layer_norm, f"h.{i}.ln_2")
        linears = (*layer.self_attention.linear[:2], layer.ffn.linear_0, layer.ffn.linear_1)
        for linear, name in zip(linears, LINEARS):
            weight = checkpoint.layer(i, name + ".weight")
            set_linear(linear, weight.T, checkpoint.layer(i, name + ".bias"))
    names = [str(i) for i in range(checkpoint.vocab_size)]
    names[-1] = "<unk>"
    spec.register_vocabulary(names)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "<unk>"
    spec.config.layer_norm_epsilon = checkpoint.epsilon
    spec.validate()
    spec.optimize()
    directory.mkdir(parents=True, exist_ok=True)
    spec.save(str(directory))


def supported_formats():
    types = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "q8": "int8_float32"}
    supported = ctranslate2.get_supported_compute_types("cpu")
    return {ours: theirs for ours, theirs in types.items() if theirs in supported}


class CTranslate2:
    FORMATS = supported_formats()
    # Its default on AMD, oneDNN, takes six times as long for one row in float32.
    ENVIRONMENT = {"f32": {"CT2_USE_MKL": "1"}}

    def __init__(self, checkpoint, weight_format, threads, cache):
        self.vocab_size = checkpoint.vocab_size
        directory = cache / "ctranslate2"
        if not (directory / "model.bin").exists():
            convert(checkpoint, directory)
        self.generator = ctranslate2.Generator(
            str(directory),
            compute_type=self.FORMATS[weight_format],
            intra_threads=threads,
            inter_threads=1,
        )

    def start(self, batch, capacity):
        pass

    def generate(self, prompts, n, callback=None):
        self.generator.generate_batch(
            prompts,
            min_length=n,
            max_length=n,
            include_prompt_in_result=False,
            callback=callback,
        )

    def prompts(self, batch, length):
        ids = np.random.default_rng(1).integers(0, self.vocab_size - 1, (batch, length))
        return [[str(i) for i in row] for row in ids]

    def prefill(self, batch, length):
        prompts = self.prompts(batch, length)
        return lambda: self.generate(prompts, 1), 1

    def decode(self, batch, context, steps):
        prompts = self.prompts(batch, context)
        reported = {}  # step: when its last sequence was

        def on_token(result):
            reported[result.step] = time.perf_counter()

        def run():
            self.generate(prompts, 1 + steps, on_token)
            return reported[steps] - reported[0]

        return run, steps

    def forward(self, tokens, position):
        view = self.generator.forward_batch(tokens.tolist())
        self.last = np.array(view)[0, -1]

    def logits(self):
        return self.last
