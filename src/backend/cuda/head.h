/* The most probable token of each row of a decoding batch, without its logits. */
#ifndef BML_BACKEND_CUDA_HEAD_H
#define BML_BACKEND_CUDA_HEAD_H

#include "backend/cuda/choice.h"
#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows a [m, k] of TYPE against W [n, k]. */
typedef struct bml_cuda_head {
    bml_dtype type;
    int m, n, k;
    const void *a, *w;
    void *parts; /* room for m rows of 8 bytes for each 128 of n */
    bml_cuda_choice choice;
} bml_cuda_head;

/* Whether bml_cuda_head_argmax takes it: up to 256 rows, two logits or more, on Hopper. */
bool bml_cuda_takes_head(const bml_cuda_head *head);

/* Gives the choice of row r: the lowest index of the largest of row r's n logits; -1 if one of them
 * is NaN or infinite. Two kernels. */
cudaError_t bml_cuda_head_argmax(const bml_cuda_head *head, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
