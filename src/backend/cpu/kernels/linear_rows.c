/*
 * out = x W + bias with W stored [in, out], the layout of Hugging Face's Conv1D.
 *
 * Every output is one chain of fused multiply-adds over the inputs in order, beginning with the
 * bias: its bits do not depend on the batch, on blocking or on threads. Two ways through memory:
 *   stream  few tokens: W is read once, row by row, and the outputs stay in the first-level cache;
 *   blocked many tokens: panels of W are packed (and widened) once, and register tiles of
 *           TILE_ROWS tokens x TILE_VECS vectors run over them.
 */
#include "backend/cpu/kernels/linear.h"

enum {
#if VL == 16 /* 32 registers: 24 accumulators */
    TILE_ROWS = 12,
#else /* 16 registers: 12 accumulators */
    TILE_ROWS = 6,
#endif
    TILE_VECS = 2,
    TILE_COLS = TILE_VECS * VL,
    PANELS = 4,          /* panels packed at a time: a tile of x is used for all of them */
    DEPTH = 512,         /* inputs packed at a time */
    STREAM_TOKENS = 8,   /* at most this many tokens are streamed */
    STREAM_ROWS = 16,    /* rows of W at a time */
    STREAM_TILE = 4,     /* tokens, or vectors, that share a load */
    STREAM_FLOATS = 4096 /* outputs that stay in the first-level cache */
};
_Static_assert(PANELS *TILE_COLS *DEPTH * sizeof(float) <= BML_CPU_PACK_BYTES, "scratch");

typedef bml_linear_job job;

static inline float *out_at(const job *j, size_t token, size_t col)
{
    return j->out + token * j->n_out + col;
}

static void begin_with_bias(const job *j, size_t begin, size_t end)
{
    for (size_t t = 0; t < j->n_tokens; t++)
        if (j->bias)
            memcpy(out_at(j, t, begin), j->bias + begin, (end - begin) * sizeof(float));
        else
            memset(out_at(j, t, begin), 0, (end - begin) * sizeof(float));
}

/* ---- stream -----------------------------------------------------------------------------------*/

/* Adds rows of W to VECS vectors of TOKENS outputs, in registers. */
static inline __attribute__((always_inline)) void stream_tile(const job *j, bml_dtype dtype,
                                                              size_t tokens, size_t vecs,
                                                              size_t token, size_t row,
                                                              size_t n_rows, size_t col, int tail)
{
    vf acc[STREAM_TILE][STREAM_TILE];
    const char *w = (const char *)j->w->buffer.data;
    size_t row_bytes = j->n_out * bml_dtype_size(dtype);
    for (size_t t = 0; t < tokens; t++)
        for (size_t v = 0; v < vecs; v++) {
            const float *out = out_at(j, token + t, col + v * VL);
            acc[t][v] = tail ? vf_load_n(out, tail) : vf_load(out);
        }
    for (size_t r = row; r < row + n_rows; r++) {
        vf wr[STREAM_TILE];
        for (size_t v = 0; v < vecs; v++)
            wr[v] = tail ? vf_load_as_n(dtype, w + r * row_bytes, col, tail)
                         : vf_load_as(dtype, w + r * row_bytes, col + v * VL);
        for (size_t t = 0; t < tokens; t++) {
            vf x = vf_set1(j->x[(token + t) * j->n_in + r]);
            for (size_t v = 0; v < vecs; v++)
                acc[t][v] = vf_fma(x, wr[v], acc[t][v]);
        }
    }
    for (size_t t = 0; t < tokens; t++)
        for (size_t v = 0; v < vecs; v++) {
            float *out = out_at(j, token + t, col + v * VL);
            if (tail)
                vf_store_n(out, acc[t][v], tail);
            else
                vf_store(out, acc[t][v]);
        }
}

/* Columns begin..end of every output, STREAM_ROWS rows of W at a time. */
static inline __attribute__((always_inline)) void stream_cols(const job *j, bml_dtype dtype,
                                                              size_t begin, size_t end)
{
    for (size_t row = 0; row < j->n_in; row += STREAM_ROWS) {
        size_t n_rows = j->n_in - row < STREAM_ROWS ? j->n_in - row : STREAM_ROWS, col = begin;
        for (; col + STREAM_TILE * VL <= end; col += STREAM_TILE * VL) {
            size_t t = 0;
            for (; t + STREAM_TILE <= j->n_tokens; t += STREAM_TILE)
                for (size_t v = 0; v < STREAM_TILE; v += 2)
                    stream_tile(j, dtype, STREAM_TILE, 2, t, row, n_rows, col + v * VL, 0);
            for (; t < j->n_tokens; t++)
                stream_tile(j, dtype, 1, STREAM_TILE, t, row, n_rows, col, 0);
        }
        for (; col < end; col += VL)
            for (size_t t = 0; t < j->n_tokens; t++)
                stream_tile(j, dtype, 1, 1, t, row, n_rows, col,
                            end - col < VL ? (int)(end - col) : 0);
    }
}

