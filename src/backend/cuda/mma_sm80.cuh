/* mma.sync and what fills its operands, one PTX instruction a function. */
#ifndef BML_BACKEND_CUDA_MMA_SM80_CUH
#define BML_BACKEND_CUDA_MMA_SM80_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* Four 8x8 blocks of 16-bit elements; lane l gives the address of row l % 8 of block l / 8. */
__device__ __forceinline__ void load_blocks(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

__device__ __forceinline__ void load_blocks_transposed(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* d += a b; a 16x16, b 16x8 */
template <typename T>
__device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    if constexpr (__is_same(T, __nv_bfloat16))
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Eight elements of a row of N from COLUMN, zeros past its end; WIDE: rows and column are 16-byte
 * aligned. */
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T *row, int column, int n, bool wide)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    if (wide && column + 8 <= n)
        return __ldg((const uint4 *)(row + column));
    for (int i = 0; i < 8 && column + i < n; i++)
        ((T *)&v)[i] = row[column + i];
    return v;
}

#endif
