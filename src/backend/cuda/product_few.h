/* Products with few rows of activations, as decoding has them. */
#ifndef BML_BACKEND_CUDA_PRODUCT_FEW_H
#define BML_BACKEND_CUDA_PRODUCT_FEW_H

#include "backend/cuda/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BML_CUDA_FEW = 32 };

/* Whether bml_cuda_product_few takes this product: few rows, W by outputs, k a multiple of 32. */
bool bml_cuda_is_few(const bml_cuda_product *product);

/* A layer norm in front of a product, as bml_cuda_norm16 describes it. */
typedef struct bml_cuda_norm {
    const float *x;
    const int32_t *row;
    const float *weight, *bias;
    float epsilon;
} bml_cuda_norm;

/* Whether the product can begin with a norm: so few rows that every block may take their norms. */
bool bml_cuda_takes_norm(const bml_cuda_product *product);

/* What bml_cuda_product16 does; with NORM, which may be NULL, of what it makes of the rows of x in
 * place of a. */
cudaError_t bml_cuda_product_few(const bml_cuda_product *product, const bml_cuda_norm *norm,
                                 cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
