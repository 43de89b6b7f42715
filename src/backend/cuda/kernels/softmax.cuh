/*
 * Softmaxes on their way over keys (Milakov and Gimelshein 2018, "Online normalizer calculation for
 * softmax"): v, the largest score, and the sum of weights. Scores are logarithms to base two. What
 * is not finite shows.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_SOFTMAX_CUH
#define BML_BACKEND_CUDA_KERNELS_SOFTMAX_CUH

#include "backend/cuda/kernels/approximate.cuh"
#include "backend/cuda/kernels/cached.cuh"

#include <float.h>

/* NaN if either is. */
__device__ static float most_of(float a, float b)
{
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

/* The largest of all lanes', in one instruction of integers that are in the order of the floats. A
 * NaN without a sign is the largest; one with a sign is the smallest. Needs compute capability 8.0.
 */
__device__ static float largest_of_warp(float x)
{
    int i = __float_as_int(x);
    i = __reduce_max_sync(~0u, i ^ (i >> 31 & 0x7fffffff));
    return __int_as_float(i ^ (i >> 31 & 0x7fffffff));
}

/* What a lane has of one: eight elements of v, of the keys that its group looks at. */
struct softmax_state {
    float top = -FLT_MAX, sum = 0, v[8] = {};

    /* Two keys more. */
    template <class Kv>
    __device__ __forceinline__ void add(float a, float b, const Kv *of_a, const Kv *of_b)
    {
        float va[8], vb[8], most = most_of(top, most_of(a, b));
        load_cached(va, of_a);
        load_cached(vb, of_b);
        float before = exp2_fast(top - most);
        a = exp2_fast(a - most);
        b = exp2_fast(b - most);
        top = most;
        sum = fmaf(sum, before, a + b);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = fmaf(v[i], before, fmaf(a, va[i], b * vb[i]));
    }
};

/*
 * What many states have together of one element: N states for each of the LANES, two or four, that
 * work on it. V is that element of the lane's first state, TOPS and SUMS the state's largest score
 * and sum; its next state is APART states of PITCH floats further, and ENDS_APART tops and sums.
 * All of the lanes get the element, not yet divided by the SUM, and that and the TOP.
 */
template <int N>
__device__ __forceinline__ float joined(int lanes, const float *v, const float *tops,
                                        const float *sums, int apart, int pitch, int ends_apart,
                                        float &top, float &sum)
{
    float t[N], out = 0;
    top = -FLT_MAX;
    sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        t[i] = tops[i * ends_apart];
#pragma unroll
    for (int i = 0; i < N; i++)
        top = most_of(top, t[i]);
    top = most_of(top, __shfl_xor_sync(~0u, top, 1));
    if (lanes == 4)
        top = most_of(top, __shfl_xor_sync(~0u, top, 2));
#pragma unroll
    for (int i = 0; i < N; i++) {
        float weight = exp2_fast(t[i] - top);
        sum = fmaf(weight, sums[i * ends_apart], sum);
        out = fmaf(weight, v[i * apart * pitch], out);
    }
    out += __shfl_xor_sync(~0u, out, 1);
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (lanes == 4) {
        out += __shfl_xor_sync(~0u, out, 2);
        sum += __shfl_xor_sync(~0u, sum, 2);
    }
    return out;
}

#endif
