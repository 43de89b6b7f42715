/* Products with few rows of activations, as decoding has them. */
#ifndef BML_BACKEND_CUDA_PRODUCT_FEW_H
#define BML_BACKEND_CUDA_PRODUCT_FEW_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BML_CUDA_FEW = 64 };

/* Whether bml_cuda_product_few takes this product: few rows, W by outputs, k a multiple of 32. */
bool bml_cuda_is_few(const bml_cuda_product *product);

/* What bml_cuda_product16 does. */
cudaError_t bml_cuda_product_few(const bml_cuda_product *product, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
