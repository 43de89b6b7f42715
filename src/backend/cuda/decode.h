/* The pass of one token, or of a few, as one launch; see decode.cu and decode_few.cu. */
#ifndef BML_BACKEND_CUDA_DECODE_H
#define BML_BACKEND_CUDA_DECODE_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a queue keeps between launches: above all the weights again, in the order of the pass. */
typedef struct bml_cuda_decoder bml_cuda_decoder;

void bml_cuda_decoder_free(bml_cuda_decoder *decoder);

/* How many clusters of blocks, with SHARED_BYTES each, the current device holds at once, and the
 * launch uses; 0 if it cannot be. */
int bml_cuda_decode_clusters(int shared_bytes);

/* Whether the pass of QUEUE's batch can be one launch, on Hopper or later, with the shapes that
 * these are written for: one token or, with 16-bit weights, up to BML_CUDA_FEW of a slot each, of
 * which all or none want logits. The first one makes the queue's decoder; without room for it none
 * can be. */
bool bml_cuda_can_decode(bml_queue *queue, const bml_weights *weights, const bml_kv_cache *cache);

/* As bml_backend.forward, where that says yes. */
void bml_cuda_decode(bml_queue *queue, const bml_weights *weights, bml_activations *activations,
                     bml_kv_cache *cache, int n_valid);

#ifdef __cplusplus
}
#endif

#endif
