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

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)). Two divisions share a reciprocal; the bound keeps the
 * product of their divisors finite, and is where the results have long become zero. */
__device__ __forceinline__ void gelu_tanh(float &x, float &y)
{
    float a = x * (-2.3022082f - 0.1029432f * x * x), b = y * (-2.3022082f - 0.1029432f * y * y);
    a = 1.f + exp2_fast(fminf(a, 60.f));
    b = 1.f + exp2_fast(fminf(b, 60.f));
    float both = reciprocal_fast(a * b);
    x *= both * b;
    y *= both * a;
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

/* Where a 16-bit result goes: to its row, or to queries, keys and values. A cache has fewer than
 * 2^31 rows. */
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
    int line = __ldg(p.slot + row) * cache.n_head * cache.n_ctx + __ldg(p.position + row);
    return (T *)(value ? cache.v : cache.k) + (size_t)(line + head * cache.n_ctx) * cache.head_dim +
           (c - head * cache.head_dim);
}

/* A unit: 32 columns of this lane's rows ROW and ROW + 8. WIDE: eight columns of a 16-bit result
 * from a multiple of eight lie together, 16-byte aligned. */
template <typename T, bool WIDE, bool QKV>
__device__ __forceinline__ void put16(const bml_cuda_product &p, int row, int column,
                                      const float *d, uint32_t divisor = 0)
{
    int quad = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float *e = d + 2 * h;
        int r = row + 8 * h;
        if constexpr (WIDE) {
            uint4 v = transpose_quad(pack<T>(e[0], e[1]), pack<T>(e[4], e[5]), pack<T>(e[8], e[9]),
                                     pack<T>(e[12], e[13]));
            if (r < p.m && column + 8 * quad < p.n)
                *(uint4 *)place16<T, QKV>(p, r, column + 8 * quad, divisor) = v;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int c = column + i / 2 * 8 + 2 * quad + i % 2;
                if (r < p.m && c < p.n)
                    *place16<T, QKV>(p, r, c, divisor) = (T)e[i / 2 * 4 + i % 2];
            }
        }
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

/* The residual's sums are made where the rows lie, if the chip can: nothing waits for them. */
__device__ __forceinline__ void put_sum(float4 *to, float4 v)
{
#if __CUDA_ARCH__ >= 900
    atomicAdd(to, v);
#else
    float4 x = *to;
    *to = make_float4(x.x + v.x, x.y + v.y, x.z + v.z, x.w + v.w);
#endif
}

/* The same where four columns from a multiple of four lie together, 16-byte aligned. Of two blocks,
 * lanes with even numbers take the first and their neighbours the second. */
template <bool RESIDUAL>
__device__ __forceinline__ void put_fours(const bml_cuda_product &p, int row, int column,
                                          const float *d)
{
    bool odd = threadIdx.x & 1;
    int c = column + 2 * (threadIdx.x & 2) + (odd ? 8 : 0);
    float own[16]; /* copies: a choice among wgmma's own registers would make it wait */
#pragma unroll
    for (int i = 0; i < 16; i++)
        asm volatile("mov.f32 %0, %1;" : "=f"(own[i]) : "f"(d[i]));
#pragma unroll
    for (int i = 0; i < 4; i++) { /* pairs of blocks by rows */
        int r = row + 8 * (i & 1), at = c + i / 2 * 16;
        const float *first = own + i / 2 * 8 + 2 * (i & 1), *second = first + 4;
        float x = __shfl_xor_sync(~0u, odd ? first[0] : second[0], 1);
        float y = __shfl_xor_sync(~0u, odd ? first[1] : second[1], 1);
        float4 v =
            odd ? make_float4(x, y, second[0], second[1]) : make_float4(first[0], first[1], x, y);
        float4 *to = (float4 *)((float *)p.out + (size_t)r * p.out_pitch + at);
        if (r < p.m && at < p.n)
            RESIDUAL ? put_sum(to, v) : (void)(*to = v);
    }
}

__device__ __forceinline__ void activate(float *d, bml_activation activation)
{
    switch (activation) {
    case BML_ACT_GELU_TANH:
#pragma unroll
        for (int i = 0; i < 16; i += 2)
            gelu_tanh(d[i], d[i + 1]);
        return;
    case BML_ACT_GELU_ERF:
#pragma unroll
        for (int i = 0; i < 16; i++)
            d[i] = 0.5f * d[i] * (1.f + erff(d[i] * 0.70710678f));
        return;
    case BML_ACT_RELU:
#pragma unroll
        for (int i = 0; i < 16; i++)
            d[i] = d[i] < 0.f ? 0.f : d[i]; /* NaN stays NaN */
    }
}

/* Any epilogue of a unit. */
template <typename T, bool WIDE>
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
        put16<T, WIDE, true>(p, row, column, d, head_divisor(p));
        return;
    case BML_CUDA_ACTIVATION:
        activate(d, p.activation);
        break;
    case BML_CUDA_STORE16:
        break;
    }
    put16<T, WIDE, false>(p, row, column, d);
}

/*
 * The epilogue of a lane's sums, COUNT units of 16, each ROW_STEP and COLUMN_STEP after the one
 * before; those of UNITS, a bit each. What a pass often does stands there COUNT times, each short:
 * such code runs once a tile, and may come from memory. For the rest the units are moved one by one
 * to the same registers.
 */
template <typename T, bool WIDE, int COUNT, int ROW_STEP, int COLUMN_STEP>
__device__ __forceinline__ void finish(const bml_cuda_product &p, int row, int column, float *d,
                                       uint32_t units)
{
    bool fours = ((uint32_t)(p.n | p.out_pitch) | (uint32_t)(uintptr_t)p.out / 4) % 4 == 0;
    auto each = [&](auto unit) {
#pragma unroll
        for (int u = 0; u < COUNT; u++)
            if (units >> u & 1)
                unit(row + ROW_STEP * u, column + COLUMN_STEP * u, d + 16 * u);
    };
    if (p.epilogue == BML_CUDA_RESIDUAL && fours) {
        each([&](int r, int c, float *v) { put_fours<true>(p, r, c, v); });
    } else if (p.epilogue == BML_CUDA_STORE32 && fours) {
        each([&](int r, int c, float *v) { put_fours<false>(p, r, c, v); });
    } else if (WIDE && p.epilogue == BML_CUDA_STORE16) {
        each([&](int r, int c, float *v) { put16<T, true, false>(p, r, c, v); });
    } else if (WIDE && p.epilogue == BML_CUDA_QKV) {
        uint32_t divisor = head_divisor(p);
        each([&](int r, int c, float *v) { put16<T, true, true>(p, r, c, v, divisor); });
    } else if (WIDE && p.epilogue == BML_CUDA_ACTIVATION && p.activation == BML_ACT_GELU_TANH) {
        each([&](int r, int c, float *v) {
            activate(v, BML_ACT_GELU_TANH);
            put16<T, true, false>(p, r, c, v);
        });
    } else {
#pragma unroll 1
        for (int u = 0; u < COUNT; u++) {
            float v[16];
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                if (u == i)
#pragma unroll
                    for (int j = 0; j < 16; j++)
                        v[j] = d[16 * i + j];
            if (units >> u & 1)
                finish_unit<T, WIDE>(p, row + ROW_STEP * u, column + COLUMN_STEP * u, v);
        }
    }
}

#endif
