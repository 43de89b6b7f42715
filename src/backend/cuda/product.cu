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
    int step, store, add;
} candidates[] = {
    {{64, 1}, 230, 400, 800},    {{64, 2}, 230, 3300, 3700},  {{96, 1}, 290, 600, 1300},
    {{96, 2}, 290, 5000, 6500},  {{128, 1}, 310, 900, 1800},  {{128, 2}, 310, 5500, 6500},
    {{128, 4}, 310, 6000, 7000}, {{192, 1}, 440, 1500, 3500}, {{256, 1}, 575, 1500, 6500},
};

static bml_cuda_tile choose_tile(const bml_cuda_product *p, int units)
{
    const candidate *best = NULL;
    double least = 0;
    int steps = bml_cuda_divided_up(p->k, 64);
    for (const candidate &c : candidates) {
        int pair = c.tile.columns >= 192 ? 2 : 1; /* rows come in pairs of tiles */
        double blocks = (double)bml_cuda_divided_up(p->m, 128 * pair) * pair *
                        bml_cuda_divided_up(p->n, c.tile.columns) * c.tile.split;
        double rounds = ceil(blocks / units);
        int end = p->epilogue == BML_CUDA_RESIDUAL ? c.add : c.store;
        double time = rounds * (bml_cuda_divided_up(steps, c.tile.split) * c.step + end);
        if (steps >= c.tile.split && (!best || time < least)) {
            best = &c;
            least = time;
        }
    }
    return best->tile;
}

/* The copy engine wants rows that start at multiples of 16 bytes, and so do 16-bit results. */
static bool fits_sm90(const bml_cuda_product *p)
{
    bool wide = p->epilogue == BML_CUDA_STORE32 || p->epilogue == BML_CUDA_RESIDUAL ||
                (p->n % 8 == 0 && p->out_pitch % 8 == 0 && bml_cuda_aligned(p->out) &&
                 (p->epilogue != BML_CUDA_QKV || p->cache.head_dim % 8 == 0));
    return wide && p->a_pitch % 8 == 0 && (p->out_in ? p->k : p->n) % 8 == 0 &&
           bml_cuda_aligned(p->a) && bml_cuda_aligned(p->w);
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
