/*
 * argmax: the lowest index of the largest of a row's first n_valid values; -1 if any of these is
 * NaN or infinite, which is told by its bits, for a compiler may take it that no value is either.
 */
#include "common.metal"

/* A row a threadgroup. */
kernel void
argmax(device int *ids [[buffer(0)]], device const float *x [[buffer(1)]],
       constant argmax_args &args [[buffer(2)]], threadgroup float *tops [[threadgroup(0)]],
       threadgroup uint *marks [[threadgroup(1)]], uint group [[threadgroup_position_in_grid]],
       uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
       uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    device const float *row = x + ulong(group) * args.n_cols;
    threadgroup uint *firsts = marks, *faults = marks + SIMD_WIDTH; /* of each simdgroup */
    float top = -INFINITY;
    uint first = 0xffffffff, fault = 0;
    for (uint i = thread_index; i < args.n_valid; i += ARGMAX_THREADS) {
        float value = row[i];
        fault |= (as_type<uint>(value) & 0x7f800000) == 0x7f800000;
        if (value > top) {
            top = value;
            first = i;
        }
    }
    float best = simd_max(top);
    first = simd_min(top == best ? first : 0xffffffff);
    fault = simd_max(fault);
    if (lane == 0) {
        tops[simdgroup] = best;
        firsts[simdgroup] = first;
        faults[simdgroup] = fault;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup != 0)
        return;
    top = tops[lane]; /* there are as many simdgroups as lanes */
    best = simd_max(top);
    first = simd_min(top == best ? firsts[lane] : 0xffffffff);
    fault = simd_max(faults[lane]);
    if (lane == 0)
        ids[group] = fault ? -1 : int(first);
}
