/* The attentions behind bml_cuda_attention16, one for each kind of matrix unit. */
#ifndef BML_BACKEND_CUDA_ATTENTION_H
#define BML_BACKEND_CUDA_ATTENTION_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a block goes through the keys: KEYS at a time, GROUPS warpgroups in turn. There are 64 and
 * 128 for one warpgroup, and 64 for three. */
typedef struct bml_cuda_steps {
    int keys, groups;
} bml_cuda_steps;

/* Head size 64, 16-byte aligned rows; compute capability 9.0. */
cudaError_t bml_cuda_attention_sm90(const bml_cuda_attention *attention, bml_cuda_steps steps,
                                    cudaStream_t stream);

/* Head sizes up to 256; compute capability 8.0. */
cudaError_t bml_cuda_attention_sm80(const bml_cuda_attention *attention, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
