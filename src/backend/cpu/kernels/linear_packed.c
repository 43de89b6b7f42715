/*
 * out = x W + bias for the quantised formats (backend/cpu/quant.h): integer dot products inside a
 * block, float32 sums over the blocks in order. Integers are exact, and the order of the float sums
 * is fixed: the same bits for every batch, split and number of threads. Two ways through memory:
 *     stream   few tokens: tile after tile of W, as it is stored;
 *     blocked  many tokens: as many at a time as stay in the second-level cache while the tiles go
 *              by; Q4's nibbles are replaced by their levels once for all of these.
 */
#include "backend/cpu/kernels/linear.h"
#include "backend/cpu/quant.h"

enum {
    VECS = BML_TILE / VL, /* vectors across a tile's outputs */
#if VL == 16
    MOST_TOKENS = 6, /* tokens that share each load of weights; a batch of 8 goes as 4 and 4 */
    FEW_TOKENS = 4,
    TILES = 2,   /* for which a block of inputs is made ready once */
    ABREAST = 2, /* and of these the ones that share each load of inputs */
#elif VL == 8
    MOST_TOKENS = 4,
    FEW_TOKENS = 2,
    TILES = 4,
    ABREAST = 1,
#else
    MOST_TOKENS = 2,
    FEW_TOKENS = 2,
    TILES = 1,
    ABREAST = 1,
#endif
    UNROLLED = VL == 16 ? 16 : 2,     /* rows; more than 2 do not leave 16 registers to the sums */
    BLOCKED_TOKENS = 2 * MOST_TOKENS, /* from so many on */
    TOKEN_BYTES = 512 << 10,          /* of these in the second-level cache */
    AHEAD_BYTES = VL == 8 ? 1536 : 4096 /* how far ahead of a single token's stream memory is asked
                                           (4096, on AVX2: a load and what it asks for meet in the
                                           first-level cache) */
};

typedef bml_linear_job job;

/* Where a tile's bytes come from: as stored, or Q4's nibbles already replaced by their levels and
 * laid out like Q8's bytes. */
typedef enum source { Q8, Q4, Q4_UNPACKED } source;

/* What memory is asked for meanwhile (past the end this is harmless, a prefetch cannot fault): from
 * NEXT on, as far from there as stored rows are from a tile's first one, the line of every
 * EVERY-th row; 0 asks for nothing. */
typedef struct asking {
    size_t every;
    const char *next;
} asking;

/* Tokens and tiles that a product is for. */
typedef struct piece {
    size_t token, n_tokens, tile;
} piece;

/* Tiles side by side: their scales and their bytes, and how far behind them the next tile's
 * are. */
typedef struct tiles {
    const char *scales, *row_scale, *q;
    size_t stride, q_stride;
} tiles;

static tiles stored_tiles(const job *j, size_t tile)
{
    size_t bytes = bml_tile_bytes(j->w->format, j->n_in);
    const char *at = (const char *)j->w->buffer.data + tile * bytes;
    bool q8 = j->w->format == BML_WEIGHTS_Q8;
    return (tiles){.scales = q8 ? at : at + BML_TILE * sizeof(float),
                   .row_scale = at,
                   .q = at + bml_tile_header(j->w->format, j->n_in),
                   .stride = bytes,
                   .q_stride = bytes};
}

/* Q4's levels as unsigned bytes, 128 more, like Q8's. */
typedef struct levels {
    uint8_t of[16];
} levels;

static inline levels unsigned_levels(void)
{
    levels l;
    for (int i = 0; i < 16; i++)
        l.of[i] = (uint8_t)(bml_q4_levels[i] + 128);
    return l;
}

/* Bytes of a row of inputs as it is stored. */
static inline size_t stored_row(source from)
{
    return from == Q8 ? 64 : 32;
}

