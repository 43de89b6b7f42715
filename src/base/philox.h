/*
 * Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a random
 * number as a pure function of a key and a counter, so a draw needs no state and no order.
 */
#ifndef BML_BASE_PHILOX_H
#define BML_BASE_PHILOX_H

#include <stdint.h>

/* The 128-bit block for KEY and COUNTER (low half; the high half is 0). */
static inline void bml_philox(uint64_t key, uint64_t counter, uint32_t block[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53 * c0, p1 = (uint64_t)0xcd9e8d57 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9e3779b9;
        k1 += 0xbb67ae85;
    }
    block[0] = c0;
    block[1] = c1;
    block[2] = c2;
    block[3] = c3;
}

/* Uniform in [0, 1), a multiple of 2^-53. */
static inline double bml_philox_uniform(uint64_t key, uint64_t counter)
{
    uint32_t block[4];
    bml_philox(key, counter, block);
    return (double)(((uint64_t)block[1] << 32 | block[0]) >> 11) * 0x1p-53;
}

#endif
