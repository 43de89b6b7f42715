"""PyTorch, eager and compiled: GPT-2 written for speed, with a cache of fixed size in place of
transformers' growing one, so that it compiles to one graph a shape."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn import LayerNorm, Module, ModuleList

from checkpoint import LINEARS

BLOCK = 32  # weights to a scale, 4 bits


def add_constants(module, **tensors):
    """As buffers: only those can the compiler freeze."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)


class Int8Linear(Module):
    """Integer products: activations are quantised on the fly, weights have a scale a row."""

    def __init__(self, weight, bias):
        super().__init__()
        scales = (weight.abs().amax(1) / 127).double()
        zeros = torch.zeros(len(weight), dtype=torch.long)
        quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantised, bias)

    def forward(self, x):
        return torch.ops.quantized.linear_dynamic(x, self.packed, reduce_range=False)


class Int4Linear(Module):
    """4-bit weights in blocks, bfloat16 activations."""

    def __init__(self, weight, bias):
        super().__init__()
        self.n_out = len(weight)
        weight = F.pad(weight, (0, 0, 0, -len(weight) % 16))  # the packer asks for that
        blocks = weight.view(len(weight), -1, BLOCK)
        scales = blocks.abs().amax(2).clamp(min=1e-8) / 7
        quantised = (blocks / scales[..., None]).round().clamp(-8, 7) + 8
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], -1)
        add_constants(
            self,
            weight=pack(quantised.view_as(weight).int(), 1),
            scales=scales_and_zeros.transpose(0, 1).contiguous().bfloat16(),
            bias=None if bias is None else bias.bfloat16(),
        )

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, BLOCK, self.scales)
        y = y[:, : self.n_out].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class FloatLinear(Module):
    """F.linear where it is fast, for one row, and oneDNN's packed weights for more."""

    def __init__(self, weight, bias, dtype, pack):
        super().__init__()
        bias = None if bias is None else bias.to(dtype)
        add_constants(self, weight=weight.to(dtype), bias=bias)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight) if pack else None

    def forward(self, x):
        if self.packed is None or x.numel() == x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Block(Module):
    def __init__(self, checkpoint, i, make_linear):
        super().__init__()
        self.n_head = checkpoint.n_head
        self.ln_1 = layer_norm(checkpoint, f"h.{i}.ln_1")
        self.ln_2 = layer_norm(checkpoint, f"h.{i}.ln_2")
        self.qkv, self.out, self.up, self.down = (
            make_linear(
                torch.tensor(checkpoint.layer(i, name + ".weight").T).contiguous(),
                torch.tensor(checkpoint.layer(i, name + ".bias")),
            )
            for name in LINEARS
        )

    def forward(self, x, k_cache, v_cache, position, mask):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, -1).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(width, -1)
        )
        k_cache.index_copy_(2, position, k)
        v_cache.index_copy_(2, position, v)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k_cache, v_cache, mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


def layer_norm(checkpoint, name):
    norm = LayerNorm(checkpoint.n_embd, eps=checkpoint.epsilon)
    norm.weight.data = torch.tensor(checkpoint[name + ".weight"])
    norm.bias.data = torch.tensor(checkpoint[name + ".bias"])
    return norm


class GPT2(Module):
    def __init__(self, checkpoint, make_linear, dtype):
        super().__init__()
        wte = torch.tensor(checkpoint["wte.weight"])
        self.head = make_linear(wte, None)
        add_constants(self, wte=wte.to(dtype), wpe=torch.tensor(checkpoint["wpe.weight"]).to(dtype))
        self.ln_f = layer_norm(checkpoint, "ln_f")
        self.blocks = ModuleList(
            Block(checkpoint, i, make_linear) for i in range(checkpoint.n_layer)
        )
        self.to(dtype)

    def forward(self, tokens, position, k_caches, v_caches):
        """tokens [B, T], position [T]: those of the tokens."""
        x = F.embedding(tokens, self.wte) + F.embedding(position, self.wpe)
        mask = None
        if tokens.shape[1] == 1:
            seen = torch.arange(k_caches[0].shape[2]) <= position
            mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -torch.inf)
            mask = mask.view(1, 1, 1, -1)
        for block, k_cache, v_cache in zip(self.blocks, k_caches, v_caches):
            x = block(x, k_cache, v_cache, position, mask)
        return self.head(self.ln_f(x[:, -1]))


class Eager:
    FORMATS = {
        "f32": "float32",
        "bf16": "bfloat16",
        "f16": "float16",
        "q8": "int8 (fbgemm)",
        "q4": f"int4 block {BLOCK}",
    }
    KINDS = {
        "f32": (partial(FloatLinear, dtype=torch.float32, pack=True), torch.float32),
        "bf16": (partial(FloatLinear, dtype=torch.bfloat16, pack=True), torch.bfloat16),
        # oneDNN has no float16 for this kind of processor
        "f16": (partial(FloatLinear, dtype=torch.float16, pack=False), torch.float16),
        "q8": (Int8Linear, torch.float32),
        "q4": (Int4Linear, torch.bfloat16),
    }

    def __init__(self, checkpoint, weight_format, threads, cache):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        make_linear, self.dtype = self.KINDS[weight_format]
        self.checkpoint = checkpoint
        self.model = self.step = GPT2(checkpoint, make_linear, self.dtype).eval()

    def start(self, batch, capacity):
        c = self.checkpoint
        shape = (batch, c.n_head, capacity, c.n_embd // c.n_head)
        # A tensor a layer: the compiler would copy the whole of one for all layers.
        self.caches = [
            [torch.zeros(shape, dtype=self.dtype) for _ in range(c.n_layer)] for _ in "kv"
        ]

    def forward(self, tokens, position):
        positions = torch.arange(position, position + tokens.shape[1])
        self.last = self.step(torch.from_numpy(tokens), positions, *self.caches)

    def logits(self):
        return self.last[0].float().numpy()


def plain(dtype):
    """The compiler packs by itself."""
    return partial(FloatLinear, dtype=dtype, pack=False), dtype


class Compiled(Eager):
    # What it can make of integer weights is slower than Eager's.
    FORMATS = {"f32": "float32", "bf16": "bfloat16"}
    KINDS = {"f32": plain(torch.float32), "bf16": plain(torch.bfloat16)}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        import torch._inductor.config as inductor

        inductor.freezing = True  # weights become constants, packed for the kernels
        inductor.max_autotune = True  # in float32 several times faster than MKL, the default
        inductor.cpp_wrapper = True  # no Python between the kernels
        self.step = torch.compile(self.model, dynamic=False)
