/* The pass of many tokens with 16-bit weights and a cache of the same type, through the matrix
 * units. */
#ifndef BML_BACKEND_CUDA_PASS16_H
#define BML_BACKEND_CUDA_PASS16_H

#include "backend/cuda/cuda.h"

/* What a queue keeps between passes: one that comes again and again is a graph by then. */
typedef struct bml_cuda_graph bml_cuda_graph;

void bml_cuda_graph_free(bml_cuda_graph *graph);

/* Whether these passes can have such a cache, with weights of its type. */
bool bml_cuda_takes_cache16(const bml_kv_cache *cache);

bool bml_cuda_can_pass16(const bml_weights *weights, const bml_kv_cache *cache);

/* As bml_backend.forward. */
void bml_cuda_pass16(bml_queue *queue, const bml_weights *weights, bml_activations *activations,
                     bml_kv_cache *cache, int n_valid);

#endif