/* Vector V of the bytes for inputs 4 * row.. of a tile. */
static inline vi weight_bytes(source from, const char *q, size_t row, size_t v, const levels *l)
{
    if (from != Q4)
        return vi_load(q + row * 64 + v * 4 * VL);
    vi both = vi_load(q + row / 2 * 64 + v * 4 * VL);
    return vi_lookup16(l->of, (row % 2 ? both >> 4 : both) & 0x0f0f0f0f);
}

/* Vector V of a span's scales. */
static inline vf weight_scale(source from, const char *scales, size_t span, size_t v)
{
    size_t at = span * BML_TILE + v * VL;
    return from == Q8 ? vf_from_bf16(vh_load((const uint16_t *)scales + at))
                      : vf_from_int8((const int8_t *)scales + at);
}

static inline void finish(const job *j, size_t token, size_t col, vf y)
{
    if (j->bias && col < j->n_out)
        y += j->n_out - col < VL ? vf_load_n(j->bias + col, (int)(j->n_out - col))
                                 : vf_load(j->bias + col);
    bml_linear_finish(j, token, col, y);
}

/*
 * DOT[token][tile][vector] += the products with rows of Q, the first of which has inputs FIRST_FOUR
 * and so on.
 */
static inline __attribute__((always_inline)) void
add_rows(vi dot[MOST_TOKENS][ABREAST][VECS], source from, const char *q, size_t q_stride,
         const fours *inputs, size_t first_four, size_t rows, size_t tokens, size_t n_tiles,
         asking ask, size_t ask_stride)
{
    size_t unrolled = UNROLLED < rows ? UNROLLED : rows;
    if (unrolled < ask.every)
        unrolled = ask.every;
    const levels l = unsigned_levels();
    for (size_t r = 0; r < rows; r += unrolled)
        FOR_EACH (i, unrolled) {
            vi w[ABREAST][VECS];
            FOR_EACH (n, n_tiles) {
                FOR_EACH (v, VECS)
                    w[n][v] = weight_bytes(from, q + n * q_stride, r + i, v, &l);
                if (ask.every && i % ask.every == 0)
                    __builtin_prefetch(ask.next + n * ask_stride + (r + i) * stored_row(from));
            }
            FOR_EACH (t, tokens)
                FOR_EACH (n, n_tiles)
                    FOR_EACH (v, VECS)
                        dot[t][n][v] =
                            vi_dot4(dot[t][n][v], w[n][v], &inputs[t], first_four + r + i);
        }
}

/*
 * A piece of TOKENS (of which n_tokens are there) and N_TILES. A span is what shares a scale: a
 * block of Q8, half a block of Q4.
 */
