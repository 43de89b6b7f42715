/*
 * out = x W + bias with W stored [in, out], the layout of Hugging Face's Conv1D.
 *
 * Every output is two chains of fused multiply-adds: one over the first half of the inputs in
 * order, beginning with the bias, and one over the second half; then the two are added. Nothing
 * else decides an output's bits: not the batch, not blocking, not threads. Two halves, because a
 * thread that takes half of the inputs reads one stretch of memory from end to end, where half of
 * the columns would be a piece of every row. Two ways through memory:
 *     stream   few tokens: W is read once, row by row, a few rows at a time in registers, and the
 *              outputs come and go from the nearest cache; or, with too few registers for that, in
 *              lots: some tokens' outputs in registers while rows of the lot pass;
 *     blocked  many tokens: panels of W are packed (and widened) once, while those before are in
 *              use, and register tiles of TILE_ROWS tokens x TILE_VECS vectors run over them.
 */
#include "backend/cpu/kernels/linear.h"

enum {
#if VL == 16 || defined(__aarch64__) /* 32 registers: 24 accumulators */
    TILE_ROWS = 12,
    STREAM_ROWS = 8, /* rows of W that a tile of the stream holds, where several tokens share it */
#else                /* 16 registers: 12 accumulators */
    TILE_ROWS = 6,
    STREAM_ROWS = 4,
#endif
    TILE_VECS = 2,
    TILE_COLS = TILE_VECS * VL,
    STREAM_VECS = 2,
    STREAM_WIDE = 4,    /* for one or two tokens: one row, this many vectors of it */
    AHEAD_BYTES = 8192, /* and memory is asked so far ahead */
    LOTS = VL == 8,     /* whether several tokens read W in lots */
    LOT_ROWS = 128,     /* the most rows of a lot */
    LOT_TOKENS = 4,
    AHEAD_ROWS = 16 /* the same for panels, which are pieces of rows: too short a stream for the
                        processor's own prefetchers */
};
_Static_assert((int)TILE_COLS <= (int)BML_CPU_PANEL, "scratch");

typedef bml_linear_job job;

/* Inputs first..last of a half. */
static void inputs_of(const job *j, int half, size_t *first, size_t *last)
{
    *first = half ? j->n_in / 2 : 0;
    *last = half ? j->n_in : j->n_in / 2;
}

/* ---- stream -----------------------------------------------------------------------------------*/

/*
 * Adds ROWS rows of W from row ROW and column COL on, held in registers, to VECS vectors of every
 * token's outputs, which pass through. Meanwhile memory is asked for from NEXT on, LINES a token.
 * (Past the end of the matrix this is harmless, a prefetch cannot fault.)
 */
static inline __attribute__((always_inline)) void stream_tile(const job *j, bml_dtype dtype,
                                                              float *sums, size_t rows, size_t vecs,
                                                              size_t row, size_t col,
                                                              const char *next, size_t lines)
{
    const float *x = j->x + row;
    float *out = sums + col;
    vf wr[STREAM_ROWS][STREAM_WIDE];
    FOR_EACH (r, rows)
        FOR_EACH (v, vecs)
            wr[r][v] = vf_load_as(dtype, j->w->buffer.data, (row + r) * j->n_out + col + v * VL);
    for (size_t t = 0; t < j->n_tokens; t++, x += j->n_in, out += j->n_out) {
        vf acc[STREAM_WIDE];
        for (size_t line = 0; line < lines; line++, next += 64)
            __builtin_prefetch(next);
        FOR_EACH (v, vecs)
            acc[v] = vf_load(out + v * VL);
        FOR_EACH (r, rows)
            FOR_EACH (v, vecs)
                acc[v] = vf_fma(vf_set1(x[r]), wr[r][v], acc[v]);
        FOR_EACH (v, vecs)
            vf_store(out + v * VL, acc[v]);
    }
}

/* One row's columns begin..end, a vector at a time, the last one of any length. */
static void stream_row(const job *j, bml_dtype dtype, float *sums, size_t row, size_t begin,
                       size_t end)
{
    const char *w = (const char *)j->w->buffer.data + row * j->n_out * bml_dtype_size(dtype);
    for (size_t col = begin; col < end; col += VL) {
        int n = end - col < VL ? (int)(end - col) : VL;
        vf wr = n == VL ? vf_load_as(dtype, w, col) : vf_load_as_n(dtype, w, col, n);
        for (size_t t = 0; t < j->n_tokens; t++) {
            float *out = sums + t * j->n_out + col;
            vf x = vf_set1(j->x[t * j->n_in + row]);
            if (n == VL)
                vf_store(out, vf_fma(x, wr, vf_load(out)));
            else
                vf_store_n(out, vf_fma(x, wr, vf_load_n(out, n)), n);
        }
    }
}

