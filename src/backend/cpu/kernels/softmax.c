/* softmax: exp(x - max) / sum over each row. */
#include "backend/cpu/kernels/kernels.h"

#include <math.h>

void KERNEL(softmax_row)(float *x, size_t n)
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
        return;
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

    vf scale = vf_set1(1 / vf_sum(sum_lanes));
    for (i = 0; i < full; i += VL)
        vf_store(x + i, vf_load(x + i) * scale);
    if (tail)
        vf_store_n(x + i, vf_load_n(x + i, tail) * scale, tail);
}

typedef struct job {
    float *x;
    size_t n_cols;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t r = begin; r < end; r++)
        KERNEL(softmax_row)(j->x + r * j->n_cols, j->n_cols);
}

void KERNEL(softmax)(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols)
{
    job j = {x->data, (size_t)n_cols};
    KERNEL(parallel)(queue, rows, &j, (size_t)n_rows, 1, 4 * (size_t)n_cols);
}
