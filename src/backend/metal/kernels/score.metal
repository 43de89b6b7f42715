/*
 * score: a row of logits seen from its target: the largest logit, the target's, its rank, and the
 * sums of e^d and d e^d with d = logit - max. A logit that is not finite makes the largest NaN.
 */
#include "common.metal"

/* A row a threadgroup. */
kernel void score(device row_score *scores [[buffer(0)]], device const float *x [[buffer(1)]],
                  device const int *targets [[buffer(2)]], constant score_args &args [[buffer(3)]],
                  threadgroup float *scratch [[threadgroup(0)]],
                  uint group [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]],
                  uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    place at = {thread_index, lane, simdgroup};
    device const float *row = x + ulong(group) * args.n_cols;
    uint target = uint(targets[group]);
    float own = row[target], top = -INFINITY;
    float before = 0, faults = 0; /* counts, exact as long as they are below 2^24 */
    for (uint i = thread_index; i < args.n_cols; i += ROW_THREADS) {
        float value = row[i];
        faults += (as_type<uint>(value) & 0x7f800000) == 0x7f800000 ? 1.0f : 0.0f;
        before += value > own || (value == own && i < target) ? 1.0f : 0.0f;
        top = max(top, value);
    }
    faults = threadgroup_sum(faults, scratch, at);
    before = threadgroup_sum(before, scratch, at);
    top = threadgroup_max(top, scratch, at);
    float sum = 0, weighted = 0;
    for (uint i = thread_index; i < args.n_cols; i += ROW_THREADS) {
        float d = row[i] - top, e = exp(d);
        sum += e;
        weighted += d * e;
    }
    sum = threadgroup_sum(sum, scratch, at);
    weighted = threadgroup_sum(weighted, scratch, at);
    if (thread_index != 0)
        return;
    device row_score &score = scores[group];
    score.max = faults > 0 ? as_type<float>(0x7fc00000u) : top;
    score.target = own;
    score.rank = int(before) + 1;
    score.sum = sum;
    score.weighted = weighted;
}
