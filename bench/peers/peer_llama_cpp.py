"""llama.cpp, and so ggml, through the C functions that llama-cpp-python exposes."""

import os

import gguf
import llama_cpp as c
import numpy as np

Type = gguf.GGMLQuantizationType

GGUF_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def write_gguf(checkpoint, path, linear_type, table_type):
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(checkpoint.n_layer)
    writer.add_context_length(checkpoint.n_positions)
    writer.add_embedding_length(checkpoint.n_embd)
    writer.add_feed_forward_length(checkpoint.n_inner)
    writer.add_head_count(checkpoint.n_head)
    writer.add_layer_norm_eps(checkpoint.epsilon)
    writer.add_tokenizer_model("no_vocab")  # ids in, ids out
    writer.add_vocab_size(checkpoint.vocab_size)

    def add(name, array, qtype=Type.F32):
        data = gguf.quants.quantize(np.ascontiguousarray(array), qtype)
        writer.add_tensor(name, data, raw_dtype=qtype)

    add("token_embd.weight", checkpoint["wte.weight"], table_type)
    add("position_embd.weight", checkpoint["wpe.weight"])
    for part in ("weight", "bias"):
        add(f"output_norm.{part}", checkpoint[f"ln_f.{part}"])
        for i in range(checkpoint.n_layer):
            for ours, theirs in GGUF_NAMES.items():
                array = checkpoint.layer(i, f"{ours}.{part}")
                if array.ndim == 2:
                    add(f"blk.{i}.{theirs}.{part}", array.T, linear_type)
                else:
                    add(f"blk.{i}.{theirs}.{part}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    # The type of the linear weights, and of the embeddings, which are the head too. As in ours,
    # they keep 8 bits beside 4-bit weights.
    TYPES = {
        "f32": (Type.F32, Type.F32),
        "bf16": (Type.BF16, Type.BF16),
        "f16": (Type.F16, Type.F16),
        "q8": (Type.Q8_0, Type.Q8_0),
        "q4": (Type.Q4_0, Type.Q8_0),
    }
    FORMATS = {ours: types[0].name.lower() for ours, types in TYPES.items()}

    def __init__(self, checkpoint, weight_format, threads, cache):
        self.threads = threads
        self.vocab_size = checkpoint.vocab_size
        self.context = None
        path = cache / f"{weight_format}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            write_gguf(checkpoint, part, *self.TYPES[weight_format])
            os.replace(part, path)
        self.quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self.quiet, None)
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(
            str(path).encode(), c.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")

    def start(self, batch, capacity):
        if self.context:
            c.llama_batch_free(self.batch)
            c.llama_free(self.context)
        params = c.llama_context_default_params()
        params.n_ctx = batch * capacity
        params.n_batch = batch * capacity
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self.threads
        self.context = c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = c.llama_get_memory(self.context)
        self.batch = c.llama_batch_init(batch * capacity, 0, 1)

    def forward(self, tokens, position):
        n_sequences, length = tokens.shape
        batch = self.batch
        batch.n_tokens = tokens.size
        i = 0
        for s, row in enumerate(tokens.tolist()):
            c.llama_memory_seq_rm(self.memory, s, position, -1)
            for t, token in enumerate(row):
                batch.token[i] = token
                batch.pos[i] = position + t
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = s
                batch.logits[i] = t + 1 == length
                i += 1
        self.last = length - 1
        if c.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        c.llama_synchronize(self.context)

    def logits(self):
        row = c.llama_get_logits_ith(self.context, self.last)
        return np.ctypeslib.as_array(row, (self.vocab_size,))
