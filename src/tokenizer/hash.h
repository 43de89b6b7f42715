/* Multiplicative hashing for the tokenizer's open-addressing tables. */
#ifndef BML_TOKENIZER_HASH_H
#define BML_TOKENIZER_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Odd constants; the upper bits of a product depend on every bit of the factor. */
#define BML_HASH_A 0x9e3779b97f4a7c15u
#define BML_HASH_B 0xc2b2ae3d27d4eb4fu
#define BML_HASH_C 0x165667b19e3779f9u

static inline uint64_t bml_hash_bytes(const void *data, size_t length)
{
    const uint8_t *p = data;
    uint64_t hash = length * BML_HASH_C, word;
    for (; length >= 8; p += 8, length -= 8) {
        memcpy(&word, p, 8);
        hash = (hash ^ word) * BML_HASH_A;
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, p, length);
    hash = (hash ^ word) * BML_HASH_A;
    return hash ^ hash >> 32;
}

/* log2 of the number of slots for COUNT entries: at most half full, at least 2 slots. */
static inline unsigned bml_hash_bits(size_t count)
{
    unsigned bits = 1;
    while (((size_t)1 << bits) / 2 < count)
        bits++;
    return bits;
}

#endif
