/*
 * How the blocks of one launch hand each other floats without barriers: the lowest bit of every
 * second word tells which use of the buffer it belongs to, so a reader polls the very words that it
 * needs and whoever writes them says nothing else. Words go in pairs, which are written and read as
 * one. It costs the last bit of the mantissa.
 *
 * A use writes every word of the buffer once. Its tag is the use's number modulo 2. A buffer may be
 * written again once every reader has read it, which the data flow must see to.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_EXCHANGE_CUH
#define BML_BACKEND_CUDA_KERNELS_EXCHANGE_CUH

#include <stdint.h>

/* After this many looks, some seconds, what is waited for will not come: the launch fails. */
enum { POLL_LIMIT = 1 << 24 };

__device__ static inline float tagged(float x, uint32_t tag)
{
    return __uint_as_float((__float_as_uint(x) & ~1u) | tag);
}

__device__ static inline uint64_t tagged(float x, float y, uint32_t tag)
{
    return (uint64_t)__float_as_uint(y) << 32 | __float_as_uint(tagged(x, tag));
}

__device__ static inline void put(float *to, float2 v, uint32_t tag)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(tagged(v.x, v.y, tag))
                 : "memory");
}

__device__ static inline void put(float *to, float4 v, uint32_t tag)
{
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to),
                 "l"(tagged(v.x, v.y, tag)), "l"(tagged(v.z, v.w, tag))
                 : "memory");
}

__device__ static inline uint4 load_words(const float *from)
{
    uint64_t a, b;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from));
    return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
}

__device__ static inline bool carry(uint4 v, uint32_t tag)
{
    return (((v.x ^ tag) | (v.z ^ tag)) & 1) == 0;
}

__device__ static inline float4 floats_of(uint4 v)
{
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
}

/* Waits for four words, 16-byte aligned, to carry TAG. */
__device__ static inline float4 get(const float *from, uint32_t tag)
{
    for (int looks = 0;; looks++) {
        uint4 v = load_words(from);
        if (carry(v, tag))
            return floats_of(v);
        if (looks == POLL_LIMIT)
            __trap();
    }
}

/* For a whole warp: SUM[j], for M of MOST rows, becomes the sum of N of four quads, PITCH floats
 * apart, the first one APART floats behind that of the row before; 0 if N is less than 1. All are
 * waited for together: until the first one is there nobody looks at the others, which would be in
 * the way of what is waited for. */
template <int MOST>
__device__ static inline void get_sums(float4 (&sum)[MOST], const float *from, int apart, int m,
                                       int pitch, int n, uint32_t tag)
{
    uint4 words[MOST][4];
    bool first = true, all = false;
    for (int looks = 0; !all; looks++) {
        all = true;
        if (m > 0 && n > 0) {
            words[0][0] = load_words(from);
            all = carry(words[0][0], tag);
        }
        all = __all_sync(~0u, all);
        if (looks == POLL_LIMIT)
            __trap();
    }
    for (int looks = 0; first || !all; looks++) {
        first = false;
        all = true;
#pragma unroll
        for (int j = 0; j < MOST; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (j < m && i < n)
                    words[j][i] = load_words(from + j * apart + i * pitch);
#pragma unroll
        for (int j = 0; j < MOST; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                all &= j >= m || i >= n || carry(words[j][i], tag);
        all = __all_sync(~0u, all);
        if (looks == POLL_LIMIT)
            __trap();
    }
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        sum[j] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (j < m && i < n) {
                float4 v = floats_of(words[j][i]);
                sum[j] =
                    make_float4(sum[j].x + v.x, sum[j].y + v.y, sum[j].z + v.z, sum[j].w + v.w);
            }
    }
}

/* The sum of N of four quads, PITCH floats apart, all waited for together; 0 if N is less than 1.
 */
__device__ static inline float4 get_sum(const float *from, int pitch, int n, uint32_t tag)
{
    float4 sum = make_float4(0, 0, 0, 0);
    uint4 words[4];
    bool all = n <= 0;
    for (int looks = 0; !all; looks++) {
        all = true;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < n)
                words[i] = load_words(from + i * pitch);
#pragma unroll
        for (int i = 0; i < 4; i++)
            all &= i >= n || carry(words[i], tag);
        if (looks == POLL_LIMIT)
            __trap();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < n) {
            float4 v = floats_of(words[i]);
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
    return sum;
}

#endif
