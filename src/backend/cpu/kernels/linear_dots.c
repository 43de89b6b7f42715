/*
 * out = x W' + bias with W stored [out, in]: the tied head, and nn.Linear.
 *
 * Every output is a dot product of two rows, summed in VL interleaved lanes that are added up at
 * the end: the same order for every batch, blocking and number of threads. Tiles of tokens x
 * outputs keep the sums in registers.
 */
#include "backend/cpu/kernels/linear.h"

enum {
    TILE_TOKENS = 4,
#if VL == 16
    TILE_OUTS = 6,
#else
    TILE_OUTS = 3,
#endif
    BLOCK_BYTES = 384 << 10 /* of x that stay in the second-level cache */
};

typedef bml_linear_job job;

static inline __attribute__((always_inline)) void tile(const job *j, bml_dtype dtype, size_t tokens,
                                                       size_t outs, size_t token, size_t o)
{
    vf acc[TILE_TOKENS][TILE_OUTS] = {0};
    const float *x[TILE_TOKENS];
    const void *w[TILE_OUTS];
    for (size_t t = 0; t < tokens; t++)
        x[t] = j->x + (token + t) * j->n_in;
    for (size_t r = 0; r < outs; r++)
        w[r] = (const char *)j->w->buffer.data + (o + r) * j->n_in * bml_dtype_size(dtype);

    size_t i = 0;
    for (; i + VL <= j->n_in; i += VL) {
        vf xs[TILE_TOKENS];
        for (size_t t = 0; t < tokens; t++)
            xs[t] = vf_load(x[t] + i);
        for (size_t r = 0; r < outs; r++) {
            vf ws = vf_load_as(dtype, w[r], i);
            for (size_t t = 0; t < tokens; t++)
                acc[t][r] = vf_fma(xs[t], ws, acc[t][r]);
        }
    }
    int tail = (int)(j->n_in - i);
    if (tail)
        for (size_t r = 0; r < outs; r++) {
            vf ws = vf_load_as_n(dtype, w[r], i, tail);
            for (size_t t = 0; t < tokens; t++)
                acc[t][r] = vf_fma(vf_load_n(x[t] + i, tail), ws, acc[t][r]);
        }

    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < outs; r++) {
            float sum = vf_sum(acc[t][r]);
            j->out[(token + t) * j->n_out + o + r] = j->bias ? sum + j->bias[o + r] : sum;
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
        for (size_t o = begin; o < end;) {
            bool full = end - o >= TILE_OUTS;
            size_t t = first;
            for (; t + TILE_TOKENS <= last; t += TILE_TOKENS)
                if (full)
                    tile(j, dtype, TILE_TOKENS, TILE_OUTS, t, o);
                else
                    tile(j, dtype, TILE_TOKENS, 1, t, o);
            for (; t < last; t++)
                if (full)
                    tile(j, dtype, 1, TILE_OUTS, t, o);
                else
                    tile(j, dtype, 1, 1, t, o);
            o += full ? TILE_OUTS : 1;
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
