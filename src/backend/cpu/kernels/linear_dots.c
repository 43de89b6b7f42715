/*
 * out = x W' + bias with W stored [out, in]: the tied head, and nn.Linear.
 *
 * Every output is a dot product of two rows, summed in VL interleaved lanes that are added up at
 * the end: the same order for every batch, blocking and number of threads. A tile is VL sums or
 * more, kept in registers and added up together: tokens x outputs, or one token's outputs.
 */
#include "backend/cpu/kernels/linear.h"

enum {
#if VL == 16
    TILE_TOKENS = 4,
#elif VL == 8
    TILE_TOKENS = 3, /* 12 sums, of 16 registers: 8 would wait for each other */
#else
    TILE_TOKENS = 2,
#endif
    TILE_OUTS = VL == 4 ? 2 : 4,
    ASK_OUTS = VL == 8 ? 2 * TILE_OUTS : TILE_OUTS,           /* so far ahead several tokens ask */
    TILE_SUMS = (TILE_TOKENS * TILE_OUTS + VL - 1) / VL * VL, /* as vf_sum_all takes them */
    BLOCK_BYTES = 384 << 10, /* of x that stay in the second-level cache */
    AHEAD_BYTES = 4096       /* how far ahead of a single token's stream memory is asked */
};

typedef bml_linear_job job;

static const char *row_of(const job *j, bml_dtype dtype, size_t row)
{
    return (const char *)j->w->buffer.data + row * j->n_in * bml_dtype_size(dtype);
}

/*
 * TOKENS x OUTS sums, lane by lane, of which the first N_OUTS outputs of each token exist. What
 * memory holds next is asked for meanwhile, LINES lines a step: in its own order, which is what the
 * processor's prefetchers take up. (Past the end this is harmless, a prefetch cannot fault.)
 */
static inline __attribute__((always_inline)) void
multiply(const job *j, bml_dtype dtype, size_t tokens, size_t outs, size_t n_outs, size_t token,
         size_t o, const char *next, size_t lines, vf *acc /* [tokens][outs] */)
{
    const float *x[VL];
    const char *w[VL];
    FOR_EACH (t, tokens)
        x[t] = j->x + (token + t) * j->n_in;
    FOR_EACH (r, outs) {
        w[r] = row_of(j, dtype, o + (r < n_outs ? r : n_outs - 1));
        FOR_EACH (t, tokens)
            acc[t * outs + r] = (vf){0};
    }
    size_t i = 0;
    for (; i + VL <= j->n_in; i += VL) {
        vf xs[VL];
        for (size_t line = 0; line < lines; line++, next += 64)
            __builtin_prefetch(next);
        FOR_EACH (t, tokens)
            xs[t] = vf_load(x[t] + i);
        FOR_EACH (r, outs) {
            vf ws = vf_load_as(dtype, w[r], i);
            FOR_EACH (t, tokens)
                acc[t * outs + r] = vf_fma(xs[t], ws, acc[t * outs + r]);
        }
    }
    int tail = (int)(j->n_in - i);
    if (tail)
        FOR_EACH (r, outs) {
            vf ws = vf_load_as_n(dtype, w[r], i, tail);
            FOR_EACH (t, tokens)
                acc[t * outs + r] = vf_fma(vf_load_n(x[t] + i, tail), ws, acc[t * outs + r]);
        }
}

static void store(const job *j, const vf acc[TILE_SUMS], size_t tokens, size_t outs, size_t n_outs,
                  size_t token, size_t o)
{
    float sums[TILE_SUMS];
    for (size_t i = 0; i < tokens * outs; i += VL)
        vf_store(sums + i, vf_sum_all(acc + i));
    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < n_outs; r++) {
            float bias = j->bias ? j->bias[o + r] : 0;
            j->out[(token + t) * j->n_out + o + r] = sums[t * outs + r] + bias;
        }
}

/* TOKENS x N_OUTS outputs. Share SHARE of N_SHARES of the rows that come next is asked for. */
static inline __attribute__((always_inline)) void tile(const job *j, bml_dtype dtype, size_t tokens,
                                                       size_t n_outs, size_t share, size_t n_shares,
                                                       size_t token, size_t o)
{
    vf acc[TILE_SUMS] = {0};
    const char *next = row_of(j, dtype, o + ASK_OUTS);
    size_t lines = 0;
    if (share < n_shares) {
        lines = (TILE_OUTS * VL * bml_dtype_size(dtype) / 64 + n_shares - 1) / n_shares;
        next += share * lines * 64 * (j->n_in / VL);
    }
    multiply(j, dtype, tokens, TILE_OUTS, n_outs, token, o, next, lines, acc);
    store(j, acc, tokens, TILE_OUTS, n_outs, token, o);
}

/* How many of LEFT tokens go together next: a tile's, but where one would stay alone two and two.
 */
static size_t tile_tokens(size_t left)
{
    if (TILE_TOKENS == 3 && (left == 2 || left == 4))
        return 2;
    return left >= TILE_TOKENS ? TILE_TOKENS : 1;
}

/* N outputs of one token, row by row: one sequential stream. */
static inline __attribute__((always_inline)) void one_token(const job *j, bml_dtype dtype, size_t n,
                                                            bool ahead, size_t token, size_t o)
{
    vf acc[TILE_SUMS] = {0};
    for (size_t r = 0; r < n; r++)
        multiply(j, dtype, 1, 1, 1, token, o + r, row_of(j, dtype, o + r) + AHEAD_BYTES, ahead,
                 acc + r);
    store(j, acc, 1, VL, n, token, o);
}

static inline __attribute__((always_inline)) void run(const job *j, bml_dtype dtype, size_t begin,
                                                      size_t end)
{
    size_t block = BLOCK_BYTES / (j->n_in * sizeof(float)) / TILE_TOKENS * TILE_TOKENS;
    if (block < TILE_TOKENS)
        block = TILE_TOKENS;
    for (size_t first = 0; first < j->n_tokens; first += block) {
        size_t last = j->n_tokens - first < block ? j->n_tokens : first + block;
        size_t tiled = first, n_tiles = 0, tokens;
        for (; (tokens = tile_tokens(last - tiled)) > 1; tiled += tokens)
            n_tiles++;
        size_t shares = n_tiles < 2 ? 1 : 2;
        /* VL outputs at a time: as one row of tiles, and token by token for the rest. */
        for (size_t o = begin; o < end; o += VL) {
            size_t n = end - o < VL ? end - o : VL;
            for (size_t part = 0; part < n; part += TILE_OUTS) {
                size_t n_outs = n - part < TILE_OUTS ? n - part : TILE_OUTS, share = 0;
                for (size_t t = first; t < tiled; t += tokens, share++) {
                    tokens = tile_tokens(last - t);
                    if (TILE_TOKENS != 3 || tokens == TILE_TOKENS)
                        tile(j, dtype, TILE_TOKENS, n_outs, share, shares, t, o + part);
                    else
                        tile(j, dtype, 2, n_outs, share, shares, t, o + part);
                }
            }
            for (size_t t = tiled; t < last; t++)
                one_token(j, dtype, n, t == first, t, o);
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