/* Rows first..last and columns begin..end, in tiles of ROWS x VECS vectors and what they leave. A
 * tile asks for as many bytes from AHEAD bytes on, in the order of memory: that is what the
 * processor's own prefetchers take up. */
static inline __attribute__((always_inline)) void stream_rows(const job *j, bml_dtype dtype,
                                                              float *sums, size_t rows, size_t vecs,
                                                              size_t ahead, size_t first,
                                                              size_t last, size_t begin, size_t end)
{
    size_t row = first, wide = end - (end - begin) % (vecs * VL);
    size_t size = bml_dtype_size(dtype), row_bytes = j->n_out * size;
    size_t lines = rows * vecs * VL * size / 64;
    lines = (lines + j->n_tokens - 1) / j->n_tokens;
    for (; row + rows <= last; row += rows) {
        const char *w = (const char *)j->w->buffer.data + row * row_bytes;
        for (size_t col = begin; col < wide; col += vecs * VL)
            stream_tile(j, dtype, sums, rows, vecs, row, col, w + rows * col * size + ahead, lines);
        for (size_t r = row; r < row + rows; r++)
            stream_row(j, dtype, sums, r, wide, end);
    }
    for (; row < last; row++)
        stream_row(j, dtype, sums, row, begin, end);
}

/* What is asked for meanwhile: a piece of each of many rows, in the order of memory. */
typedef struct asking {
    const char *row;
    size_t at, row_bytes, bytes; /* of a row, and of these the ones that are wanted */
} asking;

static inline void ask_next(asking *a)
{
    __builtin_prefetch(a->row + a->at, 0, 2);
    a->at += 64;
    if (a->at >= a->bytes) {
        a->at = 0;
        a->row += a->row_bytes;
    }
}

/*
 * Adds ROWS rows of W to TILE_COLS outputs of LOT_TOKENS tokens, which stay in registers meanwhile.
 * X is [rows][BML_CPU_OWN_ROWS], from the first of the tokens on; OUT is each one's outputs. The
 * FIRST tokens leave W as float32 in PANEL for the others. Tiles that read as many bytes as this
 * one in SHARES passes ask for a share of what is next each.
 */
static inline __attribute__((always_inline)) void
lot_tile(bml_dtype dtype, bool first, size_t shares, size_t rows, const char *w, size_t row_bytes,
         const float *x, float *const out[LOT_TOKENS], float *panel, asking *next)
{
    size_t bytes = TILE_COLS * bml_dtype_size(dtype), of_line = bytes < 64 ? 64 / bytes : 1;
    vf acc[LOT_TOKENS][TILE_VECS];
    FOR_EACH (t, LOT_TOKENS)
        FOR_EACH (v, TILE_VECS)
            acc[t][v] = vf_load(out[t] + v * VL);
    for (size_t r = 0; r < rows; r += STREAM_ROWS)
        FOR_EACH (i, STREAM_ROWS) {
            vf wr[TILE_VECS];
            float *kept = panel + (r + i) * TILE_COLS;
            if (i % (of_line * shares) == 0)
                ask_next(next);
            FOR_EACH (v, TILE_VECS) {
                wr[v] = first ? vf_load_as(dtype, w + (r + i) * row_bytes, v * VL)
                              : vf_load(kept + v * VL);
                if (first)
                    vf_store(kept + v * VL, wr[v]);
            }
            FOR_EACH (t, LOT_TOKENS)
                FOR_EACH (v, TILE_VECS)
                    acc[t][v] =
                        vf_fma(vf_set1(x[(r + i) * BML_CPU_OWN_ROWS + t]), wr[v], acc[t][v]);
        }
    FOR_EACH (t, LOT_TOKENS)
        FOR_EACH (v, TILE_VECS)
            vf_store(out[t] + v * VL, acc[t][v]);
}

/*
 * The same for several tokens in lots of 32 KB, of which the second-level cache has one and the
 * next, which is asked for meanwhile. Float32 has fewer rows: where a row is a multiple of 4 KB
 * long, as many as a set of that cache has room for is soon reached.
 */
