"""Goldens of the fourteen kernels: tests/data/kernels/kernels.safetensors.

Inputs are float32; outputs are computed by NumPy in float64 and rounded to float32. A case's
tensors are named KERNEL.N.NAME; README.md lists them. Seeded: the same bytes on every run.
"""

import math
import pathlib

import numpy as np
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/data/kernels/kernels.safetensors"

rng = np.random.default_rng(20240614)
tensors = {}
counts = {}


def case(kernel, **values):
    """Adds a case: integers and integer arrays as I32, all else as F32."""
    number = counts.get(kernel, 0)
    counts[kernel] = number + 1
    for name, value in values.items():
        value = np.asarray(value)
        dtype = np.int32 if value.dtype.kind in "iub" else np.float32
        tensors[f"{kernel}.{number}.{name}"] = np.ascontiguousarray(value, dtype=dtype)


def normal(*shape, scale=1.0):
    """Random float32 values, as float64 so that what is computed from them is."""
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(np.float64)


def f32(value):
    return float(np.float32(value))


def softmax_rows(x):
    """Over the last axis; a row of all -inf gives zeros."""
    top = x.max(-1, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(top), 0.0, top))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def embedding():
    for vocab, positions, width, n in ((7, 5, 3, 4), (67, 40, 33, 9), (10, 6, 128, 1)):
        wte, wpe = normal(vocab, width), normal(positions, width)
        token, position = rng.integers(0, vocab, n), rng.integers(0, positions, n)
        token[0], position[0] = vocab - 1, positions - 1
        if n > 2:
            token[1], position[1] = 0, 0
        case("embedding", wte=wte, wpe=wpe, token=token, position=position,
             out=wte[token] + wpe[position])


def layernorm():
    def add(x, epsilon, with_bias=True, row=None):
        width = x.shape[1]
        weight, bias = normal(width) + 1, normal(width)
        weight = weight.astype(np.float32).astype(np.float64)
        chosen = x if row is None else x[row]
        mean = chosen.mean(1, keepdims=True)
        variance = ((chosen - mean) ** 2).mean(1, keepdims=True)
        out = (chosen - mean) / np.sqrt(variance + f32(epsilon)) * weight
        values = dict(x=x, weight=weight, epsilon=epsilon)
        if with_bias:
            out = out + bias
            values["bias"] = bias
        if row is not None:
            values["row"] = row
        case("layernorm", out=out, **values)

    add(normal(3, 7), 1e-5)
    add(normal(5, 33), 1e-5, with_bias=False)
    add(normal(2, 384), 1e-3)
    add(normal(1, 1), 1e-5)
    add(normal(4, 65, scale=1e-3), 1e-6)
    add(normal(7, 31), 1e-5, row=np.array([0, 3, 6]))
    # Constant rows: the variance is exactly zero.
    add(np.array([[3.25] * 21, [0.0] * 21, [-1e4] * 21]), 1e-5)
    # A mean far larger than the deviations: one-pass variance gives garbage here. Multiples of
    # 1/8 near 8192 with a mean that is a multiple too, so float32 two-pass is exact up to rounding.
    big = np.round(normal(3, 64) * 8) / 8
    add(8192 + big - np.round(big.mean(1, keepdims=True) * 8) / 8, 1e-5)


def matmul():
    for m, n, k in ((1, 1, 1), (3, 5, 7), (17, 33, 65), (1, 67, 31), (31, 2, 40)):
        a, b = normal(m, k), normal(k, n)
        case("matmul", a=a, b=b, out=a @ b)


def linear():
    for t, n_in, n_out, with_bias in ((1, 1, 1, True), (3, 7, 5, True), (5, 33, 17, False),
                                      (1, 65, 70, True), (13, 48, 31, True), (2, 129, 3, False)):
        x, w, bias = normal(t, n_in), normal(n_in, n_out, scale=0.3), normal(n_out)
        out = x @ w + (bias if with_bias else 0)
        values = dict(x=x, out=out)
        if with_bias:
            values["bias"] = bias
        case("linear", w=w, **values)
        case("linear_transposed", w=w.T, **values)


