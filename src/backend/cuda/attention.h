/* The attentions behind bml_cuda_attention16, one for each kind of matrix unit. */
#ifndef BML_BACKEND_CUDA_ATTENTION_H
#define BML_BACKEND_CUDA_ATTENTION_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Head size 64, 16-byte aligned rows; compute capability 9.0. KEYS (64, 128): how many a block
 * takes at a time. */
cudaError_t bml_cuda_attention_sm90(const bml_cuda_attention *attention, int keys,
                                    cudaStream_t stream);

/* Head sizes up to 256; compute capability 8.0. */
cudaError_t bml_cuda_attention_sm80(const bml_cuda_attention *attention, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