static inline __attribute__((always_inline)) void
product(const job *j, source from, tiles w, size_t tokens, size_t n_tiles, asking ask, piece p)
{
    size_t spans = from == Q8 ? 1 : 2, rows = 16 / spans, row_bytes = from == Q4 ? 32 : 64;
    size_t abreast = n_tiles < ABREAST ? n_tiles : ABREAST;
    const bml_quant_row *x[MOST_TOKENS];
    vf sum[MOST_TOKENS][TILES][VECS];
    FOR_EACH (t, tokens) {
        size_t token = p.token + (t < p.n_tokens ? t : p.n_tokens - 1);
        x[t] = bml_quant_row_at(j->quantized, j->n_in, token);
        FOR_EACH (n, n_tiles)
            FOR_EACH (v, VECS)
                sum[t][n][v] = (vf){0};
    }
    for (size_t b = 0; b < bml_n_blocks(j->n_in); b++) {
        const bml_quant_block *block[MOST_TOKENS];
        fours inputs[MOST_TOKENS];
        FOR_EACH (t, tokens) {
            block[t] = &x[t]->block[b];
            inputs[t] = fours_of(block[t]->q);
        }
        for (size_t half = 0; half < spans; half++) {
            size_t s = b * spans + half;
            for (size_t first = 0; first < n_tiles; first += abreast) {
                vi dot[MOST_TOKENS][ABREAST][VECS];
                FOR_EACH (t, tokens) {
                    vi start = vi_dot4_start(spans == 1 ? block[t]->sum : block[t]->half_sum[half]);
                    FOR_EACH (n, abreast)
                        FOR_EACH (v, VECS)
                            dot[t][n][v] = start;
                }
                const char *q = w.q + first * w.q_stride + s * rows * row_bytes;
                asking here = ask;
                if (ask.every)
                    here.next += first * w.stride + s * rows * stored_row(from);
                add_rows(dot, from, q, w.q_stride, inputs, half * rows, rows, tokens, abreast, here,
                         w.stride);
                FOR_EACH (n, abreast)
                    FOR_EACH (v, VECS) {
                        const char *scales = w.scales + (first + n) * w.stride;
                        vf scale = weight_scale(from, scales, s, v);
                        if (ask.every && v == 0)
                            __builtin_prefetch(scales + n_tiles * w.stride + s * 32 / spans);
                        FOR_EACH (t, tokens) {
                            vf *to = &sum[t][first + n][v];
                            *to = vf_fma(__builtin_convertvector(dot[t][n][v], vf),
                                         vf_scale_down(scale, block[t]->down), *to);
                        }
                    }
            }
        }
    }
    FOR_EACH (t, tokens)
        FOR_EACH (n, n_tiles)
            FOR_EACH (v, VECS) {
                vf y = sum[t][n][v];
                if (from != Q8) /* first, as an x that is huge needs it */
                    y *= vf_load((const float *)(w.row_scale + n * w.stride) + v * VL);
                y *= x[t]->scale;
                if (t < p.n_tokens)
                    finish(j, p.token + t, (p.tile + n) * BML_TILE + v * VL, y);
            }
}

/* Asks from NEXT on for one of SHARES shares of stored tiles, which as many products do. */
static inline asking ask_share(source from, const char *next, size_t share, size_t shares)
{
    return (asking){64 / stored_row(from) * shares, next + share * 64};
}

static const asking nothing = {0, NULL};

/* ---- stream -----------------------------------------------------------------------------------*/

/* All of few tokens, N_TILES at a time from TILE on. */
static inline __attribute__((always_inline)) void stream_tiles(const job *j, source from,
                                                               size_t n_tiles, size_t tile)
{
    tiles w = stored_tiles(j, tile);
    piece p = {.tile = tile};
    while (p.token < j->n_tokens) {
        size_t left = j->n_tokens - p.token;
        /* One token reads a single stream; a few share tiles, the next of which can be asked for
         * by the first, for whom memory sets the pace. */
        if (left >= MOST_TOKENS && left != 2 * FEW_TOKENS && left != 2 * FEW_TOKENS + 1) {
            p.n_tokens = MOST_TOKENS;
            product(j, from, w, MOST_TOKENS, n_tiles, nothing, p);
        } else if (left >= FEW_TOKENS) {
            p.n_tokens = FEW_TOKENS;
            if (p.token == 0)
                product(j, from, w, FEW_TOKENS, n_tiles,
                        ask_share(from, w.q + n_tiles * w.stride, 0, 1), p);
            else
                product(j, from, w, FEW_TOKENS, n_tiles, nothing, p);
        } else {
            p.n_tokens = 1;
            product(j, from, w, 1, n_tiles, ask_share(from, w.q + AHEAD_BYTES, 0, 1), p);
        }
        p.token += p.n_tokens;
    }
}

static inline __attribute__((always_inline)) void stream(const job *j, source from, size_t tile,
                                                         size_t end)
{
    for (; j->n_tokens >= FEW_TOKENS && tile + TILES <= end; tile += TILES)
        stream_tiles(j, from, TILES, tile);
    for (; tile < end; tile++)
        stream_tiles(j, from, 1, tile);
}

/* ---- blocked ----------------------------------------------------------------------------------*/

