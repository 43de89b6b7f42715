/* embedding: out[t] = wte[token[t]] + wpe[position[t]] */
#include "backend/cpu/kernels/kernels.h"

typedef struct job {
    float *out;
    const bml_weight *wte, *wpe;
    const bml_batch *batch;
} job;

static const void *row_of(const bml_weight *w, size_t row, size_t n_embd)
{
    return (const char *)w->buffer.data + row * n_embd * bml_dtype_size(w->dtype);
}

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    size_t n_embd = (size_t)j->wte->n_in;
    for (size_t t = begin; t < end; t++) {
        const void *token = row_of(j->wte, (size_t)j->batch->token[t], n_embd);
        const void *position = row_of(j->wpe, (size_t)j->batch->position[t], n_embd);
        float *out = j->out + t * n_embd;
        size_t i = 0;
        for (; i + VL <= n_embd; i += VL)
            vf_store(out + i,
                     vf_load_as(j->wte->dtype, token, i) + vf_load_as(j->wpe->dtype, position, i));
        int tail = (int)(n_embd - i);
        if (tail)
            vf_store_n(out + i,
                       vf_load_as_n(j->wte->dtype, token, i, tail) +
                           vf_load_as_n(j->wpe->dtype, position, i, tail),
                       tail);
    }
}

void KERNEL(embedding)(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                       const bml_weight *wpe)
{
    job j = {out->data, wte, wpe, queue->batch};
    KERNEL(parallel)(queue, rows, &j, (size_t)queue->batch->n_tokens, 1, (size_t)wte->n_in);
}
