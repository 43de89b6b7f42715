/*
 * The kernels of a pass over many tokens, where the matrix units decide: products with their
 * epilogues fused, causal attention against the cache, and the norm before them. Activations
 * between them are of the weights' 16-bit type; the residual stream, norms, biases, sums and logits
 * are float32.
 *
 *   x -> bml_cuda_norm16 -> product QKV -> bml_cuda_attention16 -> product RESIDUAL ->
 *        bml_cuda_norm16 -> product ACTIVATION -> product RESIDUAL -> x
 *
 * All pointers are device memory. Each call enqueues one kernel on STREAM, can be captured into a
 * graph, and returns what went wrong with the launch. Rows of a matrix are PITCH elements apart.
 * Kernels of one stream overlap (launch.cuh): each waits for the one before, but reads weights,
 * query tiles, slots, positions and numbers of rows without waiting, so these must not come from a
 * kernel that may still run.
 */
#ifndef BML_BACKEND_CUDA_PREFILL_H
#define BML_BACKEND_CUDA_PREFILL_H

#include "backend/backend.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What becomes of a product's sums, once the bias is added. */
typedef enum bml_cuda_epilogue {
    BML_CUDA_ACTIVATION, /* out (16-bit) = activation(sum) */
    BML_CUDA_STORE32,    /* out (float32) = sum */
    BML_CUDA_RESIDUAL,   /* out (float32) += sum */
    BML_CUDA_QKV         /* n = 3C: the first C columns to out (16-bit, [m, C]), the others into the
                            cache as keys and values, each row at its slot and position */
} bml_cuda_epilogue;

/* One layer of the cache: k, v [n_slots, H, n_ctx, D], 16-bit. */
typedef struct bml_cuda_cache16 {
    void *k, *v;
    int n_slots, n_head, n_ctx, head_dim;
} bml_cuda_cache16;

/* out = epilogue(a W^T + bias); a [m, k], W [n, k]. */
typedef struct bml_cuda_product {
    bml_dtype type; /* of a, W and 16-bit outputs: BML_BF16 or BML_F16 */
    int m, n, k;
    const void *a;
    int a_pitch;
    const void *w;     /* rows without gaps */
    const float *bias; /* [n], or NULL */
    bml_cuda_epilogue epilogue;
    bml_activation activation; /* ACTIVATION */
    void *out;
    int out_pitch;
    bml_cuda_cache16 cache;         /* QKV */
    const int32_t *slot, *position; /* QKV: [m] */
} bml_cuda_product;

/* Any shape runs; wgmma takes those whose rows start at multiples of 16 bytes, on sm_90. Runs give
 * the same bits; a row's rounding can depend on how many rows there are, not on what they hold. */
cudaError_t bml_cuda_product16(const bml_cuda_product *product, cudaStream_t stream);

/* Up to 128 queries: tokens TOKEN .. TOKEN + COUNT - 1 of the batch, which lie in one slot at
 * positions POSITION, POSITION + 1, ... */
typedef struct bml_cuda_query_tile {
    int32_t token, count, slot, position;
} bml_cuda_query_tile;

/* Cuts a batch into query tiles (host memory; at most n_tokens), the long ones of each run first;
 * returns how many. Every token's keys and values must be in the cache before its attention. */
int bml_cuda_query_tiles(const bml_batch *batch, bml_cuda_query_tile *tiles);

typedef struct bml_cuda_attention {
    bml_dtype type; /* of q, out and the cache: BML_BF16 or BML_F16 */
    const void *q;  /* [n_tokens, H * D] */
    int q_pitch;
    void *out; /* [n_tokens, H * D], rows without gaps */
    int n_tokens;
    bml_cuda_cache16 cache;
    const bml_cuda_query_tile *tiles; /* [n_tiles], device memory */
    int n_tiles;
    float scale;
} bml_cuda_attention;

/* Head sizes up to 256; 64 with 16-byte rows on sm_90 has its own kernel. What the cache holds past
 * a token's position does not matter, whatever it is. */
cudaError_t bml_cuda_attention16(const bml_cuda_attention *attention, cudaStream_t stream);

/* Weights that come after a norm, which brings them to the L2 cache while it waits for x; 16-byte
 * aligned, BYTES a multiple of 16 or 0. */
typedef struct bml_cuda_ahead {
    const void *weights[2];
    size_t bytes[2];
} bml_cuda_ahead;

/* out[r] = layernorm(x[row ? row[r] : r]); x [*, n_embd] float32, out [n_rows, n_embd] of TYPE. */
cudaError_t bml_cuda_norm16(bml_dtype type, void *out, const float *x, const int32_t *row,
                            const float *weight, const float *bias, int n_rows, int n_embd,
                            float epsilon, bml_cuda_ahead ahead, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
