/* layernorm: (x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016). */
#pragma once

#include "common.metal"

/*
 * One row, by ROW_THREADS threads. Everything is taken relative to the row's first element: those
 * differences are nearly exact where the mean is large against the spread, and zero in a constant
 * row. OUT is device or threadgroup memory; who reads it waits at a barrier first.
 */
template <typename Out>
static inline void normalise_row(Out out, device const float *x, device const float *weight,
                                 device const float *bias, constant norm_args &args,
                                 threadgroup float *scratch, place at)
{
    float origin = x[0], sum = 0, squares = 0;
    for (uint i = at.thread_index; i < args.n; i += ROW_THREADS)
        sum += x[i] - origin;
    float mean = threadgroup_sum(sum, scratch, at) / float(args.n);
    for (uint i = at.thread_index; i < args.n; i += ROW_THREADS) {
        float d = x[i] - origin - mean;
        squares += d * d;
    }
    float variance = threadgroup_sum(squares, scratch, at) / float(args.n);
    float scale = 1 / sqrt(variance + args.epsilon);
    for (uint i = at.thread_index; i < args.n; i += ROW_THREADS) {
        float y = (x[i] - origin - mean) * scale * weight[i];
        out[i] = args.has_bias ? y + bias[i] : y;
    }
}

/* A row a threadgroup. */
kernel void layernorm(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                      device const float *weight [[buffer(2)]],
                      device const float *bias [[buffer(3)]], device const int *row [[buffer(4)]],
                      constant norm_args &args [[buffer(5)]],
                      threadgroup float *scratch [[threadgroup(0)]],
                      uint group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    ulong from = args.of_batch ? ulong(row[group]) : group;
    normalise_row(out + ulong(group) * args.n, x + from * args.n, weight, bias, args, scratch,
                  place{thread_index, lane, simdgroup});
}
