/* Attention of tokens that share no keys, as decoding has them. */
#ifndef BML_BACKEND_CUDA_ATTENTION_DECODE_H
#define BML_BACKEND_CUDA_ATTENTION_DECODE_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What bml_cuda_attention16 does, a query at a time: token t is at position[t] of slot[t] (device
 * memory), whose key and value are in the cache. Those before it are read without waiting: no
 * kernel that may still run writes them. Tiles are not looked at. Heads of 64 or 128. */
cudaError_t bml_cuda_attention_decode(const bml_cuda_attention *attention, const int32_t *slot,
                                      const int32_t *position, bool clusters, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