static void stream_part(const job *j, size_t begin, size_t end)
{
    begin_with_bias(j, begin, end);
    size_t block = STREAM_FLOATS / j->n_tokens / TILE_COLS * TILE_COLS;
    for (size_t col = begin; col < end; col += block) {
        size_t stop = end - col < block ? end : col + block;
        switch (j->w->dtype) {
        case BML_F32:
            stream_cols(j, BML_F32, col, stop);
            break;
        case BML_BF16:
            stream_cols(j, BML_BF16, col, stop);
            break;
        default:
            stream_cols(j, BML_F16, col, stop);
        }
        bml_linear_finish_stored(j, col, stop);
    }
}

/* ---- blocked ----------------------------------------------------------------------------------*/

/* W[row .. row+depth, col .. col+TILE_COLS] as float32, zeros past the last column. */
static void pack_panel(const job *j, size_t row, size_t depth, size_t col, float *panel)
{
    bml_dtype dtype = j->w->dtype;
    for (size_t i = 0; i < depth; i++, panel += TILE_COLS) {
        const void *w =
            (const char *)j->w->buffer.data + (row + i) * j->n_out * bml_dtype_size(dtype);
        for (size_t v = 0; v < TILE_VECS; v++) {
            size_t at = col + v * VL;
            int n = at >= j->n_out ? 0 : j->n_out - at < VL ? (int)(j->n_out - at) : VL;
            vf packed = {0};
            if (n == VL)
                packed = vf_load_as(dtype, w, at);
            else if (n)
                packed = vf_load_as_n(dtype, w, at, n);
            vf_store(panel + v * VL, packed);
        }
    }
}

/* Adds depth inputs to a tile of up to ROWS tokens (n_rows of them real) x TILE_COLS outputs. */
static inline __attribute__((always_inline)) void tile(const job *j, size_t rows, size_t n_rows,
                                                       size_t token, size_t row, size_t depth,
                                                       size_t col, const float *panel)
{
    vf acc[TILE_ROWS][TILE_VECS];
    const float *x[TILE_ROWS];
    int n[TILE_VECS]; /* columns of each vector that exist */
    for (size_t v = 0; v < TILE_VECS; v++) {
        size_t at = col + v * VL;
        n[v] = at >= j->n_out ? 0 : j->n_out - at < VL ? (int)(j->n_out - at) : VL;
    }
    for (size_t r = 0; r < rows; r++) {
        size_t t = token + (r < n_rows ? r : n_rows - 1);
        x[r] = j->x + t * j->n_in + row;
        for (size_t v = 0; v < TILE_VECS; v++) {
            const float *out = out_at(j, t, col + v * VL);
            acc[r][v] = n[v] == VL ? vf_load(out) : n[v] ? vf_load_n(out, n[v]) : (vf){0};
        }
    }
    for (size_t i = 0; i < depth; i++, panel += TILE_COLS) {
        vf w[TILE_VECS];
        for (size_t v = 0; v < TILE_VECS; v++)
            w[v] = vf_load(panel + v * VL);
        for (size_t r = 0; r < rows; r++) {
            vf xi = vf_set1(x[r][i]);
            for (size_t v = 0; v < TILE_VECS; v++)
                acc[r][v] = vf_fma(xi, w[v], acc[r][v]);
        }
    }
    bool last = row + depth == j->n_in;
    for (size_t r = 0; r < rows && r < n_rows; r++)
        for (size_t v = 0; v < TILE_VECS; v++) {
            float *out = out_at(j, token + r, col + v * VL);
            if (last)
                bml_linear_finish(j, token + r, col + v * VL, acc[r][v]);
            else if (n[v] == VL)
                vf_store(out, acc[r][v]);
            else if (n[v])
                vf_store_n(out, acc[r][v], n[v]);
        }
}

static void blocked_part(const job *j, size_t begin, size_t end, float *panels)
{
    begin_with_bias(j, begin, end);
    for (size_t col = begin; col < end; col += PANELS * TILE_COLS)
        for (size_t row = 0; row < j->n_in; row += DEPTH) {
            size_t depth = j->n_in - row < DEPTH ? j->n_in - row : DEPTH;
            size_t n_panels = 0;
            for (; n_panels < PANELS && col + n_panels * TILE_COLS < end; n_panels++)
                pack_panel(j, row, depth, col + n_panels * TILE_COLS,
                           panels + n_panels * DEPTH * TILE_COLS);
            for (size_t t = 0; t < j->n_tokens; t += TILE_ROWS) {
                size_t n_rows = j->n_tokens - t < TILE_ROWS ? j->n_tokens - t : TILE_ROWS;
                for (size_t p = 0; p < n_panels; p++) {
                    const float *panel = panels + p * DEPTH * TILE_COLS;
                    size_t c = col + p * TILE_COLS;
                    if (n_rows > TILE_ROWS * 2 / 3)
                        tile(j, TILE_ROWS, n_rows, t, row, depth, c, panel);
                    else if (n_rows > TILE_ROWS / 3)
                        tile(j, TILE_ROWS * 2 / 3, n_rows, t, row, depth, c, panel);
                    else
                        tile(j, TILE_ROWS / 3, n_rows, t, row, depth, c, panel);
                }
            }
        }
}

void KERNEL(linear_rows)(const bml_linear_job *j, size_t begin, size_t end, float *scratch)
{
    if (j->n_tokens <= STREAM_TOKENS)
        stream_part(j, begin, end);
    else
        blocked_part(j, begin, end, scratch);
}
