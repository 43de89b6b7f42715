/* score: what log-probability, rank and entropy of a target need of a row of logits. */
#include "backend/cpu/kernels/kernels.h"

#include <math.h>

/* One row: its largest logit and the target's rank in a first pass, the sums in a second. */
static bml_row_score score_row(const float *x, size_t n, size_t target)
{
    const vf own = vf_set1(x[target]);
    vf max = vf_set1(x[0]), poison = {0};
    vi above = {0}; /* in each lane, minus the number of logits that come before the target's */
    for (size_t i = 0; i < n; i += VL) {
        int count = n - i < VL ? (int)(n - i) : VL;
        vf v = count == VL ? vf_load(x + i) : vf_first_n(vf_load_n(x + i, count), count, -INFINITY);
        /* v - v is 0 for finite v, else NaN, and a NaN stays in the sum. */
        poison += count == VL ? v - v : vf_first_n(v - v, count, 0);
        max = vf_max(v, max);
        if (i + VL <= target)
            above += v >= own; /* an equal logit of a lower id comes first */
        else if (i > target)
            above += v > own;
        else
            for (size_t id = i; id < i + (size_t)count; id++)
                above[0] -= x[id] > x[target] || (x[id] == x[target] && id < target);
    }
    bml_row_score score = {.max = vf_hmax(max), .target = x[target], .rank = 1 - vi_sum(above)};
    if (vf_sum(poison) != 0) {
        score.max = NAN;
        return score;
    }
    /* Sums of up to 64 vectors in float32, and of these in float64. */
    double all = 0, all_weighted = 0;
    for (size_t block = 0; block < n; block += 64 * VL) {
        size_t end = n - block < 64 * VL ? n : block + 64 * VL;
        vf sum = {0}, weighted = {0};
        for (size_t i = block; i < end; i += VL) {
            int count = end - i < VL ? (int)(end - i) : VL;
            vf d = (count == VL ? vf_load(x + i) : vf_load_n(x + i, count)) - score.max;
            vf e = count == VL ? vf_exp(d) : vf_first_n(vf_exp(d), count, 0);
            sum += e;
            weighted = vf_fma(d, e, weighted);
        }
        all += (double)vf_sum(sum);
        all_weighted += (double)vf_sum(weighted);
    }
    score.sum = (float)all;
    score.weighted = (float)all_weighted;
    return score;
}

typedef struct job {
    bml_row_score *scores;
    const float *logits;
    const int32_t *target;
    size_t n_cols;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t r = begin; r < end; r++)
        j->scores[r] = score_row(j->logits + r * j->n_cols, j->n_cols, (size_t)j->target[r]);
}

void KERNEL(score)(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                   int n_cols)
{
    job j = {scores->data, logits->data, queue->batch->target, (size_t)n_cols};
    KERNEL(parallel)(queue, rows, &j, (size_t)n_rows, 1, 2 * (size_t)n_cols);
}
