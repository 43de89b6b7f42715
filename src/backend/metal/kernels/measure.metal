/* What the GPU can do: streaming reads, and multiply-adds of float32. */
#include "common.metal"

/* Each thread reads every n_threads-th four floats, eight at a time, and keeps their sum. */
kernel void measure_read(device float *out [[buffer(0)]], device const float4 *data [[buffer(1)]],
                         constant uint &n [[buffer(2)]], uint index [[thread_position_in_grid]],
                         uint n_groups [[threadgroups_per_grid]],
                         uint n_in_group [[threads_per_threadgroup]])
{
    uint n_threads = n_groups * n_in_group;
    float4 sum = float4(0.0f);
    for (uint i = index; i < n; i += 8 * n_threads)
        for (uint j = 0; j < 8; j++)
            if (i + j * n_threads < n)
                sum += data[i + j * n_threads];
    out[index] = sum.x + sum.y + sum.z + sum.w;
}

/* Four vectors of chains, N rounds: 32 operations a round. */
kernel void measure_multiply(device float *out [[buffer(0)]], constant uint &n [[buffer(1)]],
                             uint index [[thread_position_in_grid]])
{
    float start = float(index) * 1e-9f;
    float4 a = float4(start), b = float4(start + 1), c = float4(start + 2), d = float4(start + 3);
    float4 by = float4(0.999f), plus = float4(0.001f);
    for (uint i = 0; i < n; i++) {
        a = fma(a, by, plus);
        b = fma(b, by, plus);
        c = fma(c, by, plus);
        d = fma(d, by, plus);
    }
    float4 sum = a + b + c + d;
    out[index] = sum.x + sum.y + sum.z + sum.w;
}
