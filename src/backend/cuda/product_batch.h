/* Products of a decoding batch: tens or hundreds of rows, each of another sequence. */
#ifndef BML_BACKEND_CUDA_PRODUCT_BATCH_H
#define BML_BACKEND_CUDA_PRODUCT_BATCH_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    BML_CUDA_BATCH = 256, /* rows at most, for which a queue has memory */
    BML_CUDA_MAX_SPLIT = 8,
};

/* How such a product is cut: blocks of 64 rows and COLUMNS (48 or 96), SPLIT blocks for a part of
 * k each. */
typedef struct bml_cuda_cut {
    int columns, split;
} bml_cuda_cut;

/* How to cut a product on the current chip, a STORE32 into at most MAX_SPLIT parts (no more than
 * BML_CUDA_MAX_SPLIT). No columns: bml_cuda_product16 has to make it. */
bml_cuda_cut bml_cuda_batch_cut(const bml_cuda_product *product, int max_split);

/* Keys and values that an attention will read, each head's of each token up to its position: query
 * q is of head q % H of token q / H. slot and position [n_queries / H] are device memory. */
typedef struct bml_cuda_keys_ahead {
    bml_cuda_cache16 cache;
    const int32_t *slot, *position;
    int n_queries;
} bml_cuda_keys_ahead;

/* What bml_cuda_product16 does. Of a STORE32 each part goes to an out of its own, [m, out_pitch]
 * after [m, out_pitch]; their sum is the product. AHEAD, if not NULL, is what an attention soon
 * reads: some of it is brought to the L2 cache while memory idles. Compute capability 9.0. */
cudaError_t bml_cuda_product_batch(const bml_cuda_product *product, bml_cuda_cut cut,
                                   const bml_cuda_keys_ahead *ahead, cudaStream_t stream);

/* Whether bml_cuda_norm_batch takes rows of N_EMBD elements. */
bool bml_cuda_takes_norm_batch(int n_embd);

/* As bml_cuda_norm16, once the N_SUMS (0, 1, 2, 4, 8) outs of such a product, of N_TOKENS rows,
 * have been added to the rows of x that are normed, each of which ROW names once. */
cudaError_t bml_cuda_norm_batch(bml_dtype type, void *out, float *x, const float *sums, int n_sums,
                                int n_tokens, const int32_t *row, const float *weight,
                                const float *bias, int n_rows, int n_embd, float epsilon,
                                cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
