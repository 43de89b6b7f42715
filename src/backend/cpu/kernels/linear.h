/*
 * Products with weights, as the kernels and the fused pass share them: a job, the columns of it
 * that one thread does, and what happens to an output before it is stored.
 */
#ifndef BML_BACKEND_CPU_KERNELS_LINEAR_H
#define BML_BACKEND_CPU_KERNELS_LINEAR_H

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/kernels.h"

typedef struct bml_linear_job {
    float *out;      /* [n_tokens, n_out]; with ADD also needed, as room for partial sums */
    const float *x;  /* [n_tokens, n_in]; not used by packed weights */
    void *quantized; /* the same as rows of bml_quant_row; packed weights only */
    float *second; /* [n_tokens, n_out]: room for sums over the second half of the inputs; row-major
                      [in, out] weights and up to BML_CPU_OWN_ROWS tokens only */
    const bml_weight *w;
    const float *bias; /* [n_out] or NULL */
    size_t n_tokens, n_in, n_out;
    /* What happens to y = x W + bias at the end: */
    enum { BML_STORE, BML_ACTIVATE, BML_ADD } epilogue;
    bml_activation activation; /* BML_ACTIVATE: out = activation(y) */
    float *residual;           /* BML_ADD: residual [n_tokens, n_out] += y */
} bml_linear_job;

static inline bml_linear_job bml_linear_job_of(float *out, const float *x, const bml_weight *w,
                                               const bml_buffer *bias, size_t n_tokens)
{
    return (bml_linear_job){.out = out,
                            .x = x,
                            .w = w,
                            .bias = bias->data,
                            .n_tokens = n_tokens,
                            .n_in = (size_t)w->n_in,
                            .n_out = (size_t)w->n_out};
}

/* Columns begin..end of the job; both are multiples of the grain, or end is n_out. SCRATCH is the
 * thread's. */
void KERNEL(linear_cols)(const bml_linear_job *job, size_t begin, size_t end, float *scratch);
size_t KERNEL(linear_grain)(const bml_weight *w);

/* Its three ways: row-major [in, out], row-major [out, in], packed. */
void KERNEL(linear_rows)(const bml_linear_job *job, size_t begin, size_t end, float *scratch);
void KERNEL(linear_dots)(const bml_linear_job *job, size_t begin, size_t end);
void KERNEL(linear_packed)(const bml_linear_job *job, size_t begin, size_t end, float *scratch);

/*
 * The part of one thread of several, without columns: where linear_by_halves says so, a thread
 * first does a half of the inputs (linear_half, as linear_part splits it) and, after a barrier,
 * joins the halves of the columns that it is to finish.
 */
bool KERNEL(linear_by_halves)(const bml_linear_job *job, int n_parts);
void KERNEL(linear_part)(const bml_linear_job *job, int part, int n_parts);
void KERNEL(linear_half)(const bml_linear_job *job, int half, size_t begin, size_t end);
void KERNEL(linear_join)(const bml_linear_job *job, size_t begin, size_t end);

/* A whole job on the queue's pool; quantises x first where the weights are packed. */
void KERNEL(linear_run)(bml_queue *queue, bml_linear_job *job);

/* The vector of finished sums y for columns col.. of a token; columns past n_out are dropped. */
static inline void bml_linear_finish(const bml_linear_job *j, size_t token, size_t col, vf y)
{
    if (col >= j->n_out)
        return;
    size_t at = token * j->n_out + col;
    int n = j->n_out - col < VL ? (int)(j->n_out - col) : VL;
    float *out = j->out + at;
    if (j->epilogue == BML_ACTIVATE) {
        y = bml_activate(y, j->activation);
    } else if (j->epilogue == BML_ADD) {
        out = j->residual + at;
        y += n == VL ? vf_load(out) : vf_load_n(out, n);
    }
    if (n == VL)
        vf_store(out, y);
    else
        vf_store_n(out, y, n);
}

/* The epilogue for sums of columns begin..end that already lie in out; both are multiples of VL, or
 * end is n_out. */
static inline void bml_linear_finish_stored(const bml_linear_job *j, size_t begin, size_t end)
{
    if (j->epilogue == BML_STORE)
        return;
    for (size_t t = 0; t < j->n_tokens; t++)
        for (size_t c = begin; c < end; c += VL) {
            const float *y = j->out + t * j->n_out + c;
            bml_linear_finish(j, t, c, end - c < VL ? vf_load_n(y, (int)(end - c)) : vf_load(y));
        }
}

#endif
