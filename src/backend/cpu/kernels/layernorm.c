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

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    size_t n = j->n_embd;
    for (size_t r = begin; r < end; r++) {
        const float *x = j->x + (j->row ? (size_t)j->row[r] : r) * n;
        float *out = j->out + r * n;
        double mean = sum_of(x, n, 0, false) / (double)n;
        double variance = sum_of(x, n, mean, true) / (double)n;
        double scale = 1 / sqrt(variance + (double)j->epsilon);
        for (size_t i = 0; i < n; i++) {
            float y = (float)((x[i] - mean) * scale) * j->weight[i];
            out[i] = j->bias ? y + j->bias[i] : y;
        }
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
