/* argmax: the lowest index of the largest of the first n_valid logits; -1 for NaN or infinity. */
#include "backend/cpu/kernels/kernels.h"

int32_t KERNEL(argmax_row)(const float *x, size_t n)
{
    size_t full = n - n % VL, i;
    /* x - x is 0 for finite x and NaN for the rest, and a NaN stays in the sum. */
    vf max_lanes = vf_set1(x[0]), poison = {0};
    for (i = 0; i < full; i += VL) {
        vf v = vf_load(x + i);
        poison += v - v;
        max_lanes = vf_max(v, max_lanes);
    }
    float max = vf_hmax(max_lanes), rest = vf_sum(poison);
    for (; i < n; i++) {
        rest += x[i] - x[i];
        max = x[i] > max ? x[i] : max;
    }
    if (rest != 0)
        return -1;
    int32_t best = 0;
    while (x[best] != max)
        best++;
    return best;
}

typedef struct job {
    int32_t *ids;
    const float *logits;
    size_t n_cols, n_valid;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t r = begin; r < end; r++)
        j->ids[r] = KERNEL(argmax_row)(j->logits + r * j->n_cols, j->n_valid);
}

void KERNEL(argmax)(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                    int n_cols, int n_valid)
{
    job j = {ids->data, logits->data, (size_t)n_cols, (size_t)n_valid};
    KERNEL(parallel)(queue, rows, &j, (size_t)n_rows, 1, (size_t)n_valid / 4);
}
