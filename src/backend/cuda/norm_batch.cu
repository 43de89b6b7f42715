/*
 * The norm between a decoding batch's products: a block a row. What the product before it left in
 * parts is added to the residual stream on the way.
 */
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_batch.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

static __device__ __forceinline__ float4 sum(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Over all threads; PARTS is theirs alone. */
static __device__ __forceinline__ float block_sum(float x, float *parts)
{
    for (int i = 16; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++)
        x += parts[i];
    return x;
}

template <typename T, int VECTORS /* of a thread */, int SUMS>
static __global__ __launch_bounds__(THREADS, 1) void norm(T *out, float *x, const float *sums,
                                                          size_t step, const int32_t *row,
                                                          const float *weight, const float *bias,
                                                          int n, float epsilon)
{
    __shared__ float parts[2][WARPS];
    float4 v[VECTORS], w[VECTORS], b[VECTORS];
    float all = 0, squares = 0;
    allow_next();
    size_t r = row ? row[blockIdx.x] : blockIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 4 * (threadIdx.x + THREADS * i);
        w[i] = b[i] = v[i] = make_float4(0, 0, 0, 0);
        if (c < n)
            w[i] = __ldg((const float4 *)(weight + c));
        if (c < n && bias)
            b[i] = __ldg((const float4 *)(bias + c));
    }
    await_previous();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 4 * (threadIdx.x + THREADS * i);
        if (c < n) {
            const float *more = sums + r * n + c;
            float4 part[SUMS + 1];
            v[i] = *(const float4 *)(x + r * n + c);
#pragma unroll
            for (int s = 0; s < SUMS; s++)
                part[s] = *(const float4 *)(more + s * step);
#pragma unroll
            for (int s = 0; s < SUMS; s++)
                v[i] = sum(v[i], part[s]);
            if (SUMS)
                *(float4 *)(x + r * n + c) = v[i];
        }
        all += (v[i].x + v[i].y) + (v[i].z + v[i].w);
    }
    float mean = block_sum(all, parts[0]) / n;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float4 d = make_float4(v[i].x - mean, v[i].y - mean, v[i].z - mean, v[i].w - mean);
        if (4 * (threadIdx.x + THREADS * i) < n)
            squares += d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w;
        v[i] = d;
    }
    float scale = rsqrtf(block_sum(squares, parts[1]) / n + epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 4 * (threadIdx.x + THREADS * i);
        if (c < n)
            *(uint2 *)(out + (size_t)blockIdx.x * n + c) = make_uint2(
                pack<T>(v[i].x * scale * w[i].x + b[i].x, v[i].y * scale * w[i].y + b[i].y),
                pack<T>(v[i].z * scale * w[i].z + b[i].z, v[i].w * scale * w[i].w + b[i].w));
    }
}

template <typename T, int VECTORS> static const void *kernel_of(int n_sums)
{
    return n_sums == 0   ? (const void *)norm<T, VECTORS, 0>
           : n_sums == 1 ? (const void *)norm<T, VECTORS, 1>
           : n_sums == 2 ? (const void *)norm<T, VECTORS, 2>
           : n_sums == 4 ? (const void *)norm<T, VECTORS, 4>
                         : (const void *)norm<T, VECTORS, BML_CUDA_MAX_SPLIT>;
}

template <typename T> static const void *kernel_for(int n, int n_sums)
{
    return n <= 4 * THREADS ? kernel_of<T, 1>(n_sums) : kernel_of<T, 2>(n_sums);
}

bool bml_cuda_takes_norm_batch(int n_embd)
{
    return n_embd % 4 == 0 && n_embd <= 8 * THREADS;
}

cudaError_t bml_cuda_norm_batch(bml_dtype type, void *out, float *x, const float *sums, int n_sums,
                                int n_tokens, const int32_t *row, const float *weight,
                                const float *bias, int n_rows, int n_embd, float epsilon,
                                cudaStream_t stream)
{
    const void *kernel = type == BML_F16 ? kernel_for<__half>(n_embd, n_sums)
                                         : kernel_for<__nv_bfloat16>(n_embd, n_sums);
    size_t step = (size_t)n_tokens * n_embd;
    void *arguments[] = {&out, &x, &sums, &step, &row, &weight, &bias, &n_embd, &epsilon};
    return bml_cuda_launch(kernel, dim3((unsigned)n_rows), THREADS, 1, 0, arguments, stream);
}
