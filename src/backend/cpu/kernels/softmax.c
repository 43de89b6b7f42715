/* softmax: exp(x - max) / sum over each row. Attention divides only what it makes of the row. */
#include "backend/cpu/kernels/kernels.h"

#include <math.h>

float KERNEL(exp_row)(float *x, size_t n)
{
    const vf minus_inf = vf_set1(-INFINITY);
    size_t i, full = n - n % VL;
    int tail = (int)(n % VL);

    vf max_lanes = minus_inf;
    for (i = 0; i < full; i += VL)
        max_lanes = vf_max(vf_load(x + i), max_lanes);
    if (tail)
        max_lanes = vf_max(vf_first_n(vf_load_n(x + i, tail), tail, -INFINITY), max_lanes);
    float max = vf_hmax(max_lanes);
    if (max == -INFINITY) { /* nothing to attend to: zeros, but a NaN is not hidden */
        for (i = 0; i < n; i++)
            x[i] = isnan(x[i]) ? x[i] : 0;
        return 1;
    }

    vf sum_lanes = {0}, m = vf_set1(max);
    for (i = 0; i < full; i += VL) {
        vf e = vf_exp(vf_load(x + i) - m);
        sum_lanes += e;
        vf_store(x + i, e);
    }
    if (tail) {
        vf e = vf_first_n(vf_exp(vf_load_n(x + i, tail) - m), tail, 0);
        sum_lanes += e;
        vf_store_n(x + i, e, tail);
    }
    return 1 / vf_sum(sum_lanes);
}

typedef struct job {
    float *x;
    size_t n_cols;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t r = begin; r < end; r++) {
        float *x = j->x + r * j->n_cols, scale = KERNEL(exp_row)(x, j->n_cols);
        for (size_t i = 0; i < j->n_cols; i++)
            x[i] *= scale;
    }
}

void KERNEL(softmax)(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols)
{
    job j = {x->data, (size_t)n_cols};
    KERNEL(parallel)(queue, rows, &j, (size_t)n_rows, 1, 4 * (size_t)n_cols);
}
