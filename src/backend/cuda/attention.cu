/* Which attention runs, and how a batch is cut for it. */
#include "backend/cuda/attention.h"
#include "backend/cuda/launch.cuh"

enum { TILE = 128 };

/* The queries from START that follow one another in one slot. */
static int run_length(const bml_batch *batch, int start)
{
    int length = 1;
    while (start + length < batch->n_tokens && batch->slot[start + length] == batch->slot[start] &&
           batch->position[start + length] == batch->position[start] + length)
        length++;
    return length;
}

int bml_cuda_query_tiles(const bml_batch *batch, bml_cuda_query_tile *tiles)
{
    int n = 0;
    for (int start = 0, length; start < batch->n_tokens; start += length) {
        length = run_length(batch, start);
        for (int at = (length - 1) / TILE * TILE; at >= 0; at -= TILE) {
            int count = length - at < TILE ? length - at : TILE;
            tiles[n++] = (bml_cuda_query_tile){start + at, count, batch->slot[start],
                                               batch->position[start] + at};
        }
    }
    return n;
}

cudaError_t bml_cuda_attention16(const bml_cuda_attention *a, cudaStream_t stream)
{
    bml_cuda_chip chip;
    cudaError_t error = bml_cuda_current_chip(&chip);
    if (error || a->n_tiles == 0)
        return error;
    bool fits = a->cache.head_dim == 64 && a->q_pitch % 8 == 0 && bml_cuda_aligned(a->q) &&
                bml_cuda_aligned(a->out) && bml_cuda_aligned(a->cache.k) &&
                bml_cuda_aligned(a->cache.v);
    if (chip.major != 9 || !fits)
        return bml_cuda_attention_sm80(a, stream);
    /* Few blocks end sooner with many warps or long steps; many fill the chip with short ones. */
    int blocks = 2 * a->n_tiles * a->cache.n_head;
    bml_cuda_steps steps = {64, 1};
    if (blocks <= 2 * chip.units)
        steps = {64, 3};
    else if (blocks <= 4 * chip.units)
        steps = {128, 1};
    return bml_cuda_attention_sm90(a, steps, stream);
}
