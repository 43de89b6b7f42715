/*
 * How the blocks of one launch hand each other what they have without barriers: a reader polls the
 * very words that it needs, and these say for themselves whether they are complete. All words are 0
 * before the launch.
 *
 * A sum is a word of 64 bits to which everybody adds: above, in units of 2^-28, what it amounts to;
 * below, how many have added something, modulo 32, and how many of these had what does not fit,
 * likewise. Integers add up to the same whoever comes first. A sum goes on from use to use: what a
 * reader looks for is the difference to what it saw last, to which N have added. The next use may
 * begin when every reader has seen this one, which the data flow must see to.
 *
 * A record is four words, written once.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_EXCHANGE_CUH
#define BML_BACKEND_CUDA_KERNELS_EXCHANGE_CUH

#include <stdint.h>

/* After this many looks, some seconds, what is waited for will not come: the launch fails. */
enum { POLL_LIMIT = 1 << 24 };

enum { SUM_COUNT = 31, SUM_UNFIT = 31 << 5, SUM_SHIFT = 10 };

/* Adds V to a sum, if no larger than 2^20, so that no 31 of them overflow; else what makes it NaN.
 */
__device__ static inline void add_to(uint64_t *sum, float v)
{
    bool fits = fabsf(v) <= 0x1p20f;
    uint64_t some = (uint64_t)__float2ll_rn(v * 0x1p28f) << SUM_SHIFT | 1;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sum),
                 "l"(fits ? some : (uint64_t)(1 << 5 | 1))
                 : "memory");
}

/* Two sums, 16-byte aligned. */
__device__ static inline ulonglong2 load_sums(const uint64_t *from)
{
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from));
    return v;
}

/* What was added to a sum since it was LAST, if that is complete. */
__device__ static inline float added(uint64_t difference)
{
    return difference & SUM_UNFIT ? __int_as_float(0x7fffffff)
                                  : __ll2float_rn((long long)difference) * 0x1p-38f;
}

/* Waits until N more have added to a sum than when it was LAST. */
__device__ static inline void await_sum(const uint64_t *sum, uint64_t last, uint32_t n)
{
    for (int looks = 0; (uint32_t)(load_sums(sum).x - last - n) & SUM_COUNT; looks++)
        if (looks == POLL_LIMIT)
            __trap();
}

/* For a whole warp: the same for pairs of sums: lanes' Ith, PLACE(I) sums behind FROM, if that is
 * not negative. Gives what was added, and the new LAST. */
template <int PAIRS, class Place>
__device__ __forceinline__ static void get_sums(float2 (&got)[PAIRS], ulonglong2 (&last)[PAIRS],
                                                const uint64_t *from, Place place, uint32_t n)
{
    ulonglong2 now[PAIRS];
    bool all = false;
    for (int looks = 0; !all; looks++) {
        uint32_t missing = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            if (place(i) >= 0)
                now[i] = load_sums(from + place(i));
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            if (place(i) >= 0)
                missing |= ((uint32_t)now[i].x - (uint32_t)last[i].x - n) |
                           ((uint32_t)now[i].y - (uint32_t)last[i].y - n);
        all = __all_sync(~0u, (missing & SUM_COUNT) == 0);
        if (looks == POLL_LIMIT)
            __trap();
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if (place(i) >= 0) {
            got[i] = make_float2(added(now[i].x - last[i].x - n), added(now[i].y - last[i].y - n));
            last[i] = now[i];
        }
}

/* ---- records ---- */

/* Writes four words, of which the first and the third have no lowest bit: it says that they are
 * there. Pairs of words are written and read as one. */
__device__ static inline void put(uint4 *to, uint4 v)
{
    uint64_t a = (uint64_t)v.y << 32 | v.x | 1, b = (uint64_t)v.w << 32 | v.z | 1;
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b)
                 : "memory");
}

/* Waits for a record, 16-byte aligned. */
__device__ static inline uint4 get(const uint4 *from)
{
    uint64_t a, b;
    int looks = 0;
    do {
        if (looks++ == POLL_LIMIT)
            __trap();
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from));
    } while (!(a & b & 1));
    return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
}

#endif