static inline __attribute__((always_inline)) void stream_lots(const job *j, bml_dtype dtype,
                                                              float *sums, size_t first,
                                                              size_t last, size_t begin, size_t end)
{
    const size_t most_rows = dtype == BML_F32 ? 32 : LOT_ROWS;
    const size_t most_cols = dtype == BML_F32 ? 256 : 128;
    float xs[LOT_ROWS * BML_CPU_OWN_ROWS], panel[LOT_ROWS * TILE_COLS], nobody[TILE_COLS] = {0};
    size_t n = j->n_tokens, size = bml_dtype_size(dtype), row_bytes = j->n_out * size, row, rows;
    size_t wide = end - (end - begin) % TILE_COLS;
    for (row = first; row + STREAM_ROWS <= last; row += rows) {
        const char *w = (const char *)j->w->buffer.data + row * row_bytes;
        rows = last - row < most_rows ? (last - row) / STREAM_ROWS * STREAM_ROWS : most_rows;
        for (size_t r = 0; r < rows; r++)
            for (size_t t = 0; t < BML_CPU_OWN_ROWS; t++)
                xs[r * BML_CPU_OWN_ROWS + t] = t < n ? j->x[t * j->n_in + row + r] : 0;
        for (size_t col = begin, cols; col < wide; col += cols) {
            cols = wide - col < most_cols ? wide - col : most_cols;
            asking next = {
                w + (col + cols < wide ? (col + cols) * size : rows * row_bytes + begin * size), 0,
                row_bytes, cols * size};
            for (size_t c = 0; c < cols; c += TILE_COLS)
                for (size_t t = 0; t < n; t += LOT_TOKENS) {
                    float *out[LOT_TOKENS]; /* tokens that are not there have their own */
                    FOR_EACH (i, LOT_TOKENS)
                        out[i] = t + i < n ? sums + (t + i) * j->n_out + col + c : nobody;
                    if (n <= LOT_TOKENS)
                        lot_tile(dtype, true, 1, rows, w + (col + c) * size, row_bytes, xs, out,
                                 panel, &next);
                    else if (t == 0)
                        lot_tile(dtype, true, 2, rows, w + (col + c) * size, row_bytes, xs, out,
                                 panel, &next);
                    else
                        lot_tile(dtype, false, 2, rows, NULL, 0, xs + t, out, panel, &next);
                }
        }
        for (size_t r = row; r < row + rows; r++)
            stream_row(j, dtype, sums, r, wide, end);
    }
    for (; row < last; row++)
        stream_row(j, dtype, sums, row, begin, end);
}

static inline __attribute__((always_inline)) void stream_as(const job *j, bml_dtype dtype,
                                                            float *sums, size_t first, size_t last,
                                                            size_t begin, size_t end)
{
    /* One or two tokens: one sequential stream is what memory does best. More: fewer trips of the
     * outputs between cache and registers. */
    if (j->n_tokens <= 2)
        stream_rows(j, dtype, sums, 1, STREAM_WIDE, AHEAD_BYTES, first, last, begin, end);
    else if (LOTS)
        stream_lots(j, dtype, sums, first, last, begin, end);
    else
        stream_rows(j, dtype, sums, STREAM_ROWS, STREAM_VECS,
                    STREAM_ROWS * j->n_out * bml_dtype_size(dtype), first, last, begin, end);
}

void KERNEL(linear_half)(const job *j, int half, size_t begin, size_t end)
{
    float *sums = half ? j->second : j->out;
    size_t first, last;
    inputs_of(j, half, &first, &last);
    for (size_t t = 0; t < j->n_tokens; t++)
        if (half == 0 && j->bias)
            memcpy(sums + t * j->n_out + begin, j->bias + begin, (end - begin) * sizeof(float));
        else
            memset(sums + t * j->n_out + begin, 0, (end - begin) * sizeof(float));
    switch (j->w->dtype) {
    case BML_F32:
        stream_as(j, BML_F32, sums, first, last, begin, end);
        break;
    case BML_BF16:
        stream_as(j, BML_BF16, sums, first, last, begin, end);
        break;
    default:
        stream_as(j, BML_F16, sums, first, last, begin, end);
    }
}

