/* Which of the fused passes runs for which model and batch, and the one that runs ahead. */
#include "backend/cuda/decode.h"
#include "backend/cuda/expand.h"
#include "backend/cuda/pass16.h"

static bool enqueue(bml_queue *queue, const bml_weights *weights, bml_activations *activations,
                    bml_kv_cache *cache, int n_valid)
{
    if (bml_cuda_can_decode(queue, weights, cache)) {
        bml_cuda_decode(queue, weights, activations, cache, n_valid);
        return true;
    }
    if (bml_cuda_takes_cache16(cache))
        weights = bml_cuda_expand(queue, weights, cache->dtype);
    if (!bml_cuda_can_pass16(weights, cache))
        return false;
    bml_cuda_pass16(queue, weights, activations, cache, n_valid);
    return true;
}

bool bml_cuda_forward(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                      bml_activations *activations, bml_kv_cache *cache, int n_valid)
{
    bml_cuda_chain *chain = &queue->chain;
    if (bml_cuda_chain_has(queue, n_valid))
        queue->ids = activations->ids.data;
    else if (!enqueue(queue, weights, activations, cache, n_valid))
        return false;
    const bml_batch *next = bml_cuda_chain_next(queue, cache->n_ctx);
    if (!next)
        return true;
    queue->batch = next;
    queue->batch_copied = true; /* as good as: the pass before leaves it on the device */
    enqueue(queue, weights, activations, cache, n_valid);
    queue->batch = batch;
    chain->ahead = !queue->error;
    /* Whoever asks for that step enqueues it, and hears what is wrong. */
    queue->error = cudaSuccess;
    return true;
}
