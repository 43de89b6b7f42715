/* Four floats at once. */
#ifndef BML_BACKEND_CUDA_KERNELS_QUAD_CUH
#define BML_BACKEND_CUDA_KERNELS_QUAD_CUH

__device__ static float4 fma4(float4 a, float4 b, float4 c)
{
    return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z),
                       fmaf(a.w, b.w, c.w));
}

__device__ static float4 add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Elementwise over four neighbouring lanes; all of them get the sum. */
__device__ static float4 sum_of_four(float4 v)
{
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
        v = add4(v, make_float4(__shfl_xor_sync(~0u, v.x, step), __shfl_xor_sync(~0u, v.y, step),
                                __shfl_xor_sync(~0u, v.z, step), __shfl_xor_sync(~0u, v.w, step)));
    return v;
}

#endif
