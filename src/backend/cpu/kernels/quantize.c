/* Activations to int8, block by block; see backend/cpu/quant.h. */
#include "backend/cpu/kernels/kernels.h"
#include "backend/cpu/quant.h"

#include <math.h>

static void quantize_block(const float *x, size_t n, int8_t *q, float *scale, int32_t *correction)
{
    float padded[BML_BLOCK];
    if (n < BML_BLOCK) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, n * sizeof *x);
        x = padded;
    }
    /* As integers, absolute values keep their order, with infinity and NaN above all others. */
    vi max = {0};
    for (int i = 0; i < BML_BLOCK; i += VL)
        max = vi_max((vi)vf_abs(vf_load(x + i)), max);
    int32_t largest_bits = vi_hmax(max);
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    if (!isfinite(largest)) { /* let it show in whatever this block touches */
        memset(q, 0, BML_BLOCK);
        *scale = NAN;
        correction[0] = correction[1] = 0;
        return;
    }
    *scale = largest / 127;
    vf inverse = vf_set1(largest > 0 ? 127 / largest : 0);
    const vf magic = vf_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int half = 0; half < 2; half++) {
        vi sum = {0};
        for (int i = half * 32; i < half * 32 + 32; i += VL) {
            vf rounded = vf_load(x + i) * inverse + magic;
            vi v = (vi)rounded - (vi)magic;
            sum += v;
            vi_store_int8(q + i, v);
        }
        correction[half] = -128 * vi_sum(sum);
    }
}

void KERNEL(quantize_row)(const float *x, size_t n_in, bml_quant_row row)
{
    for (size_t b = 0; b * BML_BLOCK < n_in; b++) {
        size_t n = n_in - b * BML_BLOCK < BML_BLOCK ? n_in - b * BML_BLOCK : BML_BLOCK;
        quantize_block(x + b * BML_BLOCK, n, row.q + b * BML_BLOCK, &row.scale[b],
                       &row.correction[2 * b]);
    }
}
