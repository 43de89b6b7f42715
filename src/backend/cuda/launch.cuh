/*
 * Kernels that overlap: the next one's blocks start, and set themselves up, while the last blocks
 * of the one before still run.
 */
#ifndef BML_BACKEND_CUDA_LAUNCH_CUH
#define BML_BACKEND_CUDA_LAUNCH_CUH

#include <cuda_runtime_api.h>

/* Starts KERNEL, which calls await_previous, in clusters of CLUSTER blocks along x. */
extern "C" cudaError_t bml_cuda_launch(const void *kernel, dim3 grid, int threads, int cluster,
                                       size_t shared_bytes, void **arguments, cudaStream_t stream);

#ifdef __CUDACC__
/* The next kernel of the stream may start. */
__device__ __forceinline__ void allow_next()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the kernels before have ended. No kernel touches before this what another writes. */
__device__ __forceinline__ void await_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

#endif
