/*
 * Which product runs. The wgmma kernel's tile is the one whose time, by a model of what was
 * measured on an H200, is least: rounds of tiles, each so many steps along k and an end.
 */
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product.h"

#include <math.h>

/* Nanoseconds of a step of 64 along k, and of a tile's end, where results are stored or added to
 * what is there; a split's tiles each start anew. */
static const struct candidate {
    bml_cuda_tile tile;
    double step, store, add;
} candidates[] = {
    {{64, 96, 1, false}, 220, 100, 800},     {{128, 64, 1, false}, 300, 200, 600},
    {{128, 64, 2, false}, 300, 3300, 3700},  {{128, 96, 1, false}, 340, 600, 1300},
    {{128, 96, 2, false}, 340, 5000, 6500},  {{128, 128, 1, false}, 420, 600, 2200},
    {{128, 128, 2, false}, 420, 5500, 6500}, {{128, 128, 4, false}, 420, 6000, 7000},
    {{128, 192, 1, false}, 580, 1000, 3500}, {{128, 256, 1, false}, 740, 1800, 7000},
    {{128, 128, 1, true}, 420, 5000, 12000}, {{128, 192, 1, true}, 600, 9000, 16000},
};

static double time_of(const candidate &c, const bml_cuda_product *p, int units)
{
    int pair = c.tile.columns >= 192 || c.tile.turns ? 2 : 1; /* rows in pairs of tiles */
    double blocks = (double)bml_cuda_divided_up(p->m, c.tile.rows * pair) * pair *
                    bml_cuda_divided_up(p->n, c.tile.columns) * c.tile.split;
    double sums = bml_cuda_divided_up(bml_cuda_divided_up(p->k, 64), c.tile.split) * c.step;
    double end = p->epilogue == BML_CUDA_RESIDUAL ? c.add : c.store, rounds = ceil(blocks / units);
    if (!c.tile.turns)
        return rounds * (sums + end);
    /* An end is hidden behind the other's sums, as far as these are long enough; the last is not.
     */
    return rounds * fmax(sums, (sums + end) / 2) + end / 4;
}

static bml_cuda_tile choose_tile(const bml_cuda_product *p, int units)
{
    const candidate *best = NULL;
    double least = 0;
    for (const candidate &c : candidates) {
        double time = time_of(c, p, units);
        if (bml_cuda_divided_up(p->k, 64) >= c.tile.split && (!best || time < least)) {
            best = &c;
            least = time;
        }
    }
    return best->tile;
}

/* The copy engine wants rows that start at multiples of 16 bytes, and so do all results but float32
 * that is added to nothing. */
static bool fits_sm90(const bml_cuda_product *p)
{
    bool fits =
        p->a_pitch % 8 == 0 && p->k % 8 == 0 && bml_cuda_aligned(p->a) && bml_cuda_aligned(p->w);
    if (p->epilogue == BML_CUDA_RESIDUAL)
        return fits && p->out_pitch % 4 == 0 && bml_cuda_aligned(p->out);
    if (p->epilogue == BML_CUDA_STORE32)
        return fits;
    return fits && p->n % 8 == 0 && p->out_pitch % 8 == 0 && bml_cuda_aligned(p->out) &&
           (p->epilogue != BML_CUDA_QKV || p->cache.head_dim % 8 == 0);
}

cudaError_t bml_cuda_product16(const bml_cuda_product *p, cudaStream_t stream)
{
    bml_cuda_chip chip;
    cudaError_t error = bml_cuda_current_chip(&chip);
    if (error || p->m == 0)
        return error;
    if (chip.major != 9 || !fits_sm90(p))
        return bml_cuda_product_sm80(p, stream);
    return bml_cuda_product_sm90(p, choose_tile(p, chip.units), stream);
}