def qkv_split():
    for t, heads, size in ((1, 1, 1), (3, 2, 5), (4, 3, 11), (2, 2, 64)):
        qkv = normal(t, 3 * heads * size)
        q, k, v = qkv.reshape(t, 3, heads, size).transpose(1, 2, 0, 3)
        case("qkv_split", qkv=qkv, heads=heads, q=q, k=k, v=v)


def kv_append():
    # LAYERS, the layer written, SLOTS, N_CTX, HEADS, SIZE, then (slot, position) of each token.
    cases = ((1, 0, 1, 4, 1, 1, [(0, 0)]),
             (2, 1, 3, 5, 2, 3, [(2, 0), (0, 4), (2, 1), (1, 2)]),
             (3, 2, 2, 7, 3, 11, [(1, 6), (0, 0), (0, 1), (0, 2), (1, 0)]))
    for layers, layer, slots, n_ctx, heads, size, where in cases:
        k, v = normal(heads, len(where), size), normal(heads, len(where), size)
        cache_k = normal(slots, heads, n_ctx, size)
        cache_v = normal(slots, heads, n_ctx, size)
        out_k, out_v = cache_k.copy(), cache_v.copy()
        for t, (slot, position) in enumerate(where):
            out_k[slot, :, position] = k[:, t]
            out_v[slot, :, position] = v[:, t]
        case("kv_append", layers=layers, layer=layer, slot=np.array([s for s, _ in where]),
             position=np.array([p for _, p in where]), k=k, v=v, cache_k=cache_k, cache_v=cache_v,
             out_k=out_k, out_v=out_v)


def softmax():
    inf = np.inf
    case("softmax", x=[[2.5]], out=[[1.0]])
    for rows, cols, scale in ((3, 7, 1), (5, 33, 10), (2, 257, 3)):
        x = normal(rows, cols, scale=scale)
        case("softmax", x=x, out=softmax_rows(x))
    x = normal(5, 19, scale=4)
    x[0] = -inf                 # nothing to attend to: zeros
    x[1, 3:] = -inf             # a masked tail
    x[2, ::2] = -inf            # holes
    x[3, :] = -inf
    x[3, 18] = -5.0             # a single survivor: one
    case("softmax", x=x, out=softmax_rows(x))
    # Overflows without subtracting the maximum; and differences that underflow to zero.
    x = np.array([[1e4, 1e4, 0.0], [-1e4, -1e4, -1e4], [88.0, 89.0, 90.0], [3e38, -3e38, 3e38],
                  [0.0, -200.0, -100.0]])
    x = x.astype(np.float32).astype(np.float64)
    case("softmax", x=x, out=softmax_rows(x))


def attend(q, k, v, scale, seen):
    """q [H, D] against the first SEEN of k, v [H, N, D]."""
    scores = np.einsum("hd,hnd->hn", q, k[:, :seen]) * f32(scale)
    return np.einsum("hn,hnd->hd", softmax_rows(scores), v[:, :seen])


def attention():
    for t, heads, size, scale in ((1, 1, 1, 1.0), (5, 2, 3, 3 ** -0.5), (9, 3, 11, 11 ** -0.5),
                                  (17, 1, 2, 1.0), (33, 2, 8, 0.125), (4, 1, 96, 96 ** -0.5)):
        q, k, v = normal(heads, t, size), normal(heads, t, size), normal(heads, t, size)
        out = np.stack([attend(q[:, i], k, v, scale, i + 1) for i in range(t)], axis=1)
        case("attention", q=q, k=k, v=v, scale=scale, out=out)