void KERNEL(linear_join)(const job *j, size_t begin, size_t end)
{
    for (size_t t = 0; t < j->n_tokens; t++)
        for (size_t c = begin; c < end; c += VL) {
            size_t at = t * j->n_out + c;
            int n = end - c < VL ? (int)(end - c) : VL;
            if (n == VL)
                bml_linear_finish(j, t, c, vf_load(j->out + at) + vf_load(j->second + at));
            else
                bml_linear_finish(j, t, c,
                                  vf_load_n(j->out + at, n) + vf_load_n(j->second + at, n));
        }
}

/* ---- blocked ----------------------------------------------------------------------------------*/

/* Floats of a panel, and how many panels are packed at once: what fits, but always one. */
static size_t panel_size(const job *j)
{
    return (j->n_in - j->n_in / 2) * TILE_COLS;
}

static size_t most_panels(const job *j)
{
    size_t fit = BML_CPU_PACK_BYTES / sizeof(float) / panel_size(j);
    return fit ? fit : 1;
}

/* What is packed at once: a half of the inputs for some panels, from column COL on. */
typedef struct piece {
    size_t col, n_panels, row, depth;
    int half;
} piece;

/* The N-th piece of columns begin..end; without panels behind the last. */
static piece piece_at(const job *j, size_t begin, size_t end, size_t n)
{
    size_t most = most_panels(j), last;
    piece p = {.col = begin + n / 2 * most * TILE_COLS, .half = n % 2};
    if (p.col < end) {
        size_t left = (end - p.col + TILE_COLS - 1) / TILE_COLS;
        p.n_panels = left < most ? left : most;
    }
    inputs_of(j, p.half, &p.row, &last);
    p.depth = last - p.row;
    return p;
}

/* How far a piece is packed, counted in rows of single panels; all panels' first rows come first,
 * so that W is read in the order of memory. */
typedef struct packing {
    const job *j;
    piece p;
    size_t done, n;
    size_t meanwhile; /* so many may be packed by tiles: all, or none if columns are missing */
    float *panels;    /* one behind the other */
} packing;

static packing begin_packing(const job *j, piece p, float *panels)
{
    size_t n = p.n_panels * p.depth;
    bool whole = p.col + p.n_panels * TILE_COLS <= j->n_out;
    return (packing){.j = j, .p = p, .n = n, .meanwhile = whole ? n : 0, .panels = panels};
}

/* Packs a row of a panel as float32, with zeros past the last column of all; WHOLE: none is
 * missing. */
static inline __attribute__((always_inline)) void pack_next(packing *k, bool whole)
{
    const job *j = k->j;
    bml_dtype dtype = j->w->dtype;
    size_t row = k->done / k->p.n_panels, panel = k->done % k->p.n_panels;
    size_t col = k->p.col + panel * TILE_COLS, at = (k->p.row + row) * j->n_out + col;
    const char *ahead =
        (const char *)j->w->buffer.data + (at + AHEAD_ROWS * j->n_out) * bml_dtype_size(dtype);
    float *to = k->panels + (panel * k->p.depth + row) * TILE_COLS;
    FOR_EACH (v, TILE_VECS) {
        size_t left = col + v * VL < j->n_out ? j->n_out - col - v * VL : 0;
        vf packed = {0};
        __builtin_prefetch(ahead + v * VL * sizeof(float));
        if (whole || left >= VL)
            packed = vf_load_as(dtype, j->w->buffer.data, at + v * VL);
        else if (left)
            packed = vf_load_as_n(dtype, j->w->buffer.data, at + v * VL, (int)left);
        vf_store(to + v * VL, packed);
    }
    k->done++;
}

static void pack_rest(packing *k)
{
    while (k->done < k->n)
        pack_next(k, false);
}

/*
 * One half of ROWS tokens x TILE_COLS outputs; those before token FIRST are not wanted. Meanwhile
 * the next piece is packed, a bit after each STEPS inputs: reading W would else wait for memory.
 */
