/* Activations to int8, a row at a time; see backend/cpu/quant.h. */
#include "backend/cpu/kernels/kernels.h"
#include "backend/cpu/quant.h"

#include <math.h>

enum {
    EXPONENT = 0x7f800000,
    MOST_DOWN = 24 << 23 /* what is smaller than that beside the row's largest is zeros */
};
static const float nothing = 0x1p-90f; /* and so is a row that stays below this */

/* Block B of a row: where it lies or, if it is a short last one, with zeros behind it in PADDED. */
static const float *block_of(const float *x, size_t n_in, size_t b, float padded[BML_BLOCK])
{
    size_t left = n_in - b * BML_BLOCK;
    x += b * BML_BLOCK;
    if (left >= BML_BLOCK)
        return x;
    memset(padded, 0, BML_BLOCK * sizeof *padded);
    return memcpy(padded, x, left * sizeof *x);
}

/* The bits of the largest absolute value: as integers these keep their order, with infinity and
 * NaN above all others. */
static uint32_t largest_bits(const float *x)
{
    vi max = {0};
    for (int i = 0; i < BML_BLOCK; i += VL)
        max = vi_max((vi)vf_abs(vf_load(x + i)), max);
    return (uint32_t)vi_hmax(max);
}

static void quantize_block(const float *x, float inverse, bml_quant_block *block)
{
    const vf magic = vf_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int half = 0; half < 2; half++) {
        vi sum = {0};
        for (int i = half * 32; i < half * 32 + 32; i += VL) {
            vf rounded = vf_load(x + i) * inverse + magic;
            vi v = (vi)rounded - (vi)magic;
            sum += v;
            vi_store_int8(block->q + i, v);
        }
        block->half_sum[half] = -128 * vi_sum(sum);
    }
    block->sum = block->half_sum[0] + block->half_sum[1];
}

void KERNEL(quantize_row)(const float *x, size_t n_in, bml_quant_row *row)
{
    float padded[BML_BLOCK];
    size_t n_blocks = bml_n_blocks(n_in);
    uint32_t row_bits = 0;
    for (size_t b = 0; b < n_blocks; b++) {
        uint32_t bits = largest_bits(block_of(x, n_in, b, padded));
        row->block[b].down = bits; /* for now */
        row_bits = bits > row_bits ? bits : row_bits;
    }
    float largest = bml_float_from_bits(row_bits);
    if (!isfinite(largest) || largest < nothing) {
        memset(row->block, 0, n_blocks * sizeof *row->block);
        row->scale = isfinite(largest) ? 0 : NAN;
        return;
    }
    row->scale = largest / 127;
    for (size_t b = 0; b < n_blocks; b++) {
        bml_quant_block *block = &row->block[b];
        /* The exponents' difference, less one where the block's mantissa is the larger. */
        uint32_t down = (row_bits - block->down) & EXPONENT;
        block->down = down < MOST_DOWN ? down : MOST_DOWN;
        float inverse = bml_float_from_bits(bml_float_bits(127 / largest) + block->down);
        quantize_block(block_of(x, n_in, b, padded), inverse, block);
    }
}
