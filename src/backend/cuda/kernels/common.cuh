/* What the kernels share: element types, sums over a block, enqueueing. */
#ifndef BML_BACKEND_CUDA_KERNELS_COMMON_CUH
#define BML_BACKEND_CUDA_KERNELS_COMMON_CUH

#include "backend/cuda/cuda.h"
#include "backend/cuda/weight.h"

extern "C" {
#include "backend/cpu/quant.h"
}

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ static inline float to_float(float x)
{
    return x;
}

__device__ static inline float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

__device__ static inline float to_float(__half x)
{
    return __half2float(x);
}

__device__ static inline void from_float(float *to, float x)
{
    *to = x;
}

__device__ static inline void from_float(__nv_bfloat16 *to, float x)
{
    *to = __float2bfloat16(x);
}

__device__ static inline void from_float(__half *to, float x)
{
    *to = __float2half(x);
}

/* Calls F with a null pointer of the element type that DTYPE stands for. */
template <class F> static void with_type(bml_dtype dtype, F f)
{
    if (dtype == BML_F32)
        f((const float *)nullptr);
    else if (dtype == BML_BF16)
        f((const __nv_bfloat16 *)nullptr);
    else
        f((const __half *)nullptr);
}

/* The config's activation. */
__device__ static inline float activate(float x, bml_activation activation)
{
    if (activation == BML_ACT_GELU_TANH) /* x/2 (1 + tanh(u)) = x / (1 + exp(-2u)): no overflow */
        return x / (1 + expf(-2 * 0.7978845608f * (x + 0.044715f * x * x * x)));
    if (activation == BML_ACT_GELU_ERF)
        return 0.5f * x * erfcf(-0.70710678f * x);
    return x < 0 ? 0 : x; /* ReLU; NaN stays NaN */
}

template <class T> __device__ static inline T add(T a, T b)
{
    return a + b;
}

/* Like fmaxf, but a NaN stays. */
__device__ static inline float larger(float a, float b)
{
    return a > b || a != a ? a : b;
}

/* Folds every thread's VALUE with OP, which commutes; all threads of the block, whose warps are a
 * power of two, get the result. */
template <class T> __device__ static T fold_block(T value, T (*op)(T, T))
{
    __shared__ T partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    for (int step = 16; step; step /= 2)
        value = op(value, __shfl_xor_sync(~0u, value, step));
    __syncthreads(); /* PARTIAL may still be read from the last call */
    if (lane == 0)
        partial[warp] = value;
    __syncthreads();
    value = partial[lane % n_warps];
    for (int step = n_warps / 2; step; step /= 2)
        value = op(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

/* A candidate: the largest logit with the lowest index, or the mark of a row that is not finite. */
struct candidate {
    float logit;
    int id; /* -1: not finite */
};

/* The id of a candidate that stands for no logits. */
enum { NO_ID = 1 << 29 };

__device__ static candidate better(candidate a, candidate b)
{
    if (a.id < 0 || b.id < 0)
        return {0, -1};
    bool second = b.logit > a.logit || (b.logit == a.logit && b.id < a.id);
    return second ? b : a;
}

__device__ static inline candidate best_of_warp(candidate best)
{
#pragma unroll
    for (int step = 16; step; step /= 2)
        best = better(best, candidate{__shfl_xor_sync(~0u, best.logit, step),
                                      __shfl_xor_sync(~0u, best.id, step)});
    return best;
}

/* Weight [row][i] of a matrix in any format. */
__device__ static inline float weight_at(const char *rows, bml_weight_format format, int n_in,
                                         size_t row, int i)
{
    const char *r = rows + row * bml_cuda_row_bytes(format, (size_t)n_in);
    if (format == BML_WEIGHTS_F32)
        return ((const float *)r)[i];
    if (format == BML_WEIGHTS_BF16)
        return to_float(((const __nv_bfloat16 *)r)[i]);
    if (format == BML_WEIGHTS_F16)
        return to_float(((const __half *)r)[i]);
    /* Q8: a Q4 matrix is never an embedding. */
    size_t b = (size_t)i / BML_CUDA_BLOCK;
    const __nv_bfloat16 *scales =
        (const __nv_bfloat16 *)(r + bml_cuda_scales_at(BML_WEIGHTS_Q8, b));
    const int8_t *q = (const int8_t *)(r + bml_cuda_block_at(BML_WEIGHTS_Q8, b));
    return to_float(scales[b % BML_CUDA_GROUP]) * q[i % BML_CUDA_BLOCK];
}

/* The 16 levels of Q4, as kernels get them. */
static inline uint4 q4_levels(void)
{
    uint4 levels;
    memcpy(&levels, bml_q4_levels, sizeof levels);
    return levels;
}

/* The levels that the four lowest nibbles stand for, as four int8. */
__device__ static inline int q4_levels_of(uint32_t nibbles, uint4 levels)
{
    uint32_t low = __byte_perm(levels.x, levels.y, nibbles & 0x7777);
    uint32_t high = __byte_perm(levels.z, levels.w, nibbles & 0x7777);
    uint32_t is_high = __byte_perm(0xff00, 0, nibbles >> 3 & 0x1111);
    return (int)((low & ~is_high) | (high & is_high));
}

static inline unsigned blocks_for(size_t n, size_t each)
{
    return (unsigned)((n + each - 1) / each);
}

/* To be called behind every launch. */
static inline void launched(bml_queue *queue)
{
    bml_cuda_note(queue, cudaGetLastError());
}

#endif
