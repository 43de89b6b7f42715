/* softmax: each row in place, exp(x - max) / sum; a row of all -inf gives zeros. */
#include "common.metal"

/* A row a threadgroup. */
kernel void softmax(device float *x [[buffer(0)]], constant softmax_args &args [[buffer(1)]],
                    threadgroup float *scratch [[threadgroup(0)]],
                    uint group [[threadgroup_position_in_grid]],
                    uint thread_index [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    place at = {thread_index, lane, simdgroup};
    device float *row = x + ulong(group) * args.n_cols;
    float top = -INFINITY, sum = 0;
    for (uint i = thread_index; i < args.n_cols; i += ROW_THREADS)
        top = max(top, row[i]);
    top = threadgroup_max(top, scratch, at);
    if (top == -INFINITY)
        top = 0; /* exp then gives zeros, or NaN where there is one */
    for (uint i = thread_index; i < args.n_cols; i += ROW_THREADS)
        sum += exp(row[i] - top);
    sum = threadgroup_sum(sum, scratch, at);
    for (uint i = thread_index; i < args.n_cols; i += ROW_THREADS)
        row[i] = sum == 0 ? 0 : exp(row[i] - top) / sum;
}
