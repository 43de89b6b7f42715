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
        KERNEL(linear_packed)(j, begin, end, scratch);
    else if (j->w->out_in)
        KERNEL(linear_dots)(j, begin, end);
    else
        KERNEL(linear_rows)(j, begin, end, scratch);
}

size_t KERNEL(linear_grain)(const bml_weight *w)
{
    return bml_is_packed(w->format) || w->out_in ? 2 * BML_TILE : 4 * BML_TILE;
}

bool KERNEL(linear_by_halves)(const bml_linear_job *j, int n_parts)
{
    return !bml_is_packed(j->w->format) && !j->w->out_in && j->n_tokens <= BML_CPU_OWN_ROWS &&
           n_parts % 2 == 0;
}

void KERNEL(linear_part)(const bml_linear_job *j, int part, int n_parts)
{
    size_t begin, end;
    bml_split(j->n_out, KERNEL(linear_grain)(j->w), part / 2, n_parts / 2, &begin, &end);
    if (begin < end)
        KERNEL(linear_half)(j, part % 2, begin, end);
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
    if (KERNEL(linear_by_halves)(&j->linear, n_parts)) {
        KERNEL(linear_part)(&j->linear, part, n_parts);
        bml_pool_barrier(j->queue->pool);
        KERNEL(linear_join)(&j->linear, begin, end);
    } else {
        KERNEL(linear_cols)(&j->linear, begin, end, bml_cpu_scratch(j->queue, part));
    }
}

void KERNEL(linear_run)(bml_queue *queue, bml_linear_job *job)
{
    pool_job j = {*job, queue};
    j.linear.second = queue->second;
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
