/*
 * out = x W + bias with W stored [in, out], the layout of Hugging Face's Conv1D.
 *
 * Every output is two chains of fused multiply-adds: one over the first half of the inputs in
 * order, beginning with the bias, and one over the second half; then the two are added. Nothing
 * else decides an output's bits: not the batch, not blocking, not threads. Two halves, because a
 * thread that takes half of the inputs reads one stretch of memory from end to end, where half of
 * the columns would be a piece of every row. Two ways through memory:
 *     stream   few tokens: W is read once, row by row, a few rows at a time in registers, and the
 *              outputs come and go from the nearest cache;
 *     blocked  many tokens: panels of W are packed (and widened) once, and register tiles of
 *              TILE_ROWS tokens x TILE_VECS vectors run over them.
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
    AHEAD_ROWS = 32     /* the same for panels, which are pieces of rows: too short a stream for the
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
 * Adds ROWS rows of W, held in registers, to VECS vectors of every token's outputs, which pass
 * through. Meanwhile as many bytes are asked for from AHEAD bytes on, in the order of memory and
 * LINES a token: that is what the processor's own prefetchers take up. (Past the end of the
 * matrix this is harmless, a prefetch cannot fault.)
 */
static inline __attribute__((always_inline)) void stream_tile(const job *j, bml_dtype dtype,
                                                              float *sums, size_t rows, size_t vecs,
                                                              size_t row, size_t ahead,
                                                              size_t lines, size_t col)
{
    size_t size = bml_dtype_size(dtype), row_bytes = j->n_out * size;
    const char *w = (const char *)j->w->buffer.data + row * row_bytes;
    const char *next = w + rows * col * size + ahead;
    vf wr[STREAM_ROWS][STREAM_WIDE];
    FOR_EACH (r, rows)
        FOR_EACH (v, vecs)
            wr[r][v] = vf_load_as(dtype, w + r * row_bytes, col + v * VL);
    for (size_t t = 0; t < j->n_tokens; t++) {
        float *out = sums + t * j->n_out + col;
        const float *x = j->x + t * j->n_in + row;
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

/* Rows first..last and columns begin..end, in tiles of ROWS x VECS vectors and what they leave. */
static inline __attribute__((always_inline)) void stream_rows(const job *j, bml_dtype dtype,
                                                              float *sums, size_t rows, size_t vecs,
                                                              size_t ahead, size_t first,
                                                              size_t last, size_t begin, size_t end)
{
    size_t row = first, wide = end - (end - begin) % (vecs * VL);
    size_t lines = rows * vecs * VL * bml_dtype_size(dtype) / 64;
    lines = (lines + j->n_tokens - 1) / j->n_tokens;
    for (; row + rows <= last; row += rows) {
        for (size_t col = begin; col < wide; col += vecs * VL)
            stream_tile(j, dtype, sums, rows, vecs, row, ahead, lines, col);
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

/* N_PANELS panels, W[row .. row+depth, col .. col+TILE_COLS] the first, as float32; zeros past the
 * last column of all. */
static void pack_panels(const job *j, size_t row, size_t depth, size_t col, size_t n_panels,
                        float *panels)
{
    bml_dtype dtype = j->w->dtype;
    size_t row_bytes = j->n_out * bml_dtype_size(dtype);
    const char *w = (const char *)j->w->buffer.data + row * row_bytes;
    for (size_t i = 0; i < depth; i++, w += row_bytes, panels += TILE_COLS)
        for (size_t v = 0; v < n_panels * TILE_VECS; v++) {
            size_t at = col + v * VL;
            int n = at >= j->n_out ? 0 : j->n_out - at < VL ? (int)(j->n_out - at) : VL;
            vf packed = {0};
            __builtin_prefetch(w + AHEAD_ROWS * row_bytes + at * bml_dtype_size(dtype));
            if (n == VL)
                packed = vf_load_as(dtype, w, at);
            else if (n)
                packed = vf_load_as_n(dtype, w, at, n);
            vf_store(panels + v / TILE_VECS * depth * TILE_COLS + v % TILE_VECS * VL, packed);
        }
}

/* One half of up to ROWS tokens (n_rows of them real) x TILE_COLS outputs. */
static inline __attribute__((always_inline)) void tile(const job *j, size_t rows, size_t n_rows,
                                                       size_t token, int half, size_t row,
                                                       size_t depth, size_t col, const float *panel)
{
    vf acc[TILE_ROWS][TILE_VECS];
    const float *x[TILE_ROWS];
    int n[TILE_VECS]; /* columns of each vector that exist */
    FOR_EACH (v, TILE_VECS) {
        size_t at = col + v * VL;
        n[v] = at >= j->n_out ? 0 : j->n_out - at < VL ? (int)(j->n_out - at) : VL;
        vf start = {0};
        if (half == 0 && j->bias && n[v])
            start = n[v] == VL ? vf_load(j->bias + at) : vf_load_n(j->bias + at, n[v]);
        FOR_EACH (r, rows)
            acc[r][v] = start;
    }
    FOR_EACH (r, rows)
        x[r] = j->x + (token + (r < n_rows ? r : n_rows - 1)) * j->n_in + row;
    for (size_t i = 0; i < depth; i++, panel += TILE_COLS) {
        vf w[TILE_VECS];
        FOR_EACH (v, TILE_VECS)
            w[v] = vf_load(panel + v * VL);
        FOR_EACH (r, rows) {
            vf xi = vf_set1(x[r][i]);
            FOR_EACH (v, TILE_VECS)
                acc[r][v] = vf_fma(xi, w[v], acc[r][v]);
        }
    }
    FOR_EACH (r, rows)
        FOR_EACH (v, TILE_VECS) {
            float *out = j->out + (token + r) * j->n_out + col + v * VL;
            if (r >= n_rows || !n[v])
                continue;
            if (half)
                bml_linear_finish(j, token + r, col + v * VL,
                                  (n[v] == VL ? vf_load(out) : vf_load_n(out, n[v])) + acc[r][v]);
            else if (n[v] == VL)
                vf_store(out, acc[r][v]);
            else
                vf_store_n(out, acc[r][v], n[v]);
        }
}

static void all_tiles(const job *j, int half, size_t row, size_t depth, size_t col, size_t n_panels,
                      const float *panels)
{
    for (size_t t = 0; t < j->n_tokens; t += TILE_ROWS) {
        size_t n_rows = j->n_tokens - t < TILE_ROWS ? j->n_tokens - t : TILE_ROWS;
        for (size_t p = 0; p < n_panels; p++) {
            const float *panel = panels + p * depth * TILE_COLS;
            size_t c = col + p * TILE_COLS;
            if (n_rows > TILE_ROWS * 2 / 3)
                tile(j, TILE_ROWS, n_rows, t, half, row, depth, c, panel);
            else if (n_rows > TILE_ROWS / 3)
                tile(j, TILE_ROWS * 2 / 3, n_rows, t, half, row, depth, c, panel);
            else
                tile(j, TILE_ROWS / 3, n_rows, t, half, row, depth, c, panel);
        }
    }
}

static void blocked(const job *j, size_t begin, size_t end, float *panels)
{
    size_t panel_bytes = (j->n_in - j->n_in / 2) * TILE_COLS * sizeof(float);
    size_t most_panels = BML_CPU_PACK_BYTES / panel_bytes;
    if (most_panels == 0)
        most_panels = 1; /* the scratch has room for one of any model's width */
    for (size_t col = begin; col < end; col += most_panels * TILE_COLS) {
        size_t left = (end - col + TILE_COLS - 1) / TILE_COLS;
        size_t n_panels = left < most_panels ? left : most_panels;
        for (int half = 0; half < 2; half++) {
            size_t row, last;
            inputs_of(j, half, &row, &last);
            pack_panels(j, row, last - row, col, n_panels, panels);
            all_tiles(j, half, row, last - row, col, n_panels, panels);
        }
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
