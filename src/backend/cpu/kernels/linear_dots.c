/*
 * out = x W' + bias with W stored [out, in]: the tied head, and nn.Linear.
 *
 * Every output is a dot product of two rows, summed in VL interleaved lanes that are added up at
 * the end: the same order for every batch, blocking and number of threads. A tile is VL sums, kept
 * in registers and added up together: tokens x outputs, or one token's outputs.
 */
#include "backend/cpu/kernels/linear.h"

enum {
    TILE_TOKENS = VL == 16 ? 4 : 2,
    TILE_OUTS = VL / TILE_TOKENS,
    BLOCK_BYTES = 384 << 10 /* of x that stay in the second-level cache */
};

typedef bml_linear_job job;

/* TOKENS x OUTS = VL sums, of which the first N_OUTS outputs of each token exist. AHEAD asks for
 * the rows of W behind these, which come next. */
static inline __attribute__((always_inline)) void tile(const job *j, bml_dtype dtype, size_t tokens,
                                                       size_t outs, size_t n_outs, bool ahead,
                                                       size_t token, size_t o)
{
    vf acc[VL] = {0}; /* [tokens][outs] */
    const float *x[VL];
    const void *w[VL];
    for (size_t t = 0; t < tokens; t++)
        x[t] = j->x + (token + t) * j->n_in;
    for (size_t r = 0; r < outs; r++) {
        size_t row = o + (r < n_outs ? r : n_outs - 1);
        w[r] = (const char *)j->w->buffer.data + row * j->n_in * bml_dtype_size(dtype);
    }

    size_t i = 0;
    for (; i + VL <= j->n_in; i += VL) {
        vf xs[VL];
        for (size_t t = 0; t < tokens; t++)
            xs[t] = vf_load(x[t] + i);
        for (size_t r = 0; r < outs; r++) {
            vf ws = vf_load_as(dtype, w[r], i);
            if (ahead && i * bml_dtype_size(dtype) % 64 == 0) /* the rows after these */
                __builtin_prefetch((const char *)w[r] +
                                   (outs * j->n_in + i) * bml_dtype_size(dtype));
            for (size_t t = 0; t < tokens; t++)
                acc[t * outs + r] = vf_fma(xs[t], ws, acc[t * outs + r]);
        }
    }
    int tail = (int)(j->n_in - i);
    if (tail)
        for (size_t r = 0; r < outs; r++) {
            vf ws = vf_load_as_n(dtype, w[r], i, tail);
            for (size_t t = 0; t < tokens; t++)
                acc[t * outs + r] = vf_fma(vf_load_n(x[t] + i, tail), ws, acc[t * outs + r]);
        }

    float sums[VL];
    vf_store(sums, vf_sum_all(acc));
    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < n_outs; r++) {
            float bias = j->bias ? j->bias[o + r] : 0;
            j->out[(token + t) * j->n_out + o + r] = sums[t * outs + r] + bias;
        }
}

static inline __attribute__((always_inline)) void run(const job *j, bml_dtype dtype, size_t begin,
                                                      size_t end)
{
    size_t block = BLOCK_BYTES / (j->n_in * sizeof(float)) / TILE_TOKENS * TILE_TOKENS;
    if (block < TILE_TOKENS)
        block = TILE_TOKENS;
    for (size_t first = 0; first < j->n_tokens; first += block) {
        size_t last = j->n_tokens - first < block ? j->n_tokens : first + block;
        size_t tiled = first + (last - first) / TILE_TOKENS * TILE_TOKENS;
        /* VL outputs at a time: as one row of tiles, and token by token for the rest. */
        for (size_t o = begin; o < end; o += VL) {
            size_t n = end - o < VL ? end - o : VL;
            for (size_t part = 0; part < n; part += TILE_OUTS) {
                size_t n_outs = n - part < TILE_OUTS ? n - part : TILE_OUTS;
                for (size_t t = first; t < tiled; t += TILE_TOKENS)
                    tile(j, dtype, TILE_TOKENS, TILE_OUTS, n_outs, t == first, t, o + part);
            }
            for (size_t t = tiled; t < last; t++)
                tile(j, dtype, 1, VL, n, tiled == first, t, o);
        }
    }
}

void KERNEL(linear_dots)(const bml_linear_job *j, size_t begin, size_t end)
{
    switch (j->w->dtype) {
    case BML_F32:
        run(j, BML_F32, begin, end);
        break;
    case BML_BF16:
        run(j, BML_BF16, begin, end);
        break;
    default:
        run(j, BML_F16, begin, end);
    }
    bml_linear_finish_stored(j, begin, end);
}
