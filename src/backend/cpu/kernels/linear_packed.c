/*
 * out = x W + bias for the quantised formats (backend/cpu/quant.h): integer dot products inside a
 * block, float32 sums over the blocks in order. Integers are exact, and the order of the float sums
 * is fixed: the same bits for every batch, split and number of threads.
 */
#include "backend/cpu/kernels/linear.h"
#include "backend/cpu/quant.h"

enum {
    VECS = BML_TILE / VL, /* vectors across a tile's outputs */
#if VL == 16
    MOST_TOKENS = 6, /* tokens and tiles that share each load; a batch of 8 goes as 4 and 4 */
    FEW_TOKENS = 4,
    TILES = 2,
#else
    MOST_TOKENS = 2,
    FEW_TOKENS = 2,
    TILES = 1,
#endif
    AHEAD_BYTES = 4096 /* how far ahead of a single token's stream memory is asked */
};

/* Four inputs of a block as vi_dot4 wants them. */
static inline int32_t four(const int8_t *q, size_t at)
{
    int32_t x4;
    memcpy(&x4, q + at, sizeof x4);
    return x4;
}

static inline void finish(const bml_linear_job *j, size_t token, size_t col, vf y)
{
    if (j->bias && col < j->n_out)
        y += j->n_out - col < VL ? vf_load_n(j->bias + col, (int)(j->n_out - col))
                                 : vf_load(j->bias + col);
    bml_linear_finish(j, token, col, y);
}

static inline __attribute__((always_inline)) void tile_q8(const bml_linear_job *j, size_t tokens,
                                                          size_t tiles, size_t ahead, size_t token,
                                                          size_t tile)
{
    size_t n_blocks = bml_n_blocks(j->n_in), tile_bytes = bml_tile_bytes(BML_WEIGHTS_Q8, j->n_in);
    const char *w = (const char *)j->w->buffer.data + tile * tile_bytes;
    const char *q = w + bml_tile_header(BML_WEIGHTS_Q8, j->n_in);
    bml_quant_row x[MOST_TOKENS];
    vf acc[MOST_TOKENS][TILES][VECS];
    FOR_EACH (t, tokens) {
        x[t] = bml_quant_row_at(j->quantized, j->n_in, token + t);
        FOR_EACH (n, tiles)
            FOR_EACH (v, VECS)
                acc[t][n][v] = (vf){0};
    }
    for (size_t b = 0; b < n_blocks; b++) {
        vi dot[MOST_TOKENS][TILES][VECS];
        FOR_EACH (t, tokens) {
            vi start = vi_dot4_start(x[t].correction[2 * b] + x[t].correction[2 * b + 1]);
            FOR_EACH (n, tiles)
                FOR_EACH (v, VECS)
                    dot[t][n][v] = start;
        }
        FOR_EACH (k, BML_BLOCK / 4)
            FOR_EACH (n, tiles)
                FOR_EACH (v, VECS) {
                    const char *at =
                        q + n * tile_bytes + (b * (BML_BLOCK / 4) + k) * 64 + v * 4 * VL;
                    vi row = vi_load(at);
                    if (ahead)
                        __builtin_prefetch(at + ahead);
                    FOR_EACH (t, tokens)
                        dot[t][n][v] =
                            vi_dot4(dot[t][n][v], row, four(x[t].q, b * BML_BLOCK + 4 * k));
                }
        FOR_EACH (n, tiles)
            FOR_EACH (v, VECS) {
                const uint16_t *scales = (const uint16_t *)(w + n * tile_bytes) + b * BML_TILE;
                vf scale = vf_from_bf16(vh_load(scales + v * VL));
                FOR_EACH (t, tokens)
                    acc[t][n][v] = vf_fma(__builtin_convertvector(dot[t][n][v], vf),
                                          scale * x[t].scale[b], acc[t][n][v]);
            }
    }
    FOR_EACH (t, tokens)
        FOR_EACH (n, tiles)
            FOR_EACH (v, VECS)
                finish(j, token + t, (tile + n) * BML_TILE + v * VL, acc[t][n][v]);
}

