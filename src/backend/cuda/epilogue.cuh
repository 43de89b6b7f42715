/*
 * What becomes of a product's sums: bias, activation, and where the results go. Matrix instructions
 * leave 16 rows of 8 columns in a warp so that lane l holds columns 2 (l % 4) and the next of rows
 * l / 4 and l / 4 + 8; the unit here is four such blocks side by side.
 */
#ifndef BML_BACKEND_CUDA_EPILOGUE_CUH
#define BML_BACKEND_CUDA_EPILOGUE_CUH

#include "backend/cuda/kernels/approximate.cuh"
#include "backend/cuda/prefill.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T> __device__ __forceinline__ uint32_t pack(float low, float high);

template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high)
{
    __half2 pair = __floats2half2_rn(low, high);
    return *(uint32_t *)&pair;
}

/* x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)): right also where the power is infinite. */
__device__ __forceinline__ float gelu_tanh(float x)
{
    float power = exp2_fast(x * (-2.3022082f - 0.1029432f * x * x));
    return x * reciprocal_fast(1.f + power);
}

/* To a lane's COUNT blocks of 16 rows and 8 columns; BIAS has that of the first, and N in all. */
template <int COUNT> __device__ __forceinline__ void add_bias(float *d, const float *bias, int n)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int c = 8 * i + 2 * (threadIdx.x & 3);
        float2 b = make_float2(0.f, 0.f);
        if (c + 1 < n)
            b = *(const float2 *)(bias + c);
        else if (c < n)
            b.x = bias[c];
        d[4 * i] += b.x;
        d[4 * i + 1] += b.y;
        d[4 * i + 2] += b.x;
        d[4 * i + 3] += b.y;
    }
}

/* What a column is multiplied by to be divided by the head size, in the high half; exact below
 * 2^32 / head size. */
__device__ __forceinline__ uint32_t head_divisor(const bml_cuda_product &p)
{
    uint32_t divisor = 0xffffffffu / (uint32_t)max(p.cache.head_dim, 2) + 1;
    asm volatile("" : "+r"(divisor)); /* made once, not wherever it is used */
    return divisor;
}

/* The place of a token's first head in the cache, in rows: fewer than 2^31. */
__device__ __forceinline__ int cache_line(const bml_cuda_cache16 &cache, int slot, int position)
{
    return slot * cache.n_head * cache.n_ctx + position;
}

/* Where a 16-bit result goes: to its row, or to queries, keys and values. */
template <typename T, bool QKV>
__device__ __forceinline__ T *place16(const bml_cuda_product &p, int row, int column,
                                      uint32_t divisor)
{
    const bml_cuda_cache16 &cache = p.cache;
    int width = cache.n_head * cache.head_dim;
    if (!QKV || column < width)
        return (T *)p.out + (size_t)row * p.out_pitch + column;
    bool value = column >= 2 * width;
    int c = column - (value ? 2 * width : width);
    int head = cache.head_dim > 1 ? (int)__umulhi((uint32_t)c, divisor) : c;
    int line = cache_line(cache, __ldg(p.slot + row), __ldg(p.position + row));
    return (T *)(value ? cache.v : cache.k) + (size_t)(line + head * cache.n_ctx) * cache.head_dim +
           (c - head * cache.head_dim);
}

/* A unit: 32 columns of this lane's rows ROW and ROW + 8. */
template <typename T, bool QKV>
__device__ __forceinline__ void put16(const bml_cuda_product &p, int row, int column,
                                      const float *d, uint32_t divisor = 0)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int r = row + 8 * (i >> 1 & 1), c = column + i / 4 * 8 + 2 * (threadIdx.x & 3) + (i & 1);
        if (r < p.m && c < p.n)
            *place16<T, QKV>(p, r, c, divisor) = (T)d[i];
    }
}

/* A unit in float32. */
template <bool RESIDUAL>
__device__ __forceinline__ void put32(const bml_cuda_product &p, int row, int column,
                                      const float *d)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int r = row + 8 * (i >> 1 & 1), c = column + i / 4 * 8 + 2 * (threadIdx.x & 3) + (i & 1);
        float *to = (float *)p.out + (size_t)r * p.out_pitch + c;
        if (r < p.m && c < p.n)
            *to = RESIDUAL ? *to + d[i] : d[i];
    }
}

template <int N> __device__ __forceinline__ void activate(float *d, bml_activation activation)
{
    switch (activation) {
    case BML_ACT_GELU_TANH:
#pragma unroll
        for (int i = 0; i < N; i++)
            d[i] = gelu_tanh(d[i]);
        return;
    case BML_ACT_GELU_ERF:
#pragma unroll
        for (int i = 0; i < N; i++)
            d[i] = 0.5f * d[i] * (1.f + erff(d[i] * 0.70710678f));
        return;
    case BML_ACT_RELU:
#pragma unroll
        for (int i = 0; i < N; i++)
            d[i] = d[i] < 0.f ? 0.f : d[i]; /* NaN stays NaN */
    }
}

/* Any epilogue of a unit. */
template <typename T>
__device__ __forceinline__ void finish_unit(const bml_cuda_product &p, int row, int column,
                                            float *d)
{
    switch (p.epilogue) {
    case BML_CUDA_STORE32:
        put32<false>(p, row, column, d);
        return;
    case BML_CUDA_RESIDUAL:
        put32<true>(p, row, column, d);
        return;
    case BML_CUDA_QKV:
        put16<T, true>(p, row, column, d, head_divisor(p));
        return;
    case BML_CUDA_ACTIVATION:
        activate<16>(d, p.activation);
        put16<T, false>(p, row, column, d);
    }
}

/* Calls ACT with U and unit U of a lane's sums, COUNT units of 16, in the same registers for each:
 * one code, where COUNT would take long to fetch. */
template <int COUNT, typename F> __device__ __forceinline__ void each_unit(const float *d, F &&act)
{
#pragma unroll 1
    for (int u = 0; u < COUNT; u++) {
        float v[16];
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (u == i)
#pragma unroll
                for (int j = 0; j < 16; j++)
                    v[j] = d[16 * i + j];
        act(u, v);
    }
}

#endif
