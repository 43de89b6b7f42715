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

/* Waits for four words, 16-byte aligned, to carry TAG. */
__device__ static inline float4 get(const float *from, uint32_t tag)
{
    for (int looks = 0;; looks++) {
        uint4 v;
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from)
                     : "memory");
        if (((v.x ^ tag) & 1) + ((v.y ^ tag) & 1) + ((v.z ^ tag) & 1) + ((v.w ^ tag) & 1) == 0)
            return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                               __uint_as_float(v.w));
        if (looks == POLL_LIMIT)
            __trap();
    }
}

#endif
