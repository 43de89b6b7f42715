/*
 * linear and linear_transposed: out = x W + bias, on the way that fits how W is held. Row-major
 * weights differ in layout; packed ones (backend/cpu/quant.h) no longer do.
 */
#include "backend/cpu/kernels/linear.h"

#include "backend/cpu/quant.h"

void KERNEL(linear_cols)(const bml_linear_job *j, size_t begin, size_t end, float *scratch)
{
    if (begin == end)
        return;
    if (bml_is_packed(j->w->format))
        KERNEL(linear_packed)(j, begin, end);
    else if (j->w->out_in)
        KERNEL(linear_dots)(j, begin, end);
    else
        KERNEL(linear_rows)(j, begin, end, scratch);
}

size_t KERNEL(linear_grain)(const bml_weight *w)
{
    return bml_is_packed(w->format) || w->out_in ? 2 * BML_TILE : 4 * BML_TILE;
}

typedef struct pool_job {
    bml_linear_job linear;
    bml_queue *queue;
} pool_job;

static void quantize_part(void *context, int part, int n_parts)
{
    const bml_linear_job *j = &((pool_job *)context)->linear;
    size_t begin, end;
    bml_split(j->n_tokens, 1, part, n_parts, &begin, &end);
    for (size_t t = begin; t < end; t++)
        KERNEL(quantize_row)
    (j->x + t * j->n_in, j->n_in, bml_quant_row_at(j->quantized, j->n_in, t));
}

static void cols_part(void *context, int part, int n_parts)
{
    const pool_job *j = context;
    size_t begin, end;
    bml_split(j->linear.n_out, KERNEL(linear_grain)(j->linear.w), part, n_parts, &begin, &end);
    KERNEL(linear_cols)(&j->linear, begin, end, bml_cpu_scratch(j->queue, part));
}

void KERNEL(linear_run)(bml_queue *queue, bml_linear_job *job)
{
    pool_job j = {*job, queue};
    if (bml_is_packed(job->w->format)) {
        j.linear.quantized = queue->quantized;
        bml_pool_run(queue->pool, quantize_part, &j);
    }
    bml_pool_run(queue->pool, cols_part, &j);
}

void KERNEL(linear)(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                    const bml_buffer *bias, int n_tokens)
{
    bml_linear_job j = bml_linear_job_of(out->data, x->data, w, bias, (size_t)n_tokens);
    KERNEL(linear_run)(queue, &j);
}

void KERNEL(linear_transposed)(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                               const bml_weight *w, const bml_buffer *bias, int n_tokens)
{
    KERNEL(linear)(queue, out, x, w, bias, n_tokens);
}
