/*
 * How weight matrices lie in device memory. Every matrix is held by outputs, [n_out, n_in],
 * whatever the file has: a row is what one output reads, and all products read rows.
 *
 * F32, BF16 and F16: plain rows without gaps.
 *
 * Q8 and Q4 hold the values of the CPU's formats (src/backend/cpu/quant.h) in rows. Inputs are cut
 * into blocks of 64, the last one padded with zeros; up to eight blocks make a group, which begins
 * with 16 bytes of scales:
 *     Q8: bfloat16 scale[8], then int8 q[n_blocks][64];  w = scale * q
 *     Q4: int8 scale[8][2],  then uint8 q[n_blocks][32]; w = row_scale * scale * level[nibble],
 *         a scale for each half block of 32 inputs. The four bytes from 8c + 4h on hold inputs
 *         32h + 8c .. 32h + 8c + 7 in the order of their nibbles, c in 0..3, h in 0..1.
 * The float32 row_scale of all outputs of a Q4 matrix lie behind its last row.
 */
#ifndef BML_BACKEND_CUDA_WEIGHT_H
#define BML_BACKEND_CUDA_WEIGHT_H

#include "bml.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __CUDACC__
#define BML_CUDA_BOTH __host__ __device__
#else
#define BML_CUDA_BOTH
#endif

enum { BML_CUDA_BLOCK = 64, BML_CUDA_GROUP = 8, BML_CUDA_SCALES = 16 };

BML_CUDA_BOTH static inline bool bml_cuda_packed(bml_weight_format format)
{
    return format == BML_WEIGHTS_Q8 || format == BML_WEIGHTS_Q4;
}

BML_CUDA_BOTH static inline size_t bml_cuda_n_blocks(size_t n_in)
{
    return (n_in + BML_CUDA_BLOCK - 1) / BML_CUDA_BLOCK;
}

/* Bytes of the 64 inputs of a block, without its scales. */
BML_CUDA_BOTH static inline size_t bml_cuda_block_bytes(bml_weight_format format)
{
    return format == BML_WEIGHTS_Q8 ? 64 : format == BML_WEIGHTS_Q4 ? 32 : 0;
}

/* Where block B's bytes begin in a packed row, and where its group's scales do. */
BML_CUDA_BOTH static inline size_t bml_cuda_block_at(bml_weight_format format, size_t b)
{
    return (b / BML_CUDA_GROUP + 1) * BML_CUDA_SCALES + b * bml_cuda_block_bytes(format);
}

BML_CUDA_BOTH static inline size_t bml_cuda_scales_at(bml_weight_format format, size_t b)
{
    size_t group = b / BML_CUDA_GROUP;
    return group * (BML_CUDA_SCALES + BML_CUDA_GROUP * bml_cuda_block_bytes(format));
}

BML_CUDA_BOTH static inline size_t bml_cuda_row_bytes(bml_weight_format format, size_t n_in)
{
    size_t n_blocks = bml_cuda_n_blocks(n_in);
    if (bml_cuda_packed(format))
        return (n_blocks + BML_CUDA_GROUP - 1) / BML_CUDA_GROUP * BML_CUDA_SCALES +
               n_blocks * bml_cuda_block_bytes(format);
    return n_in * (format == BML_WEIGHTS_F32 ? 4 : 2);
}

/* Bytes of a whole matrix. */
BML_CUDA_BOTH static inline size_t bml_cuda_weight_bytes(bml_weight_format format, size_t n_in,
                                                         size_t n_out)
{
    size_t row_scales = format == BML_WEIGHTS_Q4 ? n_out * sizeof(float) : 0;
    return n_out * bml_cuda_row_bytes(format, n_in) + row_scales;
}

#endif
