/* embedding: out[t] = wte[token[t]] + wpe[position[t]] */
#include "backend/cpu/kernels/kernels.h"

/* Elements i.. (VL of them, fewer at the end of the row) of a row of W. */
static vf elements(const bml_weight *w, size_t row, size_t i)
{
    size_t n_in = (size_t)w->n_in;
    int n = n_in - i < VL ? (int)(n_in - i) : VL;
    if (w->format != BML_WEIGHTS_Q8) {
        const void *at = (const char *)w->buffer.data + row * n_in * bml_dtype_size(w->dtype);
        return n == VL ? vf_load_as(w->dtype, at, i) : vf_load_as_n(w->dtype, at, i, n);
    }
    /* Row r of the embedding is output r of the head: see backend/cpu/quant.h. */
    size_t block = i / BML_BLOCK, output = row % BML_TILE;
    const char *tile =
        (const char *)w->buffer.data + row / BML_TILE * bml_tile_bytes(w->format, n_in);
    const uint8_t *q = (const uint8_t *)tile + bml_tile_header(w->format, n_in);
    vf values = {0};
    for (int l = 0; l < n; l++) {
        size_t at = i + (size_t)l;
        values[l] = (float)(q[at / 4 * (BML_TILE * 4) + output * 4 + at % 4] - 128);
    }
    return values * bml_bf16_to_f32(((const uint16_t *)tile)[block * BML_TILE + output]);
}

void KERNEL(embedding_row)(float *out, const bml_weight *wte, const bml_weight *wpe, int32_t token,
                           int32_t position)
{
    size_t n_embd = (size_t)wte->n_in, i = 0;
    for (; i + VL <= n_embd; i += VL)
        vf_store(out + i, elements(wte, (size_t)token, i) + elements(wpe, (size_t)position, i));
    if (i < n_embd)
        vf_store_n(out + i, elements(wte, (size_t)token, i) + elements(wpe, (size_t)position, i),
                   (int)(n_embd - i));
}

typedef struct job {
    float *out;
    const bml_weight *wte, *wpe;
    const bml_batch *batch;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t t = begin; t < end; t++)
        KERNEL(embedding_row)
    (j->out + t * (size_t)j->wte->n_in, j->wte, j->wpe, j->batch->token[t], j->batch->position[t]);
}

void KERNEL(embedding)(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                       const bml_weight *wpe)
{
    job j = {out->data, wte, wpe, queue->batch};
    KERNEL(parallel)(queue, rows, &j, (size_t)queue->batch->n_tokens, 1, (size_t)wte->n_in);
}
