/* Weights into the packed formats of backend/cpu/quant.h, tile by tile. */
#include "backend/cpu/device.h"
#include "backend/cpu/kernels/kernels.h"
#include "backend/cpu/quant.h"

#include <math.h>

typedef struct job {
    const bml_matrix *matrix;
    bool out_in;
    size_t n_in, n_out;
    bml_weight_format format;
    char *tiles;
} job;

static float element(const bml_matrix *m, size_t i)
{
    if (m->dtype == BML_F32)
        return ((const float *)m->data)[i];
    uint16_t half = ((const uint16_t *)m->data)[i];
    return m->dtype == BML_BF16 ? bml_bf16_to_f32(half) : bml_f16_to_f32(half);
}

/* w[output][input] of one tile and block; zeros outside the matrix. */
static void gather(const job *j, size_t tile, size_t block, float w[BML_TILE][BML_BLOCK])
{
    size_t first_out = tile * BML_TILE, first_in = block * BML_BLOCK;
    size_t outs = j->n_out - first_out < BML_TILE ? j->n_out - first_out : BML_TILE;
    size_t ins = j->n_in - first_in < BML_BLOCK ? j->n_in - first_in : BML_BLOCK;
    memset(w, 0, BML_TILE * sizeof *w);
    if (j->out_in) {
        for (size_t o = 0; o < outs; o++)
            for (size_t i = 0; i < ins; i++)
                w[o][i] = element(j->matrix, (first_out + o) * j->n_in + first_in + i);
    } else {
        for (size_t i = 0; i < ins; i++)
            for (size_t o = 0; o < outs; o++)
                w[o][i] = element(j->matrix, (first_in + i) * j->n_out + first_out + o);
    }
}

static float largest_magnitude(const float *x, size_t n)
{
    float largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    return largest;
}

/* A difference is 0, or NaN where X is not finite. */
static bool all_finite(const float *x, size_t n)
{
    float sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i] - x[i];
    return sum == 0;
}

/* The smallest bfloat16 that is not below f >= 0. */
static uint16_t bf16_above(float f)
{
    uint16_t h = (uint16_t)(bml_float_bits(f) >> 16);
    return bml_bf16_to_f32(h) < f ? (uint16_t)(h + 1) : h;
}

enum { BF16_NAN = 0x7fc0 };

/* An output with a weight that is not finite gets scales that are not, so that it shows. */
static void pack_q8(const job *j, size_t tile)
{
    float w[BML_TILE][BML_BLOCK];
    char *to = j->tiles + tile * bml_tile_bytes(j->format, j->n_in);
    uint16_t *scales = (uint16_t *)to;
    uint8_t *q = (uint8_t *)to + bml_tile_header(j->format, j->n_in);
    bool bad[BML_TILE] = {0};
    for (size_t b = 0; b < bml_n_blocks(j->n_in); b++, q += BML_TILE * BML_BLOCK) {
        gather(j, tile, b, w);
        for (size_t o = 0; o < BML_TILE; o++) {
            bad[o] |= !all_finite(w[o], BML_BLOCK);
            uint16_t scale = bf16_above(largest_magnitude(w[o], BML_BLOCK) / 127);
            float d = bml_bf16_to_f32(scale), inverse = d > 0 ? 1 / d : 0;
            scales[b * BML_TILE + o] = scale;
            for (size_t i = 0; i < BML_BLOCK; i++) {
                int v = (int)lrintf(w[o][i] * inverse);
                v = v > 127 ? 127 : v < -127 ? -127 : v; /* 1 / d may be a little too large */
                q[i / 4 * (BML_TILE * 4) + o * 4 + i % 4] = (uint8_t)(v + 128);
            }
        }
    }
    for (size_t i = 0; i < bml_n_blocks(j->n_in) * BML_TILE; i++)
        if (bad[i % BML_TILE])
            scales[i] = BF16_NAN;
}

/* The index of the level nearest to each of n values: how many midpoints lie below it. */
static void nearest_levels(const float *x, float inverse, uint8_t *index)
{
    float midpoint[15];
    for (int l = 0; l < 15; l++)
        midpoint[l] = 0.5f * (float)(bml_q4_levels[l] + bml_q4_levels[l + 1]);
    for (size_t i = 0; i < 32; i += VL) {
        vf v = vf_load(x + i) * inverse;
        vi count = {0};
        for (int l = 0; l < 15; l++)
            count -= v > midpoint[l];
        for (size_t lane = 0; lane < VL; lane++)
            index[i + lane] = (uint8_t)count[lane];
    }
}

/*
 * The scale for 32 weights: the largest one is put at the top or at the bottom of the levels, which
 * gives two candidates; for each the least-squares scale of the indices it leads to is taken, and
 * the better of the two is kept.
 */
