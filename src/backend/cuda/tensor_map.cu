#include "backend/cuda/tensor_map.h"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, asked for at run time: the program then starts without a driver. */
static encode_fn find_encode(void)
{
    static void *known; /* the same for every thread that looks for it */
    void *entry = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (entry)
        return (encode_fn)entry;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return NULL;
    __atomic_store_n(&known, entry, __ATOMIC_RELAXED);
    return (encode_fn)entry;
}

cudaError_t bml_cuda_tensor_map(CUtensorMap *map, bml_dtype type, const void *base, int rank,
                                const uint64_t *size, const uint64_t *pitch, int box_rows)
{
    encode_fn encode = find_encode();
    cuuint64_t sizes[3], pitches[2], bytes = type == BML_F32 ? 4 : 2;
    cuuint32_t box[3] = {(cuuint32_t)(128 / bytes), (cuuint32_t)box_rows, 1}, step[3] = {1, 1, 1};
    CUtensorMapDataType element = type == BML_F32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                  : type == BML_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    for (int i = 0; i < rank; i++)
        sizes[i] = size[i];
    for (int i = 0; i < rank - 1; i++)
        pitches[i] = bytes * pitch[i];
    if (!encode)
        return cudaErrorNotSupported;
    CUresult result = encode(map, element, (cuuint32_t)rank, (void *)base, sizes, pitches, box,
                             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
