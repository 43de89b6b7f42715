/*
 * What becomes of a product's sums: bias, activation, and where the results go. Matrix instructions
 * leave 16 rows of 8 columns in a warp so that lane l holds columns 2 (l % 4) and the next of rows
 * l / 4 and l / 4 + 8; the unit here is four such blocks side by side.
 */
#ifndef BML_BACKEND_CUDA_EPILOGUE_CUH
#define BML_BACKEND_CUDA_EPILOGUE_CUH

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

/* Each lane of four gives p[i] to lane i: columns 2 q of four blocks become 8 columns of block q.
 */
__device__ __forceinline__ uint4 transpose_quad(uint32_t p0, uint32_t p1, uint32_t p2, uint32_t p3)
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t a = __shfl_xor_sync(~0u, odd ? p0 : p1, 1), b = __shfl_xor_sync(~0u, odd ? p2 : p3, 1);
    (odd ? p0 : p1) = a;
    (odd ? p2 : p3) = b;
    a = __shfl_xor_sync(~0u, high ? p0 : p2, 2);
    b = __shfl_xor_sync(~0u, high ? p1 : p3, 2);
    (high ? p0 : p2) = a;
    (high ? p1 : p3) = b;
    return make_uint4(p0, p1, p2, p3);
}

__device__ __forceinline__ float activate(float x, bml_activation activation)
{
    if (activation == BML_ACT_RELU)
        return fmaxf(x, 0.f);
    if (activation == BML_ACT_GELU_ERF)
        return 0.5f * x * (1.f + erff(x * 0.70710678f));
    /* x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), which has no overflow: x / inf is 0 */
    return __fdividef(x, 1.f + __expf(x * (-1.5957691f - 0.0713548f * x * x)));
}

/* Where a 16-bit result goes; eight columns from a multiple of eight lie together. */
template <typename T>
__device__ __forceinline__ T *place16(const bml_cuda_product &p, int row, int column)
{
    const bml_cuda_cache16 &cache = p.cache;
    int width = cache.n_head * cache.head_dim;
    if (p.epilogue != BML_CUDA_QKV || column < width)
        return (T *)p.out + (size_t)row * p.out_pitch + column;
    bool value = column >= 2 * width;
    int c = column - (value ? 2 * width : width), head = c / cache.head_dim;
    size_t line = ((size_t)p.slot[row] * cache.n_head + head) * cache.n_ctx + p.position[row];
    return (T *)(value ? cache.v : cache.k) + line * cache.head_dim + (c - head * cache.head_dim);
}

/* Two neighbouring columns; pairs start at even columns. */
__device__ __forceinline__ void put32(const bml_cuda_product &p, int row, int column, float2 v)
{
    float *to = (float *)p.out + (size_t)row * p.out_pitch + column;
    bool residual = p.epilogue == BML_CUDA_RESIDUAL;
    if (column + 1 < p.n && !(p.out_pitch & 1)) {
        float2 *pair = (float2 *)to;
#if __CUDA_ARCH__ >= 900
        if (residual) /* the sum is made where the row lies: nothing waits for it */
            atomicAdd(pair, v);
        else
            *pair = v;
#else
        *pair = residual ? make_float2(pair->x + v.x, pair->y + v.y) : v;
#endif
        return;
    }
    to[0] = residual ? to[0] + v.x : v.x;
    if (column + 1 < p.n)
        to[1] = residual ? to[1] + v.y : v.y;
}

__device__ __forceinline__ float2 bias_pair(const bml_cuda_product &p, int column)
{
    if (!p.bias || column >= p.n)
        return make_float2(0.f, 0.f);
    if (!(p.n & 1))
        return __ldg((const float2 *)(p.bias + column));
    return make_float2(p.bias[column], column + 1 < p.n ? p.bias[column + 1] : 0.f);
}

/* The epilogue of 32 columns from COLUMN, of this lane's rows ROW and ROW + 8. WIDE: n, pitch and
 * head size of a 16-bit output are multiples of eight. */
template <typename T, bool WIDE>
__device__ __forceinline__ void finish(const bml_cuda_product &p, int row, int column, float *d)
{
    int quad = threadIdx.x & 3, c = column + 2 * quad;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 bias = bias_pair(p, c + 8 * j);
        d[4 * j] += bias.x;
        d[4 * j + 1] += bias.y;
        d[4 * j + 2] += bias.x;
        d[4 * j + 3] += bias.y;
    }
    if (p.epilogue == BML_CUDA_STORE32 || p.epilogue == BML_CUDA_RESIDUAL) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int r = row + 8 * (i & 1), at = c + 8 * (i >> 1);
            if (r < p.m && at < p.n)
                put32(p, r, at, make_float2(d[2 * i], d[2 * i + 1]));
        }
        return;
    }
    if (p.epilogue == BML_CUDA_ACTIVATION) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            d[i] = activate(d[i], p.activation);
    }
    if constexpr (WIDE) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float *e = d + 2 * h;
            uint4 v = transpose_quad(pack<T>(e[0], e[1]), pack<T>(e[4], e[5]),
                                     pack<T>(e[8], e[9]), pack<T>(e[12], e[13]));
            if (row + 8 * h < p.m && column + 8 * quad < p.n)
                *(uint4 *)place16<T>(p, row + 8 * h, column + 8 * quad) = v;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int r = row + 8 * (i >> 1 & 1), at = c + 8 * (i >> 2) + (i & 1);
            if (r < p.m && at < p.n)
                *place16<T>(p, r, at) = (T)d[i];
        }
    }
}

#endif
