/*
 * How the blocks of one launch hand each other floats without barriers: the lowest bit of every
 * word tells which use of the buffer it belongs to, so a reader polls the very words that it needs
 * and whoever writes them says nothing else. It costs the last bit of the mantissa.
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

/* X must carry its tag already. */
__device__ static inline void put_word(float *to, float x)
{
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

__device__ static inline void put(float *to, float x, uint32_t tag)
{
    put_word(to, tagged(x, tag));
}

__device__ static inline uint4 load_words(const float *from)
{
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ static inline bool carry(uint4 v, uint32_t tag)
{
    return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 1) == 0;
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

/* The same for FROM's quads i, i + step, ... below n, of which i is one: N of them at most, looked
 * at together. Where there is none quad i is looked at again: no branch keeps a load waiting. */
template <int N>
__device__ static void get_all(float4 v[N], const float *from, int n, int i, int step, uint32_t tag)
{
    bool all;
    int looks = 0;
    do {
        all = true;
        uint4 words[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            words[j] = load_words(from + 4 * (i + j * step < n ? i + j * step : i));
#pragma unroll
        for (int j = 0; j < N; j++) {
            all &= carry(words[j], tag);
            v[j] = floats_of(words[j]);
        }
        if (looks++ == POLL_LIMIT)
            __trap();
    } while (!all);
}

/* Calls USE(index, quad) for each of them, N at most, N a multiple of 2. */
template <int N, class Use>
__device__ static void use_all(const float *from, int n, int i, int step, uint32_t tag, Use use)
{
    if (i < n && n <= step) {
        use(i, get(from + 4 * i, tag));
    } else if (i < n && n <= 2 * step) {
        float4 v[2];
        get_all<2>(v, from, n, i, step, tag);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (i + j * step < n)
                use(i + j * step, v[j]);
    } else if (i < n) {
        float4 v[N];
        get_all<N>(v, from, n, i, step, tag);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (i + j * step < n)
                use(i + j * step, v[j]);
    }
}

#endif