def attention_cached():
    cases = ((1, 0, 1, 4, 1, 1, 1.0, [(0, 0)]),
             (2, 1, 3, 9, 2, 3, 3 ** -0.5, [(2, 0), (0, 8), (1, 3), (1, 4)]),
             (1, 0, 4, 21, 3, 11, 11 ** -0.5, [(3, 20), (1, 0), (0, 17), (2, 9), (0, 18)]),
             (2, 0, 2, 13, 1, 64, 0.125, [(1, 11), (0, 6)]))
    for layers, layer, slots, n_ctx, heads, size, scale, where in cases:
        q = normal(heads, len(where), size)
        cache_k, cache_v = normal(slots, heads, n_ctx, size), normal(slots, heads, n_ctx, size)
        out = np.stack([attend(q[:, t], cache_k[slot], cache_v[slot], scale, position + 1)
                        for t, (slot, position) in enumerate(where)], axis=1)
        case("attention_cached", layers=layers, layer=layer, scale=scale, q=q, out=out,
             slot=np.array([s for s, _ in where]), position=np.array([p for _, p in where]),
             cache_k=cache_k, cache_v=cache_v)


def heads_merge():
    for t, heads, size in ((1, 1, 1), (3, 2, 5), (4, 3, 11), (2, 2, 64)):
        x = normal(heads, t, size)
        case("heads_merge", x=x, out=x.transpose(1, 0, 2).reshape(t, heads * size))


def residual_add():
    for n in (1, 7, 33, 257):
        x, y = normal(n), normal(n)
        case("residual_add", x=x, y=y, out=x + y)


def gelu():
    values = np.concatenate([[0.0, -0.0, 13.3, -13.3, 40.0, -40.0, 1e4, -1e4, 1e-8, -1e-8, 5.5,
                              -5.5, -0.7517916], np.linspace(-10, 10, 101), normal(90, scale=2)])
    x = values.astype(np.float32).astype(np.float64)
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    # 1 + erf(x) cancels for x well below zero; erfc does not.
    erf_form = 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))
    for activation, out in ((0, tanh), (1, erf_form), (2, np.maximum(x, 0))):
        case("gelu", x=x, activation=activation, out=out)


def argmax():
    def add(x, n_valid):
        top = x[:, :n_valid]
        ids = np.where(np.isfinite(top).all(1), np.argmax(np.nan_to_num(top), 1), -1)
        case("argmax", x=x, n_valid=n_valid, out=ids)

    add(normal(1, 1), 1)
    add(normal(5, 97), 97)
    x = normal(6, 33)
    x[0, 4] = x[0, 20] = 50.0   # a tie: the lowest index
    x[1] = 0.0                  # all the same
    x[2] = -3e38
    x[2, 32] = -2e38            # the last one, and all are very negative
    x[3, 0] = 9.0               # the first one
    x[4, 31] = x[4, 32] = 7.5   # a tie at the end
    add(x, 33)
    x = normal(3, 33)
    x[0, 30] = 100.0            # beyond n_valid: not chosen
    x[1, 29] = 99.0             # the first id beyond
    x[2, 28] = 98.0             # the last valid one
    add(x, 29)
    x = normal(7, 41)
    x[0, 0] = x[1, 17] = x[2, 40] = np.nan
    x[3, 5] = np.inf
    x[4, 39] = -np.inf
    x[5] = np.nan
    add(x, 41)
    x = normal(2, 41)
    x[0, 35] = np.nan           # NaN where ids are padding does no harm
    x[1, 40] = np.inf
    add(x, 35)


for make in (embedding, layernorm, matmul, linear, qkv_split, kv_append, softmax, attention,
             attention_cached, heads_merge, residual_add, gelu, argmax):
    make()
for kernel, count in counts.items():
    tensors[f"{kernel}.cases"] = np.array(count, dtype=np.int32)
OUT.parent.mkdir(parents=True, exist_ok=True)
save_file(tensors, OUT)
print(OUT, OUT.stat().st_size, "bytes", counts)
