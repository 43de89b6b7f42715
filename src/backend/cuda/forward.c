/* Which of the fused passes runs for which model and batch. */
#include "backend/cuda/decode.h"
#include "backend/cuda/pass16.h"

bool bml_cuda_forward(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                      bml_activations *activations, bml_kv_cache *cache, int n_valid)
{
    (void)batch; /* the queue's */
    if (bml_cuda_can_decode(queue, weights, cache))
        bml_cuda_decode(queue, weights, activations, cache, n_valid);
    else if (bml_cuda_can_pass16(weights, cache))
        bml_cuda_pass16(queue, weights, activations, cache, n_valid);
    else
        return false;
    return true;
}
