/* argmax: the lowest index of the largest of the first n_valid logits; -1 for NaN or infinity. */
#include "backend/cpu/kernels/kernels.h"

typedef struct job {
    int32_t *ids;
    const float *logits;
    size_t n_cols, n_valid;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t r = begin; r < end; r++) {
        const float *x = j->logits + r * j->n_cols;
        size_t full = j->n_valid - j->n_valid % VL, i;
        /* x - x is 0 for finite x and NaN for the rest, and a NaN stays in the sum. */
        vf max_lanes = vf_set1(x[0]), poison = {0};
        for (i = 0; i < full; i += VL) {
            vf v = vf_load(x + i);
            poison += v - v;
            max_lanes = vf_max(v, max_lanes);
        }
        float max = vf_hmax(max_lanes), rest = vf_sum(poison);
        for (; i < j->n_valid; i++) {
            rest += x[i] - x[i];
            max = x[i] > max ? x[i] : max;
        }
        size_t best = 0;
        if (rest == 0)
            while (x[best] != max)
                best++;
        j->ids[r] = rest == 0 ? (int32_t)best : -1;
    }
}

void KERNEL(argmax)(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                    int n_cols, int n_valid)
{
    job j = {ids->data, logits->data, (size_t)n_cols, (size_t)n_valid};
    KERNEL(parallel)(queue, rows, &j, (size_t)n_rows, 1, (size_t)n_valid / 4);
}
