/*
 * Which product runs. The wgmma kernel's tile is the one whose time, by a model of what was
 * measured on an H200, is least: rounds of blocks, each a beginning and an end and its steps along
 * k.
 */
#include "backend/cuda/product.h"

/* Cycles of a step of 64 along k, and of the rest of a tile: filling the ring, the epilogue. */
static const struct candidate {
    bml_cuda_tile tile;
    int step, rest;
} candidates[] = {
    {{64, 1}, 320, 7500},   {{64, 2}, 320, 9500},  {{96, 1}, 420, 8000},
    {{96, 2}, 420, 10000},  {{128, 1}, 560, 8500}, {{128, 2}, 560, 11000},
    {{128, 4}, 560, 12000}, {{192, 1}, 800, 8500}, {{256, 1}, 1080, 9500},
};

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

static bml_cuda_tile choose_tile(int m, int n, int k, int units)
{
    bml_cuda_tile best = {};
    double least = 0;
    for (const candidate &c : candidates) {
        int pair = c.tile.columns >= 192 ? 2 : 1;
        double blocks =
            (double)ceil_div(m, 128 * pair) * pair * ceil_div(n, c.tile.columns) * c.tile.split;
        double rounds = (double)(long)((blocks + units - 1) / units);
        double time = rounds * (ceil_div(ceil_div(k, 64), c.tile.split) * c.step + c.rest);
        if (ceil_div(k, 64) < c.tile.split)
            continue;
        if (!best.columns || time < least) {
            best = c.tile;
            least = time;
        }
    }
    return best;
}

static bool aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

/* The copy engine wants rows that start at multiples of 16 bytes, and so do 16-bit results. */
static bool fits_sm90(const bml_cuda_product *p)
{
    bool wide = p->epilogue == BML_CUDA_STORE32 || p->epilogue == BML_CUDA_RESIDUAL ||
                (p->n % 8 == 0 && p->out_pitch % 8 == 0 && aligned(p->out) &&
                 (p->epilogue != BML_CUDA_QKV || p->cache.head_dim % 8 == 0));
    return wide && p->a_pitch % 8 == 0 && (p->out_in ? p->k : p->n) % 8 == 0 && aligned(p->a) &&
           aligned(p->w);
}

cudaError_t bml_cuda_product16(const bml_cuda_product *p, cudaStream_t stream)
{
    int device, major, units;
    cudaError_t error = cudaGetDevice(&device);
    if (!error)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error)
        error = cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device);
    if (error)
        return error;
    if (major != 9 || !fits_sm90(p))
        return bml_cuda_product_sm80(p, stream);
    return bml_cuda_product_sm90(p, choose_tile(p->m, p->n, p->k, units), stream);
}
