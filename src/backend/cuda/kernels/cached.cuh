/* Elements of embeddings and of the cache of keys and values, of whatever type, as floats. */
#ifndef BML_BACKEND_CUDA_KERNELS_CACHED_CUH
#define BML_BACKEND_CUDA_KERNELS_CACHED_CUH

#include "backend/cuda/kernels/common.cuh"

/* Elements 4i .. 4i + 3 of a row of an embedding. */
__device__ static float4 embedding_at(const char *rows, bml_weight_format format, int n_embd,
                                      int row, int i)
{
    const char *at = rows + row * bml_cuda_row_bytes(format, (size_t)n_embd);
    if (format == BML_WEIGHTS_F32)
        return ((const float4 *)at)[i];
    if (format == BML_WEIGHTS_Q8)
        return make_float4(weight_at(rows, format, n_embd, row, 4 * i),
                           weight_at(rows, format, n_embd, row, 4 * i + 1),
                           weight_at(rows, format, n_embd, row, 4 * i + 2),
                           weight_at(rows, format, n_embd, row, 4 * i + 3));
    uint2 v = ((const uint2 *)at)[i];
    if (format == BML_WEIGHTS_BF16)
        return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                           __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
    float2 low = __half22float2(*(const __half2 *)&v.x),
           high = __half22float2(*(const __half2 *)&v.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ static float to_cache_and_back(float x, bml_dtype kv)
{
    return kv == BML_F32    ? x
           : kv == BML_BF16 ? __bfloat162float(__float2bfloat16(x))
                            : __half2float(__float2half(x));
}

__device__ static void store_cached(char *to, size_t at, float x, bml_dtype kv)
{
    if (kv == BML_F32)
        ((float *)to)[at] = x;
    else if (kv == BML_BF16)
        ((__nv_bfloat16 *)to)[at] = __float2bfloat16(x);
    else
        ((__half *)to)[at] = __float2half(x);
}

/* Two elements of 16 bits side by side as floats. */
template <class T> __device__ static float2 two_of(uint32_t pair)
{
    if constexpr (std::is_same_v<T, __half>)
        return __half22float2(*(const __half2 *)&pair);
    else
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/* Eight elements. */
__device__ static void load_cached(float out[8], const float *from)
{
    *(float4 *)out = ((const float4 *)from)[0];
    *(float4 *)(out + 4) = ((const float4 *)from)[1];
}

template <class Kv> __device__ static void load_cached(float out[8], const Kv *from)
{
    uint4 v = *(const uint4 *)from;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = two_of<Kv>(words[j]);
        out[2 * j] = f.x;
        out[2 * j + 1] = f.y;
    }
}

#endif
