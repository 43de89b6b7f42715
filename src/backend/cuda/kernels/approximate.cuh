/* What the hardware computes in one instruction, to about two units in the last place; denormals
 * count as zero. */
#ifndef BML_BACKEND_CUDA_KERNELS_APPROXIMATE_CUH
#define BML_BACKEND_CUDA_KERNELS_APPROXIMATE_CUH

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
