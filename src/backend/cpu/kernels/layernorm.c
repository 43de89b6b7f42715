/*
 * layernorm: (x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016, arXiv
 * 1607.06450). Mean and variance are taken in float64: a row whose mean is large against its spread
 * loses nothing, and a constant row gives exactly the bias.
 */
#include "backend/cpu/kernels/kernels.h"

#include <math.h>

enum { LANES = 8 };

typedef struct job {
    float *out;
    const float *x, *weight, *bias;
    const int32_t *row; /* NULL: every row in turn */
    size_t n_embd;
    float epsilon;
} job;

/* Sum over the row of x - shift, or of its square: in LANES interleaved partial sums. */
static double sum_of(const float *x, size_t n, double shift, bool squared)
{
    double lane[LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++) {
            double d = x[i + l] - shift;
            lane[l] += squared ? d * d : d;
        }
    for (size_t l = 0; i + l < n; l++) {
        double d = x[i + l] - shift;
        lane[l] += squared ? d * d : d;
    }
    for (size_t l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

void KERNEL(layernorm_row)(float *out, const float *x, const float *weight, const float *bias,
                           size_t n, float epsilon)
{
    double mean = sum_of(x, n, 0, false) / (double)n;
    double variance = sum_of(x, n, mean, true) / (double)n;
    double scale = 1 / sqrt(variance + (double)epsilon);
    for (size_t i = 0; i < n; i++) {
        float y = (float)((x[i] - mean) * scale) * weight[i];
        out[i] = bias ? y + bias[i] : y;
    }
}

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t r = begin; r < end; r++) {
        const float *x = j->x + (j->row ? (size_t)j->row[r] : r) * j->n_embd;
        KERNEL(layernorm_row)(j->out + r * j->n_embd, x, j->weight, j->bias, j->n_embd, j->epsilon);
    }
}

void KERNEL(layernorm)(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                       const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                       float epsilon, bool rows_of_batch)
{
    job j = {.out = out->data,
             .x = x->data,
             .weight = weight->data,
             .bias = bias->data,
             .row = rows_of_batch ? queue->batch->row : NULL,
             .n_embd = (size_t)n_embd,
             .epsilon = epsilon};
    KERNEL(parallel)(queue, rows, &j, (size_t)n_rows, 1, 3 * (size_t)n_embd);
}
