/* The products behind bml_cuda_product16, one for each kind of matrix unit. */
#ifndef BML_BACKEND_CUDA_PRODUCT_H
#define BML_BACKEND_CUDA_PRODUCT_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the wgmma product is cut: tiles of 128 rows and COLUMNS columns (64, 96, 128, 192, 256), or
 * of 64 and 96; SPLIT: blocks that share a tile's sum over k (128 rows and up to 128 columns; at
 * most 8, and at most one for each 64 of k); TURNS: a warpgroup takes whole tiles, in turn with the
 * other (128 rows, 128 and 192 columns). */
typedef struct bml_cuda_tile {
    int rows, columns, split;
    bool turns;
} bml_cuda_tile;

/* wgmma and the copy engine: 16-byte rows, 16-byte aligned; compute capability 9.0. */
cudaError_t bml_cuda_product_sm90(const bml_cuda_product *product, bml_cuda_tile tile,
                                  cudaStream_t stream);

/* mma.sync: any shape; compute capability 8.0. */
cudaError_t bml_cuda_product_sm80(const bml_cuda_product *product, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
