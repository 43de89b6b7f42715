/* Four floats at once. */
#ifndef BML_BACKEND_CUDA_KERNELS_QUAD_CUH
#define BML_BACKEND_CUDA_KERNELS_QUAD_CUH

__device__ static float4 add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

#endif
