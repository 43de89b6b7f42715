/*
 * Packed weights for passes of many tokens, whose products read 16-bit ones: a copy of each matrix
 * in the type of activations and cache. It takes two bytes a weight, is made when a queue's first
 * such pass comes, and rounds what scale times value is to that type.
 */
#ifndef BML_BACKEND_CUDA_EXPAND_H
#define BML_BACKEND_CUDA_EXPAND_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bml_cuda_expanded bml_cuda_expanded;

void bml_cuda_expanded_free(bml_cuda_expanded *expanded);

/* WEIGHTS with 16-bit matrices of TYPE, which never differs within a queue, in the place of packed
 * ones: they themselves if none are packed, or if memory does not suffice. */
const bml_weights *bml_cuda_expand(bml_queue *queue, const bml_weights *weights, bml_dtype type);

#ifdef __cplusplus
}
#endif

#endif
