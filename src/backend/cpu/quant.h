/*
 * The CPU's quantised weight formats, and how activations are quantised to meet them.
 *
 * A weight matrix y = W x (n_out outputs of n_in inputs) is cut into tiles of 16 outputs, stored
 * one after the other, so a thread reads one sequential stream; outputs past n_out are zeros.
 * Inputs are cut into blocks of 64, the last one padded with zeros. Inside a tile, bytes that
 * belong to the same four inputs of the 16 outputs form one 64-byte row: what an integer
 * dot-product instruction (x86 vpdpbusd, Arm sdot) takes at once. No sums across lanes are ever
 * needed.
 *
 * Q8 (8.25 bits a weight): w = scale * (byte - 128), one scale for every output and block, chosen
 * as max|w| / 127 and rounded up to bfloat16.
 *     tile: uint16_t scale[n_blocks][16]            bfloat16, padded to a multiple of 64 bytes
 *           uint8_t  q[n_blocks][16][16][4]         [block][input / 4][output][input % 4]
 *
 * Q4 (4.25 bits a weight and 32 an output): w = row_scale * scale * level[nibble], with one int8
 * scale for every output and half block of 32 inputs, and 16 levels spaced for bell-shaped weights
 * (a Lloyd-Max quantiser of Gaussian blocks, largest magnitude at -127).
 *     tile: float   row_scale[16]
 *           int8_t  scale[n_blocks][2][16]          padded to a multiple of 64 bytes
 *           uint8_t q[n_blocks][8][16][4]           row r holds inputs 8r .. 8r+7 of the block:
 *                                                   8r + i in the low nibble of byte i, 8r + 4 + i
 *                                                   in the high one
 *
 * An output with a weight that is not finite has NaN for its scales.
 *
 * An activation row of n_in floats becomes int8 in blocks of 64, x = scale * 2^-k * int8: one scale
 * for the row, max|x| / 127, and for each block the largest k whose range still holds it. So what a
 * block's products are multiplied by is the weights' scale with a smaller exponent: an integer
 * subtraction, where a multiplication would take the unit that multiplies the bytes. Since weight
 * bytes are unsigned, blocks and half blocks also keep -128 times their sum: a dot product that
 * starts there equals one with byte - 128. A row with NaN or infinity gets the scale NaN, so that
 * it shows in the result.
 */
#ifndef BML_BACKEND_CPU_QUANT_H
#define BML_BACKEND_CPU_QUANT_H

#include "backend/backend.h"

enum { BML_TILE = 16, BML_BLOCK = 64 };

static inline bool bml_is_packed(bml_weight_format format)
{
    return format == BML_WEIGHTS_Q8 || format == BML_WEIGHTS_Q4;
}

static inline size_t bml_n_blocks(size_t n_in)
{
    return (n_in + BML_BLOCK - 1) / BML_BLOCK;
}

static inline size_t bml_n_tiles(size_t n_out)
{
    return (n_out + BML_TILE - 1) / BML_TILE;
}

/* Bytes of a tile before q, and of a tile in all. */
static inline size_t bml_tile_header(bml_weight_format format, size_t n_in)
{
    size_t scales = bml_n_blocks(n_in) * 32; /* in both formats */
    size_t padded = (scales + 63) & ~(size_t)63;
    return format == BML_WEIGHTS_Q8 ? padded : padded + BML_TILE * sizeof(float);
}

static inline size_t bml_tile_bytes(bml_weight_format format, size_t n_in)
{
    size_t bits = format == BML_WEIGHTS_Q8 ? 8 : 4;
    return bml_tile_header(format, n_in) + bml_n_blocks(n_in) * (BML_TILE * BML_BLOCK * bits / 8);
}

typedef struct bml_quant_block {
    int8_t q[BML_BLOCK];
    uint32_t down;            /* k << 23: what it takes from a float's exponent */
    int32_t sum, half_sum[2]; /* -128 times the sum of q, and of its halves */
} bml_quant_block;

/* A quantised activation row. */
typedef struct bml_quant_row {
    float scale;
    bml_quant_block block[];
} bml_quant_row;

/* A multiple of 64, so that rows do not share cache lines. */
static inline size_t bml_quant_row_bytes(size_t n_in)
{
    size_t bytes = sizeof(bml_quant_row) + bml_n_blocks(n_in) * sizeof(bml_quant_block);
    return (bytes + 63) & ~(size_t)63;
}

static inline bml_quant_row *bml_quant_row_at(void *rows, size_t n_in, size_t row)
{
    return (bml_quant_row *)((char *)rows + row * bml_quant_row_bytes(n_in));
}

/* The Q4 levels. */
extern const int8_t bml_q4_levels[16];

#endif