static inline __attribute__((always_inline)) void tile_q4(const bml_linear_job *j, size_t tokens,
                                                          size_t tiles, size_t ahead, size_t token,
                                                          size_t tile)
{
    size_t n_blocks = bml_n_blocks(j->n_in), tile_bytes = bml_tile_bytes(BML_WEIGHTS_Q4, j->n_in);
    const char *w = (const char *)j->w->buffer.data + tile * tile_bytes;
    const char *q = w + bml_tile_header(BML_WEIGHTS_Q4, j->n_in);
    uint8_t table[16];
    for (int i = 0; i < 16; i++)
        table[i] = (uint8_t)(bml_q4_levels[i] + 128);
    bml_quant_row x[MOST_TOKENS];
    vf acc[MOST_TOKENS][TILES][VECS];
    FOR_EACH (t, tokens) {
        x[t] = bml_quant_row_at(j->quantized, j->n_in, token + t);
        FOR_EACH (n, tiles)
            FOR_EACH (v, VECS)
                acc[t][n][v] = (vf){0};
    }
    for (size_t half = 0; half < 2 * n_blocks; half++) {
        vi dot[MOST_TOKENS][TILES][VECS];
        FOR_EACH (t, tokens) {
            vi start = vi_dot4_start(x[t].correction[half]);
            FOR_EACH (n, tiles)
                FOR_EACH (v, VECS)
                    dot[t][n][v] = start;
        }
        FOR_EACH (k, 4)
            FOR_EACH (n, tiles)
                FOR_EACH (v, VECS) {
                    const char *at = q + n * tile_bytes + (half * 4 + k) * 64 + v * 4 * VL;
                    vi row = vi_load(at);
                    if (ahead)
                        __builtin_prefetch(at + ahead);
                    vi low = vi_lookup16(table, row & 0x0f0f0f0f);
                    vi high = vi_lookup16(table, (row >> 4) & 0x0f0f0f0f);
                    FOR_EACH (t, tokens) {
                        dot[t][n][v] = vi_dot4(dot[t][n][v], low, four(x[t].q, half * 32 + 8 * k));
                        dot[t][n][v] =
                            vi_dot4(dot[t][n][v], high, four(x[t].q, half * 32 + 8 * k + 4));
                    }
                }
        FOR_EACH (n, tiles)
            FOR_EACH (v, VECS) {
                const int8_t *scales =
                    (const int8_t *)(w + n * tile_bytes + BML_TILE * sizeof(float));
                vf scale = vf_from_int8(scales + half * BML_TILE + v * VL);
                FOR_EACH (t, tokens)
                    acc[t][n][v] = vf_fma(__builtin_convertvector(dot[t][n][v], vf),
                                          scale * x[t].scale[half / 2], acc[t][n][v]);
            }
    }
    FOR_EACH (t, tokens)
        FOR_EACH (n, tiles)
            FOR_EACH (v, VECS) {
                vf row_scale = vf_load((const float *)(w + n * tile_bytes) + v * VL);
                finish(j, token + t, (tile + n) * BML_TILE + v * VL, acc[t][n][v] * row_scale);
            }
}

/* AHEAD: ask for what lies so many bytes further on, unless it is 0 (past the end this is harmless,
 * a prefetch cannot fault); for the first tokens, where memory sets the pace. */
typedef void tile_kernel(const bml_linear_job *j, size_t tokens, size_t tiles, size_t ahead,
                         size_t token, size_t tile);

/* All tokens of one tile or of TILES: MOST_TOKENS at a time, and what that leaves over. */
static inline __attribute__((always_inline)) void some_tokens(const bml_linear_job *j,
                                                              tile_kernel kernel, size_t tiles,
                                                              size_t tile, size_t first,
                                                              size_t last)
{
    /* One token reads a single stream; a few share tiles, the next of which can be asked for. */
    size_t next_tiles = tiles * bml_tile_bytes(j->w->format, j->n_in);
    for (size_t t = first; t < last;) {
        size_t left = last - t;
        if (left >= MOST_TOKENS && left != 2 * FEW_TOKENS && left != 2 * FEW_TOKENS + 1) {
            kernel(j, MOST_TOKENS, tiles, 0, t, tile);
            t += MOST_TOKENS;
        } else if (left >= FEW_TOKENS) {
            if (t == first)
                kernel(j, FEW_TOKENS, tiles, next_tiles, t, tile);
            else
                kernel(j, FEW_TOKENS, tiles, 0, t, tile);
            t += FEW_TOKENS;
        } else {
            kernel(j, 1, tiles, AHEAD_BYTES, t, tile);
            t++;
        }
    }
}

/* Tokens in blocks that stay in the second-level cache while the weights go by. */
static inline __attribute__((always_inline)) void
all_tiles(const bml_linear_job *j, tile_kernel kernel, size_t begin, size_t end)
{
    enum { BLOCK_BYTES = 256 << 10 };
    size_t block = BLOCK_BYTES / bml_quant_row_bytes(j->n_in) / MOST_TOKENS * MOST_TOKENS;
    if (block < MOST_TOKENS)
        block = MOST_TOKENS;
    for (size_t first = 0; first < j->n_tokens; first += block) {
        size_t last = j->n_tokens - first < block ? j->n_tokens : first + block, tile = begin;
        for (; last - first >= FEW_TOKENS && tile + TILES <= end; tile += TILES)
            some_tokens(j, kernel, TILES, tile, first, last);
        for (; tile < end; tile++)
            some_tokens(j, kernel, 1, tile, first, last);
    }
}

void KERNEL(linear_packed)(const bml_linear_job *j, size_t begin, size_t end)
{
    size_t tile = begin / BML_TILE, last = bml_n_tiles(end);
    if (j->w->format == BML_WEIGHTS_Q8)
        all_tiles(j, tile_q8, tile, last);
    else
        all_tiles(j, tile_q4, tile, last);
}
