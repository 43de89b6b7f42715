/*
 * What starts kernels. They overlap: the next one's blocks start, and set themselves up, while the
 * last blocks of the one before still run.
 */
#ifndef BML_BACKEND_CUDA_LAUNCH_CUH
#define BML_BACKEND_CUDA_LAUNCH_CUH

#include <cuda_runtime_api.h>
#include <stdint.h>

/* Of the current device: the first number of its compute capability, its multiprocessors, and the
 * bytes of shared memory of one of them. */
typedef struct bml_cuda_chip {
    int major, units, shared;
} bml_cuda_chip;

extern "C" cudaError_t bml_cuda_current_chip(bml_cuda_chip *chip);

/* Whether 16 bytes can be loaded at once from here. */
static inline bool bml_cuda_aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

static inline int bml_cuda_divided_up(int n, int by)
{
    return (n + by - 1) / by;
}

/* Lets KERNEL have BYTES of shared memory, always as many: what a kernel may take is known to the
 * whole process, and another thread may be about to launch it with more. */
extern "C" cudaError_t bml_cuda_allow_shared(const void *kernel, size_t bytes);

/* Starts KERNEL, which calls await_previous, in clusters of CLUSTER blocks along x. */
extern "C" cudaError_t bml_cuda_launch(const void *kernel, dim3 grid, int threads, int cluster,
                                       size_t shared_bytes, void **arguments, cudaStream_t stream);

/* The same of a kernel that takes up to MOST_BYTES, which never differs. */
extern "C" cudaError_t bml_cuda_launch_within(const void *kernel, dim3 grid, int threads,
                                              int cluster, size_t shared_bytes, size_t most_bytes,
                                              void **arguments, cudaStream_t stream);

/* Starts KERNEL, whose blocks, in clusters of CLUSTER, wait for each other. CHECKED: they start
 * when all can. If not, they start as those of the kernels before end, so that the caller must see
 * to it that no two such kernels of different streams can have a part of the device each. KERNEL
 * calls await_previous. */
extern "C" cudaError_t bml_cuda_launch_together(const void *kernel, int blocks, int threads,
                                                int cluster, size_t shared_bytes, bool checked,
                                                void *argument, cudaStream_t stream);

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
