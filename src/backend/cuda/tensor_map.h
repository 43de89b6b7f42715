/* What the copy engine knows of a tensor: its shape, and the box that one copy moves. */
#ifndef BML_BACKEND_CUDA_TENSOR_MAP_H
#define BML_BACKEND_CUDA_TENSOR_MAP_H

#include "bml.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor of TYPE and RANK 2 or 3, innermost dimension first; PITCH[i] elements between neighbours
 * of dimension i + 1. Boxes are 128 bytes by BOX_ROWS, rows swizzled; what lies outside the tensor
 * reads as zeros and is not written. */
cudaError_t bml_cuda_tensor_map(CUtensorMap *map, bml_dtype type, const void *base, int rank,
                                const uint64_t *size, const uint64_t *pitch, int box_rows);

#ifdef __cplusplus
}
#endif

#endif