static float q4_scale(const float *w)
{
    float peak = 0, best_gain = 0, best = 0;
    for (size_t i = 0; i < 32; i++)
        peak = fabsf(w[i]) > fabsf(peak) ? w[i] : peak;
    if (peak == 0)
        return 0;
    for (int end = 0; end < 16; end += 15) {
        uint8_t index[32];
        float wl = 0, ll = 0; /* sums of weight * level and of level^2 */
        nearest_levels(w, bml_q4_levels[end] / peak, index);
        for (size_t i = 0; i < 32; i++) {
            float level = bml_q4_levels[index[i]];
            wl += w[i] * level;
            ll += level * level;
        }
        float gain = fabsf(wl) / sqrtf(ll); /* its square is what the squared error falls by */
        if (gain > best_gain) {
            best_gain = gain;
            best = wl / ll;
        }
    }
    return best;
}

static void pack_q4(const job *j, size_t tile)
{
    float w[BML_TILE][BML_BLOCK], largest[BML_TILE] = {0};
    bool bad[BML_TILE] = {0};
    char *to = j->tiles + tile * bml_tile_bytes(j->format, j->n_in);
    float *row_scale = (float *)to;
    int8_t *scales = (int8_t *)(row_scale + BML_TILE);
    uint8_t *q = (uint8_t *)to + bml_tile_header(j->format, j->n_in);
    size_t n_blocks = bml_n_blocks(j->n_in), block_bytes = BML_TILE * BML_BLOCK / 2;
    /* First every scale, for the largest of each output, which the int8 scales are relative to.
     * Until a block is packed, its scales wait at the end of q: packing never reaches them. */
    typedef float half_scales[2][BML_TILE];
    half_scales *waiting = (half_scales *)(q + n_blocks * (block_bytes - sizeof *waiting));
    for (size_t b = 0; b < n_blocks; b++) {
        gather(j, tile, b, w);
        for (size_t o = 0; o < BML_TILE; o++) {
            bad[o] |= !all_finite(w[o], BML_BLOCK);
            for (size_t half = 0; half < 2; half++) {
                float d = q4_scale(w[o] + 32 * half);
                waiting[b][half][o] = d;
                largest[o] = fabsf(d) > largest[o] ? fabsf(d) : largest[o];
            }
        }
    }
    for (size_t o = 0; o < BML_TILE; o++)
        row_scale[o] = bad[o] ? NAN : largest[o] / 127;
    for (size_t b = 0; b < n_blocks; b++, q += block_bytes) {
        half_scales wanted;
        memcpy(wanted, waiting[b], sizeof wanted);
        gather(j, tile, b, w);
        memset(q, 0, block_bytes);
        for (size_t o = 0; o < BML_TILE; o++)
            for (size_t half = 0; half < 2; half++) {
                float unit = row_scale[o] > 0 ? 1 / row_scale[o] : 0;
                int scale = (int)lrintf(wanted[half][o] * unit);
                scale = scale > 127 ? 127 : scale < -127 ? -127 : scale;
                scales[(2 * b + half) * BML_TILE + o] = (int8_t)scale;
                uint8_t index[32];
                nearest_levels(w[o] + 32 * half, scale ? unit / (float)scale : 0, index);
                for (size_t i = 0; i < 32; i++) {
                    size_t row = half * 4 + i / 8;
                    q[row * (BML_TILE * 4) + o * 4 + i % 4] |=
                        (uint8_t)(index[i] << (i % 8 < 4 ? 0 : 4));
                }
            }
    }
}

static void pack_part(void *context, int part, int n_parts)
{
    const job *j = context;
    size_t begin, end;
    bml_split(bml_n_tiles(j->n_out), 1, part, n_parts, &begin, &end);
    for (size_t tile = begin; tile < end; tile++)
        if (j->format == BML_WEIGHTS_Q8)
            pack_q8(j, tile);
        else
            pack_q4(j, tile);
}

bml_status KERNEL(weight_new)(bml_device *device, const bml_matrix *matrix, bool out_in,
                              bml_weight_format format, bml_weight *weight, bml_error *err)
{
    if (!bml_is_packed(format))
        return bml_cpu_weight_rows(device, matrix, out_in, format, weight, err);
    job j = {.matrix = matrix,
             .out_in = out_in,
             .n_in = (size_t)(out_in ? matrix->cols : matrix->rows),
             .n_out = (size_t)(out_in ? matrix->rows : matrix->cols),
             .format = format};
    bml_weight w = {.format = format,
                    .n_in = (int)j.n_in,
                    .n_out = (int)j.n_out,
                    .out_in = out_in,
                    .owned = true};
    bml_pool *pool;
    bml_status status = bml_cpu_weight_memory(
        device, bml_n_tiles(j.n_out) * bml_tile_bytes(format, j.n_in), &w.buffer, &pool, err);
    if (status)
        return status;
    j.tiles = w.buffer.data;
    bml_pool_run(pool, pack_part, &j);
    bml_cpu_device_note(device, &w);
    *weight = w;
    return BML_OK;
}
