/* Kernels with one fault each, and what they would be without it: see test_standin.c. */
#include <metal_stdlib>

using namespace metal;

constant uint CHOICE [[function_constant(1)]];

/* Each thread reads what the opposite one writes. */
kernel void exchange(device float *out [[buffer(0)]], threadgroup float *shared [[threadgroup(0)]],
                     uint t [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]])
{
    shared[t] = float(t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = shared[n - 1 - t];
}

kernel void exchange_without_barrier(device float *out [[buffer(0)]],
                                     threadgroup float *shared [[threadgroup(0)]],
                                     uint t [[thread_index_in_threadgroup]],
                                     uint n [[threads_per_threadgroup]])
{
    shared[t] = -1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    shared[t] = float(t);
    out[t] = shared[n - 1 - t];
}

/* A sum of each simdgroup's, twice: the second round writes over what the first may still read. */
kernel void scratch_used_again(device float *out [[buffer(0)]],
                               threadgroup float *shared [[threadgroup(0)]],
                               uint t [[thread_index_in_threadgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint n_simdgroups [[simdgroups_per_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]])
{
    float total = 0;
    for (uint round = 1; round <= 2; round++) {
        float sum = simd_sum(float(round));
        if (lane == 0)
            shared[simdgroup] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint s = 0; s < n_simdgroups; s++)
            total += round * shared[s];
    }
    out[t] = total;
}

kernel void exchange_in_simdgroup(device float *out [[buffer(0)]],
                                  threadgroup float *shared [[threadgroup(0)]],
                                  uint t [[thread_index_in_threadgroup]])
{
    shared[t] = float(t);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = shared[t ^ 31];
}

kernel void exchange_in_simdgroup_without_barrier(device float *out [[buffer(0)]],
                                                  threadgroup float *shared [[threadgroup(0)]],
                                                  uint t [[thread_index_in_threadgroup]])
{
    shared[t] = float(t);
    out[t] = shared[t ^ 31];
}

/* Through device memory, whose barrier is another. */
kernel void exchange_with_wrong_flags(device float *out [[buffer(0)]],
                                      uint t [[thread_index_in_threadgroup]],
                                      uint n [[threads_per_threadgroup]])
{
    out[t] = float(t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float other = out[n - 1 - t];
    threadgroup_barrier(mem_flags::mem_device);
    out[t] = other;
}

kernel void missed_barrier(device float *out [[buffer(0)]], uint t [[thread_index_in_threadgroup]])
{
    if (t >= 32)
        return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = 1;
}

kernel void missed_simd_sum(device float *out [[buffer(0)]], uint t [[thread_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]])
{
    out[t] = 0;
    if (lane < 16)
        out[t] = simd_sum(1.0f);
}

kernel void different_operations(device float *out [[buffer(0)]],
                                 uint t [[thread_index_in_threadgroup]],
                                 uint lane [[thread_index_in_simdgroup]])
{
    if (lane < 16)
        out[t] = simd_sum(1.0f);
    else
        out[t] = simd_max(1.0f);
}

kernel void groups_share(device float *out [[buffer(0)]],
                         uint group [[threadgroup_position_in_grid]],
                         uint t [[thread_index_in_threadgroup]])
{
    if (t == 0)
        out[0] = float(group);
}

/* Bytes that belong to the buffer's memory, but not to what is bound of it. */
kernel void reads_past_end(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                           uint t [[thread_index_in_threadgroup]])
{
    out[t] = x[t + 1];
}

kernel void writes_past_end(device float *out [[buffer(0)]], uint t [[thread_index_in_threadgroup]])
{
    out[t + 1] = 1;
}

kernel void writes_past_threadgroup(device float *out [[buffer(0)]],
                                    threadgroup float *shared [[threadgroup(0)]],
                                    uint t [[thread_index_in_threadgroup]])
{
    shared[t + 1] = 1;
    out[t] = 1;
}

kernel void writes_to_constant(device const float *x [[buffer(0)]],
                               uint t [[thread_index_in_threadgroup]])
{
    ((device float *)x)[t] = 1;
}

kernel void reads_unwritten(device float *out [[buffer(0)]],
                            threadgroup float *shared [[threadgroup(0)]],
                            uint t [[thread_index_in_threadgroup]])
{
    out[t] = shared[t];
}

/* ---- what must be right --------------------------------------------------------------------- */

struct numbers {
    uint a, b;
};

kernel void arguments(device uint *out [[buffer(0)]], constant numbers &args [[buffer(2)]],
                      uint index [[thread_position_in_grid]],
                      uint group [[threadgroup_position_in_grid]],
                      uint groups [[threadgroups_per_grid]], uint t [[thread_index_in_threadgroup]],
                      uint threads [[threads_per_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]])
{
    device uint *row = out + index * 10;
    row[0] = group;
    row[1] = groups;
    row[2] = t;
    row[3] = threads;
    row[4] = lane;
    row[5] = simdgroup;
    row[6] = simdgroups;
    row[7] = args.a;
    row[8] = args.b;
    row[9] = CHOICE;
}

kernel void simd_operations(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                            uint t [[thread_index_in_threadgroup]])
{
    device float *row = out + t * 6;
    row[0] = simd_sum(x[t]);
    row[1] = simd_max(x[t]);
    row[2] = float(simd_max(uint(x[t])));
    row[3] = float(simd_min(uint(x[t])));
    row[4] = simd_shuffle_xor(x[t], 5);
    row[5] = simd_broadcast(x[t], 7);
}

/* out = a b + a b^T, 8 by 8 */
kernel void matrices(device float *out [[buffer(0)]], device const float *a [[buffer(1)]],
                     device const float *b [[buffer(2)]])
{
    simdgroup_float8x8 left, right, across, sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, b, 8);
    simdgroup_load(across, b, 8, 0, true);
    simdgroup_multiply(sum, left, right);
    simdgroup_multiply_accumulate(sum, left, across, sum);
    simdgroup_store(sum, out, 8);
}

kernel void vectors(device float *out [[buffer(0)]], device const half *x [[buffer(1)]],
                    uint t [[thread_index_in_threadgroup]])
{
    float4 four = float4(((device const half4 *)x)[t]);
    four = four * 2 + float4(1, 2, 3, 4);
    four += 0.5f;
    ((device float4 *)out)[t] = four;
}

kernel void plain_tanh(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                       uint t [[thread_index_in_threadgroup]])
{
    out[t] = tanh(x[t]);
}