/* TILES of Q4 with bytes in place of nibbles, in TO. */
static tiles unpack(tiles w, size_t n_blocks, char *to)
{
    const levels l = unsigned_levels();
    size_t bytes = n_blocks * BML_TILE * BML_BLOCK;
    for (size_t n = 0; n < TILES; n++)
        for (size_t row = 0; row < bytes / 64; row++)
            FOR_EACH (v, VECS) {
                vi unpacked = weight_bytes(Q4, w.q + n * w.q_stride, row, v, &l);
                memcpy(to + n * bytes + row * 64 + v * 4 * VL, &unpacked, sizeof unpacked);
            }
    w.q = to;
    w.q_stride = bytes;
    return w;
}

/* Products of their own functions, each with all registers to its sums: inlined side by side, gcc
 * 12 adds a move to every product of bytes. */
#define PRODUCT(name, from, tokens, shares)                                                        \
    static __attribute__((noinline)) void name(const job *j, tiles w, const char *next,            \
                                               size_t share, piece p)                              \
    {                                                                                              \
        product(j, from, w, tokens, TILES, ask_share(from, next, share, shares), p);               \
    }
PRODUCT(q8_asking, Q8, MOST_TOKENS, 2)
PRODUCT(q8_alone, Q8, MOST_TOKENS, 0)
PRODUCT(q8_few, Q8, FEW_TOKENS, 0)
PRODUCT(q4_asking, Q4_UNPACKED, MOST_TOKENS, 2)
PRODUCT(q4_alone, Q4_UNPACKED, MOST_TOKENS, 0)
PRODUCT(q4_few, Q4_UNPACKED, FEW_TOKENS, 0)

/* TILES for the piece's tokens. The first two products ask for the next tiles, which begin at NEXT:
 * one alone would wait for memory, and the others would not. */
static void blocked_tiles(const job *j, bool q8, tiles w, const char *next, piece all)
{
    piece p = all;
    for (size_t n = 0; p.token < all.token + all.n_tokens; n++) {
        size_t left = all.token + all.n_tokens - p.token;
        p.n_tokens = left < MOST_TOKENS ? left : MOST_TOKENS;
        if (left <= FEW_TOKENS)
            (q8 ? q8_few : q4_few)(j, w, next, 0, p);
        else if (n < 2)
            (q8 ? q8_asking : q4_asking)(j, w, next, n, p);
        else
            (q8 ? q8_alone : q4_alone)(j, w, next, 0, p);
        p.token += p.n_tokens;
    }
}

static void blocked(const job *j, size_t tile, size_t end, char *scratch)
{
    size_t fit = TOKEN_BYTES / bml_quant_row_bytes(j->n_in) + 1;
    size_t n_blocks = (j->n_tokens + fit - 1) / fit; /* of about the same size */
    size_t most_tokens = (j->n_tokens + n_blocks - 1) / n_blocks;
    most_tokens = (most_tokens + MOST_TOKENS - 1) / MOST_TOKENS * MOST_TOKENS;
    if (most_tokens < BLOCKED_TOKENS)
        most_tokens = BLOCKED_TOKENS;
    piece p = {0};
    for (; p.token < j->n_tokens; p.token += p.n_tokens) {
        size_t left = j->n_tokens - p.token;
        p.n_tokens = left < most_tokens ? left : most_tokens;
        for (p.tile = tile; p.tile < end; p.tile += TILES) {
            tiles w = stored_tiles(j, p.tile);
            const char *next = w.q + TILES * w.stride;
            if (j->w->format == BML_WEIGHTS_Q8)
                blocked_tiles(j, true, w, next, p);
            else
                blocked_tiles(j, false, unpack(w, bml_n_blocks(j->n_in), scratch), next, p);
        }
    }
}

void KERNEL(linear_packed)(const bml_linear_job *j, size_t begin, size_t end, float *scratch)
{
    size_t tile = begin / BML_TILE, last = bml_n_tiles(end), whole = tile;
    if (j->n_tokens >= BLOCKED_TOKENS) {
        whole = last - (last - tile) % TILES;
        blocked(j, tile, whole, (char *)scratch);
    }
    if (j->w->format == BML_WEIGHTS_Q8)
        stream(j, Q8, whole, last);
    else
        stream(j, Q4, whole, last);
}