static inline __attribute__((always_inline)) void tile(const job *j, size_t rows, size_t token,
                                                       size_t first, const piece *p, size_t col,
                                                       const float *panel, size_t steps,
                                                       packing *next)
{
    vf acc[TILE_ROWS][TILE_VECS];
    size_t stride = j->n_in;
    const float *x[TILE_ROWS / 3 + 1]; /* one for three rows: 12 pointers would not be registers */
    int n[TILE_VECS];                  /* columns of each vector that exist */
    FOR_EACH (g, (rows + 2) / 3)
        x[g] = j->x + (token + 3 * g) * stride + p->row;
    FOR_EACH (v, TILE_VECS) {
        size_t at = col + v * VL;
        n[v] = at >= j->n_out ? 0 : j->n_out - at < VL ? (int)(j->n_out - at) : VL;
        vf start = {0};
        if (p->half == 0 && j->bias && n[v])
            start = n[v] == VL ? vf_load(j->bias + at) : vf_load_n(j->bias + at, n[v]);
        FOR_EACH (r, rows)
            acc[r][v] = start;
    }
    for (const float *end = panel + p->depth * TILE_COLS; panel < end;) {
        const float *pause = panel + steps * TILE_COLS;
        if (pause > end)
            pause = end;
        for (; panel < pause; panel += TILE_COLS) {
            vf w[TILE_VECS];
            FOR_EACH (v, TILE_VECS)
                w[v] = vf_load(panel + v * VL);
            FOR_EACH (r, rows) {
                vf xi = vf_set1(x[r / 3][r % 3 * stride]);
                FOR_EACH (v, TILE_VECS)
                    acc[r][v] = vf_fma(xi, w[v], acc[r][v]);
            }
            FOR_EACH (g, (rows + 2) / 3)
                x[g]++;
        }
        if (next->done < next->meanwhile)
            pack_next(next, true);
    }
    FOR_EACH (r, rows)
        FOR_EACH (v, TILE_VECS) {
            float *out = j->out + (token + r) * j->n_out + col + v * VL;
            if (token + r < first || !n[v])
                continue;
            if (p->half)
                bml_linear_finish(j, token + r, col + v * VL,
                                  (n[v] == VL ? vf_load(out) : vf_load_n(out, n[v])) + acc[r][v]);
            else if (n[v] == VL)
                vf_store(out, acc[r][v]);
            else
                vf_store_n(out, acc[r][v], n[v]);
        }
}

/* A function of its own, so that the loops have all registers. */
static __attribute__((noinline)) void any_tile(const job *j, size_t rows, size_t token,
                                               size_t first, const piece *p, size_t col,
                                               const float *panel, size_t steps, packing *next)
{
    if (rows == TILE_ROWS)
        tile(j, TILE_ROWS, token, first, p, col, panel, steps, next);
    else if (rows == TILE_ROWS * 2 / 3)
        tile(j, TILE_ROWS * 2 / 3, token, first, p, col, panel, steps, next);
    else
        tile(j, TILE_ROWS / 3, token, first, p, col, panel, steps, next);
}

static void all_tiles(const job *j, const piece *p, const float *panels, packing *next)
{
    size_t n = j->n_tokens, end, steps = (n + TILE_ROWS - 1) / TILE_ROWS;
    for (size_t t = 0; t < n; t = end) {
        size_t rows = n - t > TILE_ROWS * 2 / 3 && n >= TILE_ROWS ? TILE_ROWS
                      : n - t > TILE_ROWS / 3                     ? TILE_ROWS * 2 / 3
                                                                  : TILE_ROWS / 3;
        size_t token = t + rows <= n ? t : n - rows; /* some once more, where fewer are left */
        end = token + rows;
        for (size_t i = 0; i < p->n_panels; i++)
            any_tile(j, rows, token, t, p, p->col + i * TILE_COLS,
                     panels + i * p->depth * TILE_COLS, steps, next);
    }
}

static void blocked(const job *j, size_t begin, size_t end, float *scratch)
{
    float *other = scratch + most_panels(j) * panel_size(j);
    packing now = begin_packing(j, piece_at(j, begin, end, 0), scratch);
    pack_rest(&now);
    for (size_t n = 1; now.p.n_panels; n++) {
        packing next = begin_packing(j, piece_at(j, begin, end, n), other);
        all_tiles(j, &now.p, now.panels, &next);
        pack_rest(&next);
        other = now.panels;
        now = next;
    }
}

void KERNEL(linear_rows)(const bml_linear_job *j, size_t begin, size_t end, float *scratch)
{
    if (j->n_tokens > BML_CPU_OWN_ROWS) {
        blocked(j, begin, end, scratch);
        return;
    }
    KERNEL(linear_half)(j, 0, begin, end);
    KERNEL(linear_half)(j, 1, begin, end);
    KERNEL(linear_join)(j, begin, end);
}
